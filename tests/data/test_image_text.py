"""The datamodule: what a batch holds, that randomness follows (seed, epoch, index), and what it refuses."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import Tensor

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import write_json
from medclip_dcl.common.findings import CHEXPERT
from medclip_dcl.data.fields import IMAGE_FIELDS
from medclip_dcl.data.image_text import ImageTextDataModule
from medclip_dcl.data.link import ImageTextRequirements
from medclip_dcl.data.prepared import PreparedDataError, write_table
from medclip_dcl.networks.image_text import pad_tokens
from medclip_dcl.networks.text_encoder import BertSentences
from medclip_dcl.pictures.geometry import Seen, View
from medclip_dcl.pictures.transforms import load_grey
from tests.small import SENTENCES


def datamodule(folder, small_bert, fields=(), masked=False, **options) -> ImageTextDataModule:
    if isinstance(fields, str):  # a user's file
        fields, options = (), {**options, "fields": fields}
    options = {"image_size": 40, "crop_size": 32, "batch_size": 8, "num_workers": 0, **options}
    data = ImageTextDataModule(str(folder), **options)
    encoder = encoder_of(small_bert)
    of_sentences, of_images = (
        tuple(name for name in fields if (name in {*IMAGE_FIELDS, "Rib fracture"}) == is_of_images)
        for is_of_images in (False, True)
    )
    vocabulary = encoder.tokenizer.get_vocab() if masked else None
    data.connect(
        ImageTextRequirements(encoder.tokenize, of_sentences, of_images, masked_vocabulary=vocabulary)
    )
    return data


@cache
def encoder_of(folder: Path) -> BertSentences:
    return BertSentences(str(folder))


def require(data: ImageTextDataModule, of_sentences=(), of_images=()) -> None:
    """Connect a model with other fields."""
    data.connect(ImageTextRequirements(data.requirements.tokenize, tuple(of_sentences), tuple(of_images)))


def batches(loader, epoch=0):
    loader.sampler.set_epoch(epoch)
    return list(loader)


def test_training_batches(small_set, small_bert):
    data = datamodule(small_set, small_bert, fields=("log_p", "rho"), sentences="all")
    data.setup("fit")
    found = batches(data.train_dataloader())
    assert len(found) == 3
    batch = found[1]
    assert batch["images"].shape == (8, 1, 32, 32)
    assert batch["image_index"].tolist() == sorted(batch["image_index"].tolist())
    reports = data.prepared.table("reports").set_index("study_id")["sentence_id"]
    for i, study in enumerate(batch["study_id"].tolist()):
        mine = batch["sentence_id"][batch["image_index"] == i].tolist()
        assert mine == list(dict.fromkeys(reports[[study]]))
    ids = batch["sentence_id"].tolist()
    assert batch["anchor"]["log_p"].tolist() == pytest.approx([-1.5 * i - 0.5 for i in ids])
    assert batch["anchor"]["rho"].tolist() == pytest.approx([0.1 * i for i in ids])
    text = data.prepared.table("sentences")["text"][ids[0]]
    expected = data.requirements.tokenize([text])[0]
    assert batch["tokens"][0, : batch["lengths"][0]].tolist() == expected
    assert (batch["tokens"][0, batch["lengths"][0] :] == 0).all()
    everyone = [x for b in found for x in b["dicom_id"]]
    assert len(set(everyone)) == 24
    assert set(everyone) == set(data.prepared.table("images").query("use == 'train'")["dicom_id"])


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"cache_images": True}])
def test_workers_and_cache_change_nothing(small_set, small_bert, options):
    plain, other = datamodule(small_set, small_bert), datamodule(small_set, small_bert, **options)
    plain.setup("fit")
    other.setup("fit")
    for epoch in (0, 1):
        a, b = batches(plain.train_dataloader(), epoch), batches(other.train_dataloader(), epoch)
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x["images"], y["images"]) and torch.equal(x["sentence_id"], y["sentence_id"])


def test_epochs_and_seeds_draw_other_sentences_and_crops(small_set, small_bert):
    def by_image(seed, epoch):
        data = datamodule(small_set, small_bert, seed=seed)
        data.setup("fit")
        rows = {}
        for batch in batches(data.train_dataloader(), epoch):
            for dicom_id, sentence, image in zip(
                batch["dicom_id"], batch["sentence_id"].tolist(), batch["images"], strict=True
            ):
                rows[dicom_id] = (sentence, image)
        return rows

    first, again, later, other = by_image(0, 0), by_image(0, 0), by_image(0, 1), by_image(1, 0)
    assert all(torch.equal(first[k][1], again[k][1]) and first[k][0] == again[k][0] for k in first)
    for changed in (later, other):
        assert any(first[k][0] != changed[k][0] for k in first)
        assert not any(torch.equal(first[k][1], changed[k][1]) for k in first)


def test_evaluation_loaders_hold_every_image_once(small_set, small_bert):
    data = datamodule(small_set, small_bert, batch_size=3)
    data.setup("fit")
    validate = [x for batch in data.val_dataloader() for x in batch["dicom_id"]]
    assert sorted(validate) == sorted(data.evaluation("validate").images["dicom_id"])
    tested = list(data.test_dataloader())
    ids = [x for batch in tested for x in batch["dicom_id"]]
    assert sorted(ids) == sorted(data.evaluation("test").images["dicom_id"]) and len(set(ids)) == 10
    path = data.prepared.table("images").set_index("dicom_id")["path"][ids[0]]
    assert (tested[0]["images"][0, 0].numpy() == load_grey(data.prepared.read_image(path), 40)).all()
    assert tested[0]["image_scale"].tolist() == [[1, 1, 0]] * 3
    assert (data.load_image(ids[0]) == load_grey(data.prepared.read_image(path), 40)).all()
    test, held_out = data.evaluation("test"), data.evaluation("validate")
    assert len(test.cases) == 30 and len(test.boxes) == 4
    assert set(test.images.columns) == {"dicom_id", "subject_id", "study_id", "height", "width"}
    assert len(held_out.boxes) == 0 and len(held_out.images) == 8 and len(held_out.cases) == 40
    assert not held_out.sentences.duplicated(["dicom_id", "sentence_id"]).any()
    assert not set(held_out.images["subject_id"]) & set(test.images["subject_id"])


def test_evaluation_of_the_middle_shows_it_everywhere(small_set, small_bert):
    data = datamodule(small_set, small_bert, evaluation_crop=24)
    whole = datamodule(small_set, small_bert)
    for one in (data, whole):
        one.setup("fit")
    for name in ("val_dataloader", "test_dataloader", "predict_dataloader"):
        middle, all_of_it = next(iter(getattr(data, name)())), next(iter(getattr(whole, name)()))
        assert torch.equal(middle["images"], all_of_it["images"][:, :, 8:32, 8:32])
    assert next(iter(data.train_dataloader()))["images"].shape[-1] == 32
    assert (
        data.evaluation("test").view == View(24, 40) and str(whole.evaluation("test").view) == "whole image"
    )


@pytest.fixture
def wide_set(small_set, tmp_path):
    """The small set as if it had been prepared from its originals (60 x 50) by shortest: images of 48 x 40."""
    folder = shutil.copytree(small_set, tmp_path / "set")
    info = json.loads((folder / "dataset.json").read_text())
    write_json({**info, "options": {"geometry": "shortest", "size": 40}}, folder / "dataset.json")
    for file in (folder / "images").rglob("*.jpg"):
        with Image.open(file) as image:
            wide = image.resize((40, 48))
        wide.save(file, quality=95)
    return folder


def test_wide_images_are_cropped_anywhere_and_seen_centred(wide_set, small_bert):
    data = datamodule(wide_set, small_bert, cache_images=True, crop_size=40)
    data.setup("fit")
    prepared = data.prepared
    paths = prepared.table("images").set_index("dicom_id")["path"]
    first = next(iter(data.val_dataloader()))
    assert first["images"].shape[-2:] == (40, 40)
    whole = load_grey(prepared.read_image(paths[first["dicom_id"][0]]), 40)
    assert (first["images"][0, 0].numpy() == whole[4:44]).all()
    tops = set()
    for batch in batches(data.train_dataloader()):
        # Brightness and contrast vary; the crop is where the picture fits best.
        for image, dicom_id in zip(batch["images"], batch["dicom_id"], strict=True):
            original = torch.from_numpy(load_grey(prepared.read_image(paths[dicom_id]), 40).astype("float32"))
            crops = torch.stack([original[top : top + 40].flatten() for top in range(9)])
            tops.add(torch.corrcoef(torch.cat([image[:1].flatten()[None], crops]))[0, 1:].argmax().item())
    assert min(tops) <= 1 and max(tops) >= 7
    assert data.evaluation("test").view == View(40, 40, "shortest", 40)
    assert data.evaluation("test").view.of(60, 50) == Seen(5, 55, 0, 50)
    assert data.load_image(first["dicom_id"][0]).shape == (48, 40)


def test_a_shown_image_has_no_padding(small_set, small_bert, tmp_path):
    folder = shutil.copytree(small_set, tmp_path / "set")
    info = json.loads((folder / "dataset.json").read_text())
    write_json({**info, "options": {"geometry": "pad", "size": 40}}, folder / "dataset.json")
    data = datamodule(folder, small_bert, image_size=80, crop_size=64)
    dicom_id = data.prepared.table("images")["dicom_id"].iloc[3]
    whole = load_grey(data.prepared.read_image(data.prepared.table("images")["path"].iloc[3]), 80)
    # Originals are 60 x 50: fitted to 40, 33 columns are the image, 3 before and 4 after it are padding.
    assert np.array_equal(data.load_image(dicom_id), whole[:, 6:72])


def test_other_findings_are_tested_after_chex5(small_set, small_bert, tmp_path):
    folder = shutil.copytree(small_set, tmp_path / "set")
    cases = pd.read_parquet(folder / "cases.parquet")
    first = cases.query("use == 'test'")["dicom_id"].min()
    other = cases[cases["dicom_id"] == first].head(1).assign(finding="Fracture")
    write_table(pd.concat([cases[cases["dicom_id"] != first], other]), folder / "cases.parquet", "cases")
    before, after = (datamodule(place, small_bert).evaluation("test") for place in (small_set, folder))
    assert after.images["dicom_id"].tolist() == [*before.images["dicom_id"][1:], first]
    assert before.images["dicom_id"][0] == first and "Fracture" in set(after.cases["finding"])


def test_reports_are_served_after_cases_and_boxes(small_set, small_bert, tmp_path):
    data = datamodule(small_set, small_bert)
    images = data.prepared.table("images")
    split = set(images.query("official_split == 'test'")["dicom_id"])
    test = data.evaluation("test")
    assert set(test.sentences["dicom_id"]) == split and test.reports_in_words == "all"
    # Without labels and boxes, as any hospital's; one label left: its image comes first.
    folder = shutil.copytree(small_set, tmp_path / "set")
    (folder / "boxes.parquet").unlink()
    cases = pd.read_parquet(folder / "cases.parquet")
    last = max(split)
    write_table(cases[cases["dicom_id"] == last], folder / "cases.parquet", "cases")
    ids = datamodule(folder, small_bert).evaluation("test").images["dicom_id"].tolist()
    assert ids == [last, *sorted(split - {last})]
    write_table(cases[:0], folder / "cases.parquet", "cases")
    plain = datamodule(folder, small_bert).evaluation("test")
    assert set(plain.images["dicom_id"]) == split and plain.cases.empty and plain.boxes.empty
    few = [datamodule(folder, small_bert, test_reports=2, seed=seed).evaluation("test") for seed in (0, 1)]
    assert (
        few[0].images["dicom_id"].tolist() == few[1].images["dicom_id"].tolist() and len(few[0].images) == 2
    )
    assert few[0].reports_in_words.startswith("2 of 6, studies drawn")
    predicted = datamodule(folder, small_bert, test_reports=2).predict_dataloader()
    assert {x for batch in predicted for x in batch["dicom_id"]} == split
    write_table(
        pd.read_parquet(folder / "images.parquet").assign(official_split="train", use="train"),
        folder / "images.parquet",
        "images",
    )
    with pytest.raises(
        PreparedDataError,
        match="nothing to test on: no image of the test split has .*medclip-dcl prepare folder",
    ):
        datamodule(folder, small_bert).evaluation("test")


def with_two_images_in_a_study(small_set, tmp_path):
    """The set with images 0 and 1 (one patient) in study 5000."""
    folder = shutil.copytree(small_set, tmp_path / "two")
    images = pd.read_parquet(folder / "images.parquet")
    images.loc[1, "study_id"] = 5000
    write_table(images, folder / "images.parquet", "images")
    return folder


def test_further_views_are_other_images_of_the_study(small_set, small_bert, tmp_path):
    folder = with_two_images_in_a_study(small_set, tmp_path)
    # No crop and no variation: a view shows which image it is.
    options = {"crop_size": 40, "brightness": 0.0, "contrast": 0.0}
    data = datamodule(folder, small_bert, views=3, batch_size=24, **options)
    data.setup("fit")
    (batch,) = batches(data.train_dataloader())
    assert batch["images"].shape == (72, 1, 40, 40)
    assert batch["view_of"].tolist() == [*range(24)] * 3
    path = data.prepared.table("images").set_index("dicom_id")["path"]
    whole = {id_: load_grey(data.prepared.read_image(path[id_]), 40) for id_ in batch["dicom_id"]}
    pair = [id_ for id_ in batch["dicom_id"] if id_.startswith(("00000000", "00000001"))]
    for row, id_ in enumerate(batch["dicom_id"]):
        other = next((x for x in pair if x != id_), id_) if id_ in pair else id_
        for view, expected in enumerate((id_, other, id_)):
            assert (batch["images"][row + 24 * view, 0].numpy() == whole[expected]).all()


def test_each_view_is_augmented_by_itself(small_set, small_bert):
    several, one = datamodule(small_set, small_bert, views=2), datamodule(small_set, small_bert)
    several.setup("fit")
    one.setup("fit")
    a, b = batches(several.train_dataloader())[0], batches(one.train_dataloader())[0]
    assert torch.equal(a["images"][:8], b["images"]) and torch.equal(a["sentence_id"], b["sentence_id"])
    assert not torch.equal(a["images"][:8], a["images"][8:])
    assert len(next(iter(several.val_dataloader()))["images"]) == 8  # whole images, once each


def test_columns_of_the_tables_are_fields(small_set, small_bert, tmp_path):
    folder = shutil.copytree(small_set, tmp_path / "set")
    table = pd.read_parquet(folder / "labels.parquet")
    write_table(table.assign(**{"Rib fracture": 1 - table["Edema"]}), folder / "labels.parquet", "labels")
    numbers = ("height", "subject_id", "study_id")
    fields = ("n_reports", "n_tokens", "Rib fracture", "labels", "image_classes", "image_row", *numbers)
    data = datamodule(folder, small_bert, fields=fields, sentences="all")
    data.setup("fit")
    images = data.prepared.table("images").set_index("dicom_id")
    labels = data.prepared.table("labels").set_index("study_id")
    classes = data.prepared.table("image_classes")
    for batch in batches(data.train_dataloader()):
        found, studies = batch["candidate"], batch["study_id"].tolist()
        for name in numbers:
            assert found[name].dtype == torch.int64
            assert found[name].tolist() == images.loc[batch["dicom_id"], name].tolist()
        assert found["image_row"].tolist() == images.index.get_indexer(batch["dicom_id"]).tolist()
        assert found["Rib fracture"].tolist() == labels.loc[studies, "Rib fracture"].tolist()
        assert found["labels"].tolist() == labels.loc[studies, list(CHEXPERT)].to_numpy().tolist()
        for row, id_ in enumerate(batch["dicom_id"]):
            mine = classes.loc[classes["dicom_id"] == id_, "class_id"]
            assert found["image_classes"][row].nonzero().flatten().tolist() == sorted(mine)
        assert set(batch["anchor"]["n_reports"].tolist()) == {3}
        assert batch["anchor"]["n_tokens"].dtype == torch.int64


def test_fields_of_a_users_file(small_set, small_bert, tmp_path):
    ids = pd.read_parquet(small_set / "images.parquet")["dicom_id"]
    file = tmp_path / "mine.parquet"

    def setup(frame, *names, of_images=True):
        frame.to_parquet(file)
        data = datamodule(small_set, small_bert, fields=str(file), batch_size=24)
        require(data, *(((), names) if of_images else (names, ())))
        data.setup("fit")
        return batches(data.train_dataloader())[0]

    large = 2**53 + 1  # no float64
    frame = pd.DataFrame({"dicom_id": ids, "site": large, "dose": 0.5, "lateral": True, "room": "A"})
    found = setup(frame, "site", "dose", "lateral")["candidate"]
    assert set(found["site"].tolist()) == {large} and set(found["dose"].tolist()) == {0.5}
    assert found["lateral"].dtype == torch.int64
    of_sentences = pd.DataFrame({"mood": range(9)}, index=pd.Index(range(9), name="sentence_id"))
    batch = setup(of_sentences, "mood", of_images=False)
    assert batch["anchor"]["mood"].tolist() == batch["sentence_id"].tolist()
    for dose in (1.0, 2.0):  # a changed file, whose column is named like one of sentences
        named = frame.rename(columns={"dose": "log_p"}).assign(log_p=dose)
        assert set(setup(named, "log_p")["candidate"]["log_p"].tolist()) == {dose}
    for wrong, name, message in (
        (
            frame.drop(columns="dicom_id"),
            "site",
            r"expected one column sentence_id or .* found \['site', 'dose'",
        ),
        (frame.assign(sentence_id=1), "site", "expected one column sentence_id or dicom_id"),
        (
            pd.concat([frame, frame[:1]]),
            "site",
            "one row for each of its values, found 1 .* .first: 00000000-0",
        ),
        (frame[3:], "site", "3 of 24 dicom_id of the prepared set have no row for 'site' .first: 00000000-0"),
        (frame.assign(dose=float("nan")), "dose", "24 of 24 dicom_id .* no finite value, or .* for 'dose'"),
        (frame, "room", r"'room' of images; .* which has \['site', 'dose', 'lateral'\] by dicom_id"),
        (frame.assign(height=1), "height", r"'height' of images; .* or else in data.fields, .* 'height'\]"),
        (of_sentences, "mood", r"'mood' of images; .* which has \[\] by dicom_id"),
    ):
        with pytest.raises(UserError, match=message):
            setup(wrong, name)
    file.write_bytes(b"no table")
    with pytest.raises(UserError, match="mine.parquet is not readable as Parquet"):
        datamodule(small_set, small_bert, fields=str(file))._own_fields  # noqa: B018


def test_sentence_embeddings_and_their_mean_in_a_report(embedded_set, small_bert):
    data = datamodule(embedded_set, small_bert, sentences="one")
    of_sentences, of_images = ("sentence_embedding", "log_p"), ("text_embedding",)
    checked: list[Mapping[str, Tensor]] = []
    encoder = encoder_of(small_bert)
    data.connect(
        ImageTextRequirements(encoder.tokenize, of_sentences, of_images, check_sentence_fields=checked.append)
    )
    data.setup("fit")
    ids, embeddings = data.prepared.text_embedding()
    row = {int(id_): i for i, id_ in enumerate(ids)}
    reports = data.prepared.table("reports").groupby("study_id")["sentence_id"].apply(set)
    batch = batches(data.train_dataloader())[0]
    for i, study in enumerate(batch["study_id"].tolist()):
        expected = embeddings[[row[s] for s in reports[study]]].mean(0)
        assert batch["candidate"]["text_embedding"][i].tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    expected = torch.from_numpy(embeddings[[row[s] for s in batch["sentence_id"].tolist()]])
    assert torch.equal(batch["anchor"]["sentence_embedding"], expected)
    assert batch["anchor"]["log_p"].tolist() == [-1.5 * s - 0.5 for s in batch["sentence_id"].tolist()]
    # The sentences of the 24 training reports are checked once, those of validation not at all.
    data.val_dataloader()
    (fields,) = checked
    assert fields["sentence_embedding"].shape == (45, 6) and fields["log_p"].shape == (45,)


@pytest.mark.parametrize("kind", ["ranking", "posterior"])
def test_vectors_of_sentences_and_reports(embedded_set, small_bert, kind):
    data = datamodule(embedded_set, small_bert, sentences="all")
    names = (f"sentence_{kind}",), (f"report_{kind}",)
    data.connect(ImageTextRequirements(encoder_of(small_bert).tokenize, *names))
    data.setup("fit")
    found = data.prepared.ranking(None, kind)
    for loader in (data.train_dataloader(), data.val_dataloader()):
        batch = batches(loader)[0]
        for rows, keys, known, values in (
            (batch["anchor"][names[0][0]], batch["sentence_id"], found.sentence_id, found.sentences),
            (batch["candidate"][names[1][0]], batch["study_id"], found.study_id, found.reports),
        ):
            expected = [values[known.tolist().index(key)].astype(np.float32) for key in keys.tolist()]
            assert rows.dtype == torch.float32 and np.array_equal(rows.numpy(), expected)


def test_masked_sentences(small_set, small_bert):
    def epoch(**options):
        data = datamodule(small_set, small_bert, masked=True, sentences="all", **options)
        data.setup("fit")
        return data, batches(data.train_dataloader())

    data, found = epoch()
    plain = datamodule(small_set, small_bert, sentences="all")
    plain.setup("fit")
    mask = encoder_of(small_bert).tokenizer.token_to_id("[MASK]")
    hidden = masks = 0
    for batch, without in zip(found, batches(plain.train_dataloader()), strict=True):
        assert torch.equal(batch["images"], without["images"]) and "masked_tokens" not in without
        assert torch.equal(batch["sentence_id"], without["sentence_id"])
        labels, is_hidden = batch["masked_labels"], batch["masked_labels"] != -100
        assert batch["masked_tokens"].shape == batch["tokens"].shape == labels.shape
        assert is_hidden.any(1).all() and (labels[is_hidden] == batch["tokens"][is_hidden]).all()
        assert torch.equal(batch["masked_tokens"][~is_hidden], batch["tokens"][~is_hidden])
        hidden += int(is_hidden.sum())
        masks += int((batch["masked_tokens"] == mask).sum())
    assert 0.6 < masks / hidden < 0.95
    _, again = epoch(num_workers=2)
    assert all(torch.equal(a["masked_tokens"], b["masked_tokens"]) for a, b in zip(found, again, strict=True))
    _, more = epoch(mask_probability=0.8)
    assert sum(int((batch["masked_labels"] != -100).sum()) for batch in more) > 2 * hidden


def test_contrastive_batches_are_larger_than_what_is_encoded(small_set, small_bert):
    data = datamodule(small_set, small_bert, batch_size=4, contrastive_batch=12)
    data.setup("fit")
    found = batches(data.train_dataloader())
    assert [len(batch["images"]) for batch in found] == [12, 12]
    assert all(batch["encode_at_once"] == 4 for batch in found)
    assert "encode_at_once" not in next(iter(data.val_dataloader()))


def test_tokens_are_kept_for_each_tokenizer(small_set, small_bert, tmp_path):
    """And the warning of sentences that are cut is given by a later start, too."""
    folder, data = shutil.copytree(small_set, tmp_path / "set"), {}
    shutil.rmtree(folder / "arrays", ignore_errors=True)
    asked: list[int] = []

    def required(encoder: BertSentences) -> ImageTextRequirements:
        def tokenize(texts: Sequence[str]) -> list[list[int]]:
            asked.append(len(texts))
            return encoder.tokenize(texts)

        identity, cut = encoder.tokenizer_identity(), encoder.are_truncated
        return ImageTextRequirements(tokenize, tokenizer=identity, are_truncated=cut)

    for _ in range(2):
        for max_tokens in (7, 128):
            encoder = BertSentences(str(small_bert), max_tokens=max_tokens)
            data[max_tokens] = ImageTextDataModule(str(folder), image_size=40, batch_size=8, num_workers=0)
            data[max_tokens].connect(required(encoder))
            count = sum(encoder.are_truncated(SENTENCES))
            warning = rf"{count} of 9 sentences .* are longer than max_tokens"
            with warnings.catch_warnings(record=True) as told:
                data[max_tokens].setup("fit")
            assert [bool(re.match(warning, str(one.message))) for one in told] == [True] * bool(count)
        assert (
            asked == [9, 9]
            and 0 < sum(BertSentences(str(small_bert), max_tokens=7).are_truncated(SENTENCES)) < 9
        )
    for max_tokens, one in data.items():
        batch = next(iter(one.train_dataloader()))
        texts = [SENTENCES[sentence] for sentence in batch["sentence_id"].tolist()]
        tokens, lengths = pad_tokens(BertSentences(str(small_bert), max_tokens=max_tokens).tokenize(texts))
        assert torch.equal(batch["tokens"], tokens) and torch.equal(batch["lengths"], lengths)


def test_examples_are_pickled_as_names_of_files(small_set, small_bert):
    """So that loader processes that are not forked share them, too."""
    fields = ("log_p", "labels", "image_classes")
    data = datamodule(small_set, small_bert, fields=fields, sentences="all")
    data.connect(replace(data.requirements, tokenizer="of the test"))
    data.setup("fit")
    plain = next(iter(data.train_dataloader()))
    again = pickle.dumps(data.train_dataloader().dataset)
    assert len(again) < 5000
    batch = pickle.loads(again).collate(
        [pickle.loads(again)[(0, index)] for index in plain["image_key"].tolist()]
    )
    for name in ("images", "tokens", "sentence_id", "study_id"):
        assert torch.equal(batch[name], plain[name])
    assert batch["dicom_id"] == plain["dicom_id"]
    for of in ("anchor", "candidate"):
        assert all(torch.equal(batch[of][name], values) for name, values in plain[of].items())
