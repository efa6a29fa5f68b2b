"""A trained classifier by load, ask, calibrate, export and page, against the LightningModule's own logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from medclip_dcl import load
from medclip_dcl.command.cli import main
from medclip_dcl.common.errors import UserError
from medclip_dcl.runs.run_folder import IMAGES_FILE
from tests.evaluation.classifier_runs import FINDINGS, words


@pytest.fixture(scope="module")
def run(labelled_set, encoder, undrawn, tmp_path_factory) -> Path:
    """Fine-tuned for nine steps; predictions of all train images."""
    run = tmp_path_factory.mktemp("runs") / "tuned"
    main(["fit", *words(run, labelled_set, encoder)])
    main(["predict", "--config", str(run / "config.yaml"), "--data.init_args.predict_use", "train"])
    (run / IMAGES_FILE).unlink()  # its training images serve as validate images below
    return run


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "classifier"
    load(run).save_pretrained(folder)
    return folder


def logits(run: Path, folder: Path) -> pd.DataFrame:
    """Lightning's logits, by the images' paths."""
    found = pd.read_parquet(run / "predictions/finding_probabilities.parquet")
    images = pd.read_parquet(folder / "images.parquet").set_index("dicom_id")["path"]
    found["path"] = [str(folder / "images" / images[dicom_id]) for dicom_id in found["dicom_id"]]
    return found.pivot(index="path", columns="finding", values="logit")[list(FINDINGS)]


def test_load_gives_lightnings_logits(run, exported, labelled_set):
    expected = logits(run, labelled_set)
    assert len(expected) == 24 and (expected.std() > 1e-3).all()
    for source in (run, run / "checkpoints/best.ckpt", exported):
        model = load(source)
        found = model.classify(list(expected.index))
        assert list(found.columns) == list(FINDINGS)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
        vectors = model.embed_images(list(expected.index)[:3])
        assert vectors.shape == (3, 32) and np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(3))
        assert model.classify([]).shape == (0, 3)
        text = "no text encoder; ask for its own findings, by classify .*Edema, Fracture, Support Devices"
        for ask in (
            lambda model: model.similarity([], "edema"),
            lambda model: model.heat_map(expected.index[0], "edema"),
            lambda model: model.embed_texts("edema"),
        ):
            with pytest.raises(UserError, match=f"{source} holds a classifier: it has {text}"):
                ask(model)
        with pytest.raises(UserError, match="holds a classifier, which scores findings of its own"):
            model.classify([], {"Edema": ("no edema", "edema")})
