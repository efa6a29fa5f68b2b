"""Verify a prepared data set and summarise it, with the published counts for comparison."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import pandas as pd

from data_prep.command import worker_processes
from data_prep.options import Check
from data_prep.sources import image_checks, set_tables
from data_prep.sources.preparation import count_lines
from data_prep.sources.splits import too_few_lines
from medclip_dcl.data.arrays import is_sound
from medclip_dcl.data.identity import IMAGE_FILES
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.data.table_checks import USES, some
from medclip_dcl.report.tables import PUBLISHED_COUNTS

PUBLISHED = {
    "images": 377_110, "studies": 227_835, "patients": 65_379, "train": 368_960, "validate": 2_991, "test": 5_159,
}  # fmt: skip
"""Counts of MIMIC-CXR-JPG as its authors give them, by the keys of counts["release"]; of the splits the images."""

PUBLISHED_FRONTAL = 234_073
"""Frontal images with reports (SSD, section 3.2: "a subset of 234,073")."""

PUBLISHED_MS_CXR = {**PUBLISHED_COUNTS, "image_sentence_pairs": PUBLISHED_COUNTS["pairs"]}
"""Counts of MS-CXR, by the keys of counts["ms_cxr"]."""


def check_set(folder: Path, full: bool = False, pool: Executor | None = None) -> tuple[str, list[str]]:
    """The page about a prepared set, and its problems: the defect, its number of cases, and the first of them."""
    prepared = PreparedSet(folder)
    found, problems = prepared.readable_tables()
    lines = _description(prepared)
    if are_readable := not problems:
        problems += prepared.table_problems(found)
        counts = {**prepared.info["counts"], **set_tables.count(found)}
        lines += [*count_lines(counts), *_patients(found), *_anchors(found)]
        lines += [] if problems else too_few_lines(prepared.folder, prepared.info, found)
    for kind in ("log_p", "text_embedding"):
        if names := prepared.models(kind):
            lines.append(f"  {kind:<10} {', '.join(names)}")
    problems += prepared.score_problems()
    arrays = [file for file in sorted(folder.glob("arrays/*/*.arrow")) if not is_sound(file)]
    problems += some("arrays differ from, or lack, their digests; delete them, fit makes new ones", arrays)
    lines += ["", *(_beside_published(prepared.info, found) if are_readable else [])]
    try:
        lines += _rejects(prepared.folder / "rejects.csv")
    except (OSError, ValueError, KeyError) as error:
        problems.append(f"rejects.csv cannot be read ({error})")
    if {"images", IMAGE_FILES} <= found.keys():
        of_files, digests = image_checks.check_files(prepared, found, full, pool)
        of_copies, warnings = image_checks.find_copies(found["images"], digests)
        problems += of_files + of_copies
        lines += [f"  warning    {warning}" for warning in warnings]
    return "\n".join(lines), problems


def _description(prepared: PreparedSet) -> list[str]:
    info = prepared.info
    options = (
        f"{name} {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for name, value in sorted(info["options"].items())
    )
    phantom = " (digital phantom: no patient data)" if prepared.is_phantom else ""
    return [
        f"{prepared.folder}: {info['source'] or 'unknown source'}{phantom}",
        f"  format {info['format_version']}, fingerprint {info.get('fingerprint')}",
        f"  options {', '.join(options)}",
        "",
    ]


def _patients(found: Mapping[str, pd.DataFrame]) -> list[str]:
    people = found.get("studies", found["images"])
    patients = people.drop_duplicates(["subject_id", "use"])["use"]
    uses = ", ".join(f"{use} {int((patients == use).sum()):,}" for use in USES)
    return [f"  {'by use':<10} patients: {uses}"]


def _anchors(found: Mapping[str, pd.DataFrame]) -> list[str]:
    """rho of the anchors: of the sentences of training reports, once for each report that has them."""
    if "classes" not in found:
        return []
    images, reports = found["images"], found["reports"]
    training = images.loc[images["use"] == "train", "study_id"]
    anchors = reports.loc[reports["study_id"].isin(training), ["study_id", "sentence_id"]].drop_duplicates()
    rho = anchors.merge(found["classes"], on="sentence_id")["rho"]
    quartiles = ", ".join(f"{rho.quantile(share):.3f}" for share in (0.25, 0.5, 0.75))
    return [
        f"  {'anchors':<10} {len(rho):,} training sentences; share of false negatives (rho): mean {rho.mean():.3f}, "
        f"quartiles {quartiles}"
    ]


def _beside_published(info: Mapping[str, Any], found: Mapping[str, pd.DataFrame]) -> list[str]:
    """Counts of the source and the published ones, where the source is MIMIC-CXR."""
    counts = info["counts"]
    if not info["source"].startswith("mimic-cxr") or info.get("phantom"):
        return []
    rows = [(f"release: {key}", counts["release"][key], number) for key, number in PUBLISHED.items()]
    with_report = found["images"]["study_id"].isin(found["reports"]["study_id"])
    rows.append(("frontal images with a report", int(with_report.sum()), PUBLISHED_FRONTAL))
    if "boxes" in found:
        rows += [
            (f"MS-CXR: {key}", number, PUBLISHED_MS_CXR[key]) for key, number in counts["ms_cxr"].items()
        ]
        rows.append(("MS-CXR: boxes in this set", len(found["boxes"]), PUBLISHED_MS_CXR["boxes"]))
    lines = [f"  {'':<34}{'here':>10}{'published':>12}"]
    for what, here, number in rows:
        note = "" if here == number else "   differs"
        lines.append(f"  {what:<34}{here:>10,}{number:>12,}{note}")
    for name, place in (("boxes_outside_subset", "subset"), ("boxes_of_other_splits", "split of MS-CXR")):
        if counts.get(name):
            lines.append(f"  {counts[name]:,} boxes lie outside the chosen {place}")
    return [*lines, ""]


def _rejects(file: Path) -> list[str]:
    """Numbers of rejects by kind and reason; reasons that differ only in their numbers are one."""
    rejects = pd.read_csv(file, dtype=str, keep_default_na=False)[["kind", "id", "reason"]]
    if rejects.empty:
        return ["  left out   nothing"]
    rejects["reason"] = rejects["reason"].str.replace(r"(?<!HL)\d+", "n", regex=True)
    rows = rejects.groupby(["kind", "reason"]).size().reset_index().itertuples(index=False, name=None)
    return ["  left out", *(f"  {count:>8,} {kind:<7} {reason}" for kind, reason, count in rows)]


def run(options: Check) -> None:
    """Print the page and the problems; status 1 if there are any."""
    with worker_processes(options.workers) as pool:
        page, problems = check_set(options.data, options.full, pool)
    print(f"{page}\n")
    if problems:
        print(f"{len(problems)} problem{'s' if len(problems) > 1 else ''}:")
        print("\n".join(f"  - {problem}" for problem in problems))
        raise SystemExit(1)
    by_size = "" if options.full else " (image files by their sizes and times; --full reads all of them)"
    print(f"no problem found{by_size}")
