"""docs/reproduction.md: a row for each table and figure of the papers, whose command, file and costs are true."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from medclip_dcl.studies.grid_plan import read_experiment

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/reproduction.md").read_text(encoding="utf-8")
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if "`medclip-dcl study" in line]
PUBLISHED = {
    "Sample-Specific Debiasing": {"tables 1, 3, 4, 5", "figure 3", "figures 2, 4"},
    "Debiased Contrastive Learning": {
        *(
            "figures 2, 4a",
            "figure 4b",
            "figure 4c, CIFAR-10",
            "figure 4c, STL10",
            "figure 5",
            "table 1",
            "table 2",
        ),
    },
    "Contrastive unsupervised representation learning": {
        "table 1, figure 2a, CIFAR-100",
        "table 2, CIFAR-100",
    },
}
"""Paper -> its rows in full size."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1].strip("`").split()[-1])
def test_each_row_names_a_study_of_so_many_runs(row):
    name = re.fullmatch(r"`medclip-dcl study (\w+)`", row[1])
    assert name and row[2] == f"[yaml](../configs/experiments/{name[1]}.yaml)" and len(row) == 8
    experiment = read_experiment(ROOT / f"configs/experiments/{name[1]}.yaml")
    assert len(experiment.runs()) == int(row[3])


def test_each_published_table_and_figure_has_a_row():
    parts = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    assert [part.split(" (")[0] for part in parts] == [*PUBLISHED]
    for part, rows in zip(parts, PUBLISHED.values(), strict=True):
        assert rows <= {line.split(" | ")[0].strip("| ") for line in part.splitlines()}
    missing = re.findall(r"^Table (\d) ", PAGE, flags=re.MULTILINE)
    assert missing == ["2", "3"]  # SSD's prompts and DCL's reinforcement learning


def test_computed_costs_follow_from_passes_and_one_pass():
    with (ROOT / "docs/results/reproduction_cost.csv").open(encoding="utf-8", newline="") as lines:
        costs = [*csv.DictReader(lines)]
    assert {cost["study"] for cost in costs} == {
        row[1].split()[-1].strip("`") for row in ROWS if "core-days" in row[5]
    }
    for cost in costs:
        passes = float(cost["passes"])
        assert float(cost["core_days"]) == pytest.approx(
            passes * float(cost["cpu_s_a_pass"]) / 86400, rel=0.05
        )
        assert float(cost["exaflop"]) == pytest.approx(passes * float(cost["gflop_a_pass"]) / 1e9, rel=0.05)
