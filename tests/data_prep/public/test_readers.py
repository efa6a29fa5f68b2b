"""Readers of public sets, on the real tables that torchxrayvision carries, and on small releases in their layout."""

from __future__ import annotations

import ast
import csv
import gzip
import io
import json
import os
import shutil
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from pycocotools import mask as coco

from data_prep.public import chestx_det, chexpert, nih, padchest, rsna, siim, vindr
from data_prep.public.release_tables import (
    PublicTables,
    ReleaseFolder,
    image_id,
    run_lengths,
    uncompressed,
)
from data_prep.sources.finding_names import aliases, names_of, with_parents
from data_prep.sources.spellings import as_spelled
from medclip_dcl.common.errors import UserError

_FOUND = find_spec("torchxrayvision")
WHEEL = Path(_FOUND.origin).parent / "data" if _FOUND is not None and _FOUND.origin else None
"""Real tables, read without importing the package."""


PADCHEST = (
    "ImageID,StudyID,PatientID,Projection,MethodLabel,Labels,PatientSex_DICOM,PatientBirth,StudyDate_DICOM"
)
BOXES = "Image Index,Finding Label,Bbox [x,y,w,h],,,\n"
VINDR = "image_id,rad_id,class_name,x_min,y_min,x_max,y_max\n"


def _rows(name: str) -> Iterator[dict[str, str]]:
    """Rows of a table of the wheel, by the csv module."""
    assert WHEEL is not None
    if name.endswith(".zip"):
        with zipfile.ZipFile(WHEEL / name) as archive:
            text = archive.read(archive.namelist()[0]).decode()
    else:
        text = gzip.decompress((WHEEL / name).read_bytes()).decode("utf-8-sig")
    return csv.DictReader(io.StringIO(text, newline=""))


def _release(folder: Path, table: str, name: str) -> ReleaseFolder:
    """A release whose only file is a table of the wheel, under its official name."""
    assert WHEEL is not None
    if table.endswith(".zip"):
        with zipfile.ZipFile(WHEEL / table) as archive:
            (folder / name).write_bytes(archive.read(archive.namelist()[0]))
    else:
        shutil.copyfile(WHEEL / table, folder / f"{name}.gz")
    return ReleaseFolder(folder)


def _nih(*labels: str) -> dict[str, str]:
    """The table of NIH with images of these labels."""
    rows = "".join(f"{place}.png,{label},{place}\n" for place, label in enumerate(labels, start=1))
    return {"Data_Entry_2017.csv": f"Image Index,Finding Labels,Patient ID\n{rows}"}


def _write(folder: Path, files: Mapping[str, Any]) -> ReleaseFolder:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(
            content if isinstance(content, str) else json.dumps(content), encoding="utf-8"
        )
    return ReleaseFolder(folder)


def _findings(tables: PublicTables) -> list[str]:
    return tables.images.select_dtypes("float64").columns.tolist()


def _count(tables: PublicTables, value: float = 1.0) -> dict[str, int]:
    return {name: int((tables.images[name] == value).sum()) for name in _findings(tables)}


needs_wheel = pytest.mark.skipif(WHEEL is None, reason="torchxrayvision is not installed")


@pytest.mark.slow
@needs_wheel
def test_whole_nih_table_and_boxes(tmp_path: Path) -> None:
    assert WHEEL is not None
    entry = "Data_Entry_2017_v2020.csv"
    release = _release(tmp_path, f"{entry}.gz", entry)
    shutil.copyfile(WHEEL / "BBox_List_2017.csv.gz", tmp_path / "BBox_List_2017.csv.gz")
    found = nih.read(release)
    listed = Counter(name for row in _rows(f"{entry}.gz") for name in row["Finding Labels"].split("|"))
    names = {"Effusion": "Pleural Effusion", "Pleural_Thickening": "Pleural Thickening"}
    del listed["No Finding"]
    assert _count(found) == {names.get(name, name): number for name, number in listed.items()}
    assert len(found.images) == 112_120 and found.images["patient"].nunique() == 30_805
    assert found.boxes is not None and len(found.boxes) == 984 and found.boxes["image"].nunique() == 880
    of_category = found.boxes["category"].value_counts()
    assert of_category[["Atelectasis", "Infiltration", "Pleural Effusion"]].tolist() == [180, 123, 153]
    box = found.boxes.iloc[0]
    assert (box["image"], round(box["x"], 3), round(box["h"], 3)) == ("00013118_008", 225.085, 79.186)


@needs_wheel
def test_whole_table_of_relabels(tmp_path: Path) -> None:
    name = "google2019_nih-chest-xray-labels.csv"
    found = nih.read_relabels(_release(tmp_path, f"{name}.gz", name))
    rows = list(_rows(f"{name}.gz"))
    assert _count(found) == {
        common: sum(row[name] == "YES" for row in rows)
        for name, common in zip(
            nih.RELABELLED, ("Fracture", "Pneumothorax", "Lung Opacity", "Lung Lesion"), strict=True
        )
    }
    assert found.images["split"].value_counts().to_dict() == {"validate": 2414, "test": 1962}


@needs_wheel
@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_chexpert_table_or_a_ninth(tmp_path: Path, every: int) -> None:
    assert WHEEL is not None
    with gzip.open(WHEEL / "chexpert_train.csv.gz", "rt", encoding="utf-8", newline="") as lines:
        text = "".join(line for number, line in enumerate(lines) if number % every == 0)
    (tmp_path / "train.csv").write_text(text, encoding="utf-8", newline="")
    found = chexpert.read(ReleaseFolder(tmp_path))
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert len(found.images) == len(rows) == 223_414 // every
    for value, text in ((1.0, "1.0"), (0.0, "0.0"), (-1.0, "-1.0")):
        assert _count(found, value) == {
            name: sum(row[name] == text for row in rows) for name in _findings(found)
        }
    assert len(found.left_out) == sum(row["Frontal/Lateral"] == "Lateral" for row in rows)
    assert found.images["patient"].nunique() == len({row["Path"].split("/")[2] for row in rows})


@pytest.mark.slow
@needs_wheel
def test_whole_rsna_table(tmp_path: Path) -> None:
    found = rsna.read(_release(tmp_path, "kaggle_stage_2_train_labels.csv.zip", "stage_2_train_labels.csv"))
    rows = list(_rows("kaggle_stage_2_train_labels.csv.zip"))
    assert len(found.images) == 26_684 and not found.names_patients
    assert _count(found) == {"Pneumonia": len({row["patientId"] for row in rows if row["Target"] == "1"})}
    assert found.boxes is not None and len(found.boxes) == sum(row["Target"] == "1" for row in rows) == 9_555


@pytest.mark.slow
@needs_wheel
def test_whole_vindr_table(tmp_path: Path) -> None:
    found = vindr.read(_release(tmp_path, "vinbigdata-train.csv.gz", "train.csv"))
    readers: dict[tuple[str, str], set[str]] = {}
    rows = list(_rows("vinbigdata-train.csv.gz"))
    for row in rows:
        readers.setdefault((row["image_id"], row["class_name"]), set()).add(row["rad_id"])
    majority = {pair for pair, names in readers.items() if len(names) >= 2}
    known = aliases()
    positive = Counter(known[name.lower().replace("/", " ")].finding for _, name in majority)
    del positive["No Finding"]
    assert _count(found) == positive and len(found.images) == 15_000
    assert found.boxes is not None
    boxed = [row for row in rows if row["x_min"] and (row["image_id"], row["class_name"]) in majority]
    assert len(found.boxes) == len(boxed)


@pytest.mark.slow
@needs_wheel
def test_whole_siim_table(tmp_path: Path) -> None:
    found = siim.read(_release(tmp_path, "siim-pneumothorax-train-rle.csv.gz", "train-rle.csv"))
    rows = list(_rows("siim-pneumothorax-train-rle.csv.gz"))
    assert len(found.images) == len({row["ImageId"] for row in rows}) == 12_047
    assert _count(found) == {
        "Pneumothorax": len({r["ImageId"] for r in rows if r[" EncodedPixels"].strip() != "-1"})
    }
    assert found.masks is not None
    drawn = [row for row in rows if row[" EncodedPixels"].strip() != "-1"]
    for place in (0, 7, 2000):
        # The challenge's own way: fill a line of pixels, which is the picture column by column.
        line, position = np.zeros(1024 * 1024, dtype=bool), 0
        pairs = [int(number) for number in drawn[place][" EncodedPixels"].split()]
        for start, length in zip(pairs[::2], pairs[1::2], strict=True):
            position += start
            line[position : position + length] = True
            position += length
        counts = found.masks["counts"].iloc[place]
        compressed = coco.frPyObjects({"size": [1024, 1024], "counts": counts}, 1024, 1024)
        assert (coco.decode(compressed).astype(bool) == line.reshape(1024, 1024).T).all()


@needs_wheel
@pytest.mark.slow
def test_whole_padchest_table(tmp_path: Path) -> None:
    name = "PADCHEST_chest_x_ray_images_labels_160K_01.02.19.csv"
    found = padchest.read(_release(tmp_path, f"{name}.gz", name))
    rows = list(_rows(f"{name}.gz"))
    physicians = {row["PatientID"] for row in rows if row["MethodLabel"] == "Physician"}
    left_out = Counter(found.left_out.values())
    assert left_out["labelled by a network, of a patient of the test split"] > 10_000
    kept = found.images[~found.images["image"].isin(found.left_out)]
    assert set(kept["view"]) == {"PA", "AP"} and len(kept) + sum(left_out.values()) == len(rows) == 160_861
    assert not set(kept.loc[kept["split"] == "train", "patient"]) & physicians
    usable = set(kept["image"])
    wanted, unchanged = Counter[str](), 0
    for row in rows:
        if row["ImageID"].removesuffix(".png") in usable:
            names = {entry.strip() for entry in ast.literal_eval(row["Labels"])}
            assert not names & {"exclude", "suboptimal study"}
            wanted.update(names & {"scoliosis", "cardiomegaly", "pleural effusion"})
            unchanged += "unchanged" in names and "cardiomegaly" not in names
    infiltration = kept.loc[kept["split"] == "test", "Infiltration"]
    assert [int((infiltration == label).sum()) for label in (1, 0)] == [
        2_778,
        20_858,
    ]  # 883 and 22,532 by names alone
    assert [int((kept["catheter"] == label).sum()) for label in (1, 0)] == [4_880, 80_130]
    assert int((kept["Scoliosis"] == 1).sum()) == wanted["scoliosis"]
    assert int((kept["Cardiomegaly"] == 1).sum()) == wanted["cardiomegaly"]
    assert int((kept["Pleural Effusion"] == 1).sum()) >= wanted["pleural effusion"]  # and loculated ones
    assert int(kept["Cardiomegaly"].isna().sum()) == unchanged
    said = {row["ImageID"].removesuffix(".png"): row["Report"].strip() for row in rows}
    assert (kept["report"] == kept["image"].map(said).replace("nan", "")).all() and found.language == "es"
    assert int((kept["report"] == "").sum()) == 13


MASKS = [
    np.zeros((5, 3), dtype=bool),
    np.ones((4, 7), dtype=bool),
    *(
        np.random.default_rng(seed).random((9 + seed, 31)) < share
        for seed, share in enumerate((0.02, 0.5, 0.97))
    ),
    np.pad(np.ones((200, 310), dtype=bool), ((40, 17), (3, 260))),
]


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: str(mask.shape))
def test_run_lengths_are_those_of_coco(mask: np.ndarray) -> None:
    compressed = coco.encode(np.asfortranarray(mask.astype(np.uint8)))["counts"].decode("ascii")
    assert uncompressed(compressed) == run_lengths(mask)
    again = coco.frPyObjects({"size": list(mask.shape), "counts": run_lengths(mask)}, *mask.shape)
    assert (coco.decode(again).astype(bool) == mask).all()


def test_chexpert_with_masks_of_chexlocalize(tmp_path: Path) -> None:
    mask = coco.encode(np.asfortranarray(np.eye(6, 8, dtype=np.uint8)))
    empty = coco.encode(np.zeros((6, 8), dtype=np.uint8, order="F"))
    sizes = {"size": [6, 8]}
    content = {
        "patient64741_study1_view1_frontal": {
            "Airspace Opacity": {**sizes, "counts": mask["counts"].decode()},
            "Edema": {**sizes, "counts": empty["counts"].decode()},
        }
    }
    labels = (
        "Path,Lung Opacity,Edema\ntest/patient64741/study1/view1_frontal.jpg,1.0,0.0\n"
        "test/patient64741/study1/view2_lateral.jpg,1.0,0.0\n"
    )
    release = _write(
        tmp_path,
        {
            "CheXpert/test_labels.csv": labels,
            "CheXlocalize/gt_segmentations_test.json": content,
            "CheXpert/test/patient64741/study1/view1_frontal.jpg": "",
        },
    )
    found = chexpert.read(release)
    assert found.images[["image", "split", "view", "Lung Opacity"]].to_numpy().tolist() == [
        ["patient64741_study1_view1_frontal", "test", "FRONTAL", 1.0],
        ["patient64741_study1_view2_lateral", "test", "LATERAL", 1.0],
    ]
    assert found.left_out == {"patient64741_study1_view2_lateral": "its view is not frontal"}
    assert found.masks is not None
    assert found.masks[["category", "height", "width"]].to_numpy().tolist() == [
        ["Lung Opacity", 6, 8],
        ["Edema", 6, 8],
    ]
    assert found.masks["counts"].iloc[0] == run_lengths(np.eye(6, 8, dtype=bool))
    assert found.masks["counts"].iloc[1] == [48]
    assert list(release.images(found.images["image"])) == ["patient64741_study1_view1_frontal"]


def test_vindr_of_physionet(tmp_path: Path) -> None:
    boxes = "image_id,rad_id,class_name,x_min,y_min,x_max,y_max\n"
    release = _write(
        tmp_path,
        {
            "annotations_train.csv": boxes
            + "a,R1,Nodule/Mass,10,20,30,60\na,R2,Nodule/Mass,12,20,30,60\na,R3,Pleural effusion,1,1,5,5\n"
            + "b,R1,No finding,,,,\nb,R2,No finding,,,,\nb,R3,No finding,,,,\n",
            "image_labels_train.csv": "image_id,rad_id,Nodule/Mass,Pleural effusion,Tuberculosis,No finding\n"
            "a,R1,1,0,1,0\na,R2,1,0,1,0\na,R3,0,1,0,0\nb,R1,0,0,0,1\nb,R2,0,0,0,1\nb,R3,0,0,0,1\n",
            "annotations_test.csv": "image_id,class_name,x_min,y_min,x_max,y_max\nc,Pleural effusion,4,4,8,9\n",
            "image_labels_test.csv": "image_id,Nodule/Mass,Pleural effusion,Tuberculosis,No finding\nc,0,1,0,0\n",
            "sizes.csv": "image_id,width,height\na,100,200\n",
        },
    )
    found = vindr.read(release)
    columns = ["image", "split", "Lung Lesion", "Pleural Effusion"]
    assert found.images[columns].to_numpy().tolist() == [
        ["a", "train", 1.0, 0.0],
        ["b", "train", 0.0, 0.0],
        ["c", "test", 0.0, 1.0],
    ]
    assert found.images["Tuberculosis"].tolist() == [1.0, 0.0, 0.0]
    assert found.boxes is not None
    # The third reader's effusion has no majority.
    assert found.boxes[["image", "category", "reader", "w", "h"]].to_numpy().tolist() == [
        ["a", "Lung Lesion", "R1", 20.0, 40.0],
        ["a", "Lung Lesion", "R2", 18.0, 40.0],
        ["c", "Pleural Effusion", "", 4.0, 5.0],
    ]
    assert found.boxes["image_width"].tolist()[:2] == [100.0, 100.0] and np.isnan(
        found.boxes["image_width"].iloc[2]
    )


@pytest.mark.parametrize(
    ("readers", "present"),
    [("M", 1), ("MM", 1), ("M-", 0), ("MM-", 1), ("M--", 0), ("MM--", 0), ("MMM--", 1), ("MM---", 0)],
)
def test_more_than_half_of_the_readers_decide(tmp_path: Path, readers: str, present: int) -> None:
    """M: a reader who names the mass, twice; -: one who finds nothing."""
    rows = {
        "M": "a,R{0},Nodule/Mass,1,1,9,9\nA,R{0},Nodule/Mass,2,1,9,9\n",
        "-": "a,R{0},No finding,0,0,1,1\n",
    }
    text = VINDR + "".join(
        rows[reader].format(place).replace("A,", "a,") for place, reader in enumerate(readers)
    )
    found = vindr.read(_write(tmp_path, {"train.csv": text}))
    assert found.images["Lung Lesion"].tolist() == [present] and found.boxes is not None
    assert len(found.boxes) == present * 2 * readers.count("M")
    said = "labels of train: 1 of 1 images have fewer than 3 readers" in found.choices
    assert said == (len(readers) < 3)


def test_findings_of_one_common_name_are_one_label(tmp_path: Path) -> None:
    boxes = "image_id,class_name,x_min,y_min,x_max,y_max\n"
    boxes += "a,Rib fracture,1,1,9,9\nb,Clavicle fracture,2,2,9,9\nc,No finding,,,,\n"
    found = vindr.read(_write(tmp_path, {"annotations_test.csv": boxes}))
    assert found.images["Fracture"].tolist() == [1.0, 1.0, 0.0] and _findings(found) == ["Fracture"]
    assert found.boxes is not None and found.boxes["category"].tolist() == ["Fracture", "Fracture"]


def test_a_finding_of_a_lateral_image_alone_and_packed_lists(tmp_path: Path) -> None:
    rows = (
        "a.png,1,1,PA,Physician,['edema'],F,1950,20150304\nb.png,1,1,L,Physician,['scoliosis'],F,,20150304\n"
    )
    table = f"{PADCHEST}\n{rows}"
    found = padchest.read(_write(tmp_path / "p", {"chest_x_ray_images_labels_160K.csv": table}))
    assert _findings(found) == ["Edema"] and found.left_out == {"b": "its view is not frontal"}
    assert found.images["age"].tolist() == ["65", ""]
    entry = "Image Index,Finding Labels,Patient ID\n1.png,Mass,1\n2.png,Mass,2\n"
    _write(tmp_path / "n", {"Data_Entry_2017.csv": entry, "test_list.txt": "2.png\n"})
    (tmp_path / "n/train_val_list.txt.gz").write_bytes(gzip.compress(b"1.png\n"))
    assert nih.read(ReleaseFolder(tmp_path / "n")).images["split"].tolist() == ["train", "test"]


def test_a_finding_of_padchest_makes_its_parents_present(tmp_path: Path) -> None:
    cells = [
        "['air bronchogram', 'unchanged']",
        "['Goiter' 'COPD signs']",
        "array(['hydropneumothorax'], dtype=object)",
        "['reservoir_central venous catheter']",
        "['pseudonodule', 'subcutaneous emphysema', 'pericardial effusion', 'radiological finding']",
        '[""single chamber device"",\n ""kyphosis""]',
        "['']",
        "nan",
        "",
        "[np.str_('hemothorax'), np.str_('Goiter')]",
    ]
    rows = "".join(f'{n}.png,{n},{n},PA,Physician,"{cell}",,,\n' for n, cell in enumerate(cells))
    found = padchest.read(_write(tmp_path, {"chest_x_ray_images_labels_160K.csv": f"{PADCHEST}\n{rows}"}))
    present = [set(row.index[row == 1]) for _, row in found.images[_findings(found)].iterrows()]
    assert present[0] == {"air bronchogram", "Consolidation", "alveolar pattern", "Infiltration"}
    assert found.images[_findings(found)].iloc[0].isna().sum() == len(_findings(found)) - 4
    assert present[1] == {
        "goiter",
        "superior mediastinal enlargement",
        "Enlarged Cardiomediastinum",
        "COPD signs",
    }
    assert present[2] == {"Pneumothorax", "Pleural Effusion"}
    assert present[3] == {"reservoir central venous catheter", "central venous catheter", "catheter"}
    assert present[4] == {"pseudonodule", "subcutaneous emphysema", "pericardial effusion"}
    assert present[5] == {
        "single chamber device",
        "electrical device",
        "kyphosis",
        "thoracic cage deformation",
    }
    assert not present[6] and found.left_out == dict.fromkeys(("7", "8"), "it has no labels")
    assert present[9] == {"hemothorax", "Pleural Effusion", *present[1]} - {"COPD signs"}


def test_names_of_padchest_are_those_of_its_table() -> None:
    known = set(names_of("PadChest"))
    findings = set(aliases()) | {name.lower() for name in known}
    tree = yaml.safe_load((files("medclip_dcl.common") / "findings.yaml").read_text(encoding="utf-8"))
    children = [child for other in tree.values() for child in other.get("children", ())]
    assert len(known) == 194 and set(children) <= known
    # Every finding above another is a name, too, and none is above itself.
    above = with_parents(known)
    assert {parent.lower() for names in above.values() for parent in names} <= findings
    assert all(names.count(name) == 1 for name, names in above.items())
    assert with_parents(["infiltrates", "Pneumonia"]) == {
        "infiltrates": ["infiltrates"],
        "Pneumonia": ["Pneumonia"],
    }


def test_identifiers_in_another_case_are_matched(tmp_path: Path) -> None:
    assert as_spelled(["A1", "b", "c", "d"], ["a1", "B", "b", "C"]) == ["a1", "b", "C", "d"]
    assert as_spelled(["X", "AB"], ["x", "X ", "ab", "Ab"]) == ["X", "AB"]
    assert as_spelled(['="a-1.png"', "a\u20101\u200b"], ["A-1"]) == ["A-1"] * 2
    release = _write(
        tmp_path,
        {
            "annotations_test.csv": f"{VINDR}AB,,Edema,1,1,9,9\n",
            "image_labels_test.csv": "image_id,edema\nab,1\n",
            "sizes.csv": "image_id,width,height\naB,100,200\n",
            "Ab.PNG": "",
        },
    )
    found = vindr.read(release)
    assert found.boxes is not None
    assert found.boxes[["image", "category", "image_width"]].to_numpy().tolist() == [["ab", "Edema", 100]]
    assert release.images(found.images["image"]) == {"ab": tmp_path / "Ab.PNG"}
    assert image_id("Train/PATIENT00001/Study1/VIEW1_Frontal.JPG") == "patient00001_study1_view1_frontal"


def test_patients_of_rsna_are_those_of_nih(tmp_path: Path) -> None:
    release = _write(
        tmp_path,
        {
            "stage_2_train_labels.csv": "patientId,x,y,width,height,Target\n"
            "u1,1,2,3,4,1\nu1,5,5,2,2,1\nu2,,,,,0\nu3,,,,,0\n",
            "pneumonia-challenge-dataset-mappings_2018.json": [
                {"subset_img_id": "U1", "img_id": "00000013_005.png"},
                {"subset_img_id": "u2.DCM", "img_id": "00000013_006.png"},
            ],
        },
    )
    found = rsna.read(release)
    assert found.images["patient"].tolist()[:2] == ["13", "13"] and found.names_patients
    assert list(found.left_out) == ["u3"]
    assert found.boxes is not None and len(found.boxes) == 2


def test_boxes_and_polygons_of_chestx_det(tmp_path: Path) -> None:
    square = [[10, 20], [39, 20], [39, 59], [10, 59]]
    release = _write(
        tmp_path,
        {
            "ChestX_Det_train.json": [{"file_name": "7.png", "syms": [], "boxes": [], "polygons": []}],
            "ChestX_Det_test.json": [
                {
                    "file_name": "8.png",
                    "syms": ["Effusion", "pleural effusion", "Diffuse Nodule"],
                    "boxes": [[10, 20, 40, 60]] * 3,
                    "polygons": [square] * 3,
                }
            ],
        },
    )
    found = chestx_det.read(release)
    assert found.images["split"].tolist() == ["train", "test"]
    # Two names of one finding are one.
    assert len(_findings(found)) == 13
    assert found.images[["Pleural Effusion", "Diffuse Nodule"]].to_numpy().tolist() == [[0, 0], [1, 1]]
    assert found.boxes is not None and found.masks is not None
    assert found.boxes[["x", "y", "w", "h"]].to_numpy().tolist() == [[10, 20, 30, 40]] * 3
    for regions in (found.boxes, found.masks):
        assert regions["category"].tolist() == ["Pleural Effusion", "Pleural Effusion", "Diffuse Nodule"]
    mask = coco.decode(
        coco.frPyObjects({"size": [1024, 1024], "counts": found.masks["counts"].iloc[0]}, 1024, 1024)
    )
    assert mask[20:60, 10:40].all() and mask.sum() == 30 * 40


def test_official_lists_split_nih(tmp_path: Path) -> None:
    entry = "Image Index,Finding Labels,Patient ID,Patient Sex,View Position\n"
    rows = "00000001_000.png,Hernia,1,M,PA\n00000002_000.png,No Finding,2,F,AP\n00000003_000,,3,F,AP\n"
    lists = {"train_val_list.txt": "\u200b'00000001_000.PNG'\n", "test_list.txt": "00000002_000.png\n"}
    found = nih.read(_write(tmp_path, {"Data_Entry_2017_v2020.csv": entry + rows, **lists}))
    assert found.images["split"].tolist() == ["train", "test", ""]
    assert list(found.left_out) == ["00000003_000"]
    # An empty cell says nothing.
    assert (
        found.images["Hernia"].tolist()[:2] == [1.0, 0.0]
        and found.images[_findings(found)].iloc[2].isna().all()
    )
    assert found.choices[-1] == "labels: 1 of 3 images have an empty cell and are not labelled"
    assert found.images["sex"].tolist() == ["M", "F", "F"]


REFUSED: dict[str, tuple[Callable[[ReleaseFolder], PublicTables], dict[str, Any], list[str]]] = {
    "no table": (nih.read, {"other.csv": "a\n1\n"}, ["Data_Entry_2017_v2020.csv", "found neither"]),
    "cut off": (nih.read, {"Data_Entry_2017.csv": "Image Index,Finding Labels,Patient ID\n1.png,Mass,1\n2.png,Pneumo"},
        ["line 3: 2 values for 3 columns", "download it again"]),
    "labels": (chexpert.read, {"train.csv": "Path,Edema\nx/patient1/study1/view1_frontal.jpg,2.0\n"},
        ["train.csv, column Edema: expected 1, 0, -1 or empty, found '2.0' (1 of 1 rows)"]),
    "path": (chexpert.read, {"train.csv": "Path,Edema\nx.jpg,1.0\n"}, ["column Path", "'x.jpg'"]),
    "run lengths": (siim.read, {"train-rle.csv": "ImageId, EncodedPixels\na,5 3 7\n"},
        ["EncodedPixels of a", "pairs", "write yours as it does"]),
    "numbers": (rsna.read, {"stage_2_train_labels.csv": "patientId,x,y,width,height,Target\na,1,2,3,4,yes\n"},
        ["column Target", "'yes'"]),
    "mask": (
        chexpert.read,
        {
            "train.csv": "Path,Edema\nx/patient1/study1/view1_frontal.jpg,1.0\n",
            "gt_segmentations_val.json": {"a": {"Edema": {"size": [2, 2], "counts": "PPPPP"}}},
        },
        ["gt_segmentations_val.json", "the runs do not fill"],
    ),
    "records": (chestx_det.read, {"ChestX_Det_test.json": [{"file_name": "1.png", "syms": ["Mass"], "boxes": []}]},
        ["ChestX_Det_test.json", "found another form"]),
    "two lists": (
        nih.read,
        {
            "Data_Entry_2017.csv": "Image Index,Finding Labels,Patient ID\n1.png,Mass,1\n",
            "train_val_list.txt": "1.png\n",
            "test_list.txt": "1.png\n",
        },
        ["train_val_list.txt", "found 1 in both; take the release's own file"],
    ),
    "relabels": (
        nih.read_relabels,
        {
            "test_labels.csv": f"Image Index,{','.join(nih.RELABELLED)}\n1.png,1,0,0,0\n",
            "validation_labels.csv": f"Image Index,{','.join(nih.RELABELLED)}\n2.png,YES,NO,NO,\n",
        },
        ["YES, NO or empty"],
    ),
    "box without a label": (
        vindr.read,
        {
            "annotations_test.csv": "image_id,class_name,x_min,y_min,x_max,y_max\na,Edema,1,1,9,9\n",
            "image_labels_test.csv": "image_id,Edema\nb,1\n",
        },
        ["annotations_test.csv", "image_labels_test.csv"],
    ),
    "list of names": (padchest.read,
        {"chest_x_ray_images_labels_160K.csv": f"{PADCHEST}\na.png,1,1,PA,Physician,normal,,,\n"},
        ["column Labels", "'normal'"]),
    "misspelt": (
        nih.read,
        _nih("Mass|Cardiomegally", "Mass", "Cardiomegally", "Lung Opacity"),
        [
            "Finding Labels",
            "'Cardiomegally' (2 of 4 rows), and 1 more: 'Lung Opacity' (1 of 4 rows); did you mean Cardiomegaly?",
        ],
    ),
    "no label": (nih.read, _nih("", " "), ["expected names of findings", "(2 of 2 rows)"]),
    "no finding and one": (nih.read, _nih("Mass", "No Finding|Mass"), ["alone, found 'No Finding|Mass' (1 of 2 rows)"]),
    "box against a label": (nih.read,
        {**_nih("Mass", "Mass"), "BBox_List_2017.csv": f"{BOXES}2.PNG,Infiltrate,1,2,30,40\n1.png,Mass,1,2,30,40\n"},
        ["wrong boxes: 1 of 2 (first: Infiltration on image 2): expected boxes of findings that"]),
    "unknown box": (nih.read, {**_nih("Mass"), "BBox_List_2017.csv": f"{BOXES}1.png,Masss,1,2,30,40\n"},
        ["BBox_List_2017.csv, column Finding Label", "'Masss' (1 of 1 rows); did you mean Mass?"]),
    "syms as a text": (chestx_det.read,
        {"ChestX_Det_test.json": [{"file_name": "1.png", "syms": "Mass", "boxes": [[1, 2, 30, 40]]}]},
        ["syms that are no list of texts"]),
    "no syms": (chestx_det.read, {"ChestX_Det_test.json": [{"file_name": "1.png", "syms": [], "boxes": []}]},
        ["empty lists alone"]),
    "image in two spellings": (vindr.read,
        {"train.csv": f"{VINDR}AB,R1,Edema,1,1,9,9\nab,R2,Edema,1,1,9,9\nab,R3,No finding,,,,\n"},
        ["images AB and ab: expected one spelling"]),
    "columns of findings": (vindr.read,
        {"annotations_test.csv": f"{VINDR}a,,Edema,1,1,9,9\n", "image_labels_test.csv": "image_id,Edema,Edma\na,1,0\n"},
        ["image_labels_test.csv, its columns", "'Edma' (1 of 2 rows); did you mean Edema?"]),
    "half of the boxes in shares": (vindr.read,
        {"train.csv": f"{VINDR}a,R1,Edema,.1,.1,.9,.9\nb,R1,Edema,.1,.1,.9,.9\nc,R1,Edema,1,1,9,9\n"},
        ["wrong boxes: 2 of 3 (first: Edema on image a): expected boxes in pixels"]),
    "category of a mask": (
        chexpert.read,
        {
            "train.csv": "Path,Edema\nx/patient1/study1/view1_frontal.jpg,1.0\n",
            "gt_segmentations_val.json": {"a": {"Edma": {"size": [2, 2], "counts": "4"}}},
        },
        ["gt_segmentations_val.json", "'Edma' (1 of 1 rows); did you mean Edema?"],
    ),
    "box of an absent finding": (rsna.read,
        {"stage_2_train_labels.csv": "patientId,x,y,width,height,Target\na,1,2,3,4,0\n"},
        ["column Target: expected 1, or 0 without a box, found '0.0'"]),
    **{
        f"labels {cell}": (
            padchest.read,
            {"chest_x_ray_images_labels_160K.csv": f'{PADCHEST}\na.png,1,1,PA,Physician,"{cell}",,,\n'},
            words,
        )
        for cell, words in {
            "normal": ["expected a list of names"],
            "['mass''nodule']": ["'massnodule' (1 of 1 rows)"],
            "['mass' 'nodule' ... 'goiter']": ["expected a list of names"],
            "['mass', 'normalcardiomegaly']": ["column Labels", "'normalcardiomegaly' (1 of 1 rows)"],
            "['pulmonary ' 'mass']": ["'pulmonary' (1 of 1 rows)"],
        }.items()
    },
    "method": (padchest.read,
        {"chest_x_ray_images_labels_160K.csv": f"{PADCHEST}\na.png,1,1,PA,physician,['mass'],,,\n"},
        ["column MethodLabel: expected Physician | RNN_model, found 'physician'"]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_damaged_release_is_named(tmp_path: Path, case: str) -> None:
    read, files, words = REFUSED[case]
    with pytest.raises(UserError) as error:
        read(_write(tmp_path, files))
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_linked_and_unreadable_folders_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("images/a.png", "closed/b.png"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    for link in ("first", "second"):
        (tmp_path / link).symlink_to(tmp_path)
    scandir = os.scandir

    def refusing(place: str) -> object:
        if os.path.basename(place) == "closed":
            raise PermissionError(13, "Permission denied", place)
        return scandir(place)

    monkeypatch.setattr(os, "scandir", refusing)
    assert ReleaseFolder(tmp_path).images(["a", "b"]) == {"a": tmp_path / "images/a.png"}
    said = capsys.readouterr().err.splitlines()
    assert said == [
        f"warning: {tmp_path / 'closed'} is not readable (Permission denied): its files are missing",
        f"note: folders that are linked more than once are read once: 2 (first: {tmp_path / 'first'})",
    ]


def test_each_name_of_a_finding_has_one_meaning() -> None:
    known = aliases()
    assert known["effusion"] == ("Pleural Effusion", False) and known["nodule mass"] == ("Lung Lesion", True)
    table = pd.Series({name: alias.finding for name, alias in known.items()})
    assert all(known[finding.lower()].finding == finding for finding in table.unique())


def test_the_longer_of_siims_tables_is_read(tmp_path: Path) -> None:
    """The first stage's table has the training images of the first stage alone."""
    tables = {"train-rle.csv": "a,5 9\n", "stage_2_train.csv": "a,5 9\nb,-1\n"}
    release = _write(tmp_path, {name: f"ImageId, EncodedPixels\n{rows}" for name, rows in tables.items()})
    assert siim.read(release).images["image"].tolist() == ["a", "b"]


def test_vindrs_two_names_of_other_diseases_are_one_finding(tmp_path: Path) -> None:
    labels = {"image_labels_train.csv": "image_id,rad_id,Other diseases\na,R1,1\na,R2,1\na,R3,1\n"}
    labels |= {"image_labels_test.csv": "image_id,Other disease\nb,1\n"}
    boxes = {
        "annotations_train.csv": "image_id,rad_id,class_name,x_min,y_min,x_max,y_max\na,R1,No finding,,,,\n",
        "annotations_test.csv": "image_id,class_name,x_min,y_min,x_max,y_max\nb,No finding,,,,\n",
        "sizes.csv": "image_id,width,height\na,100,200\n",
    }
    found = vindr.read(_write(tmp_path, labels | boxes)).images
    assert found["Other Diseases"].tolist() == [1, 1] and "Other Disease" not in found


@pytest.mark.parametrize("between", ["/", "_"])
def test_relabels_of_four_findings_beside_those_of_all(tmp_path: Path, between: str) -> None:
    head = f"Image Index,{','.join(nih.RELABELLED)}"
    four, every = "four_findings_expert_labels", "all_findings_expert_labels"
    content = {
        f"{four}{between}test_labels.csv": f"{head}\n1_0.png,YES,NO,NO,\n",
        f"{four}{between}validation_labels.csv": f"{head}\n2_0.png,NO,NO,NO,\n",
        f"{every}{between}test_labels.csv": "Image Index,Hernia\n1_0.png,YES\n",
    }
    images = nih.read_relabels(_write(tmp_path, content)).images
    assert images[["image", "split"]].to_numpy().tolist() == [["2_0", "validate"], ["1_0", "test"]]


def test_copies_of_a_download_in_another_are_one(tmp_path: Path) -> None:
    release = _write(tmp_path, {"stage_2_train.csv": "ImageId, EncodedPixels\na,5 9\n", "a.png": "x"})
    shutil.copytree(tmp_path, tmp_path / "mirror", ignore=shutil.ignore_patterns("mirror"))
    assert siim.read(release).images["image"].tolist() == ["a"]
    assert release.images(["a"]).keys() == {"a"}
    (tmp_path / "mirror/a.png").write_text("another")
    with pytest.raises(UserError, match="holds image a twice"):
        release.images(["a"])


def test_a_table_as_kaggle_packs_it(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "stage_2_train.csv.zip", "w") as archive:
        archive.writestr("stage_2_train.csv", "ImageId, EncodedPixels\na,5 9\n")
    assert siim.read(ReleaseFolder(tmp_path)).images["image"].tolist() == ["a"]


def test_an_age_of_0_is_unknown_in_chexpert(tmp_path: Path) -> None:
    path = "CheXpert-v1.0/train/patient0000{}/study1/view1_frontal.jpg"
    rows = "".join(f"{path.format(n)},Male,{age},Frontal,AP,1.0\n" for n, age in ((1, 0), (2, 40)))
    content = {"train.csv": f"Path,Sex,Age,Frontal/Lateral,AP/PA,Edema\n{rows}"}
    assert chexpert.read(_write(tmp_path, content)).images["age"].tolist() == ["", "40"]
