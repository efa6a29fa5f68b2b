"""Comparison of runs: tables, refusals, and four well-formed files."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from medclip_dcl.metrics import summaries
from medclip_dcl.report.compare import FILES, compare, tables_of
from medclip_dcl.report.contrasts import bootstrap_differences
from medclip_dcl.report.draws import bootstrap_intervals
from medclip_dcl.report.page import latex_text, markdown_text
from medclip_dcl.report.tables import number
from tests.program import shell
from tests.report.page import Page

main = shell("compare")
pytestmark = pytest.mark.usefixtures("few_draws")

DRAWS = 100
AS_PUBLISHED = [
    ("dataset", "phantom", False),
    ("dataset", "source", "mimic-cxr-2.0.0"),
    ("counts", "grounding", "boxes", 1448),
    ("counts", "grounding", "pairs", 1162),
]
"""Counts in results.json of the set on which the paper's rows were measured."""
DASH = "–"
PUBLISHED = (
    "| DCL, η = .05 | 0.80 | 0.72 | – | 1.46 | – | 0.19 | 0.30 | 104 |",
    "| LSE+NL | 0.888 | 0.876 | 0.798 | 0.853 | 0.526 | 0.788 |",
    "| DCL, η_LM | 1.486 | – | 0.195 |",
    "| DCL, η_LM | 0.10 | 0.31 | 0.48 | 106 | 0.10 | 0.33 | 0.50 | 102 |",
)
"""A row of SSD's tables 1, 3, 4 and 5."""


@pytest.fixture(scope="module")
def runs(make_tested_run, tmp_path_factory):
    """Three runs with the same untrained network, as runs of one seed have."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        name: make_tested_run(folder / name, skill, seed)
        for name, skill, seed in (("infonce", 0.7, 1), ("dcl_lm", 1.6, 2), ("dcl_010", 0.7, 3))
    }


@pytest.fixture(scope="module")
def written(runs, tmp_path_factory):
    """Folder with the four files of one comparison."""
    folder = tmp_path_factory.mktemp("out") / "made"
    main(command(*runs.values(), "--baseline", runs["infonce"], "--untrained", "--output", folder))
    return folder


@pytest.fixture(scope="module")
def two_runs(make_tested_run, tmp_path_factory):
    """Folder of runs a and b; do not write to it."""
    folder = tmp_path_factory.mktemp("pair")
    for seed, name in enumerate("ab"):
        make_tested_run(folder / name, 1.0, seed)
    return folder


@pytest.fixture
def pair(two_runs, tmp_path):
    """Two runs to break."""
    return [shutil.copytree(two_runs / name, tmp_path / name) for name in "ab"]


def command(*words):
    return [*map(str, words)]


def markdown_tables(text):
    """Each table as label -> cells; rows between dividers keep their order."""
    found: list[dict[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("### "):
            found.append({})
        elif line.startswith("| "):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            found[-1][cells[0]] = cells[1:]
    return found


def show(interval, digits):
    return "[" + ", ".join(number(bound, digits) for bound in interval[1:3]) + "]"


def test_tables_show_results_with_their_intervals(runs, written):
    shown = markdown_tables((written / "comparison.md").read_text(encoding="utf-8"))
    for name, run in runs.items():
        metrics = json.loads((run / "results.json").read_text())["metrics"]
        found = bootstrap_intervals(run, DRAWS)
        cases = pd.read_parquet(run / "predictions/classification.parquet")
        edema = cases.query("finding == 'Edema' and label == 1")["subject_id"].nunique()
        table_1 = shown[0][name]
        # All findings have fewer than 20 patients of a class.
        assert [cell.partition(" ")[2] for cell in table_1[:3]] == ["(n = 2)"] * 3
        for cell, section, key in (
            (table_1[3], "grounding", "cnr"),
            (table_1[4], "grounding", "cnr_signed"),
            (table_1[5], "grounding", "miou"),
            (table_1[6], "retrieval", "recall"),
        ):
            assert cell == f"{metrics[section][key]:.2f} {show(found[f'{section}/{key}'], 2)}"
        auc = metrics["classification"]["by_finding"]["Edema"]["auc"]
        assert shown[1][name][1] == f"{auc:.3f} (n = {edema})"
        pairs = shown[4][f"{name}, per image-phrase pair"]
        assert pairs[1].endswith(show(found["grounding/by_pair/cnr_signed"], 3))
        tolerant = shown[5][f"{name}, duplicate-tolerant"]
        assert tolerant[7].endswith(show(found["retrieval/tolerant/text_to_image/MedR"], 0))
        median = metrics["retrieval"]["image_to_text"]["MedR"]
        assert abs(float(shown[5][name][3].split()[0]) - median) <= 0.25


def test_differences_of_single_trainings_are_not_marked(runs, written):
    text = (written / "comparison.md").read_text(encoding="utf-8")
    assert "*" not in re.sub(r"\| \*.*?\* \||\*\*.*?\*\*", "", text)
    assert "Differences over patients are not marked" in text and "5% a pair and set" in text
    shown = markdown_tables((written / "comparison.md").read_text(encoding="utf-8"))
    for name in ("dcl_lm", "dcl_010"):
        found = bootstrap_differences(runs[name], runs["infonce"], DRAWS)
        for column, path in enumerate(("cnr", "cnr_signed", "miou")):
            one = found[f"grounding/{path}"]
            cell = shown[4][f"{name} − infonce"][column]
            numbers = [float(x) for x in re.findall(r"[+-]?\d*\.\d+", cell.replace("−", "-"))]
            assert numbers == pytest.approx(one[:3], abs=5.1e-5)
            assert cell.startswith("+") == (one.value is not None and one.value > 0)
    assert "infonce − infonce" not in shown[0]
    assert "untrained − infonce" in shown[0]


@pytest.fixture
def six_trainings(two_runs, tmp_path):
    """Two objectives, three seeds each, of which the second has more skill; of classification alone."""
    for skill, name in enumerate(("infonce", "dcl_lm")):
        for seed in range(3):
            run = shutil.copytree(two_runs / "a", tmp_path / f"{name}_{seed}")
            for suffix, shift in (("", 2 * skill), ("_untrained", -1)):
                cases = pd.read_parquet(run / f"predictions{suffix}/classification.parquet")
                noise = np.random.default_rng(seed + 9 * skill * (not suffix)).normal(size=len(cases))
                cases["score_positive"] += shift * cases["label"] + 0.2 * noise
                cases.to_parquet(run / f"predictions{suffix}/classification.parquet")
                found = summaries.values_of(summaries.classification(cases, summaries.once(cases), 3))
                results = json.loads((run / f"results{suffix}.json").read_text())
                results |= {
                    "metrics": {"classification": found},
                    "checkpoint": {"file": "x", "weights": seed},
                }
                (run / f"results{suffix}.json").write_text(json.dumps(results))
            config = {"seed_everything": seed, "data": {"init_args": {"seed": seed}}, "objective": name}
            (run / "config.yaml").write_text(json.dumps(config))
    return tmp_path


def test_runs_that_differ_in_the_seed_are_grouped(six_trainings, capsys, monkeypatch):
    monkeypatch.chdir(six_trainings)
    runs = [Path(f"{name}_{seed}") for name in ("infonce", "dcl_lm") for seed in range(3)]
    main(command(*runs, "--baseline", "infonce_0", "--untrained"))
    text = capsys.readouterr().out
    shown = markdown_tables(text)[0]
    assert list(shown)[1:4] == ["infonce (3 seeds)", "dcl_lm (3 seeds)", "infonce (3 seeds), untrained"]
    aucs = [
        [json.loads((run / "results.json").read_text())["metrics"]["classification"]["auc"] for run in of]
        for of in (runs[:3], runs[3:])
    ]
    difference = np.subtract(aucs[1], aucs[0])
    low, high = stats.t.interval(0.95, 2, difference.mean(), stats.sem(difference))
    cell = shown["dcl_lm (3 seeds) − infonce (3 seeds)"][0]
    numbers = [float(x) for x in re.findall(r"[+-]?\d*\.\d+", cell.replace("−", "-"))]
    assert numbers == pytest.approx([difference.mean(), low, high], abs=5.1e-4) and cell.count("*") == 1
    assert float(shown["dcl_lm (3 seeds)"][0].split()[0]) == pytest.approx(np.mean(aucs[1]), abs=0.0051)
    assert "adjusted by Holm's method" in text
    of_one = compare(runs[:2], baseline="infonce_0")
    assert of_one.baseline == "infonce (2 seeds)" and of_one.differences == {}


def test_a_study_is_compared_in_its_own_order(six_trainings, capsys, monkeypatch):
    monkeypatch.chdir(six_trainings)
    names = []
    for seed in (1, 0, 2):
        for objective in ("infonce", "dcl_lm"):
            names.append(f"objective={objective},seed={seed}")
            shutil.copytree(f"{objective}_{seed}", f"study/runs/{names[-1]}")
    pd.DataFrame({"run": np.repeat(names, 2)}).to_parquet("study/results.parquet")
    main(["study", "--baseline", "infonce"])
    (shown, *_) = markdown_tables(capsys.readouterr().out)
    sides = ["infonce (3 seeds)", "dcl_lm (3 seeds)"]
    assert [*shown][1:3] == sides and " − ".join(sides[::-1]) in shown
    facts = json.loads(Path("runs/comparison/comparison.json").read_text())["rows"]["infonce (3 seeds)"]
    assert facts["folders"] == names[::2]


def test_published_rows_are_those_of_the_paper(pair, tmp_path):
    for part, *path, value in AS_PUBLISHED:
        _change(part, *path, value=value)(pair[0])
    main(command(pair[0], "--output", tmp_path))
    text = (tmp_path / "comparison.md").read_text(encoding="utf-8")
    assert "left out" not in text
    assert (
        "<details" not in (tmp_path / "comparison.html").read_text(encoding="utf-8").split("Compared runs")[0]
    )
    assert text.count("| *published, not rerun; MIMIC-CXR/MS-CXR* |") == 4
    assert all(row in text for row in PUBLISHED)


def test_published_rows_are_folded_beside_another_set(written):
    reason = "this set is a phantom"
    for name in FILES[:3]:
        text = (written / name).read_text(encoding="utf-8")
        assert reason in text and ("BioViL" in text) == (name == "comparison.html")
    html = (written / "comparison.html").read_text(encoding="utf-8")
    folded = re.findall(r"<details class=\"published\">.*?</details>", html, flags=re.DOTALL)
    assert len(folded) == 4 and all(reason in one for one in folded)
    assert html.count("BioViL") == sum(one.count("BioViL") for one in folded)


@pytest.mark.slow
def test_a_shared_untrained_network_is_one_row(make_tested_run, tmp_path, runs):
    shared = compare(list(runs.values()), untrained=True)
    assert [row.name for row in shared.rows] == ["infonce", "dcl_lm", "dcl_010", "untrained"]
    other = make_tested_run(tmp_path / "other", untrained="1234")
    apart = compare([runs["infonce"], other], untrained=True, baseline="other, untrained")
    assert [row.name for row in apart.rows] == ["infonce", "other", "infonce, untrained", "other, untrained"]
    assert "other, untrained" not in apart.differences
    kinds = {row.label: row.kind for row in tables_of(apart)[0].rows}
    assert kinds["other"] == "run" and kinds["other, untrained"] == "untrained"


def test_no_report_text_or_machine_path_is_written(written, runs):
    for name in FILES:
        text = (written / name).read_text(encoding="utf-8")
        assert "SECRET" not in text
        assert str(runs["infonce"].parent) not in text


def test_html_is_well_formed_and_needs_nothing_else(written):
    html = (written / "comparison.html").read_text(encoding="utf-8")
    page = Page(html)
    assert page.open == [] and page.wrong == []
    # Eight tables, four of them with folded rows of the paper, the networks and their settings.
    assert len(page.widths) == 8 + 4 + 2
    for widths in page.widths:
        assert len(set(widths)) == 1
    assert all(address.startswith("#") for address in page.addresses)
    assert not re.search(r"url\((?!#)|@import|<link|<script", html)
    assert "Phantom numbers are not patient numbers" in html
    assert "<li>a note</li>" in html


def test_latex_is_well_formed(written):
    text = (written / "comparison.tex").read_text(encoding="utf-8")
    code = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    assert code.isascii()
    bare = re.sub(r"\\[\\{}&%$#_]", "", code)
    assert bare.count("{") == bare.count("}") and bare.count("$") % 2 == 0
    assert re.findall(r"\\begin\{(\w+)\}", code) == ["table", "tabular"] * 8
    assert re.findall(r"\\end\{(\w+)\}", code) == ["tabular", "table"] * 8
    for columns, body in re.findall(
        r"\\begin\{tabular\}\{(\w+)\}(.*?)\\end\{tabular\}", code, flags=re.DOTALL
    ):
        rows = [line for line in body.splitlines() if line.endswith(r"\\")]
        assert len(rows) > 3
        for row in rows:
            spans = [int(n) - 1 for n in re.findall(r"\\multicolumn\{(\d+)\}", row)]
            assert len(re.findall(r"(?<!\\)&", row)) + 1 + sum(spans) == len(columns), row
    assert r"dcl\_lm $-$ infonce" in code


def test_names_with_special_characters_are_escaped(runs, tmp_path):
    names = r"a|<b>*,100%_&{x}\n,^~#$[1]"
    main(command(*runs.values(), "--names", names, "--output", tmp_path))
    assert r"a\|\<b\>\*" in (tmp_path / "comparison.md").read_text(encoding="utf-8")
    assert "a|&lt;b&gt;*" in (tmp_path / "comparison.html").read_text(encoding="utf-8")
    tex = (tmp_path / "comparison.tex").read_text(encoding="utf-8")
    assert r"100\%\_\&\{x\}\textbackslash{}n &" in tex
    assert latex_text("^~#$[1]") in tex
    assert markdown_text("dcl_lm") == "dcl_lm"


def test_numbers_have_their_decimals():
    found = [number(x, 2) for x in (0.8149, -0.001, None)] + [number(x, 0) for x in (104, 1025.5, 0.0)]
    assert found == ["0.81", "0.00", DASH, "104", "1,025.5", "0"]


def _change(part, *keys, value):
    """A function that sets one entry of a run's results.json."""

    def change(run):
        file = run / "results.json"
        results = json.loads(file.read_text())
        inner = results[part]
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        file.write_text(json.dumps(results))

    return change


def _without_retrieval(run):
    file = run / "results.json"
    results = json.loads(file.read_text())
    for part in ("metrics", "protocol", "counts"):
        del results[part]["retrieval"]
    file.write_text(json.dumps(results))


def _untrained_otherwise(run):
    file = run / "results_untrained.json"
    file.write_text(file.read_text().replace('"bilinear"', '"nearest"'))


def _other_patients(run):
    file = run / "predictions/retrieval.parquet"
    queries = pd.read_parquet(file)
    queries.assign(subject_id=queries["subject_id"] + 1).to_parquet(file)


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        (
            _change("protocol", "grounding", "smoothing", value=2.0),
            "a b",
            "b/results.json cannot be compared with a/results.json: protocol.grounding.smoothing is 2.0 there and not "
            "given here",
        ),
        (_change("dataset", "fingerprint", value="beef"), "a b", '"beef" there and "f00d" here'),
        (_without_retrieval, "a b", "protocol.retrieval is not given there and {"),
        (_untrained_otherwise, "a b --untrained", "results_untrained.json cannot be compared"),
        (_other_patients, "a b", "cases of retrieval differ"),
        (
            None,
            "a a/../a",
            "--names: expected 2 names that differ from each other and from untrained, found 'a', 'a'",
        ),
        (
            lambda run: (run / "results_untrained.json").unlink(),
            "a b --untrained",
            "b/results_untrained.json is missing; create it with: medclip-dcl test",
        ),
        (None, "a b --output a/results.json", "--output: expected a folder, found the file a/results.json"),
        (None, "a --names untrained", "found 'untrained'"),
        (None, "a b --baseline untrained", "--baseline: expected one of a, b (the untrained ones"),
    ],
)
def test_refused_comparisons_are_one_line(pair, tmp_path, monkeypatch, capsys, change, words, message):
    monkeypatch.chdir(tmp_path)
    if change is not None:
        change(pair[1])
    with pytest.raises(SystemExit) as stop:
        main(words.split())
    assert stop.value.code == 2 and not Path("runs").exists()
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and message in captured.err


def test_evaluations_without_numbers_and_times_may_differ(pair):
    for part, value in (("metrics", {}), ("protocol", {"perplexity": 30}), ("counts", {"images": 9})):
        _change(part, "embedding_map", value=value)(pair[1])
    _change("timings", "test_seconds", value=99.0)(pair[1])
    assert len(compare(pair).rows) == 2


def test_of_a_set_without_patients_images_are_drawn(pair, tmp_path, capsys):
    for run in pair:
        _change("dataset", "names_patients", value=False)(run)
    main(command(*pair, "--baseline", pair[0], "--output", tmp_path / "out"))
    text = capsys.readouterr().out
    assert "bootstrap draws of images" in text and "which images were tested" in text
    assert "Each draw takes the same images" in text
    assert "90 test images (the set names no patients)" in text


def test_a_run_without_reports_is_compared_otherwise(pair, capsys, tmp_path):
    file = pair[1] / "results.json"
    results = json.loads(file.read_text())
    for part in ("metrics", "protocol", "counts"):
        del results[part]["report_retrieval"]
    file.write_text(json.dumps(results))
    for order in (pair, pair[::-1]):
        main(command(*order, "--output", tmp_path / "out"))
        text = capsys.readouterr().out
        assert "no retrieval of reports, because no sentence was tested: b" in text
        shown = markdown_tables(text)
        assert shown[6]["b"] == [DASH] * 12 and DASH not in shown[6]["a"] and DASH not in shown[5]["b"]


def test_settings_that_differ_stand_in_the_comparison(pair, capsys, tmp_path):
    for run, size, frozen, source in zip(pair, (128, 144), (True, False), ("x", "y"), strict=True):
        config = {
            "run_folder": str(run),
            "trainer": {"devices": size, "callbacks": [{"init_args": {"min_cases": 5, "seed": size}}]},
            "model": {
                "init_args": {"frozen": frozen, "init_from": f"/somewhere/{source}/best_{source}.ckpt"}
            },
            "data": {"init_args": {"image_size": size, "seed": 3}},
        }
        (run / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
        results = json.loads((run / "results.json").read_text())
        results["images"] = {"shown": {"image_size": size}, "trained": {}}
        (run / "results.json").write_text(json.dumps(results))
    main(command(*pair, "--output", tmp_path / "out"))
    text = capsys.readouterr().out
    assert markdown_tables(text)[-1] == {
        "": ["a", "b"],
        "data.init_args.image_size": ["128", "144"],
        "model.init_args.frozen": ["true", "false"],
        "model.init_args.init_from": [".../best_x.ckpt", ".../best_y.ckpt"],
        "trainer.callbacks.0.init_args.seed": ["128", "144"],
    }
    assert "sizes of the images differ: 128 pixels, 144 pixels" in text
    for name in FILES:
        written = (tmp_path / "out" / name).read_text(encoding="utf-8")
        assert "model.init_args.frozen" in written.replace(r"\_", "_") and "/somewhere" not in written, name
    (pair[1] / "config.yaml").unlink()
    main(command(*pair, "--output", tmp_path / "out"))
    assert "settings are not known: b" in capsys.readouterr().out


def test_one_run_without_boxes_is_shown(make_tested_run, tmp_path):
    run = make_tested_run(tmp_path / "run", untrained=None)
    results = json.loads((run / "results.json").read_text())
    for section in ("grounding", "retrieval"):
        file = run / f"predictions/{section}.parquet"
        pd.read_parquet(file).head(0).to_parquet(file)
        results["metrics"][section] = {"cnr": None, "recall": None}
    (run / "results.json").write_text(json.dumps(results))
    shown = tables_of(compare([run]))
    assert shown[0].headings == ["AUC ↑", "ACC ↑", "average precision ↑"]
    assert shown[0].rows[0].cells[0].interval == "(n = 2)"
    assert not [table.title for table in shown if "ounding" in table.title or "Table 5" in table.title]
