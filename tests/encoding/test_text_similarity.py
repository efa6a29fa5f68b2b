"""What the similarity of texts finds, against a loop over sentences and images."""

from __future__ import annotations

import itertools
import math
import shutil

import numpy as np
import pandas as pd
import pytest

from medclip_dcl.data.prepared import PreparedDataError, PreparedSet, write_table
from medclip_dcl.encoding.options import Similar
from medclip_dcl.encoding.text_similarity import near_texts_table, read_texts, soft_targets_table, summary
from tests.program import verb

main = verb("similar")


@pytest.fixture(scope="module")
def truth(embedded_set):
    """Study, sentences and true classes of each training image, the class of each sentence, unit vectors."""
    prepared = PreparedSet(embedded_set)
    images = prepared.table("images").query("use == 'train'")[["dicom_id", "study_id"]]
    reports = prepared.table("reports").groupby("study_id")["sentence_id"].apply(set).to_dict()
    classes = prepared.table("image_classes").groupby("dicom_id")["class_id"].apply(set).to_dict()
    class_of = prepared.table("classes").set_index("sentence_id")["class_id"].to_dict()
    vectors = prepared.text_embedding().embedding.astype(np.float64)
    return (
        [(study, reports[study], classes[image]) for image, study in images.to_numpy().tolist()],
        class_of,
        vectors,
    )


def cosine(a, b) -> float:
    return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))


def test_what_a_threshold_finds_is_the_loop(embedded_set, truth):
    images, class_of, vectors = truth
    table = near_texts_table(read_texts(Similar(data=embedded_set)), batch_size=16)
    for row in table.to_dict("records"):
        found = right = true = pairs = further = right_further = drawn = 0
        for study, said, _ in images:
            for sentence in said:
                for other, others, is_true in images:
                    if other == study:
                        continue
                    if row["compare"] == "equal sentences":
                        near = [sentence == o for o in others]
                    elif row["compare"] == "sentences":
                        found_cosines = [cosine(vectors[sentence], vectors[o]) for o in others]
                        near = [x > float(row["threshold"]) for x in found_cosines]
                    else:
                        mine, theirs = (vectors[list(ids)].mean(0) for ids in (said, others))
                        near = [cosine(mine, theirs) > float(row["threshold"])]
                    is_near, drawn = any(near), drawn + np.mean(near)
                    fits = class_of[sentence] in is_true
                    further += is_near and sentence not in others
                    right_further += is_near and sentence not in others and fits
                    pairs, found, true, right = (
                        pairs + 1,
                        found + is_near,
                        true + fits,
                        right + (is_near and fits),
                    )
        assert row["in a batch, all"] == f"{15 * found / pairs:.2f}"
        assert float(row["one drawn"]) == pytest.approx(15 * drawn / pairs, abs=0.0051)
        assert row["images"] == f"{found / pairs:.2%}" and row["precision"] == f"{right / found:.3f}"
        assert row["precision, further"] == (f"{right_further / further:.3f}" if further else "-")
        assert row["recall"] == f"{right / true:.4f}"
    assert len(table) == 17


def test_the_mass_of_soft_targets_is_the_loop(embedded_set, truth):
    images, class_of, vectors = truth
    table = soft_targets_table(read_texts(Similar(data=embedded_set)), batch_size=len(images))
    for temperature, *found in table.to_numpy(dtype=float).tolist():
        masses = []
        for study, said, _ in images:
            for sentence in said:
                mass = np.zeros(3)
                for other, others, is_true in images:
                    s = 1.0 if other == study else cosine(vectors[sentence], vectors[list(others)].mean(0))
                    column = 0 if other == study else 1 if class_of[sentence] in is_true else 2
                    mass[column] += math.exp(s / temperature)
                masses.append(mass / mass.sum())
        assert found == pytest.approx(np.mean(masses, axis=0), abs=6e-4)
    assert table.columns[2:].tolist() == ["others that fit", "others that do not"]


def test_without_truth_the_tables_say_what_is_found(embedded_set, truth, tmp_path, capsys):
    folder = shutil.copytree(embedded_set, tmp_path / "set")
    for name in ("classes", "image_classes"):
        (folder / f"{name}.parquet").unlink()
    main([str(folder), "--images", "20", "--batch_size", "7"])
    said = capsys.readouterr().out
    assert "37 sentences of 20 training images" in said and "in a batch" in said
    assert "precision" not in said and "fit a sentence" not in said and "others" in said
    assert said.count("is a cosine of") == 2
    images, _, vectors = truth
    means = [vectors[list(said)].mean(0) for _, said, _ in images]
    pairs = [(a, b) for a, b in itertools.permutations(range(len(means)), 2) if images[a][0] != images[b][0]]
    expected = np.quantile([cosine(means[a], means[b]) for a, b in pairs], 0.05)
    assert f"quantiles: 5% {expected:.4f}" in summary(read_texts(Similar(data=embedded_set)), 64)


def test_model_names_its_only_embedding(embedded_set, tmp_path):
    folder = shutil.copytree(embedded_set, tmp_path / "set")
    (file,) = (folder / "text_embedding").iterdir()
    file = file.rename(file.with_name("bert-base-0123abcd-mean.parquet"))
    read_texts(Similar(data=folder, model="owner/bert-base"))
    for other in ("bert", "base"):
        with pytest.raises(PreparedDataError, match="no sentence embeddings named"):
            read_texts(Similar(data=folder, model=other))
    shutil.copy(file, file.with_name("bert-base-0123abcd.parquet"))
    read_texts(Similar(data=folder, model="bert-base-0123abcd-mean"))
    with pytest.raises(
        PreparedDataError, match="there: bert-base-0123abcd, bert-base-0123abcd-mean.; name one"
    ):
        read_texts(Similar(data=folder, model="runs/bert-base/"))


def test_refusals(embedded_set, small_set, tmp_path):
    with pytest.raises(PreparedDataError, match=r"has no sentence embeddings; .* medclip-dcl embed"):
        main([str(small_set)])
    folder = shutil.copytree(embedded_set, tmp_path / "set")
    images = pd.read_parquet(folder / "images.parquet")
    write_table(images.assign(use="test"), folder / "images.parquet", "images")
    with pytest.raises(PreparedDataError, match="fewer than two training reports"):
        main([str(folder)])
