"""PadChest-GR, CheXpert Plus and ReXGradient-160K: small releases in their layouts, through preparation and check."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from data_prep.sources.check import check_set
from medclip_dcl.command import cli
from medclip_dcl.common.errors import UserError
from medclip_dcl.data.prepared import PreparedSet
from tests.data_prep.public.test_command import prepare

GREY = np.random.default_rng(0)
GROUNDED, VIEWS = "grounded_reports_20240819.json", "metadata/{}_metadata_view_position.json"
THICKENING, EFFUSION = "Apical thickening. Chronic.", "Cardiomegaly with effusion"


def _png(file: Path, width: int = 60) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(GREY.integers(0, 4000, (40, width)).astype(np.uint16)).save(file)


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _said(found: PreparedSet) -> list[tuple[str, str]]:
    """Section and text of all sentences, in the order of studies."""
    said = found.table("reports").merge(found.table("sentences"), on="sentence_id")
    return list(
        said.sort_values(["study_id", "position"])[["section", "text"]].itertuples(index=False, name=None)
    )


# --- PadChest-GR ------------------------------------------------------------------------------------------------------


def _finding(text: str, spanish: str, labels: list[str], **boxes: Any) -> dict[str, Any]:
    return {"sentence_en": text, "sentence_es": spanish, "abnormal": True, "labels": labels, **boxes}


def padchest_gr(folder: Path) -> Path:
    """Four studies; a and b are those of test."""
    first, second = [0.1, 0.5, 0.4, 1.0005], [0.5, 0.25, 0.75, 0.5]
    thick = _finding(
        THICKENING,
        "Engrosamiento apical",
        ["apical pleural thickening"],
        boxes=[first, second],
        extra_boxes=[second],
    )
    big = _finding(
        EFFUSION, "Cardiomegalia", ["cardiomegaly", "pleural effusion"], boxes=[second], extra_boxes=[]
    )
    bare = _finding(" Scoliosis\n mild ", "Escoliosis", ["scoliosis"], boxes=[])
    none = {"sentence_en": "No pneumothorax.", "sentence_es": "Sin neumotórax.", "abnormal": False}
    reports = {"a": [thick, big, none], "b": [none], "c": [bare, none], "d": [big]}
    splits = {"a": "test", "b": "test", "c": "train", "d": "validation"}
    rows = [
        {"StudyID": f"{name}1", "ImageID": f"{name}.png", "PatientID": f"9{name}", "split": splits[name]}
        | {"label": label, "PatientSex_DICOM": "F", "PatientAge": "067Y", "study_is_benchmark": "true"}
        for name, findings in reports.items()
        for label in [label for one in findings for label in one.get("labels", [])] or ["Normal"]
    ]
    studies = [{"StudyID": f"{n}1", "ImageID": f"{n}.png", "findings": of} for n, of in reports.items()]
    for width, name in enumerate(reports, start=50):
        _png(folder / f"Padchest_GR_files/{name}.png", width)
    (folder / "grounded_reports_20240819.json").write_text(json.dumps(studies))
    with zipfile.ZipFile(folder / "master_table.csv.zip", "w") as archive:
        archive.writestr("master_table.csv", _csv(rows))
        archive.writestr("__MACOSX/._master_table.csv", "x")
    return folder


def test_padchest_gr_keeps_sentences_boxes_and_readers(tmp_path: Path) -> None:
    prepare("padchest_gr", padchest_gr(tmp_path / "raw"), tmp_path / "set")
    found = PreparedSet(tmp_path / "set")
    images = found.table("images").set_index("dicom_id")
    assert images["use"].to_dict() == {"a": "test", "b": "test", "c": "train", "d": "validate"}
    none = ("negative", "No pneumothorax.")
    big = ("positive", EFFUSION)
    assert _said(found) == [
        ("positive", THICKENING),
        big,
        none,
        none,
        ("positive", "Scoliosis mild"),
        none,
        big,
    ]
    # Image a has 50 x 40 pixels, d 53.
    boxes = found.table("boxes")
    assert boxes[["dicom_id", "reader", "category"]].to_numpy().tolist() == [
        *(["a", reader, "Pleural Thickening"] for reader in "112"),
        *([image, "1", "Cardiomegaly"] for image in "ad"),
    ]
    np.testing.assert_allclose(
        boxes[[*"xywh"]],
        np.array([[5, 20, 15, 20.0], *[[25, 10, 12.5, 10]] * 3, [26.5, 10, 13.25, 10]]),
        atol=1e-9,
    )
    cases = found.table("cases").query("use == 'test' and finding in ('Pleural Effusion', 'Scoliosis')")
    assert cases["label"].tolist() == [1, 0, 0, 0] and cases["dicom_id"].tolist() == ["a", "b"] * 2
    assert images["age"].eq(67).all() and check_set(tmp_path / "set")[1] == []
    said = str(found.info["options"]["choices"])
    for part in ("negative 3, positive 4, of which without a box 1;", "boxes: 5,", "edge: 1;"):
        assert part in said
    assert found.info["language"] == "en" and "thoracic cage deformation" in found.findings
    prepare("padchest_gr", tmp_path / "raw", tmp_path / "es", "--language", "es")
    assert _said(PreparedSet(tmp_path / "es"))[0] == ("positive", "Engrosamiento apical")
    assert PreparedSet(tmp_path / "es").info["language"] == "es"


@pytest.mark.slow
def test_a_model_grounds_its_phrases_by_reader(tmp_path: Path, exported: Path) -> None:
    prepare("padchest_gr", padchest_gr(tmp_path / "raw"), tmp_path / "set")
    words = ["--config", "mimic_cxr", "--ckpt_path", str(exported), "--untrained", "false"]
    words += ["--data.init_args.folder", str(tmp_path / "set"), "--data.init_args.num_workers", "0"]
    words += ["--trainer.accelerator", "cpu", "--trainer.precision", "32-true"]
    cli.main(["test", *words, "--run_folder", str(tmp_path / "run")])
    found = json.loads((tmp_path / "run/results.json").read_text())
    assert found["counts"]["grounding"]["by_reader"] == {"1": 2, "2": 1}
    # The first reader's boxes have 15 x 20 and 13 x 10 pixels, that of the second is the latter.
    assert found["metrics"]["grounding"]["by_pair"]["reader_iou"] == pytest.approx(130 / 430)
    assert {*pd.read_parquet(tmp_path / "run/predictions/grounding.parquet")["dicom_id"]} == {"a"}


# --- CheXpert Plus ----------------------------------------------------------------------------------------------------


def chexpert_plus(folder: Path) -> Path:
    rows, labels = [], []
    for path, findings, impression, end, edema in (
        (
            "train/patient00001/study1/view1_lateral.jpg",
            "1.EDEMA SEEN.\n\n2.NO EVIDENCE OF FRACTURE.",
            "",
            "2-ABN",
            1.0,
        ),
        ("train/patient00001/study1/view2_frontal.jpg", "EDEMA ON 1/2/05.", "", "", None),
        ("train/patient00002/study1/view1_frontal.jpg", "", "", "AS BEFORE", None),
        ("train/patient00002/study3/view1_frontal.jpg", "", "NORMAL.", "", 0.0),
        ("valid/patient00003/study1/view1_frontal.jpg", "CLEAR.", "", "", -1.0),
    ):
        row = {"path_to_image": path, "frontal_lateral": "", "ap_pa": "AP", "section_findings": findings}
        row |= {
            "section_impression": impression,
            "section_end_of_impression": end,
            "age": "62.0",
            "sex": "Female",
        }
        rows.append(row | {"split": path[:5], "report": "not read"})
        labels.append({"path_to_image": path, "Edema": edema, "Fracture": None})
        _png(folder / "PNG/PNG" / path.replace(".jpg", ".png"))
    (folder / "df_chexpert_plus_240401.csv").write_text(_csv(rows))
    (folder / "chexbert_labels").mkdir()
    (folder / "chexbert_labels/impression_fixed.json").write_text("\n".join(map(json.dumps, labels)) + "\n")
    other = folder / "DICOM/Uncompressed" / str(rows[1]["path_to_image"]).replace(".jpg", ".dcm")
    other.parent.mkdir(parents=True)
    other.write_bytes(b"beside its PNG file")
    return folder


def test_chexpert_plus_takes_a_studys_first_row(tmp_path: Path) -> None:
    prepare("chexpert_plus", chexpert_plus(tmp_path / "raw"), tmp_path / "set")
    found = PreparedSet(tmp_path / "set")
    use = found.table("images").set_index("dicom_id")["use"]
    ids = ("1_study1_view2", "2_study1_view1", "2_study3_view1", "3_study1_view1")
    uses = ("train", "excluded", "train", "validate")
    assert use.to_dict() == {f"patient0000{n}_frontal": of for n, of in zip(ids, uses, strict=True)}
    assert _said(found) == [
        *[("findings", text) for text in ("EDEMA SEEN.", "NO EVIDENCE OF FRACTURE.")],
        *[("impression", "NORMAL."), ("findings", "CLEAR.")],
    ]
    assert found.table("labels")["Edema"].fillna(9).tolist() == [1, 9, 0, -1]
    said = str(found.info["options"]["choices"])
    assert (
        "other texts: 1, other labels: 1; rows with text in section_end_of_impression alone, not read" in said
    )
    assert "alone, not read (choice): 1" in said and check_set(tmp_path / "set")[1] == []
    prepare("chexpert_plus", tmp_path / "raw", tmp_path / "t", "--official_validate_as_test")
    assert PreparedSet(tmp_path / "t").table("images")["use"].tolist()[-1] == "test"


# --- ReXGradient-160K -------------------------------------------------------------------------------------------------


def rexgradient(
    folder: Path, train_views: Any = ("PA", "AP (KUB)", "ERECT", float("nan"), None), n: int = 6
) -> Path:
    parts: dict[str, list[Any]] = {
        "train": [
            ("P1", train_views, n, "None", "Normal."),
            ("P2", ["LATERAL", "POSTERO_ANTERIOR"], 2, "none", None),
        ],
        "test": [("P3", ["AP", "ANTERO_POSTERIOR"], 2, "Clear lungs.", "None")],
    }
    for part, studies in parts.items():
        entries = {}
        for name, views, n_images, findings, impression in studies:
            paths = [
                f"deid_png/{name}/A/studies/1/series/2/instances/1.{name[1]}.{i}.png" for i in range(n_images)
            ]
            for path in paths:
                _png(folder / path)
            entries[f"p{name}_aA_s1"] = {
                **{"PatientID": name, "PatientSex": "M", "PatientAge": "006M", "Indication": "cough"},
                **{"Findings": findings, "Impression": impression, "ImageViewPosition": views},
                "ImagePath": [f"../{path}" for path in paths],
            }
        (folder / "metadata").mkdir(exist_ok=True)
        (folder / f"metadata/{part}_metadata_view_position.json").write_text(json.dumps(entries))
    return folder


def test_rexgradient_takes_frontal_views(tmp_path: Path) -> None:
    prepare("rexgradient", rexgradient(tmp_path / "raw"), tmp_path / "set")
    found = PreparedSet(tmp_path / "set")
    images = found.table("images").set_index("dicom_id")
    assert images["view"].to_dict() == {
        "1.1.0": "PA",
        "1.1.1": "AP",
        "1.2.1": "PA",
        "1.3.0": "AP",
        "1.3.1": "AP",
    }
    assert images["use"].tolist() == ["train", "train", "excluded", "test", "test"]
    assert _said(found) == [("impression", "Normal."), ("findings", "Clear lungs.")]
    assert images["age"].eq(0.5).all() and check_set(tmp_path / "set")[1] == []
    reasons = pd.read_csv(tmp_path / "set/rejects.csv")["reason"].value_counts()
    assert reasons["its view is unknown"] == 3 and reasons["its view is not frontal"] == 2
    assert "1 without ANTERO_POSTERIOR (published: 8,083), 1 with it" in str(found.info["options"]["choices"])
    prepare("rexgradient", tmp_path / "raw", tmp_path / "all", "--unknown_views")
    assert len(PreparedSet(tmp_path / "all").table("images")) == 8


# --- Bad input --------------------------------------------------------------------------------------------------------


def _changed(file: Path, old: str, new: str) -> None:
    assert old in (text := file.read_text())
    file.write_text(text.replace(old, new, 1))


BAD: dict[str, tuple[Any, Any, str]] = {
    "another set": (rexgradient, None, "expected df_chexpert_plus_240401.csv"),
    "cut off": (
        padchest_gr,
        lambda f: (f / GROUNDED).write_text((f / GROUNDED).read_text()[:300]),
        "download it again",
    ),
    "twice": (padchest_gr, lambda f: _png(f / "other/a.png"), "holds image a twice"),
    "two splits": (
        padchest_gr,
        lambda f: (f / "master_table.csv").write_text(
            "StudyID,ImageID,PatientID,split,label,PatientSex_DICOM,PatientAge\na1,a.png,9,test,x,,\na1,a.png,9,train,y,,\n"
        ),
        "column split: expected one value for each study, found 'test', and 1 more: 'train'",
    ),
    "study of two tables": (
        rexgradient,
        lambda f: (f / VIEWS.format("valid")).write_text((f / VIEWS.format("test")).read_text()),
        "expected each study in one split",
    ),
    "shares": (
        padchest_gr,
        lambda f: _changed(f / GROUNDED, "1.0005", "1.0015"),
        "expected boxes in shares of the image's sides, 0 to 1, found 'a1' (1 of 5 rows)",
    ),
    "study without a row": (
        padchest_gr,
        lambda f: _changed(f / GROUNDED, '"b1"', '"x1"'),
        "expected studies and images of",
    ),
    "more views": (lambda f: rexgradient(f, ["PA"] * 3, 2), None, "3 views of 2 images"),
    "label": (
        chexpert_plus,
        lambda f: _changed(f / "chexbert_labels/impression_fixed.json", "-1.0", "2.0"),
        "other labels or an image twice",
    ),
    "language": (rexgradient, "--language es", "--language: only for padchest_gr, not rexgradient"),
    "templates": (rexgradient, "--templates public", "--templates: rexgradient has reports"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(tmp_path: Path, case: str) -> None:
    make, change, message = BAD[case]
    folder = make(tmp_path / "raw")
    words = change.split() if isinstance(change, str) else []
    if callable(change):
        change(folder)
    name = "rexgradient" if (folder / "metadata").exists() else "chexpert_plus"
    name = "padchest_gr" if (folder / GROUNDED).exists() else name
    with pytest.raises(UserError) as error:
        prepare("chexpert_plus" if case == "another set" else name, folder, tmp_path / "set", *words)
    assert message in str(error.value) and "\n" not in str(error.value)
