"""A labelled set and runs of a classifier, for several modules."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from medclip_dcl.command.cli import main
from medclip_dcl.common.findings import CHEXPERT
from medclip_dcl.data.prepared import write_table
from medclip_dcl.models.classifier import Classifier
from medclip_dcl.networks.image_encoder import ResNetRegions
from tests.evaluation.classifier_runs import words


@pytest.fixture(scope="module")
def labelled_set(small_set, tmp_path_factory) -> Path:
    """`small_set` with ten test images, of which nine are labelled; Fracture has one positive test case."""
    folder = shutil.copytree(small_set, tmp_path_factory.mktemp("labelled") / "set")
    images = pd.read_parquet(folder / "images.parquet")
    images.loc[images["use"] == "grounding", "official_split"] = "test"
    write_table(images, folder / "images.parquet", "images")
    labels = pd.read_parquet(folder / "labels.parquet")
    generator = np.random.default_rng(8)
    labels[list(CHEXPERT)] = generator.choice(
        [1.0, 0.0, -1.0, np.nan], (len(labels), len(CHEXPERT)), p=[0.4, 0.4, 0.1, 0.1]
    )
    is_test = labels["study_id"].isin(images.loc[images["official_split"] == "test", "study_id"])
    labels.loc[is_test, "Edema"] = [1, 0, 0, 1, 1, -1, np.nan, 0, 1, np.nan]
    labels.loc[is_test, "Fracture"] = [0, 0, 1, 0, 0, 0, 0, 0, -1, np.nan]
    labels.loc[is_test, "Support Devices"] = [1, np.nan, 1, 1, -1, np.nan, 1, np.nan, np.nan, np.nan]
    labels.loc[labels["study_id"] == 5041, list(CHEXPERT)] = np.nan
    write_table(labels, folder / "labels.parquet", "labels")
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    """A classifier's checkpoint of a small ResNet, as a source, trained at 32 pixels with crops of 24."""
    torch.manual_seed(11)
    file = tmp_path_factory.mktemp("source") / "source.ckpt"
    model = Classifier(["Edema"], ResNetRegions(dim=5, stride=16, width=8))
    model.network.mean.fill_(0.3)
    model.network.image_size, model.network.crop_size = 32, 24
    content: dict[str, Any] = {"state_dict": model.state_dict()}
    model.on_save_checkpoint(content)
    torch.save(content, file)
    return file


@pytest.fixture(scope="module")
def probed(labelled_set, encoder, undrawn, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "probe"
    main(["fit", *words(run, labelled_set, encoder, probe=True)])
    main(["test", "--config", str(run / "config.yaml")])
    return run
