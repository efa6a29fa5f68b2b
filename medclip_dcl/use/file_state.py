"""State of a file, by which a table of scores knows whether its rows are still those of the files that are there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from medclip_dcl.common.files import digest_of_file


class FileState(NamedTuple):
    """Size, times and number (of the inode) of a file, and the digest of its bytes.

    None for a file without such numbers, "" for one whose bytes cannot be read. Copies that keep their time (cp -p,
    rsync -a) and renamed files may be older than the file that they replace, so that all is compared for equality.
    """

    size: int | None = None
    mtime_ns: int | None = None
    ctime_ns: int | None = None
    inode: int | None = None
    digest: str = ""

    @classmethod
    def of(cls, name: str) -> FileState:
        """The state without the digest."""
        try:
            status = os.stat(name)
        except OSError:
            return cls()
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino % 2**63)

    @classmethod
    def read(cls, name: str) -> FileState:
        """The state with the digest, to be taken before the file is used: a later change then shows in the next one."""
        state = cls.of(name)
        is_file = os.path.isfile(name)  # a pipe would be waited for
        return state._replace(digest=digest_of_file(Path(name))) if is_file else state

    def after(self, name: str) -> FileState | None:
        """The state of a file that has the same bytes; None if they have changed."""
        now = FileState.of(name)
        if now.size is None or now == self._replace(digest=""):
            return self  # of a file that is not there now, the row is kept
        now = FileState.read(name)
        return now if self.digest and now.digest == self.digest else None
