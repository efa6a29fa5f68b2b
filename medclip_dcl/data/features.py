"""Features of frozen encoders, computed once by `medclip-dcl encode`: the folder features/NAME of a prepared set.

Files: `images.npy`, float16 (image, channel, row, column), before the projection, in the order of images.parquet, with
the global vector in a further last row where the encoder has one (`ImageTextNetwork.image_features`);
`sentences.npy`, float32 (sentence, hidden), in the order of sentences.parquet; `features.json`, written last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import Dataset

from medclip_dcl.common.files import parse_json
from medclip_dcl.data.fields import rows_of_keys
from medclip_dcl.data.prepared import PreparedDataError, PreparedSet
from medclip_dcl.networks.image_encoder import Features as FeatureMaps
from medclip_dcl.pictures.geometry import View

FOLDER = "features"
IMAGES_FILE, SENTENCES_FILE, INFO_FILE = "images.npy", "sentences.npy", "features.json"
MADE_BY = "medclip-dcl encode MODEL SET"


@dataclass(frozen=True)
class FeaturesInfo:
    """Everything on which the features depend: fingerprints of encoders and set, and the view of the images.

    `evaluation_size` is the side of the middle square that the encoder saw, in pixels; `prepared_size` the one to which
    images were fitted before they were scaled, if known.
    """

    encoders: dict[str, str]
    dataset: str
    image_size: int
    evaluation_size: int
    geometry: str
    prepared_size: int | None

    @classmethod
    def of(cls, encoders: dict[str, str], prepared: PreparedSet, view: View) -> FeaturesInfo:
        return cls(encoders, prepared.fingerprint, view.size, view.seen, *prepared.fitting)


class MappedRows:
    """Rows of a .npy file, read when they are asked for, or all at first use; each process opens the file itself."""

    def __init__(self, file: Path, in_memory: bool = False) -> None:
        self.file, self.in_memory = file, in_memory

    def __getstate__(self) -> dict[str, Any]:
        return {"file": self.file, "in_memory": self.in_memory}

    @cached_property
    def values(self) -> np.ndarray:
        return np.load(self.file, mmap_mode=None if self.in_memory else "r", allow_pickle=False)

    def __getitem__(self, rows: Sequence[int] | np.ndarray) -> Tensor:
        return torch.from_numpy(self.values[np.asarray(rows, dtype=np.int64)])


class Features:
    """Features of a prepared set, opened for reading; `in_memory` reads those of the images at once."""

    def __init__(self, prepared: PreparedSet, name: str, in_memory: bool = False) -> None:
        self.folder = prepared.folder / FOLDER / name
        self._images = MappedRows(self.folder / IMAGES_FILE, in_memory)
        self._sentences = MappedRows(self.folder / SENTENCES_FILE)
        try:
            self.info = FeaturesInfo(**parse_json((self.folder / INFO_FILE).read_text(encoding="utf-8")))
            found = len(self._images.values), len(self._sentences.values)
        except (OSError, ValueError, TypeError) as error:
            names = sorted(file.parent.name for file in (prepared.folder / FOLDER).glob(f"*/{INFO_FILE}"))
            raise PreparedDataError(
                f"data.features: {prepared.folder} has no finished features named {name} (there: "
                f"{', '.join(names) or 'none'}): {error}; make them, after deleting what there is: {MADE_BY}; or set "
                "data.features: null"
            ) from error
        self._dicom_ids = pd.Index(prepared.rows("images", ["dicom_id"])["dicom_id"])
        sentences = prepared.rows("sentences", ["sentence_id"])["sentence_id"].to_numpy()
        if self.info.dataset != prepared.fingerprint or found != (len(self._dicom_ids), len(sentences)):
            raise PreparedDataError(
                f"{self.folder} was made of another content of {prepared.folder}, whose images or tables have changed "
                f"since; delete it and make it again: {MADE_BY}"
            )
        self._row_of_sentence = np.argsort(sentences, kind="stable")
        self._sentence_ids = sentences[self._row_of_sentence]

    def rows_of_images(self, dicom_ids: Sequence[str]) -> np.ndarray:
        """Rows of these images in images.parquet."""
        return self._dicom_ids.get_indexer(pd.Index(dicom_ids))

    def of_images(self, rows: Sequence[int] | np.ndarray) -> FeatureMaps:
        """Input of the image encoder's projection, in float16, by rows of images.parquet."""
        return self._images[rows]

    def of_sentences(self, sentence_ids: Sequence[int]) -> Float[Tensor, "sentence hidden"]:
        places = rows_of_keys(self._sentence_ids, np.asarray(sentence_ids))
        return self._sentences[self._row_of_sentence[places]]


@dataclass(eq=False)
class EncodedImages(Dataset):
    """Features of images; serves whole batches."""

    features: Features
    dicom_ids: Sequence[str]

    def __post_init__(self) -> None:
        self.rows = self.features.rows_of_images(self.dicom_ids)

    def __len__(self) -> int:
        return len(self.dicom_ids)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Any]:
        dicom_ids = [self.dicom_ids[index] for index in indices]
        return {"features": self.features.of_images(self.rows[indices]), "dicom_id": dicom_ids}
