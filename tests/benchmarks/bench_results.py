"""Report, comparison and bootstrap of a test of many images: CPU seconds and peak memory of each command.

    python tests/benchmarks/bench_results.py --run runs/demo --folder FOLDER

A run folder that `test` has written, such as the demo's, lends configuration and protocol. Its predictions are replaced
by simulated ones of `--images` images: patients, studies, boxes and labels in about MIMIC-CXR's proportions, scores and
ranks at random. The numbers of results.json are computed from them by the evaluations' own functions. A second kind of
run is a classifier's, whose set labels all findings on all images, as ChestX-ray14 does.

`--code` measures another checkout, for a comparison of two commits. Each command is a process of its own: CPU time of
it and its children, and its peak resident memory (VmHWM).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from results_file import HERE, process_memory

from medclip_dcl.common.files import write_json, write_parquet
from medclip_dcl.common.findings import read_prompts
from medclip_dcl.evaluation.callback import EvaluationResult
from medclip_dcl.evaluation.classification import classification_result
from medclip_dcl.metrics import summaries
from medclip_dcl.metrics.calibration import Calibration, fit_finding
from medclip_dcl.use.score_table import ERROR, IMAGE, STATE, WARNING, FileState, ScoreTable

DRAWS = "patient_draws.parquet"
PATIENTS, STUDIES, BOXES = 65_379 / 377_110, 227_835 / 377_110, 1_448 / 5_159
"""For each image: patients and studies of MIMIC-CXR-JPG; boxes of MS-CXR for each test image."""
REPORTS = 5_000
"""Most studies that `test` retrieves (data.test_reports)."""
LABELS = {
    "Cardiomegaly": (0.20, 0.07),
    "Edema": (0.12, 0.11),
    "Pleural Effusion": (0.24, 0.12),
    "Pneumonia": (0.07, 0.11),
    "Pneumothorax": (0.05, 0.19),
    "Atelectasis": (0.20, 0.007),
    "Consolidation": (0.05, 0.035),
    "Enlarged Cardiomediastinum": (0.03, 0.023),
    "Fracture": (0.02, 0.004),
    "Lung Lesion": (0.03, 0.004),
    "Lung Opacity": (0.23, 0.013),
    "No Finding": (0.33, 0.0),
    "Pleural Other": (0.009, 0.0003),
    "Support Devices": (0.29, 0.015),
}
"""Share of studies with a positive and with a negative label, about those of MIMIC-CXR-JPG; the others have none."""
_RUN = """
import sys, time
sys.argv = ["medclip-dcl", *sys.argv[1:]]
from medclip_dcl.__main__ import main
try:
    main()
finally:
    sys.stdout.flush()
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
    print("peak", peak, file=sys.stderr)
"""


def images_of(number: int, random: np.random.Generator) -> pd.DataFrame:
    """predictions/images.parquet: views of MIMIC-CXR's frontal images, sex, and age, unknown for one in twenty."""
    n_studies, n_patients = max(2, int(number * STUDIES)), max(2, int(number * PATIENTS))
    patient = np.sort(
        np.concatenate([np.arange(n_patients), _skewed(n_studies - n_patients, n_patients, random)])
    )
    study = np.sort(
        np.concatenate([np.arange(n_studies), random.integers(n_studies, size=number - n_studies)])
    )
    of_image = patient[study]
    age = np.where(
        random.random(n_patients) < 0.05, np.nan, random.normal(62, 17, n_patients).clip(18, 91).round()
    )
    sex = np.where(random.random(n_patients) < 0.48, "F", "M")
    words = random.integers(2**32, size=(number, 5), dtype=np.uint32)
    ids = ["-".join(f"{word:08x}" for word in row) for row in words.tolist()]
    found = pd.DataFrame(
        {
            "dicom_id": ids,
            "study_id": 50_000_000 + study,
            "subject_id": 10_000_000 + of_image,
            "view": np.where(random.random(number) < 0.6, "AP", "PA"),
            "sex": sex[of_image],
            "age": age[of_image],
        }
    )
    return found.sort_values("dicom_id").reset_index(drop=True)


def _skewed(number: int, n: int, random: np.random.Generator) -> np.ndarray:
    """Most patients have one study, a few have dozens."""
    weights = random.pareto(1.5, n) + 0.1
    return random.choice(n, number, p=weights / weights.sum())


def cases_of(
    images: pd.DataFrame, random: np.random.Generator, is_complete: bool, findings: Sequence[str]
) -> pd.DataFrame:
    """Cases finding by finding, as the evaluations write them; scores of the two classes overlap."""
    studies, study = np.unique(images["study_id"].to_numpy(), return_inverse=True)
    parts = []
    for finding in findings:
        positive, negative = LABELS.get(finding, (0.04, 0.2))
        drawn = random.random(len(studies))
        label = np.where(drawn < positive, 1, 0)
        is_case = (drawn < positive + negative) | is_complete
        rows = images[is_case[study]]
        its = label[study][is_case[study]]
        score = random.normal(0, 0.1, len(rows)) + 0.12 * its
        part = rows[["dicom_id", "subject_id"]].assign(finding=finding, label=its.astype("int64"))
        if is_complete:
            parts.append(part.assign(logit=np.float32(20 * score - 2).astype("float64")))
        else:
            low = random.uniform(-0.2, 0.2, len(rows))
            scores = (np.float32(x).astype("float64") for x in (low + score / 2, low - score / 2))
            parts.append(part.assign(**dict(zip(("score_positive", "score_negative"), scores, strict=True))))
    return pd.concat(parts, ignore_index=True)


def boxes_of(images: pd.DataFrame, categories: Sequence[str], random: np.random.Generator) -> pd.DataFrame:
    """Boxes with their numbers; some images and phrases have several."""
    n = int(len(images) * BOXES)
    rows = np.sort(random.integers(len(images), size=n))
    signed, miou = random.normal(1, 0.8, n), random.beta(2, 20, n)
    category = random.choice(categories, n)
    return pd.DataFrame(
        {
            **{name: images[name].to_numpy()[rows] for name in ("dicom_id", "subject_id")},
            "category": category,
            "phrase": [
                f"{one.lower()} {k}"
                for one, k in zip(category, random.integers(n // 4 + 1, size=n), strict=True)
            ],
            "box": np.arange(n),
            **{side: random.uniform(100, 1000, n) for side in "xywh"},
            "cnr": np.abs(signed),
            "cnr_signed": signed,
            "miou": miou,
            "pair_cnr_signed": signed,
            "pair_miou": miou,
        }
    )


def ranks_of(n: int, n_candidates: int, random: np.random.Generator) -> dict[str, Any]:
    rank = np.ceil(n_candidates * random.beta(0.4, 2, n)).clip(1)
    return {"rank": rank, "rank_tolerant": (rank / 2).round().clip(1), "n_candidates": n_candidates}


def retrieval_of(boxes: pd.DataFrame, random: np.random.Generator) -> pd.DataFrame:
    own = boxes[["dicom_id", "subject_id", "phrase", "box"]]
    parts = [
        own.assign(direction=one, **ranks_of(len(own), len(own), random)) for one in summaries.DIRECTIONS
    ]
    order = ["direction", "dicom_id", "subject_id", "phrase", "box", "rank", "rank_tolerant", "n_candidates"]
    return pd.concat(parts, ignore_index=True)[order]


def reports_of(images: pd.DataFrame, random: np.random.Generator) -> pd.DataFrame:
    studies = images.drop_duplicates("study_id")
    chosen = studies.iloc[np.sort(random.choice(len(studies), min(REPORTS, len(studies)), replace=False))]
    shown = images[images["study_id"].isin(chosen["study_id"])]
    n_sentences = 3 * len(chosen)
    said_by = chosen["subject_id"].to_numpy()[random.integers(len(chosen), size=n_sentences)]
    parts = []
    for task, ids, patients in (
        ("image_report", chosen["study_id"], chosen["subject_id"].to_numpy()),
        ("image_sentence", pd.Series(range(n_sentences)), said_by),
    ):
        queries = ((shown["dicom_id"], shown["subject_id"].to_numpy(), len(ids)), (ids, patients, len(shown)))
        for direction, (query, subject, n) in zip(summaries.DIRECTIONS, queries, strict=True):
            part = {"task": task, "direction": direction, "query": query.astype(str), "subject_id": subject}
            parts.append(pd.DataFrame({**part, **ranks_of(len(query), n, random)}))
    return pd.concat(parts, ignore_index=True)


def write_run(template: Path, folder: Path, number: int, seed: int, is_classifier: bool = False) -> None:
    """A run folder with the test of so many images: the same images and labels, other scores, for each seed."""
    results = json.loads((template / "results.json").read_text(encoding="utf-8"))
    fixed, random = np.random.default_rng(0), np.random.default_rng(seed + 1)
    images = images_of(number, fixed)
    pairs = read_prompts("chexpert14")
    findings = [*pairs, *(f"Finding {n}" for n in range(15, 21))] if is_classifier else list(pairs)
    cases = cases_of(images, fixed, is_classifier, findings)
    scores = [name for name in ("logit", "score_positive", "score_negative") if name in cases]
    noise = random.normal(0, 0.02, (len(cases), len(scores)))
    cases[scores] = (cases[scores] + noise).astype("float32").astype("float64")
    found: dict[str, EvaluationResult] = {}
    name = "finding_classification" if is_classifier else "classification"
    found[name] = classification_result(cases, findings, 5, findings)
    if is_classifier:
        found[name].protocol = {"min_cases": 5, "blank": "zeros"}
    else:
        prompts = {
            f: dict(zip(("negative", "positive"), (n[0], p[0]), strict=True)) for f, (n, p) in pairs.items()
        }
        found[name].protocol = {**results["protocol"][name], "prompts": prompts}
        boxes = boxes_of(images, list(results["metrics"]["grounding"]["by_category"]), fixed)
        noise = random.normal(0, 0.1, len(boxes))
        boxes = boxes.assign(
            cnr_signed=boxes["cnr_signed"] + noise, pair_cnr_signed=boxes["pair_cnr_signed"] + noise
        )
        boxes["cnr"] = boxes["cnr_signed"].abs()
        tables = {
            "grounding": boxes,
            "retrieval": retrieval_of(boxes, random),
            "report_retrieval": reports_of(images, fixed),
        }
        for section, rows in tables.items():
            compute = getattr(summaries, section)
            counts, protocol = (results[kind][section] for kind in ("counts", "protocol"))
            metrics = summaries.values_of(compute(rows, summaries.once(rows)))
            found[section] = EvaluationResult(metrics, counts=counts, protocol=protocol, predictions=rows)
    results |= {
        kind: {section: getattr(one, kind) for section, one in found.items()}
        for kind in ("metrics", "counts", "protocol", "notes")
    }
    results["dataset"] |= {"images": number, "patients": int(images["subject_id"].nunique())}
    results["checkpoint"]["weights"] = f"{seed:016x}"
    folder.mkdir(parents=True, exist_ok=True)
    for table, its in {
        **{section: one.predictions for section, one in found.items()},
        "images": images,
    }.items():
        write_parquet(its, folder / "predictions" / f"{table}.parquet")
    for file in ("config.yaml", "metrics.csv", "fit.json", "data.json"):
        shutil.copyfile(template / file, folder / file)
    if not is_classifier:
        write_calibration(template, folder, cases, seed, pairs)
    write_json(results, folder / "results.json")


def write_calibration(
    template: Path, folder: Path, cases: pd.DataFrame, seed: int, pairs: Mapping[str, Any]
) -> None:
    """calibration.json, fitted to a fifth of the patients."""
    lent = Calibration.read(template / "calibration.json")
    own = cases[cases["subject_id"] % 5 == 0]
    logits = lent.scale * (own["score_positive"] - own["score_negative"]).to_numpy()
    fitted = {}
    for finding, pair in pairs.items():
        its = (own["finding"] == finding).to_numpy()
        rows = own[its]
        fitted[finding] = fit_finding(
            logits[its], rows["label"].to_numpy() == 1, rows["subject_id"].to_numpy(), lent.target, pair
        )
    fingerprint = {**lent.fingerprint, "weights": f"{seed:016x}"}
    Calibration(fingerprint, lent.scale, lent.target, lent.data, fitted, lent.ensemble).write(
        folder / "calibration.json"
    )


def measured(words: Sequence[str], code: Path) -> tuple[float, float]:
    """CPU seconds (of it and its processes) and peak GB of a command."""
    environment = {**os.environ, "PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *words], cwd=code, env=environment, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: status {done.returncode}\n{done.stderr[-3000:]}")
    peak = int(done.stderr.rpartition("peak ")[2].split()[0]) * 1024
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, peak / 1e9


def score_table(number: int, folder: Path) -> str:
    """CPU seconds and memory of the rows of `ask --classify`, without files of images and without a network."""
    columns, state = [f"Finding {place}" for place in range(14)], FileState(123_456, 1, 1, 1, "0" * 32)
    images = [
        f"/data/files/p10/p{10_000_000 + n // 5}/s{50_000_000 + n // 2}/{n:044x}.jpg" for n in range(number)
    ]
    before, start = process_memory()["VmRSS"], time.process_time()
    with ScoreTable(folder / "scores.parquet", columns, {"model": "simulated"}) as table:
        for first in range(0, number, 64):
            table.add(
                dict.fromkeys(columns, place / number)
                | {IMAGE: image, ERROR: None, WARNING: None, STATE: state._replace(inode=place)}
                for place, image in enumerate(images[first : first + 64], first)
            )
        table.finish(images)
    seconds, peak = time.process_time() - start, process_memory()["VmHWM"] - before
    return f"rows of {number:,} images: {seconds:.1f} CPU s, {peak / 1e9:.2f} GB"


def main() -> None:
    """Simulate, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--run", type=Path, required=True, help="a tested run that lends configuration and protocol"
    )
    parser.add_argument(
        "--folder", type=Path, required=True, help="for the simulated runs; kept, and made once"
    )
    parser.add_argument("--images", type=int, default=150_000)
    parser.add_argument("--code", type=Path, default=HERE.parents[1], help="checkout that is measured")
    parser.add_argument(
        "--scores", type=int, help="measure the table of `ask --classify` of so many images instead"
    )
    parser.add_argument("--kinds", nargs="+", default=["first", "classifier"], help="runs that are measured")
    options = parser.parse_args()
    if options.scores:
        options.folder.mkdir(parents=True, exist_ok=True)
        print(score_table(options.scores, options.folder))
        return
    folder = options.folder.resolve() / str(options.images)
    runs = {name: folder / name for name in ("first", "second", "classifier")}
    for seed, (name, run) in enumerate(runs.items()):
        if not (run / "results.json").is_file():
            write_run(options.run, run, options.images, seed, name == "classifier")
    first, second, classifier = map(str, runs.values())
    rows = []
    for what, words, fresh in (
        ("`report`, image-text model", ["report", first], [first]),
        ("`report` again (draws kept)", ["report", first], []),
        (
            "`compare` of two models",
            ["compare", first, second, "--baseline", "first", "--output", f"{folder}/both"],
            [first, second],
        ),
        ("`report`, classifier", ["report", classifier], [classifier]),
    ):
        if Path(words[1]).name not in options.kinds:
            continue
        for run in fresh:
            (Path(run) / DRAWS).unlink(missing_ok=True)
        seconds, peak = measured(words, options.code)
        rows.append(f"| {what} | {options.images:,} | {seconds:.0f} | {peak:.2f} |")
        print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
