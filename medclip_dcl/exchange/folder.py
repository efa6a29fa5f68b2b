"""The exported folder: config.json and model.safetensors for `load`, calibration.json, data.json and a model card."""

from __future__ import annotations

from pathlib import Path

from medclip_dcl.common.errors import UserError, WorseResultError
from medclip_dcl.common.files import write_json, write_text
from medclip_dcl.common.find_model import CONFIG_FILE, WEIGHTS_FILE, find_model, is_exported
from medclip_dcl.common.terms import copy_terms, files_of_terms
from medclip_dcl.common.weight_files import read_model
from medclip_dcl.data.lineage import Lineage
from medclip_dcl.exchange.card import RESULTS, model_card
from medclip_dcl.exchange.onnx_files import CLASSIFIER_FILE, IMAGE_FILE, TEXT_FILE, TOKENIZER_FILE
from medclip_dcl.metrics.calibration import CALIBRATION_FILE, CARD_FILE, Calibration, without_thresholds
from medclip_dcl.runs.run_folder import DATA_FILE
from medclip_dcl.use.model import LoadedModel, load, save

_SAVED = (CONFIG_FILE, WEIGHTS_FILE, CALIBRATION_FILE)
FILES = (*_SAVED, CARD_FILE, DATA_FILE, IMAGE_FILE, TEXT_FILE, TOKENIZER_FILE, CLASSIFIER_FILE)
"""Files of an exported folder, beside the licences and card of its source."""


def exported_files(folder: Path) -> dict[str, Path]:
    """Name -> file of each file of an exported folder; other files in it are somebody else's."""
    files = [*(folder / name for name in FILES), *files_of_terms(folder)]
    return {file.name: file for file in files if file.is_file()}


def export_model(
    source: str | Path, folder: Path, address: str | None = None, calibration: str | Path | None = None
) -> LoadedModel:
    """Write the exported folder of a model, and return the model.

    The card is made from the checkpoint's run folder. Of an exported folder, its files are copied but for ONNX. An
    earlier export at `folder` is replaced, ONNX files included. `address` stands in the example of the card; the
    folder's name by default. `calibration`: as in `load`.
    """
    found = find_model(source)
    home = found.folder or found.path
    _check_free(folder)
    model = load(found.path, calibration=calibration)
    if home.resolve() == folder.resolve():
        if calibration is not None and model.calibration is not None:
            model.calibration.write(folder / CALIBRATION_FILE)
        return model
    # Before anything is written: a card that cannot be made leaves the folder as it was.
    if found.path.is_dir():
        card = _card_of(home) if calibration is None else without_thresholds(_card_of(home))
    else:
        card = model_card(home, model.network, address or folder.resolve().name, model.calibration)
    _require_better(folder, model, card)
    # First, and at once or not at all: weights that do not fit on the disk leave the folder as it was, too.
    save(model, folder)
    for name, file in exported_files(folder).items():
        if name not in _SAVED:  # of the earlier export
            file.unlink()
    copy_terms(found.folder, folder)
    if data := Lineage.of(read_model(found.path)).record:
        write_json(data, folder / DATA_FILE)
    if card:
        write_text(card, folder / CARD_FILE)
    return model


def _require_better(folder: Path, model: LoadedModel, card: str) -> None:
    """Refuse to replace an export of the same weights that has a calibration or results which the new one lacks."""
    own, earlier, file = model.network.fingerprint(), _card_of(folder), folder / CALIBRATION_FILE
    lost = ["results"] if own["weights"] in earlier and RESULTS in earlier and RESULTS not in card else []
    if model.calibration is None and file.is_file():
        calibration = Calibration.read(file)
        lost += ["a calibration"] if calibration.fingerprint == own and calibration.calibrated() else []
    if lost:
        raise WorseResultError(
            f"{folder} is kept: it has {' and '.join(lost)} of these weights, which the source lacks; give another "
            "folder, or delete this one"
        )


def _card_of(folder: Path) -> str:
    file = folder / CARD_FILE
    return file.read_bytes().decode(errors="replace") if file.is_file() else ""


def _check_free(folder: Path) -> None:
    """Refuse a folder that holds files of another kind than an export's, or a run."""
    paths = folder.iterdir() if folder.is_dir() else [folder] if folder.exists() else ()
    names = {path.name for path in paths if not path.name.startswith(".")}
    # A first export that was killed holds the weights alone.
    is_export = is_exported(folder) or names == {WEIGHTS_FILE}
    if others := names - exported_files(folder).keys() if is_export else names:
        raise UserError(
            f"{folder} holds {min(others)}, which is not of an export; give a new or an empty folder, or that of an "
            "earlier export"
        )
