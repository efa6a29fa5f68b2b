"""Image sizes of a checkpoint's training: defaults of later runs, and warnings about other sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jsonargparse import Namespace

from medclip_dcl.common.weight_files import SavedModel
from medclip_dcl.data.images import USUAL_SIZE, usual_crop
from medclip_dcl.runs.saved import other_preparation


def fill_image_sizes(config: Namespace, known: Mapping[str, Any], trains: bool = True) -> None:
    """Replace image sizes that are null in the configuration of a command, in place.

    Args:
        config: of `fit`, `validate`, `test` or `predict`.
        known: image_size and crop_size of a training, each where it is known; without image_size SSD's 512 and 480.
        trains: False for a command that crops no image.
    """
    options = config.get("data", Namespace()).get("init_args", Namespace())
    if "image_size" not in options:
        return
    has_crop = "crop_size" in options
    if has_crop and not trains:
        options.crop_size = None
    if options.image_size is not None:
        return
    size, crop = known.get("image_size"), known.get("crop_size")
    if size is None:
        size, crop = USUAL_SIZE, None
    options.image_size = size
    # Features computed once are of whole images.
    is_whole = options.get("features") if "features" in options else config.model.init_args.get("frozen")
    if has_crop and trains and options.crop_size is None and not is_whole:
        options.crop_size = crop or usual_crop(size)


def trained_images(source: SavedModel) -> dict[str, Any]:
    """The size and geometry of the images of a network's training, as far as they are known.

    image_size_before is the size of the training that this one had started from.
    """
    known: dict[str, Any] = {
        name: source.network[name]
        for name in ("image_size", "geometry", "prepared_size")
        if name in source.network
    }
    before = (source.checkpoint.get("initial_weights") or {}).get("image_size")
    return known if before is None else {**known, "image_size_before": before}


def other_images(source: SavedModel, shown: Mapping[str, Any]) -> list[str]:
    """Sentences on how the images shown differ from those of the training; none where they are alike."""
    trained, found = trained_images(source), []
    size, other = trained.get("image_size"), shown.get("image_size")
    if size and other and size != other:
        found.append(
            f"{source.path} was trained on images of {size} pixels, data.image_size is {other}: structures appear "
            f"{other / size:.2g} times as large as in its training, which usually costs accuracy, and an image takes "
            f"{(other / size) ** 2:.2g} times the computation; --data.init_args.image_size null takes {size}"
        )
    if "geometry" in trained and "geometry" in shown and trained["geometry"] != shown["geometry"]:
        found.append(
            f"{source.path} was trained on images of geometry {trained['geometry']}, those of data.folder were "
            f"prepared with {shown['geometry']}; prepare the set with --geometry {trained['geometry']} to show them "
            "alike"
        )
    if preparation := other_preparation(shown, trained):
        found.append(f"{source.path}: {preparation}")
    return found
