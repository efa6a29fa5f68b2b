"""Load a trained model and apply it to images, without Lightning, data sets or the original paths.

>>> from medclip_dcl import load                                        # doctest: +SKIP
>>> model = load("runs/demo")                                           # doctest: +SKIP
>>> model.classify("chest.jpg")                                         # doctest: +SKIP
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from medclip_dcl.errors import MissingFileError, UserError
from medclip_dcl.findings import CHEX5, PromptSource, read_prompts
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.pictures.geometry import fit
from medclip_dcl.pictures.grey import UnusableImageError, to_grey
from medclip_dcl.pictures.image_file import read_grey
from medclip_dcl.pictures.transforms import centre_crop, scaled, to_input
from medclip_dcl.similarity import at_image_size, cosine_heat_maps
from medclip_dcl.weight_files import CONFIG_FILE, WEIGHTS_FILE, checkpoint_of_run, is_exported

ImageLike: TypeAlias = "str | Path | Image.Image | np.ndarray"


def load(source: str | Path, device: str | torch.device = "cpu") -> ImageTextInference:
    """Load a model from a run, a training checkpoint, an exported folder, or a Hugging Face repository.

    Args:
        source: a run folder (its best checkpoint by validation, else the last), a .ckpt file of `fit`, a folder of
            `save_pretrained`, or a repository id.
        device: of the model.

    Raises:
        MissingFileError: nothing at `source`, and no such repository can be reached.
        UserError: not a model of medclip_dcl, or weights that do not fit.
    """
    path = Path(source).expanduser()
    if (path / "checkpoints").is_dir() and not is_exported(path):
        path = _checkpoint_of_run(path)
    if path.suffix in (".yaml", ".json") or (path / "dataset.json").is_file():
        raise UserError(f"{path} is not a model: give a run folder, a checkpoint or an exported folder")
    network = ImageTextNetwork.from_pretrained(path if path.exists() else _download(str(source)))
    return ImageTextInference(network.to(device))


def _checkpoint_of_run(folder: Path) -> Path:
    file = checkpoint_of_run(folder / "checkpoints")
    if file is None:
        raise MissingFileError(
            f"{folder / 'checkpoints'} holds neither best.ckpt nor last.ckpt; wait for the run's first checkpoint, or "
            "give a .ckpt file"
        )
    if file.name != "best.ckpt":
        warnings.warn(f"{folder} has no best.ckpt by validation yet: loading {file}", stacklevel=3)
    return file


def _download(repository: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=[CONFIG_FILE, WEIGHTS_FILE]))
    except (OSError, ValueError) as error:
        raise MissingFileError(
            f"no file or folder {repository}, and no Hugging Face repository of that name could be downloaded"
        ) from error


class ImageTextInference:
    """A trained image-text network applied to paths (also of DICOM files), PIL images or uint8 arrays.

    Methods take one or several images, and return an empty result for an empty list. Images are converted to grey and
    fitted to the network's evaluation size like its training images (`medclip_dcl.pictures.geometry`); with geometry
    "shortest" the model sees the middle square.

    Args:
        network: in evaluation mode.
    """

    def __init__(self, network: ImageTextNetwork) -> None:
        self.network = network.eval()

    @torch.inference_mode()
    def similarity(
        self, images: ImageLike | Sequence[ImageLike], texts: str | Sequence[str]
    ) -> Float[np.ndarray, "image text"]:
        """Similarity of every image with every text, in [-1, 1] (the logits divided by gamma^2)."""
        sentences = self.network.embed_texts(_texts(texts))
        parts = [
            self.network.similarity(self._regions(image), sentences) / self.network.similarity.gamma2
            for image in _images(images)
        ]
        if not parts:
            return np.empty((0, len(sentences)), np.float32)
        return torch.cat(parts, dim=1).T.float().cpu().numpy()

    @torch.inference_mode()
    def heat_map(self, image: ImageLike, text: str) -> Float[np.ndarray, "height width"]:
        """Cosine of the text with the image's regions, bilinearly interpolated to the image's own pixels.

        NaN outside the middle square with geometry "shortest".

        Raises:
            TypeError: not one image and one text.
        """
        if not isinstance(text, str):
            raise TypeError(
                f"heat_map takes one text, a string, got {type(text).__name__}; call it for each text"
            )
        grey = as_grey(image)
        feature_map = self._feature_map(grey)
        sentence = self.network.embed_texts([text])
        regions = cosine_heat_maps(feature_map[0], sentence)[0]
        square = self.network.view.of(grey.height, grey.width)
        part = square.within(grey.height, grey.width)
        heat_map = np.full((grey.height, grey.width), np.nan, np.float32)
        enlarged = at_image_size(regions, square.height, square.width).float().cpu().numpy()
        heat_map[part.slices] = enlarged[part.slices_in(square)]
        return heat_map

    def classify(
        self,
        images: ImageLike | Sequence[ImageLike],
        prompts: PromptSource = CHEX5,
    ) -> pd.DataFrame:
        """Zero-shot scores: similarity with the positive minus that with the negative prompt.

        Above 0 the positive prompt fits better. The differences are not probabilities and not calibrated.

        Args:
            images: one or several.
            prompts: finding -> (negative, positive), each a prompt or several whose scores are averaged; or a YAML
                file of them (configs/prompts/chexpert14.yaml).

        Returns:
            One row per image, one column per finding; the index holds paths where images are paths.

        Raises:
            UserError: invalid prompts, see `medclip_dcl.findings.read_prompts`.
        """
        listed, pairs = list(_images(images)), read_prompts(prompts)
        ensembles = [texts for pair in pairs.values() for texts in pair]
        scores = self.similarity(listed, [text for texts in ensembles for text in texts])
        ends = np.cumsum([len(texts) for texts in ensembles])[:-1]
        means = np.stack([part.mean(axis=1) for part in np.split(scores, ends, axis=1)], axis=1)
        index = [str(x) if isinstance(x, (str, Path)) else i for i, x in enumerate(listed)]
        return pd.DataFrame(means[:, 1::2] - means[:, ::2], index=index, columns=list(pairs))

    @torch.inference_mode()
    def embed_images(self, images: ImageLike | Sequence[ImageLike]) -> Float[np.ndarray, "image dim"]:
        """Mean of each image's projected regions, of length 1.

        Its cosine with a sentence differs from `similarity` if that depends on single regions (LSE+NL).
        """
        parts = [self._regions(image).mean(1) for image in _images(images)]
        if not parts:
            return np.empty((0, self.network.image_encoder.dim), np.float32)
        return normalize(torch.cat(parts), dim=-1).float().cpu().numpy()

    @torch.inference_mode()
    def embed_texts(self, texts: str | Sequence[str]) -> Float[np.ndarray, "text dim"]:
        """Sentence embeddings, of length 1."""
        return normalize(self.network.embed_texts(_texts(texts)), dim=-1).float().cpu().numpy()

    def save_pretrained(self, folder: str | Path) -> None:
        """Export config.json (with the tokenizer) and model.safetensors to a folder for `load`.

        `python -m medclip_dcl.export` also writes a model card, made from the run folder.
        Vocabulary and weights derive from the training reports: share the folder only as their terms allow.
        """
        self.network.save_pretrained(folder)

    def _pixels(self, grey: Image.Image) -> Float[Tensor, "3 row column"]:
        view = self.network.view
        if view.prepared is None:
            fitted = fit(grey, view.geometry, view.size, Image.Resampling.BICUBIC)
        else:
            # The same steps as in data preparation and the datamodule.
            fitted = fit(grey, view.geometry, view.prepared, Image.Resampling.BILINEAR)
        return to_input(centre_crop(np.asarray(scaled(fitted, view.size)), view.seen))

    def _feature_map(self, grey: Image.Image) -> Float[Tensor, "1 dim row column"]:
        return self.network.feature_map(self._pixels(grey)[None].to(self.network.mean.device))

    def _regions(self, image: ImageLike) -> Float[Tensor, "1 region dim"]:
        return self.network.regions(self._feature_map(as_grey(image)))


def as_grey(image: ImageLike) -> Image.Image:
    """Convert a path, PIL image or uint8 array to an 8-bit grey image, as in data preparation.

    Files may be DICOM (needs the extra ``dicom``). More than 8 bits are scaled from the image's own range.

    Raises:
        TypeError: an array that is not uint8, or another type.
        UserError: an array of another shape than (H, W) or (H, W, 3); a file or image that cannot be used (damaged, of
            several frames, ...).
        OSError: the file is missing or cannot be read.
    """
    if isinstance(image, (str, Path)):
        try:
            return read_grey(Path(image))
        except UnusableImageError as error:
            raise UnusableImageError(f"{image}: {error}") from error
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8:
            raise TypeError(
                f"image arrays must be uint8, got {image.dtype}; scale the grey levels to 0..255 first"
            )
        if not (image.ndim == 2 or (image.ndim == 3 and image.shape[2] == 3)):
            raise UserError(f"image arrays must have the shape (H, W) or (H, W, 3), got {image.shape}")
        image = Image.fromarray(image)
    if not isinstance(image, Image.Image):
        raise TypeError(f"an image must be a path, a PIL image or a uint8 array, got {type(image).__name__}")
    return to_grey(image)


def _images(images: Any) -> Iterator[ImageLike]:
    """Iterate over one image or several; an array that does not have the shape of one image is a stack of grey ones.

    Raises:
        UserError: an array (3, H, W), which may be one image or three.
    """
    is_array = isinstance(images, np.ndarray)
    is_one_array = is_array and (images.ndim == 2 or (images.ndim == 3 and images.shape[2] == 3))
    if is_array and images.ndim == 3 and images.shape[0] == 3 and not is_one_array:
        raise UserError(
            f"an array of shape {images.shape} may be a colour image or three grey ones: give "
            "array.transpose(1, 2, 0), of shape (H, W, 3), or list(array)"
        )
    if is_one_array or isinstance(images, (str, Path, Image.Image)) or not isinstance(images, Iterable):
        yield images
    else:
        yield from images


def _texts(texts: str | Sequence[str]) -> list[str]:
    """One text or several, as a list.

    Raises:
        TypeError: anything but strings.
    """
    listed = [texts] if isinstance(texts, str) or not isinstance(texts, Iterable) else list(texts)
    for place, text in enumerate(listed):
        if not isinstance(text, str):
            raise TypeError(
                f"texts must be a string or a list of strings, got {type(text).__name__} at position {place}"
            )
    return listed
