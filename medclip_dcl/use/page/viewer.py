"""Images that the page shows, in memory, and the heat maps of sentences over them."""

from __future__ import annotations

import io
import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float
from PIL import Image

from medclip_dcl.common.errors import UserError
from medclip_dcl.metrics.calibration import Calibration
from medclip_dcl.networks.classifier import FindingNetwork
from medclip_dcl.networks.described import Encoded
from medclip_dcl.pictures.image_file import read_grey
from medclip_dcl.use.model import UNKNOWN_TEXT, EncodedImage, LoadedModel

SHOWN_SIDE = 1024
"""Longest side of a picture on the page, pixels; the model sees the image at its own resolution."""

MAX_IMAGES = 32
"""Images kept in memory; beyond it the one unused for longest is forgotten, and the page sends it again if needed."""

MAX_SENTENCES = 4


class ForgottenImageError(UserError):
    """An image is no longer in memory."""


class FindingScore(NamedTuple):
    """Zero-shot score or logit of a finding, and its probability and threshold where it is calibrated."""

    score: float
    probability: float | None = None
    threshold: float | None = None


class Viewer:
    """A model and the images that pages show, each known by a token that only its own page has.

    Methods may be called from several threads; the model works for one at a time.
    """

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self._images: OrderedDict[str, EncodedImage] = OrderedDict()
        self._images_lock, self._model_lock = threading.Lock(), threading.Lock()

    @property
    def is_classifier(self) -> bool:
        """True for a model that scores findings and reads no sentences."""
        return isinstance(self.model.network, FindingNetwork)

    @property
    def calibration(self) -> Calibration | None:
        """The model's, if it has at least one calibrated finding."""
        found = self.model.calibration
        return found if found is not None and found.calibrated() else None

    def open(self, content: bytes) -> tuple[str, EncodedImage, dict[str, FindingScore]]:
        """Decode and encode an image file: its token, the image as it is shown, and its scores by finding.

        The model has seen it at its own resolution.
        """
        with self._model_lock:
            image = read_grey(io.BytesIO(content))
            encoded = self.model.encode_image(image)
            scores = self._scores(encoded.encoded)
        image.thumbnail((SHOWN_SIDE, SHOWN_SIDE), Image.Resampling.LANCZOS)
        shown = replace(encoded, grey=image)
        token = secrets.token_urlsafe()
        with self._images_lock:
            self._images[token] = shown
            while len(self._images) > MAX_IMAGES:
                self._images.popitem(last=False)
        return token, shown, scores

    @property
    def unlabelled(self) -> list[str]:
        """Findings of the calibration that its set never labelled, which are not shown."""
        found = {} if self.calibration is None else self.calibration.findings
        return [finding for finding, one in found.items() if not one.n_positive + one.n_negative]

    def _scores(self, encoded: Encoded) -> dict[str, FindingScore]:
        calibration = self.calibration
        scores = self.model.scorer(calibrated=calibration is not None).scores(encoded)
        scores = scores.drop(columns=self.unlabelled)
        found = {"score": scores.iloc[0]}
        if calibration is not None:
            found |= {"probability": calibration.probabilities(scores).iloc[0]}
            found |= {"threshold": pd.Series(calibration.thresholds, dtype="float64")[scores.columns]}
        table = pd.DataFrame(found, dtype="float64").astype(object).replace({np.nan: None})
        return {
            str(finding): FindingScore(*row)
            for finding, row in zip(table.index, table.to_numpy(), strict=True)
        }

    def forget(self, token: str) -> None:
        with self._images_lock:
            self._images.pop(token, None)

    def image(self, token: str) -> EncodedImage:
        with self._images_lock:
            if token not in self._images:
                raise ForgottenImageError("The image is no longer in memory. Drop it again.")
            self._images.move_to_end(token)
            return self._images[token]

    def heat_maps(
        self, shown: EncodedImage, sentences: Sequence[str]
    ) -> list[Float[np.ndarray, "height width"]]:
        """Heat map of each sentence at the size of the shown picture; NaN where the model sees nothing."""
        with self._model_lock:
            maps = self.model.heat_maps(shown, sentences)
        return [maps.in_image(place) for place in range(len(sentences))]

    def note(self, sentence: str) -> str:
        """A warning about a sentence that the model can read; "" for none."""
        is_unknown = self.model.image_text.text_encoder.are_unknown([sentence])[0]
        return f"The sentence {UNKNOWN_TEXT}. " if is_unknown else ""

    def problem(self, sentence: str) -> str | None:
        """Why the model cannot read a sentence, and what to do: it is empty, or longer than the model reads."""
        if not sentence.strip():
            return "Type a sentence of a report, such as: Small left pleural effusion."
        if self.model.image_text.text_encoder.are_truncated([sentence])[0]:
            return (
                "The sentence is longer than the model reads. Shorten it, or compare its parts as sentences of their "
                "own."
            )
        return None
