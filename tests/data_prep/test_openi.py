"""Open-i in its two public forms: the official XML reports and Kaggle's tables."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from data_prep.openi import NEGBIO, parse_report, prepare
from data_prep.options import OpenI
from medclip_dcl.common.errors import UserError
from medclip_dcl.data.prepared import PreparedDataError, PreparedSet

# uid -> findings, impression, images (official name, view)
REPORTS: dict[int, tuple[str, str, list[tuple[str, str]]]] = {
    1: (
        "Heart is normal.No effusion.",
        "Normal <chest>.",
        [("CXR1_1_IM-0001-3001", "Lateral"), ("CXR1_1_IM-0001-4001", "Frontal")],
    ),
    2: ("", "1. No XXXX. 2. Stable.", [("CXR2_IM-0652-1001", "Frontal"), ("CXR2_IM-0652-2001", "Lateral")]),
    3: ("Clear.", "", []),
    10: ("", "", [("CXR10_IM-0002-1001", "Frontal")]),
    11: ("Clear.", "Normal.", [("CXR11_IM-0067-1001-0001", "Frontal"), ("CXR11_IM-0067-1001-0002", "Frontal")]),
    **{n: ("Clear.", "", [(f"CXR{n}_IM-{n:04}-1001", "Frontal")]) for n in range(20, 40)},
}  # fmt: skip


def xml(uid: int) -> str:
    findings, impression, images = REPORTS[uid]
    parts = {
        "COMPARISON": "None.",
        "INDICATION": "Positive TB test",
        "FINDINGS": findings,
        "IMPRESSION": impression,
    }
    texts = "".join(
        f'<AbstractText Label="{name}">{escape(text)}</AbstractText>' for name, text in parts.items()
    )
    pictures = "".join(
        f'<parentImage id="{name}"><figureId>F1</figureId><caption>Xray Chest PA and Lateral</caption></parentImage>'
        for name, _ in images
    )
    return (
        '<?xml version="1.0" encoding="utf-8"?><eCitation>'
        f'<uId id="CXR{uid}"/><pmcId id="{uid}"/><IUXRId id="{uid}"/>'
        f"<MedlineCitation><Article><Abstract>{texts}</Abstract></Article></MedlineCitation>"
        f"<MeSH><major>normal</major></MeSH>{pictures}</eCitation>"
    )


def pack(archive: Path, files: Mapping[str, bytes]) -> Path:
    with tarfile.open(archive, "w:gz") as packed:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    return archive


def kaggle_name(name: str) -> str:
    number, rest = name.removeprefix("CXR").replace("1_1_IM", "1_IM").split("_", 1)
    return f"{number}_{rest}.dcm.png"


def shade(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.linspace(0, 250, 21 * 34).reshape(21, 34).astype(np.uint8)).save(file)


@pytest.fixture
def official(tmp_path: Path) -> Path:
    """The official archives' content, and Kaggle's table of views."""
    folder = tmp_path / "official"
    folder.mkdir()
    pack(folder / "NLMCXR_reports.tgz", {f"ecgen-radiology/{uid}.xml": xml(uid).encode() for uid in REPORTS})
    for _, _, images in REPORTS.values():
        for name, _ in images:
            shade(folder / "NLMCXR_png" / f"{name}.png")
    return folder


@pytest.fixture
def kaggle(tmp_path: Path) -> Path:
    folder = tmp_path / "kaggle"
    folder.mkdir()
    rows = [
        (uid, "normal", "normal", "Xray Chest", "TB", "None.", *report[:2]) for uid, report in REPORTS.items()
    ]
    columns = ["uid", "MeSH", "Problems", "image", "indication", "comparison", "findings", "impression"]
    # As a program writes missing values that took the table through pandas.
    pd.DataFrame(rows, columns=columns).replace("", "nan").to_csv(folder / "indiana_reports.csv", index=False)
    views = [(uid, kaggle_name(name), view) for uid, report in REPORTS.items() for name, view in report[2]]
    table = pd.DataFrame(views, columns=["uid", "filename", "projection"])
    table.to_csv(folder / "indiana_projections.csv", index=False)
    for name in table["filename"]:
        shade(folder / "images" / "images_normalized" / name)
    return folder


def settings(source: Path, **changed: Any) -> OpenI:
    # The seed is one with which all splits have patients.
    return OpenI(
        **{"source": source, "output": source.parent / "set", "size": 16, "split_seed": 1, **changed}
    )


def said(prepared: PreparedSet) -> list[list[Any]]:
    reports = prepared.table("reports").merge(prepared.table("sentences"), on="sentence_id")
    return reports.sort_values(["study_id", "position"])[["study_id", "section", "text"]].to_numpy().tolist()


def test_both_forms_give_the_same_reports_and_images(official: Path, kaggle: Path) -> None:
    prepare(settings(kaggle))
    projections = kaggle / "indiana_projections.csv"
    prepare(settings(official, output=official.parent / "other", projections=projections))
    found = {}
    for form in ("set", "other"):
        prepared = PreparedSet(official.parent / form)
        assert prepared.info["source"] == "open-i"
        images = prepared.table("images")
        assert (images["view"] == "Frontal").all()
        assert (images["subject_id"] == images["study_id"]).all()
        assert images.set_index("study_id").loc[10, "use"] == "excluded"
        assert set(images["official_split"]) == {"train", "validate", "test"}
        counts = prepared.info["counts"]
        assert (counts["images_in_release"], counts["images_not_frontal"], len(images)) == (27, 2, 25)
        # Image names differ, what they belong to does not.
        found[form] = (images[["study_id", "use", "height", "width"]], said(prepared))
        rejected = pd.read_csv(prepared.folder / "rejects.csv", dtype=str).to_numpy().tolist()
        assert rejected == [
            ["report", "3", "its study has no image"],
            ["report", "10", "report has no findings or impression"],
        ]
    pd.testing.assert_frame_equal(found["set"][0], found["other"][0])
    assert found["set"][1] == found["other"][1]
    assert found["set"][1][:5] == [
        [1, "findings", "Heart is normal."],
        [1, "findings", "No effusion."],
        [1, "impression", "Normal <chest>."],
        [2, "impression", "No XXXX."],
        [2, "impression", "Stable."],
    ]
    assert PreparedSet(official.parent / "other").table("images")["dicom_id"][0] == "CXR1_1_IM-0001-4001.png"


def test_the_unpacked_archive_gives_the_same_set(official: Path) -> None:
    prepare(settings(official, all_views=True))
    with tarfile.open(official / "NLMCXR_reports.tgz") as packed:
        packed.extractall(official, filter="data")
    prepare(settings(official, all_views=True, output=official.parent / "unpacked"))
    first, other = (PreparedSet(official.parent / name) for name in ("set", "unpacked"))
    assert first.info["fingerprint"] == other.info["fingerprint"]
    assert len(first.table("images")) == 27 and set(first.table("images")["view"]) == {""}
    (official / "ecgen-radiology" / "2.xml").write_text(xml(2).replace("Stable", "Worse"))
    with pytest.raises(PreparedDataError, match="made differently .content of ecgen-radiology: "):
        prepare(settings(official, all_views=True, output=official.parent / "unpacked"))


def test_images_that_are_not_there_are_left_out(official: Path, kaggle: Path) -> None:
    # Kaggle's table lacks four images of the official collection.
    projections = kaggle / "indiana_projections.csv"
    table = pd.read_csv(projections, dtype=str)
    table[table["filename"] != kaggle_name("CXR39_IM-0039-1001")].to_csv(projections, index=False)
    prepare(settings(official, projections=projections, output=official.parent / "views"))
    counts = PreparedSet(official.parent / "views").info["counts"]
    assert (counts["images_in_release"], counts["images_not_frontal"], counts["images"]) == (27, 2, 24)
    rejected = pd.read_csv(official.parent / "views" / "rejects.csv", dtype=str).to_numpy().tolist()
    assert ["image", "CXR39_IM-0039-1001", "the table of projections does not name it"] in rejected
    assert len(rejected) == 4
    for name in ("CXR2_IM-0652-1001", "CXR2_IM-0652-2001", "CXR11_IM-0067-1001-0001"):
        (official / "NLMCXR_png" / f"{name}.png").unlink()
    prepare(settings(official, all_views=True))
    prepared = PreparedSet(official.parent / "set")
    rejected = pd.read_csv(prepared.folder / "rejects.csv", dtype=str).to_numpy().tolist()
    assert rejected[:3] == [
        ["image", name, "its file is not there"]
        for name in ("CXR2_IM-0652-1001", "CXR2_IM-0652-2001", "CXR11_IM-0067-1001-0001")
    ]
    assert ["report", "2", "its study has no image"] in rejected
    assert set(prepared.table("images").query("study_id == 11")["dicom_id"]) == {
        "CXR11_IM-0067-1001-0002.png"
    }
    for file in (official / "NLMCXR_png").iterdir():
        file.unlink()
    with pytest.raises(UserError, match="none of 27 images is below .*; say --images DIR, or --text_only"):
        prepare(settings(official, all_views=True, output=official.parent / "none"))


def test_labels_that_mean_the_same_are_taken(kaggle: Path) -> None:
    columns = ["filename", *NEGBIO, "Hernia", "Mass"]
    rows = pd.DataFrame(0, index=[0, 1, 2], columns=columns)
    rows["filename"], rows["Effusion"], rows["normal"], rows["Mass"] = (
        ["CXR1", "CXR2", "CXR25"],
        1,
        [0, 1, 0],
        1,
    )
    file = kaggle / "negbio_gold_14_labels.csv"
    rows.to_csv(file, index=False)
    prepare(settings(kaggle, labels=file))
    prepared = PreparedSet(kaggle.parent / "set")
    labels = prepared.table("labels").set_index("study_id")
    assert labels.loc[[1], ["Pleural Effusion", "No Finding", "Edema"]].to_numpy().tolist() == [[1, 0, 0]]
    assert labels.loc[2, "No Finding"] == 1
    # A mass alone is no "Lung Lesion"; a report without labels has none.
    assert labels["Lung Lesion"].isna().all() and labels.loc[[20]].isna().all(axis=None)
    use = prepared.table("images").set_index("dicom_id")["use"]
    evaluated = set(prepared.table("cases")["dicom_id"])
    assert evaluated == {name for name in use.index if name.split("_")[0] in ("1", "2", "25")} & set(
        use.index[use.isin(["validate", "test"])]
    )
    file.write_text(file.read_text().replace("CXR2,", "CXR1,"))
    with pytest.raises(UserError, match="expected CXR and a number, each study once, found 'CXR1'"):
        prepare(settings(kaggle, labels=file, output=kaggle.parent / "other"))


def test_table_of_frontal_images_is_asked_for(official: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "does not say which images are frontal; give --projections"),
        ({"text_only": True, "all_views": True}, "--text_only has no images: leave out"),
        ({"projections": official / "nowhere.csv"}, r"nowhere\.csv cannot be read .No such file"),
        ({"source": official / "nowhere"}, "nowhere: expected NLMCXR_reports.tgz, .* found none of them"),
    ]
    for changed, message in refused:
        with pytest.raises(UserError, match=message):
            prepare(settings(**{"source": official, **changed}))


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("indiana_reports.csv", "20,a,a,a,a,a,Clear.,", "a number, each report once, found '20'"),
        (
            "indiana_projections.csv",
            "1,1_IM-0001-4001.dcm.png,Lateral",
            "each image once, found '1_IM-0001-4001",
        ),
    ],
)
def test_a_table_with_repeated_rows_is_refused(kaggle: Path, name: str, row: str, message: str) -> None:
    with (kaggle / name).open("a") as table:
        table.write(f"{row}\n")
    with pytest.raises(UserError, match=message):
        prepare(settings(kaggle))


def test_images_of_like_names_keep_their_files(official: Path) -> None:
    like = "CXR20_2_IM-0020-1001"
    archive = official / "NLMCXR_reports.tgz"
    with tarfile.open(archive) as packed:
        packed.extractall(official, filter="data")
    archive.unlink()
    file = official / "ecgen-radiology" / "20.xml"
    file.write_text(file.read_text().replace("</MeSH>", f'</MeSH><parentImage id="{like}"/>'))
    shade(official / "NLMCXR_png" / f"{like}.png")
    prepare(settings(official, all_views=True))
    images = PreparedSet(official.parent / "set").table("images")
    assert set(images.query("study_id == 20")["dicom_id"]) == {f"{like}.png", "CXR20_IM-0020-1001.png"}


BOMB = (
    '<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b0 "ha">'
    + "".join(f'<!ENTITY b{n} "{f"&b{n - 1};" * 10}">' for n in range(1, 10))
    + ']><eCitation><uId id="CXR1"/><AbstractText Label="FINDINGS">&b9;</AbstractText></eCitation>'
)
OUTSIDE = (
    '<?xml version="1.0"?><!DOCTYPE a [<!ENTITY file SYSTEM "file:///etc/hostname">]>'
    '<eCitation><uId id="CXR1"/><AbstractText Label="FINDINGS">&file;</AbstractText></eCitation>'
)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (BOMB.encode(), "report is not XML (limit on input amplification"),
        (BOMB.encode("utf-16"), "report is not XML ("),
        (OUTSIDE.encode(), "report is not XML (undefined entity &file;"),
        (b"", "report is not XML (no element found"),
        (b"<eCitation><uId", "report is not XML (unclosed token"),
        (b'<?xml version="1.0" encoding="klingon"?><a/>', "report is not XML ("),
        (b"<eCitation/>", "report names no number (uId)"),
        (b'<eCitation><uId id="../../1"/></eCitation>', "report names no number (uId)"),
        (b"<a>" * 400_000, "report is not XML (no element found"),
        (b"x" * (2**22 + 1), "report has more than 4,194,304 bytes"),
    ],
)
def test_unreadable_report_has_a_reason(content: bytes, reason: str) -> None:
    found = parse_report(content, "report.xml")
    assert isinstance(found, str) and found.startswith(reason), found


def test_document_type_and_missing_parts_are_read() -> None:
    content = b'<!DOCTYPE eCitation><eCitation><IUXRId id="0012"/><AbstractText Label="Findings">A <b>big</b>\n heart.'
    content += b'</AbstractText><parentImage/><parentImage id="CXR12_IM-1-1"/></eCitation>'
    assert parse_report(content, "x.xml") == ("12", "A big heart.", "", ("CXR12_IM-1-1",))
    report = parse_report(b"<eCitation/>", "12.xml")
    assert report == ("12", "", "", ())


@pytest.mark.slow
def test_archive_is_never_unpacked_and_damage_named(official: Path, tmp_path: Path) -> None:
    files = {f"ecgen-radiology/{uid}.xml": xml(uid).encode() for uid in REPORTS}
    archive = pack(
        tmp_path / "evil.tgz", {**files, "../../escaped.xml": xml(3).replace("CXR3", "CXR99").encode()}
    )
    with tarfile.open(tmp_path / "links.tgz", "w:gz") as packed:
        link = tarfile.TarInfo("ecgen-radiology/4.xml")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        packed.addfile(link)
    before = {file for file in tmp_path.parent.rglob("*") if "set" not in file.parts}
    prepare(settings(archive, text_only=True, output=tmp_path / "set"))
    prepared = PreparedSet(tmp_path / "set")
    assert prepared.table("images").empty
    assert prepared.table("studies")["study_id"].tolist() == [*sorted(REPORTS), 99]
    assert [3, "findings", "Clear."] in said(prepared)
    assert {file for file in tmp_path.parent.rglob("*") if "set" not in file.parts} == before
    with pytest.raises(UserError, match=r"links\.tgz: expected the XML reports .* 0 of 0 cannot be read"):
        prepare(settings(tmp_path / "links.tgz", text_only=True, output=tmp_path / "b"))
    whole = archive.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"no archive", whole[:200] + b"\0" * 50 + whole[250:]):
        archive.write_bytes(damaged)
        with pytest.raises(UserError, match=r"(?s)evil\.tgz cannot be read .*; download it again"):
            prepare(settings(archive, text_only=True, output=tmp_path / "b"))
    pack(archive, {**files, "a/1.xml": xml(1).replace("normal", "large").encode()})
    with pytest.raises(UserError, match="expected studies whose rows have one findings, found '1'"):
        prepare(settings(archive, text_only=True, output=tmp_path / "b"))
    pack(archive, {**files, "1.xml": b"<", "2.xml": b"<"})
    with pytest.raises(UserError, match=r"2 of 27 cannot be read \(first: 1\.xml, report is not XML"):
        prepare(settings(archive, text_only=True, output=tmp_path / "b"))
    with pytest.raises(UserError, match="1 of 1 cannot be read"):
        only = pack(tmp_path / "only.tgz", {"1.xml": b"<"})
        prepare(settings(only, text_only=True, output=tmp_path / "b", rejected_share=1.0))
    prepare(settings(archive, text_only=True, output=tmp_path / "b", rejected_share=0.1))
    rejected = pd.read_csv(tmp_path / "b" / "rejects.csv", dtype=str)
    assert rejected["id"].tolist()[:2] == ["1.xml", "2.xml"]


@pytest.mark.slow
def test_the_real_labels_fit_the_real_reports(real_data: Path, tmp_path: Path) -> None:
    # The reports in Kaggle's columns, which are a part of the table's own.
    chosen = pd.read_csv(real_data / "openi" / "openi_reports.csv", dtype=str, keep_default_na=False)[::16]
    reports = tmp_path / "indiana_reports.csv"
    chosen.to_csv(reports, index=False)
    labels = real_data / "openi" / "negbio_gold_14_labels.csv"
    prepare(settings(reports, text_only=True, labels=labels, output=tmp_path / "set"))
    prepared = PreparedSet(tmp_path / "set")
    labelled = prepared.table("labels").dropna(subset="Cardiomegaly")
    gold = pd.read_csv(labels)
    gold = gold[gold["filename"].isin("CXR" + chosen["uid"])]
    assert len(labelled) == len(gold) > 200
    assert (labelled["Pleural Effusion"] == 1).sum() == gold["Effusion"].sum() > 0
    assert (labelled["No Finding"] == 1).sum() == gold["normal"].sum()
