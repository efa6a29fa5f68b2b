"""The second loss on labels: its targets and columns, its value, and the label head in checkpoints and exports."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss

from medclip_dcl.common.errors import UserError
from medclip_dcl.data.prepared import PreparedDataError, PreparedSet, write_table
from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.initial_weights import take_over
from medclip_dcl.use.model import load
from tests.models.test_image_text import build, data_of, first_batch, trainer
from tests.small import PatchRegions

NAN = float("nan")
CODES = {"Edema": [1, 0, -1, NAN], "Pneumonia": [1, 1, NAN, -1], "Fracture": [NAN, NAN, NAN, 0]}
"""Of each study but every fifth, which has no label, by the remainder of its number; other columns are blank."""


def relabel(folder: Path, codes: dict[str, list[float]]) -> Path:
    labels = PreparedSet(folder).table("labels")
    labels.iloc[:, 1:] = NAN
    for finding, values in codes.items():
        labels[finding] = [values[study % 4] if study % 5 else NAN for study in labels["study_id"]]
    write_table(labels, folder / "labels.parquet", "labels")
    return folder


@pytest.fixture(scope="module")
def coded_set(small_set, tmp_path_factory) -> Path:
    return relabel(Path(shutil.copytree(small_set, tmp_path_factory.mktemp("coded") / "set")), CODES)


def labelled(small_bert: Path, **options: Any) -> ImageTextModel:
    return build(small_bert, **{"label_weight": 0.5, "class_probability": None, **options})


@pytest.mark.parametrize(
    ("uncertain", "blank", "findings"),
    [
        ("ones", "zeros", ["Edema", "Pneumonia"]),
        ("zeros", "ignore", ["Edema", "Pneumonia"]),
        ("ignore", "ignore", ["Edema"]),
    ],
)
def test_labels_of_a_batch_are_the_studies_codes(coded_set, small_bert, caplog, uncertain, blank, findings):
    meaning = {-1: {"ones": 1, "zeros": 0}.get(uncertain, NAN), 0: 0, 1: 1}
    data = data_of(coded_set, batch_size=8, uncertain=uncertain, blank=blank)
    with caplog.at_level("INFO"):
        batch = first_batch(labelled(small_bert), data)
    assert list(data.provided().label_findings) == findings
    assert f"{len(findings)} of 14 label columns, exact readings of a phantom's reports" in caplog.text
    of_blank = 0 if blank == "zeros" else NAN
    expected = [
        [meaning.get(CODES[x][study % 4], of_blank) if study % 5 else NAN for x in findings]
        for study in batch["study_id"].tolist()
    ]
    np.testing.assert_array_equal(batch["labels"].numpy(), np.array(expected, dtype=np.float32))
    assert any(study % 5 == 0 for study in batch["study_id"].tolist())
    validate = next(iter(data.val_dataloader()))
    assert validate["labels"].shape == (len(validate["study_id"]), len(findings))


@pytest.mark.parametrize("codes", [{}, {"Edema": [1, -1, -1, 1]}])
def test_a_set_without_labels_to_learn_is_refused(codes, small_set, small_bert, tmp_path):
    data = data_of(relabel(Path(shutil.copytree(small_set, tmp_path / "set")), codes), batch_size=8)
    with pytest.raises(PreparedDataError, match="model.label_weight: .* found none of 14; .*label_weight: 0"):
        first_batch(labelled(small_bert), data)


def test_loss_is_the_cross_entropy_of_pooled_regions(coded_set, small_bert):
    data, model = data_of(coded_set, batch_size=8, views=2), labelled(small_bert).eval()
    batch = first_batch(model, data)
    model.use_data(data.provided(), "fit")
    head = model.network.label_head
    assert head is not None and not head.weight.any()
    torch.nn.init.normal_(head.weight)
    torch.nn.init.normal_(head.bias)
    loss, encoded, metrics = model._losses(batch)
    logits = encoded.feature_map.mean((2, 3)) @ head.weight.T + head.bias
    targets = batch["labels"].repeat(2, 1)  # both views
    known = ~targets.isnan()
    expected = log_loss(targets[known].numpy(), logits[known].sigmoid().detach().double().numpy())
    assert float(metrics["label_loss"]) == pytest.approx(expected, rel=1e-5)
    model.label_weight = 0.0
    assert loss.item() == pytest.approx(model._losses(batch)[0].item() + 0.5 * expected, rel=1e-5)


def test_a_batch_without_a_label_costs_nothing(coded_set, small_bert):
    data, model = data_of(coded_set, batch_size=8), labelled(small_bert)
    batch = first_batch(model, data)
    model.use_data(data.provided(), "fit")
    batch["labels"].fill_(NAN)
    loss, _, metrics = model._losses(batch)
    loss.backward()
    assert metrics["label_loss"] == model._losses(batch, across_processes=False)[2]["label_loss"] == 0
    for parameter in model.network.label_head.parameters():  # type: ignore[union-attr]
        assert parameter.grad is not None and not parameter.grad.any()


@pytest.fixture(scope="module")
def trained(coded_set, small_bert, tmp_path_factory) -> Path:
    """A checkpoint of two epochs, and the exported folder beside it."""
    folder = tmp_path_factory.mktemp("trained")
    fit = trainer(folder, max_epochs=2, num_sanity_val_steps=0)
    fit.fit(labelled(small_bert, learning_rate=0.01), data_of(coded_set, batch_size=8))
    fit.save_checkpoint(folder / "last.ckpt")
    ImageTextModel.load_from_checkpoint(folder / "last.ckpt").network.save_pretrained(folder / "exported")
    return folder


def test_every_way_of_loading_gives_one_head(trained, coded_set, small_bert):
    file = trained / "last.ckpt"
    expected = torch.load(file, weights_only=True)["state_dict"]["network.label_head.weight"]
    assert expected.abs().min() > 1e-4
    tested = build(small_bert, class_probability=None)
    trainer(trained).test(tested, data_of(coded_set), ckpt_path=str(file), weights_only=True)
    for network in (
        ImageTextModel.load_from_checkpoint(file).network,
        ImageTextNetwork.from_pretrained(trained / "exported"),
        tested.network,
    ):
        assert network.config()["label_head"] == ["Edema", "Pneumonia"]
        assert network.label_head is not None and torch.equal(network.label_head.weight, expected)
    assert build(small_bert).network.config()["label_head"] is None


def test_a_start_takes_all_but_the_head(trained, small_bert):
    network = build(small_bert).network
    record = take_over(network, trained / "exported")
    assert record.kept == [] and record.left_out == ["label_head.bias", "label_head.weight"]
    assert network.label_head is None
    there = ImageTextNetwork.from_pretrained(trained / "exported")
    assert network.encoders_fingerprint() == there.encoders_fingerprint()


def test_other_columns_end_a_continued_run(trained, coded_set, small_bert):
    file = str(trained / "last.ckpt")
    for weight, blank in ((0.5, "ignore"), (0.0, "zeros")):
        model, data = labelled(small_bert, label_weight=weight), data_of(coded_set, batch_size=8, blank=blank)
        with pytest.raises(UserError, match="trained with another label_head"):
            trainer(trained, max_epochs=3).fit(model, data, ckpt_path=file, weights_only=True)


def test_validation_adds_the_loss_of_the_label_head(trained, coded_set):
    losses, data = [], data_of(coded_set, batch_size=8)
    for label_weight in (0.5, 0.0):
        model = ImageTextModel.load_from_checkpoint(trained / "last.ckpt")
        model.label_weight = label_weight
        (found,) = trainer(trained).validate(model, data, verbose=False)
        losses.append(found["validate/loss"])
    images = PreparedSet(coded_set).rows("images", use=["validate"])
    files = [coded_set / "images" / path for path in images["path"]]
    logits = load(trained / "exported").classify(files, prompts="label_head").to_numpy("float64")
    codes = [[CODES[x][study % 4] for x in ("Edema", "Pneumonia")] for study in images["study_id"]]
    targets = np.nan_to_num(np.array(codes), nan=0.0)
    known = (targets >= 0) & (images["study_id"].to_numpy() % 5 > 0)[:, None]
    expected = log_loss(targets[known], 1 / (1 + np.exp(-logits[known])))
    assert losses[0] - losses[1] == pytest.approx(0.5 * expected, rel=1e-3)


def test_classify_by_label_head(trained, coded_set):
    model, files = load(trained / "exported"), sorted((coded_set / "images").rglob("*.jpg"))[:3]
    found = model.classify(files, prompts="label_head")
    assert list(found) == ["Edema", "Pneumonia"] and list(found.index) == [str(file) for file in files]
    encoded = [model.encode_image(file).encoded.feature_map.mean((2, 3)) for file in files]
    head = model.image_text.label_head
    assert head is not None
    np.testing.assert_allclose(
        found, (torch.cat(encoded) @ head.weight.T + head.bias).detach(), rtol=1e-4, atol=1e-6
    )
    assert len(model.classify(files).columns) == 5  # the prompts of CheX5, as without a head
    plain = ImageTextNetwork(PatchRegions(), model.image_text.text_encoder, model.image_text.similarity)
    for one, calibrated in ((model, True), (type(model)(plain), False)):
        with pytest.raises(UserError, match="prompts label_head: expected a model trained with label_weight"):
            one.classify(files, "label_head", calibrated)
