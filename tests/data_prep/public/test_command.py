"""A set of real NIH images with labels and boxes and without reports, through preparation, check, training and test."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from data_prep.public.release_tables import ReleaseFolder
from data_prep.sources.check import check_set
from data_prep.sources.keep_out import names_to_keep_out
from medclip_dcl.command import cli
from medclip_dcl.common.errors import UserError
from medclip_dcl.data.prepared import PreparedSet
from tests.program import verb

main = verb("prepare public")


def prepare(name: str, source: Path, output: Path, *more: str) -> None:
    """`more` follows the usual size."""
    main([name, "--source", str(source), "--output", str(output), "--size", "32", "--workers", "1", *more])


REDRAWN = ("--redraw_test", "--split_shares", "0.5,0.2,0.3", "--size", "64")

N_BOXED, N_NORMAL = 42, 28
ENTRIES = "Data_Entry_2017_v2020.csv"


@pytest.fixture(scope="module")
def release(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seventy images of NIH, most with boxes, and the official tables: of the large one every 25th row, and theirs."""
    source = real_data / "nih"
    folder = tmp_path_factory.mktemp("nih") / "release"
    (folder / "images").mkdir(parents=True)
    for file in source.glob("*.*"):
        shutil.copyfile(file, folder / file.name)
    boxes = pd.read_csv(source / "BBox_List_2017.csv", index_col=False)
    boxed = set(boxes["Image Index"].str.removesuffix(".png"))
    files = sorted((source / "images").iterdir())
    chosen = [file for file in files if file.stem in boxed][::19][:N_BOXED]
    chosen += [file for file in files if file.stem not in boxed][::31][:N_NORMAL]
    for file in chosen:
        shutil.copyfile(file, folder / "images" / file.name)
    names = {f"{file.stem}.png" for file in chosen}
    header, *rows = (source / ENTRIES).read_text().splitlines(keepends=True)
    kept = [row for number, row in enumerate(rows) if number % 25 == 0 or row.partition(",")[0] in names]
    (folder / ENTRIES).write_text("".join([header, *kept]))
    return folder


@pytest.fixture(scope="module")
def prepared(release: Path) -> Path:
    output = release.parent / "set"
    prepare("nih", release, output, *REDRAWN)
    return output


def test_labels_and_boxes_are_those_of_the_tables(prepared: Path, release: Path) -> None:
    found = PreparedSet(prepared)
    images, boxes, cases = (found.table(name) for name in ("images", "boxes", "cases"))
    assert len(images) == N_BOXED + N_NORMAL and not found.patients_in_training_and_evaluation
    assert set(images["use"]) == {"train", "validate", "test"} and not found.has("sentences")
    table = pd.read_csv(release / ENTRIES).set_index("Image Index")
    listed = table["Finding Labels"].str.split("|")
    own = {"Pleural Effusion": "Effusion", "Pleural Thickening": "Pleural_Thickening"}
    for dicom_id, finding, label in zip(cases["dicom_id"], cases["finding"], cases["label"], strict=True):
        assert label == (own.get(finding, finding) in listed[f"{dicom_id}.png"])
    raw = pd.read_csv(release / "BBox_List_2017.csv", index_col=False)
    raw["image"] = raw["Image Index"].str.removesuffix(".png")
    raw = raw[raw["image"].isin(images["dicom_id"])]
    assert len(boxes) == len(raw) >= N_BOXED
    # Boxes are in pixels of 1024 x 1024, the images here have 512.
    assert boxes.sort_values(["dicom_id", "x"])["x"].tolist() == pytest.approx(
        (raw.sort_values(["image", "Bbox [x"])["Bbox [x"] / 2).tolist()
    )
    assert (boxes["phrase"] == "").all()
    page, problems = check_set(prepared)
    assert problems == [] and "reports    none" in page


def test_a_rerun_does_nothing_and_a_missing_name_is_said(
    prepared: Path, release: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare("nih", release, prepared, *REDRAWN)
    shown = capsys.readouterr()
    assert "nothing to do" in shown.out and "not the official one" in shown.err
    with pytest.raises(SystemExit, match="2"):
        main(["nhi", "--source", str(release), "--output", str(prepared)])
    assert "NAME: invalid choice: 'nhi' (choose from 'nih'" in capsys.readouterr().err
    assert ReleaseFolder(release).images(["00000000_000"]) == {}


@pytest.mark.slow
def test_a_model_is_tested_on_it(prepared: Path, exported: Path, tmp_path: Path, undrawn: None) -> None:
    words = ["--config", "mimic_cxr", "--ckpt_path", str(exported), "--untrained", "false"]
    words += ["--data.init_args.folder", str(prepared), "--data.init_args.num_workers", "0"]
    words += ["--data.init_args.batch_size", "16", "--trainer.accelerator", "cpu"]
    words += ["--trainer.precision", "32-true"]
    words += ["--trainer.callbacks+=medclip_dcl.evaluation.Localisation"]
    words += ["--trainer.callbacks.init_args.min_cases", "1"]
    cli.main(["test", *words, "--run_folder", str(tmp_path)])
    results = json.loads((tmp_path / "results.json").read_text())
    found = results["metrics"]["localisation"]
    rows = pd.read_parquet(tmp_path / "predictions/localisation.parquet")
    assert found["by_category"]["Atelectasis"]["hit"] == pytest.approx(
        rows.loc[rows["category"] == "Atelectasis", "hit"].mean()
    )
    test = PreparedSet(prepared).table("images").query("use == 'test'")
    assert results["protocol"]["localisation"]["thresholds"]
    # Validate images choose thresholds, and are in no table: not in the map of embeddings, either.
    for name in ("localisation", "classification", "embedding_map", "images"):
        shown = pd.read_parquet(tmp_path / f"predictions/{name}.parquet")["dicom_id"]
        assert len(shown) and set(shown) <= set(test["dicom_id"]), name
    assert rows["area"].between(0, 1).all() and rows["hit"].between(0, 1).all()


def test_training_without_reports_names_them(
    prepared: Path, small_bert: Path, tmp_path: Path, capsys
) -> None:
    words = ["--config", "mimic_cxr", "--config", "objective/infonce"]
    words += ["--data.init_args.folder", str(prepared), "--run_folder", str(tmp_path / "run")]
    words += ["--model.init_args.text_encoder.init_args.pretrained", str(small_bert)]
    words += ["--model.init_args.image_encoder.init_args.weights", "null", "--trainer.accelerator", "cpu"]
    with pytest.raises(SystemExit):
        cli.main(["fit", *words])
    assert "has no reports" in capsys.readouterr().err


def test_no_validate_image_is_drawn_beside_official_ones(tmp_path: Path, real_data: Path) -> None:
    """CheXpert, of which only training images are there: its validate patients are official, not drawn."""
    (tmp_path / "CheXpert").mkdir()
    (tmp_path / "CheXpert/train.csv").write_text(
        "Path,Edema\n"
        + "".join(f"CheXpert/train/patient{n}/study1/view1_frontal.jpg,1.0\n" for n in range(1, 30))
    )
    (tmp_path / "CheXpert/valid.csv").write_text(
        "Path,Edema\nCheXpert/valid/patient99/study1/view1_frontal.jpg,0.0\n"
    )
    picture = next((real_data / "nih/images").iterdir())
    for n in range(1, 30):
        folder = tmp_path / f"CheXpert/train/patient{n}/study1"
        folder.mkdir(parents=True)
        shutil.copyfile(picture, folder / "view1_frontal.jpg")
    output = tmp_path / "set"
    prepare("chexpert", tmp_path / "CheXpert", output)
    assert set(PreparedSet(output).table("images")["use"]) == {"train"}
    # A truncated image is left out by name, one of many.
    (tmp_path / "CheXpert/train/patient7/study1/view1_frontal.jpg").write_bytes(picture.read_bytes()[:3000])
    prepare("chexpert", tmp_path / "CheXpert", tmp_path / "again")
    assert "patient7_study1_view1_frontal" in (tmp_path / "again/rejects.csv").read_text()


def chexpert_table(folder: Path, labels: list[str], picture: Path) -> None:
    """train.csv with a patient for each label of Edema, and their images."""
    image = "CheXpert/train/patient{}/study1/view1_frontal.jpg"
    rows = [f"{image.format(n)},{label}\n" for n, label in enumerate(labels)]
    for n in range(len(labels)):
        (folder / image.format(n)).parent.mkdir(parents=True)
        shutil.copyfile(picture, folder / image.format(n))
    (folder / "CheXpert/train.csv").write_text("Path,Edema\n" + "".join(rows))


def test_images_without_a_label_have_no_template(tmp_path: Path, real_data: Path) -> None:
    """The packaged prompts by their name; unlabelled images are no unreadable reports, of which few may be."""
    chexpert_table(
        tmp_path, [*["1.0"] * 9, *["0.0"] * 9, "-1.0", ""], next((real_data / "nih/images").iterdir())
    )
    prepare("chexpert", tmp_path / "CheXpert", tmp_path / "set", "--templates", "public")
    found = PreparedSet(tmp_path / "set")
    assert len(found.table("sentences")) == 2 and len(found.table("reports")) == 18
    unused = found.table("images").query("use == 'excluded'")["dicom_id"]
    assert set(unused) == {f"patient{n}_study1_view1_frontal" for n in (18, 19)}
    assert (tmp_path / "set/rejects.csv").read_text().count("it has no label with a prompt") == 2


def test_a_table_of_training_images_alone_is_drawn_as_a_whole(
    tmp_path: Path, real_data: Path, capsys
) -> None:
    """Kaggle's VinDr-CXR, whose test images have no labels; its images are no patients of another set."""
    rows, picture = [f"{n},No finding,0,0,1,1" for n in range(19)], next((real_data / "nih/images").iterdir())
    for n in range(20):
        Image.open(picture).save(tmp_path / f"{n}.png")
    table = ["image_id,class_name,x_min,y_min,x_max,y_max", *rows, "19,Cardiomegaly,9,9,99,99", ""]
    (tmp_path / "train.csv").write_text("\n".join(table))
    (tmp_path / "sizes.csv").write_text("image_id,width,height\n19,512,512\n")
    output = tmp_path / "set"
    prepare("vindr", tmp_path, output, "--split_shares", "0.6,0.2,0.2")
    assert set(PreparedSet(output).table("images")["use"]) == {"train", "validate", "test"}
    assert "drawn by 0.6, 0.2, 0.2" in capsys.readouterr().err
    assert {name[-4:] for name in names_to_keep_out(output)} == {".jpg"}


@pytest.mark.slow
def test_templates_give_each_label_its_sentence(release: Path, prepared: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.yaml"
    prompts.write_text(
        "Atelectasis: [No collapse, [Atelectasis is seen, Collapse]]\nHernia: [No hernia, Hernia]\nCough: [a, b]\n"
    )
    output = tmp_path / "set"
    prepare("nih", release, output, *REDRAWN, "--templates", str(prompts))
    found = PreparedSet(output)
    labels = found.table("labels").set_index("study_id")
    said = (
        found.table("reports").merge(found.table("sentences"), on="sentence_id").groupby("study_id")["text"]
    )
    assert set(said.groups) == set(labels.index)
    for study, texts in said:
        has = labels.loc[study, ["Atelectasis", "Hernia"]] == 1
        wanted = {
            "Atelectasis is seen." if has["Atelectasis"] else "No collapse.",
            "Hernia." if has["Hernia"] else "No hernia.",
        }
        assert set(texts) == wanted
    assert (found.table("images")["use"] == PreparedSet(prepared).table("images")["use"]).all()
    assert "sentences: none of reports, but templates" in str(found.info["options"]["choices"])
    prompts.write_text("Cough: [a, b]\n")
    with pytest.raises(Exception, match="--templates: expected prompts of .*Atelectasis.*, found none"):
        prepare("nih", release, tmp_path / "none", *REDRAWN, "--templates", str(prompts))


@pytest.mark.parametrize(
    ("name", "table", "content", "kind"),
    [
        (
            "rsna",
            "stage_2_train_labels.csv",
            "patientId,x,y,width,height,Target\na,9,9,99,99,1\nb,9,9,99,99,1\nb,5,5,50,50,1\n",
            "box",
        ),
        ("siim", "train-rle.csv", "ImageId, EncodedPixels\na,5 9\nb,5 9\nb,5 70\n", "mask"),
    ],
    ids=["boxes", "masks"],
)
def test_regions_of_a_damaged_image_are_left_out(
    tmp_path: Path, real_data: Path, name: str, table: str, content: str, kind: str
) -> None:
    source, output = tmp_path / "source", tmp_path / "set"
    source.mkdir()
    (source / table).write_text(content)
    shutil.copyfile(next((real_data / "nih/images").iterdir()), source / "a.jpg")
    (source / "b.dcm").write_bytes(b"damaged")
    prepare(name, source, output, "--split_shares", "0,0,1")
    rejects = pd.read_csv(output / "rejects.csv")
    assert rejects["kind"].tolist() == ["image", kind, kind]
    assert rejects["reason"].tolist()[1:] == ["its image cannot be used"] * 2
    found = PreparedSet(output)
    assert len(found.table("boxes" if kind == "box" else "masks")) == 1 and not found.names_patients
    assert check_set(output)[1] == []


def test_masks_on_turned_or_resized_images(tmp_path: Path, real_data: Path, capsys) -> None:
    (source := tmp_path / "source").mkdir()
    (source / "train-rle.csv").write_text("ImageId, EncodedPixels\na,5 9\n")
    exif = Image.Exif()
    exif[274] = 6
    with Image.open(next((real_data / "nih/images").iterdir())) as image:
        image.save(source / "a.png", exif=exif)
        prepare("siim", source, tmp_path / "turned", "--split_shares", "0,0,1")
        assert "1 masks stay as drawn" in capsys.readouterr().out
        image.resize((40, 50)).save(source / "a.png")
    with pytest.raises(UserError, match="1 of 1 masks cannot be used"):
        prepare("siim", source, tmp_path / "set", "--split_shares", "0,0,1")
    prepare("siim", source, tmp_path / "set", "--split_shares", "0,0,1", "--rejected_share", "1")
    assert PreparedSet(tmp_path / "set").table("masks").empty


def test_official_validate_patients_of_chexpert_as_test(tmp_path: Path, real_data: Path, capsys) -> None:
    file = next((real_data / "nih/images").iterdir())
    for part, n in (("train", 40), ("valid", 3)):
        paths = [f"{part}/patient{n}{place:03}/study1/view1_frontal.jpg" for place in range(n)]
        for path in paths:
            (tmp_path / "raw" / path).parent.mkdir(parents=True)
            shutil.copyfile(file, tmp_path / "raw" / path)
        pd.DataFrame({"Path": paths, "Edema": 1}).to_csv(tmp_path / "raw" / f"{part}.csv", index=False)
    prepare("chexpert", tmp_path / "raw", tmp_path / "usual")
    assert "no official test images: --official_validate_as_test" in capsys.readouterr().out
    words = ["--official_validate_as_test", "--split_shares", "0.7,0.3,0", "--split_seed", "1"]
    prepare("chexpert", tmp_path / "raw", tmp_path / "set", *words)
    images = PreparedSet(tmp_path / "set").table("images")
    n_of_use = images["use"].value_counts().to_dict()
    assert n_of_use["test"] == 3 and 5 < n_of_use["validate"] < 20 and n_of_use["train"] > 20
    with pytest.raises(UserError, match="the release has other parts"):
        (tmp_path / "raw/train.csv").rename(tmp_path / "raw/test.csv")
        prepare("chexpert", tmp_path / "raw", tmp_path / "other", "--official_validate_as_test")


@pytest.mark.parametrize(
    ("name", "file", "content", "said"),
    [
        ("vindr", "train.csv", "image_id,class_name,x_min,y_min,x_max,y_max\na,No finding,0,0,1,1\n", ""),
        (
            "nih",
            "Data_Entry_2017.csv",
            "Image Index,Finding Labels,Patient ID\na.png,Mass,1\n",
            "all images are left",
        ),
    ],
)
def test_sets_without_a_box_or_image(
    tmp_path: Path, real_data: Path, name: str, file: str, content: str, said: str
) -> None:
    source, output = tmp_path / "source", tmp_path / "set"
    source.mkdir()
    lists = {"train_val_list.txt": "x.png\n", "test_list.txt": "y.png\n"}
    for part, text in {file: content, **lists}.items():
        (source / part).write_text(text)
    shutil.copyfile(next((real_data / "nih/images").iterdir()), source / "a.jpg")
    if said:
        with pytest.raises(
            UserError, match=f"{file}: {said} out; a: its name is in neither train_val_list.txt"
        ):
            prepare(name, source, output)
    else:
        prepare(name, source, output, "--split_shares", "1,0,0")
        assert len(PreparedSet(output).table("images")) == 1 and PreparedSet(output).table("boxes").empty


def test_boxes_on_pictures_need_the_originals_sizes(tmp_path: Path, real_data: Path) -> None:
    source, output = tmp_path / "source", tmp_path / "set"
    source.mkdir()
    rows = "image_id,class_name,x_min,y_min,x_max,y_max\na,Nodule/Mass,200,400,600,1000\n"
    (source / "annotations_test.csv").write_text(rows)
    shutil.copyfile(next((real_data / "nih/images").iterdir()), source / "a.jpg")  # 512 pixels
    with pytest.raises(UserError, match=r"sizes.csv: image_id, width, height"):
        prepare("vindr", source, output)
    (source / "sizes.csv").write_text("image_id,width,height\na,2048,2048\n")
    prepare("vindr", source, output)
    boxes = PreparedSet(output).table("boxes")
    assert boxes[["category", "x", "y", "w", "h"]].to_numpy().tolist() == [["Lung Lesion", 50, 100, 100, 150]]


@pytest.fixture
def padchest(tmp_path: Path) -> Path:
    """Six images of four patients; the reports as the release writes them, one of them lost."""
    (tmp_path / "PadChest").mkdir()
    reports = ["cambi pulmonar cronic sever . no derram pleural .", "no derram pleural .", " nan"]
    rows = [
        {
            "ImageID": f"{n}.png",
            **{
                "StudyID": f"s{n // 2}",
                "PatientID": f"{n // 2:036d}",
                "Projection": "PA",
                "Labels": "['edema']",
            },
            **{"MethodLabel": "Physician" if n < 2 else "RNN_model", "Report": reports[n // 2 % 3]},
            **{"PatientSex_DICOM": "F", "PatientBirth": "1950", "StudyDate_DICOM": "20150304"},
        }
        for n in range(40)
    ]
    for n in range(40):
        Image.linear_gradient("L").rotate(n).save(tmp_path / f"PadChest/{n}.png")
    pd.DataFrame(rows).to_csv(tmp_path / "PadChest/chest_x_ray_images_labels_160K.csv", index=False)
    return tmp_path / "PadChest"


def test_reports_of_padchest_are_spanish(padchest: Path, tmp_path: Path) -> None:
    prepare("padchest", padchest, tmp_path / "set", "--reports", "--rejected_share", "0.5")
    found = PreparedSet(tmp_path / "set")
    said = found.table("reports").merge(found.table("sentences"), on="sentence_id").sort_values("position")
    texts = said.groupby("study_id")["text"].agg(list).tolist()
    assert [len(texts), max(texts, key=len)] == [
        14,
        ["cambi pulmonar cronic sever .", "no derram pleural ."],
    ]
    images = found.table("images")
    assert (images["use"] == "excluded").sum() == 12 and found.info["options"]["language"] == "es"
    assert check_set(tmp_path / "set")[1] == []
    prepare("padchest", padchest, tmp_path / "plain")
    plain = PreparedSet(tmp_path / "plain")
    assert not plain.has("sentences") and not {"reports", "language"} & {*plain.info["options"]}
    assert (plain.table("images")["use"] != "excluded").all()


def test_reports_that_a_release_lacks_are_refused(padchest: Path, tmp_path: Path) -> None:
    table = padchest / "chest_x_ray_images_labels_160K.csv"
    prompts = tmp_path / "prompts.yaml"
    prompts.write_text("Edema: [a, b]\n")
    with pytest.raises(UserError, match="--reports: expected padchest .*, and no --templates"):
        prepare("padchest", padchest, tmp_path / "set", "--reports", "--templates", str(prompts))
    pd.read_csv(table, dtype=str).drop(columns="Report").to_csv(table, index=False)
    with pytest.raises(UserError, match="--reports: expected padchest with a column Report"):
        prepare("padchest", padchest, tmp_path / "set", "--reports")
