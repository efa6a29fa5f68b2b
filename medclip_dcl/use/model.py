"""Load a trained model and apply it to images, without Lightning, data sets or the original paths.

>>> from medclip_dcl import load                                        # doctest: +SKIP
>>> model = load("runs/demo")                                           # doctest: +SKIP
>>> model.classify("chest.jpg")                                         # doctest: +SKIP
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from medclip_dcl.common.devices import usable_device
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.find_model import find_model
from medclip_dcl.common.findings import Ensemble, PromptSource
from medclip_dcl.common.weight_files import CLASSIFIER, IMAGE_TEXT, SavedModel, read_model
from medclip_dcl.metrics.calibration import CALIBRATION_FILE, CARD_FILE, Calibration, differences
from medclip_dcl.networks.classifier import FindingNetwork
from medclip_dcl.networks.described import Encoded
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.similarity import cosine_heat_maps
from medclip_dcl.networks.zero_shot import ZeroShot
from medclip_dcl.pictures.inputs import ImageLike, Images, as_grey, each_image, network_input
from medclip_dcl.runs.run_folder import DATA_FILE, stated_data
from medclip_dcl.use.heat_maps import HeatMaps

if TYPE_CHECKING:
    from medclip_dcl.pictures.figure import ShownFigure

UNKNOWN_TEXT = (
    "holds no word, or hardly one, that the text encoder knows: others like it have nearly its map and score"
)
"""Behind the name of a text."""

BATCH_SIZE = 16
"""Images read and encoded at a time."""


def load(
    source: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    calibration: str | Path | None = None,
) -> LoadedModel:
    """Load a model: a run folder, a checkpoint, an exported folder or a Hugging Face repository (owner/name).

    Args:
        source: see `medclip_dcl.common.find_model`.
        device: of the model.
        dtype: of the encoders' arithmetic; with bfloat16 or float16 (autocast) the weights stay in float32, and so do
            similarities and heat maps.
        calibration: file of ``medclip-dcl calibrate --output``; None: that of the run or of the
            exported folder, if it fits.

    Raises:
        MissingFileError: no such model.
        UserError: not a model of medclip_dcl, weights or a calibration that do not fit, or a device that cannot be
            used.
    """
    device, found = usable_device(device), find_model(source)
    network = network_of(saved := read_model(found.path))
    file = Path(calibration).expanduser() if calibration else found.folder and found.folder / CALIBRATION_FILE
    fitted = Calibration.read(file) if file and (calibration or file.is_file()) else None
    if fitted and (differing := _differing(fitted, network)):
        problem = f"{file} was fitted to another model or by an earlier version of this program ({differing} differ)"
        again = "calibrate again: medclip-dcl calibrate MODEL"
        if calibration:
            raise UserError(f"{problem}; {again}")
        warnings.warn(f"{problem} and is left out; {again}", stacklevel=2)
        fitted = None
    origin = found.path.absolute(), stated_data(saved)
    return LoadedModel(network.to(device), dtype, fitted, str(source), origin)


def save(model: LoadedModel, folder: Path) -> None:
    """Write the files of `LoadedModel.save_pretrained` over those of an earlier model."""
    file = folder / CALIBRATION_FILE
    model.network.save_pretrained(folder)
    for earlier in (file, file.with_name(DATA_FILE)):
        earlier.unlink(missing_ok=True)
    if model.calibration is not None:
        model.calibration.write(file)


def network_of(saved: SavedModel) -> ImageTextNetwork | FindingNetwork:
    """The network of a saved model, by its kind, in evaluation mode."""
    saved.require_network(IMAGE_TEXT, CLASSIFIER)
    return (FindingNetwork if saved.kind == CLASSIFIER else ImageTextNetwork).of_saved(saved)


def _differing(calibration: Calibration, network: ImageTextNetwork | FindingNetwork) -> str:
    """Names of what differs between a calibration's model and a network; "" if it was fitted to the network."""
    has_scale = math.isclose(calibration.scale, network.scale, rel_tol=1e-4)
    found = differences(calibration.fingerprint, network.fingerprint())
    return ", ".join(found if has_scale else [*found, "gamma^2"])


@dataclass(frozen=True)
class EncodedImage:
    """An image, which may be replaced by a smaller copy for smaller heat maps, and its encoding."""

    grey: Image.Image
    encoded: Encoded


@dataclass(frozen=True)
class FindingScorer:
    """Scores of encoded images by finding: of `zero_shot`, or without it a classifier's logits.

    `calibration` turns them into probabilities; None where these are not asked for.
    """

    findings: list[str]
    compute: Callable[[Encoded], Float[np.ndarray, "image finding"]]
    zero_shot: ZeroShot | None = None
    calibration: Calibration | None = None

    def scores(self, encoded: Encoded) -> pd.DataFrame:
        """A row for each image, a column for each finding."""
        return pd.DataFrame(self.compute(encoded), columns=self.findings)

    def answers(self, encoded: Encoded) -> pd.DataFrame:
        """As `scores`: probabilities where the scorer is calibrated."""
        scores = self.scores(encoded)
        return scores if self.calibration is None else self.calibration.probabilities(scores)


class LoadedModel:
    """A trained model applied to paths (also of DICOM files), PIL images or uint8 arrays.

    It holds one of two kinds of network. A classifier has no text encoder: it has `classify`, with a logit for each of
    its own findings, and `embed_images`; methods that take texts raise a UserError.

    Methods take one or several images (any iterable, read `batch_size` at a time). Images are converted to grey and
    fitted to the network's evaluation size like its training images (`medclip_dcl.pictures.geometry`); with geometry
    "shortest" the model sees the middle square. An image of one grey level gets its result and a ConstantImageWarning.

    Args:
        network: an ImageTextNetwork or a FindingNetwork, in evaluation mode.
        dtype: of the encoders' arithmetic, see `load`.
        name: of the model in an error.
        calibration: fitted to this network by ``medclip-dcl calibrate``; None for none. Its
            `findings` hold the thresholds.
        origin: file or folder that it was loaded from, and `stated_data` of that moment, for `evaluate`.

    Raises, in all methods:
        UserError: an image that cannot be used (see `medclip_dcl.pictures.inputs.as_grey`), an empty text, or one that
            is longer than the text encoder takes.

    Warns, in all methods:
        UserWarning: a text of which the text encoder knows hardly a word.
    """

    def __init__(
        self,
        network: ImageTextNetwork | FindingNetwork,
        dtype: torch.dtype = torch.float32,
        calibration: Calibration | None = None,
        name: str = "this model",
        origin: tuple[Path, tuple[object, ...]] | None = None,
    ) -> None:
        self.network = network.eval()
        self.dtype, self.calibration, self.name, self.origin = dtype, calibration, name, origin

    def __repr__(self) -> str:
        size = sum(parameter.numel() for parameter in self.network.parameters())
        findings = getattr(self.network, "findings", ["of any prompts"])
        calibrated = self.calibration.calibrated() if self.calibration else []
        return (
            f"<{self.name}: {self.network.kind}, {size:,} parameters, images of {self.network.image_size} pixels, "
            f"findings: {', '.join(findings)}, calibrated: {', '.join(calibrated) or 'none'}>"
        )

    @property
    def image_text(self) -> ImageTextNetwork:
        """The network of an image-text model.

        Raises:
            UserError: the model is a classifier.
        """
        if isinstance(self.network, ImageTextNetwork):
            return self.network
        raise UserError(
            f"{self.name} holds a classifier: it has no text encoder; ask for its own findings, by classify "
            f"(--classify): {', '.join(self.network.findings)}"
        )

    def similarity(
        self, images: Images, texts: str | Sequence[str], batch_size: int = BATCH_SIZE
    ) -> Float[np.ndarray, "image text"]:
        """Similarity of every image with every text, in [-1, 1] (the logits divided by gamma^2)."""
        sentences = self._sentences(texts)
        parts = [
            self._similarity(self.encode_inputs(inputs), sentences)
            for inputs in self._inputs(images, batch_size)
        ]
        return np.concatenate([np.empty((0, len(sentences)), np.float32), *parts])

    def heat_map(self, image: ImageLike, text: str) -> Float[np.ndarray, "height width"]:
        """Cosine of the text with the image's regions, bilinearly interpolated to the image's own pixels.

        NaN outside the middle square with geometry "shortest".
        """
        return self.heat_maps(image, [text]).in_image(0)

    @torch.inference_mode()
    def heat_maps(self, image: ImageLike | EncodedImage, texts: str | Sequence[str]) -> HeatMaps:
        """Heat maps and similarities of several texts in one image, encoding it once unless it is an EncodedImage."""
        listed = _texts(texts)
        sentences = self._sentences(listed)
        one = image if isinstance(image, EncodedImage) else self.encode_image(image)
        regions = cosine_heat_maps(one.encoded.feature_map[0], sentences).cpu()
        similarity = self._similarity(one.encoded, sentences)[0]
        return HeatMaps(one.grey, tuple(listed), similarity, regions, self.network.view)

    @torch.inference_mode()
    def encode_image(self, image: ImageLike) -> EncodedImage:
        """Encode an image once, for several calls of `heat_maps`."""
        grey = as_grey(image)
        return EncodedImage(grey, self.encode_inputs(np.stack([network_input(grey, self.network.view)])))

    def show(self, image: ImageLike, text: str) -> ShownFigure:
        """A figure of the image and the text's heat map over it; shows itself as the last line of a notebook's cell."""
        return self.show_all(image, [text])

    def show_all(self, image: ImageLike, texts: str | Sequence[str]) -> ShownFigure:
        """A figure of the image and each text's heat map over it, all with the same colours.

        It is a plain matplotlib Figure, unknown to pyplot: save it by `figure.savefig("chest.png")`.
        """
        return self.heat_maps(image, texts).figure()

    def classify(
        self,
        images: Images,
        prompts: PromptSource | None = None,
        calibrated: bool = False,
        batch_size: int = BATCH_SIZE,
        ensemble: Ensemble | None = None,
    ) -> pd.DataFrame:
        """Zero-shot scores, similarity with the positive minus that with the negative prompt; or a classifier's logits.

        Above 0 the positive prompt fits better, or the finding is more likely than not. These are not probabilities.

        Args:
            images: one or several.
            prompts: finding -> (negative, positive), each a prompt or several; or a YAML file of them,
                by path or packaged name (chexpert14). None: CheX5's, or with `calibrated` those of the calibration. A
                classifier takes none. "label_head": the findings of a model that was trained with `label_weight`, and
                its logits of them, without calibration.
            calibrated: return probabilities; NaN for a finding that had too few cases to calibrate.
            batch_size: images at a time.
            ensemble: of several prompts a side: "scores" averages their scores, "embeddings" their normalised
                embeddings, as CLIP does. None: "scores", or with `calibrated` that of the calibration.

        Returns:
            One row per image, one column per finding; the index holds paths where images are paths.

        Raises:
            UserError: invalid prompts, see `findings.read_prompts`; `calibrated` without a calibration,
                with prompts or an ensemble that it was not fitted to, or with findings of which none is calibrated.
        """
        index: list[str | int] = []

        def named() -> Iterator[ImageLike]:
            for place, image in enumerate(each_image(images)):
                index.append(str(image) if isinstance(image, (str, Path)) else place)
                yield image

        scorer = self.scorer(prompts, ensemble, calibrated)
        parts = [scorer.answers(self.encode_inputs(inputs)) for inputs in self._inputs(named(), batch_size)]
        return (
            pd.concat(parts).set_axis(index)
            if parts
            else pd.DataFrame(columns=scorer.findings, dtype="float32")
        )

    def scorer(
        self, prompts: PromptSource | None = None, ensemble: Ensemble | None = None, calibrated: bool = False
    ) -> FindingScorer:
        """The scores of `classify`, for images that are encoded elsewhere; prompts are encoded once.

        With `calibrated` they are those that the model's calibration turns into probabilities.
        """
        if prompts == "label_head" and isinstance(head := self.network, ImageTextNetwork):
            if not head.label_findings or ensemble or calibrated:
                raise UserError(
                    f"prompts label_head: expected a model trained with label_weight, no ensemble and no calibration, "
                    f"found {self.name} with the findings {[*head.label_findings]}, {ensemble} and {calibrated}"
                )
            return FindingScorer([*head.label_findings], lambda x: self._finite(lambda: head.label_logits(x)))
        calibration = self.require_calibration() if calibrated else None
        pairs = calibration.prompts(prompts, ensemble) if calibration else None
        if isinstance(network := self.network, FindingNetwork):
            if prompts is not None or ensemble is not None:
                raise UserError(
                    f"prompts, ensemble: {self.name} holds a classifier, which scores findings of its own "
                    f"({', '.join(network.findings)}); leave them out"
                )
            return FindingScorer(
                list(network.findings),
                lambda encoded: self._finite(lambda: network.classify(network.image_vectors(encoded))),
                calibration=calibration,
            )
        if calibration:
            prompts, ensemble = pairs, calibration.ensemble
        zero_shot = ZeroShot(prompts, ensemble or "scores")
        sentences = self._sentences(zero_shot.texts, zero_shot.owners)
        return FindingScorer(
            list(zero_shot.prompts),
            lambda encoded: self._finite(lambda: zero_shot.differences(network, encoded, sentences)),
            *(zero_shot, calibration),
        )

    @torch.inference_mode()
    def embed_images(self, images: Images, batch_size: int = BATCH_SIZE) -> Float[np.ndarray, "image dim"]:
        """Global vector of each image, or the mean of its projected regions, of length 1.

        A classifier's are not projected: its features before they are standardised.
        Its cosine with a sentence differs from `similarity` if that depends on single regions (LSE+NL).
        """
        parts = [
            normalize(self.network.image_vectors(self.encode_inputs(inputs)), dim=-1).cpu().numpy()
            for inputs in self._inputs(images, batch_size)
        ]
        encoder = self.network.image_encoder
        dim = encoder.feature_dim if isinstance(self.network, FindingNetwork) else encoder.dim
        return np.concatenate([np.empty((0, dim), np.float32), *parts])

    @torch.inference_mode()
    def embed_texts(self, texts: str | Sequence[str]) -> Float[np.ndarray, "text dim"]:
        """Sentence embeddings, of length 1."""
        return normalize(self._sentences(texts), dim=-1).cpu().numpy()

    def save_pretrained(self, folder: str | Path) -> None:
        """Export config.json (with any tokenizer), model.safetensors and calibration.json (if any) for `load`.

        Vocabulary and weights derive from the training reports: share the folder only as their terms allow.

        Raises:
            UserError: the folder has the card or ONNX files of an export, which would not be of these weights.
        """
        others = [*Path(folder).glob(CARD_FILE), *sorted(Path(folder).glob("*.onnx"))]
        if others:
            raise UserError(
                f"{folder} holds {', '.join(file.name for file in others)}, which are not of this model; give another "
                "folder, or export anew: medclip-dcl export MODEL --output FOLDER"
            )
        save(self, Path(folder))

    def require_calibration(self) -> Calibration:
        if self.calibration is None:
            raise UserError("this model has no calibration: run medclip-dcl calibrate MODEL, and load again")
        return self.calibration

    def _inputs(self, images: Images, batch_size: int) -> Iterator[UInt8[np.ndarray, "image side side"]]:
        if batch_size < 1:
            raise UserError(f"batch_size: expected at least 1, found {batch_size}")
        view = self.network.view
        squares = (network_input(as_grey(image), view) for image in each_image(images))
        while batch := list(islice(squares, batch_size)):
            yield np.stack(batch)

    def _similarity(
        self, encoded: Encoded, sentences: Float[Tensor, "text dim"]
    ) -> Float[np.ndarray, "image text"]:
        return self._finite(lambda: self.image_text.scores(encoded, sentences).T)

    @torch.inference_mode()
    def _finite(self, compute: Callable[[], Tensor]) -> Float[np.ndarray, "image column"]:
        scores = compute()
        if not scores.isfinite().all():
            raise UserError(f"scores are not finite in {self.dtype}; use float32, or another checkpoint")
        return scores.cpu().numpy()

    @torch.inference_mode()
    def encode_inputs(self, inputs: UInt8[np.ndarray, "image side side"]) -> Encoded:
        """Encode images that `medclip_dcl.pictures.inputs.network_input` made."""
        grey = torch.from_numpy(inputs).to(self.network.mean.device)
        with self._arithmetic():
            found = self.network.encode(grey[:, None])
            return found.each(Tensor.float)

    @torch.inference_mode()
    def _sentences(
        self, texts: str | Sequence[str], owners: Sequence[str] | None = None
    ) -> Float[Tensor, "text dim"]:
        """Sentence embeddings; `owners` name the texts in an error, which does not quote them."""
        listed, encoder = _texts(texts), self.image_text.text_encoder
        names = owners or [f"the text at position {place}" for place in range(len(listed))]
        for name, text, is_cut in zip(names, listed, encoder.are_truncated(listed), strict=True):
            if is_cut:
                raise UserError(
                    f"{name}, of {len(text.split())} words, is longer than the text encoder takes; split it "
                    "into sentences"
                )
        for name, is_unknown in zip(names, encoder.are_unknown(listed), strict=True):
            if is_unknown:
                warnings.warn(f"{name} {UNKNOWN_TEXT}", UserWarning, stacklevel=3)
        with self._arithmetic():
            return self.image_text.embed_texts(listed).float()

    def _arithmetic(self) -> torch.autocast:
        device = self.network.mean.device.type
        return torch.autocast(device, self.dtype, enabled=self.dtype != torch.float32)


def _texts(texts: str | Sequence[str]) -> list[str]:
    listed = [texts] if isinstance(texts, str) else list(texts)
    for place, text in enumerate(listed):
        if not text.strip():
            raise UserError(
                f"the text at position {place} is empty; give a sentence, such as 'No pneumothorax.'"
            )
    return listed
