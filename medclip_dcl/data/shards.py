"""Images of a prepared set as they are stored: JPEG files, or members of a few tar files (shards)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path


class StoredImages(ABC):
    """Encoded images by position; may be pickled, and used in forked processes.

    `remedy` is what a user can do about an image that cannot be read.
    """

    remedy: str

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> bytes:
        """Content of the JPEG file.

        Raises:
            OSError: the image is missing, or its shard is not as it was written.
        """

    @abstractmethod
    def where(self, index: int) -> str:
        """File of an image, for messages."""

    @abstractmethod
    def part(self, start: int, stop: int | None = None) -> StoredImages:
        """The images from `start` until `stop`."""


class ImageFiles(StoredImages):
    """Images of which each is a file, by their paths below `folder`."""

    remedy = "delete it and run the command that made the set again"

    def __init__(self, folder: Path, paths: Sequence[str]) -> None:
        self.folder, self.paths = folder, paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> bytes:
        return (self.folder / self.paths[index]).read_bytes()

    def where(self, index: int) -> str:
        return str(self.folder / self.paths[index])

    def part(self, start: int, stop: int | None = None) -> ImageFiles:
        return ImageFiles(self.folder, self.paths[start:stop])
