"""A phantom's true classes as findings: one of each band, from the release to the numbers."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from data_prep.phantom.options import Options
from data_prep.phantom.release import write_phantom
from medclip_dcl import evaluate
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.evaluation.classification import bands_of_findings
from tests.program import verb

prepare = verb("prepare")
SHARES = {"head": (0.2, 0.6), "middle": (0.06, 0.09), "tail": (0.035, 0.06)}
"""Of patients with a class, in the order of its band; all but one of the tail are tested."""


def table_of(raw: Path) -> tuple[pd.DataFrame, dict[str, str]]:
    """A table for `prepare folder` whose label columns are true classes, and the band of each."""
    images = pd.read_csv(raw / "mimic-cxr-2.0.0-metadata.csv.gz")
    true = pd.read_csv(raw / "phantom_truth/image_classes.csv").assign(value=1)
    of_images = true.pivot(index="dicom_id", columns="class_id", values="value").reindex(images["dicom_id"])
    of_images = of_images.fillna(0).astype(int).set_axis(images.index)
    of_patients = of_images.groupby(images["subject_id"]).max()
    names, bands = {}, {}
    for band, (low, high) in SHARES.items():
        its = [x for x in of_patients if low < of_patients[x].mean() < high and x not in names]
        names[its[0]] = f"Finding of the {band}"
        bands[names[its[0]]] = band
    has_tail = of_patients.index[of_patients[[*names][-1]] == 1]
    is_test = images["subject_id"].isin(has_tail[1:]) | (images["subject_id"] % 4 == 0)
    is_test &= images["subject_id"] != has_tail[0]
    p, s = images["subject_id"].astype(str), images["study_id"].astype(str)
    path = "files/p" + p.str[:2] + "/p" + p + "/s" + s + "/" + images["dicom_id"] + ".jpg"
    table = pd.DataFrame({"image": path, "patient": p, "study": s, "view": images["ViewPosition"]})
    table["split"] = is_test.map({True: "test", False: "train"})
    table["text"] = "The lungs are clear."
    return table.join(of_images[[*names]].rename(columns=names)), bands


@pytest.mark.slow
def test_a_phantoms_classes_fill_the_three_bands(tmp_path, exported):
    raw, out = tmp_path / "raw", tmp_path / "set"
    assert write_phantom(raw, Options(studies=300, seed=3, size=64))
    table, bands = table_of(raw)
    table.to_csv(raw / "table.csv", index=False)
    more = ["--table", f"{raw / 'table.csv'}", "--label_columns", *bands]
    prepare(["folder", "--output", f"{out}", "--size", "64", "--workers", "1", *more])
    assert {x: bands_of_findings(PreparedSet(out), 0.1, 0.01).get(x) for x in bands} == bands
    with pytest.warns(UserWarning):
        found = evaluate(exported, out, prompts={x: ("Nothing.", f"A {x}.") for x in bands}, device="cpu")
    values = found.set_index(["finding", "metric"])["value"]
    for finding, band in bands.items():
        for name in ("auc", "average_precision", "neg"):
            assert values["", f"classification/{band}/{name}"] == pytest.approx(
                values[finding, f"classification/{name}"]
            )
