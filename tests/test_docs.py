"""README and docs: commands parse as they stand, Python blocks run and print what is shown, links lead to files."""

from __future__ import annotations

import argparse
import configparser
import dataclasses
import importlib.util
import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonargparse
import pandas as pd
import pytest
import yaml
from PIL import Image
from pytorch_lightning import Trainer
from pytorch_lightning.cli import LightningCLI

from medclip_dcl.__main__ import VERBS, _named, main
from medclip_dcl.command.lightning_cli import RunOptions
from medclip_dcl.training.best_checkpoint import BestCheckpoint
from medclip_dcl.use.model import LoadedModel
from tests.small import platt_calibration

ROOT = Path(__file__).resolve().parent.parent
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = ROOT / "tests/benchmarks/RESULTS.md"


class Parsed(BaseException):
    """A command line was accepted by its parser."""


def blocks(language: str) -> list[tuple[str, str]]:
    """Name of the page and text of each code block in a language."""
    return [
        (page.name, block)
        for page in PAGES
        for block in re.findall(
            rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL
        )
    ]


def shown_below(page: str, block: str) -> str | None:
    """The text block directly below a Python block, which is what it prints."""
    (text,) = [path.read_text(encoding="utf-8") for path in PAGES if path.name == page]
    below = text.partition(f"```python\n{block}```\n\n```text\n")[2]
    return below.partition("```")[0] or None


def spans(pattern: str) -> list[str]:
    """Words in the running text of the pages that are marked as code."""
    return [
        " ".join(span.split())
        for page in PAGES
        for span in re.findall(
            rf"`({pattern})`", re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
        )
    ]


def commands() -> dict[str, list[str]]:
    """Words of each distinct command, continuation lines joined, comments dropped, of a loop the first turn."""
    found: dict[str, list[str]] = {}
    for _, block in blocks("bash"):
        lines = block.replace("\\\n", " ")
        for name, first in re.findall(r"for (\w+) in (\w+)", lines):
            lines = re.sub(rf"\$(?:{name}\b|{{{name}}})", first, lines)
        for line in lines.splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["torchrun"]:
                words = ["medclip-dcl", *words[words.index("medclip_dcl") + 1 :]]
            if words and words[0] not in ("for", "done"):
                found.setdefault(" ".join(words), words)
    for span in spans(r"medclip-dcl [\w.]+ (?!fit, |[\w-]+`)[^`]+"):
        found.setdefault(span, shlex.split(span))
    return found


COMMANDS = commands()
EXTENSIONS: list[tuple[str, str, str]] = re.findall(
    r"```python\n# (\w+\.py)\n(.*?)```\n\n```bash\n(.*?)```",
    (ROOT / "docs/contributing.md").read_text("utf-8"),
    re.DOTALL,
)
"""File, content and commands of each class of one's own."""


def merged(*files: str) -> dict[str, Any]:
    """Configurations composed as `--config` does, lists replaced."""

    def over(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
        return first | {
            key: over(first.get(key) or {}, value) if isinstance(value, dict) else value
            for key, value in second.items()
        }

    whole: dict[str, Any] = {}
    for file in files:
        whole = over(whole, yaml.safe_load((ROOT / "configs" / file).read_text(encoding="utf-8")))
    return whole


@pytest.fixture(scope="module")
def workplace(small_set, tmp_path_factory) -> Path:
    """A folder in which the paths of the documented commands exist."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "data").mkdir()
    for source in ("dcl_lm/checkpoints/best.ckpt", "small_language_model/language_model"):
        (folder / "runs" / source).mkdir(parents=True)
    for name in ("mimic_cxr", "hospital", "phantom"):
        (folder / "data" / name).symlink_to(small_set)
    for name in ("cifar10", "stl10"):
        (folder / "data" / name).mkdir()
    runs = {
        "dcl_lm": ("mimic_cxr.yaml", "objective/dcl_lm.yaml"),
        "longer": ("mimic_cxr.yaml", "objective/dcl_lm.yaml"),
        "infonce": ("mimic_cxr.yaml", "objective/infonce.yaml"),
        "infonce_0": ("mimic_cxr.yaml", "objective/infonce.yaml"),
        "hospital": ("mimic_cxr.yaml", "objective/infonce.yaml"),
        "heads_infonce": ("mimic_cxr.yaml", "heads.yaml", "objective/infonce.yaml"),
        "probe": ("finetune.yaml", "linear_probe.yaml"),
        "rad_dino": ("mimic_cxr.yaml", "objective/dcl_lm.yaml"),
        **dict.fromkeys(("demo", "two_levels", "patches"), ("demo.yaml", "objective/infonce.yaml")),
        "digits": ("unimodal/digits.yaml", "unimodal/objective/dcl_true.yaml"),
        "cmc": ("unimodal/cmc.yaml", "unimodal/objective/cross_view.yaml"),
        "sentences": ("unimodal/sentences.yaml",),
    }
    for name, files in runs.items():
        (folder / "runs" / name).mkdir(parents=True, exist_ok=True)
        config = merged(*files)
        if name == "hospital":
            config["data"]["init_args"]["folder"] = "data/hospital"
        (folder / "runs" / name / "config.yaml").write_text(yaml.safe_dump(config))
    for file, text, _ in EXTENSIONS:
        (folder / file).write_text(text)
    (folder / "hospital_prompts.yaml").symlink_to(ROOT / "configs/prompts/chexpert14.yaml")
    return folder


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
@pytest.mark.parametrize("name", [name for name, words in COMMANDS.items() if words[0] == "medclip-dcl"])
def test_documented_commands_are_accepted_by_their_parsers(name, workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    monkeypatch.syspath_prepend(workplace)
    parsers = {
        argparse.ArgumentParser: "parse_intermixed_args",
        jsonargparse.ArgumentParser: "parse_args",
        LightningCLI: "parse_arguments",
    }
    for parser, method in parsers.items():
        parse = getattr(parser, method)

        def stopped(self, *args, parse=parse, **options):
            parse(self, *args, **options)
            raise Parsed

        monkeypatch.setattr(parser, method, stopped)
    with pytest.raises(Parsed):
        main(COMMANDS[name][1:])


def test_each_nih_release_has_its_own_page(tmp_path):
    """Of a folder whose name has a blank and a quote, whether it ends with a slash or not."""
    (tmp_path / "an other's").mkdir()
    pages = []
    for folder in ("data/nih_release", "/nowhere/nih", f"{tmp_path}/an other's", f"{tmp_path}/an other's/"):
        words = ["make", "--dry-run", "--no-print-directory", "nih", f"NIH={folder}"]
        said = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        sets = [shlex.split(line) for line in said.splitlines() if "prepare public" in line]
        assert {words[words.index("--source") + 1] for words in sets} == {folder}
        pages.append(said.splitlines()[-1])
        name = pages[-1].split("/")[1]
        assert [words[words.index("--output") + 1] for words in sets] == [
            f"data/{name}",
            f"data/{name}_templated",
        ]
        assert said.count(f"--data.init_args.folder data/{name}") == 3
    assert "open runs/nih/benchmark" in pages[0] and len({*pages}) == 3 and pages[2] == pages[3]


def test_documented_make_targets_installs_and_batch_files_exist():
    others = {" ".join(words): words for words in COMMANDS.values() if words[0] != "medclip-dcl"}
    assert {"make demo", "make test"} <= set(others)
    for command, words in others.items():
        if words[0] == "make":
            subprocess.run(["make", "--dry-run", words[1]], cwd=ROOT, check=True, capture_output=True)
        elif words[:2] == ["jupyter", "nbconvert"]:
            assert list(ROOT.glob(words[-1])), command
        elif words[0] == "sbatch":
            _, file, *arguments = [word for word in words if not word.startswith("--")]
            text = (ROOT / "configs/slurm" / file).read_text(encoding="utf-8")
            assert len(arguments) == len(re.findall(r"^\w+=\$\{\d:\?", text, flags=re.MULTILINE)), command
        else:
            extra = re.fullmatch(r"pip install (?:-e \.|medclip_dcl)(?:\[(\w+)\])?", command)
            assert extra, f"no test knows {command}"
            assert extra[1] is None or extra[1] in SETUP["options.extras_require"]


def test_documented_options_exist():
    """Each is an option of a verb, or of LightningCLI: of a run, the Trainer, or an argument of one of its classes."""
    options = [_named(verb.options_path) for verb in VERBS.values() if verb.options]
    known = {
        one.metadata.get("flag") or f"--{one.name}" for kind in options for one in dataclasses.fields(kind)
    }
    known |= {f"--{one.name}" for one in dataclasses.fields(RunOptions)}
    known |= {"--config", "--print_config", "--seed_everything", "--import", "--ckpt_path", "--help"}
    arguments = {
        "trainer": {*inspect.signature(Trainer).parameters},
        "checkpoint": {*inspect.signature(BestCheckpoint).parameters},
    }
    for part, folders in (
        ("model", ("models", "networks", "objectives", "unimodal")),
        ("data", ("data", "unimodal")),
    ):
        texts = [
            file.read_text("utf-8") for name in folders for file in (ROOT / "medclip_dcl" / name).glob("*.py")
        ]
        arguments[part] = {
            name for text in texts for name in re.findall(r"^        (\w+): ", text, re.MULTILINE)
        }
    named = {word for span in spans(r"--[a-z][^`]*") for word in re.findall(r"--[\w.]+", span)}
    assert len(named) > 30
    wrong = [
        name
        for name in named - known
        if name.rpartition(".")[2] not in arguments.get(name.removeprefix("--").partition(".")[0], ())
    ]
    assert sorted(wrong) == []


@pytest.fixture(scope="module")
def calibrated(model, tmp_path_factory) -> Path:
    """The exported network with a calibration of the five findings."""
    network, folder = model.network, tmp_path_factory.mktemp("calibrated") / "model"
    calibration = platt_calibration(network)
    LoadedModel(network, calibration=calibration).save_pretrained(folder)
    return folder


LONG = ("def optimum(", "SyntheticClasses.on_sphere(rho=(0.25, 0.25, 0.25, 0.25))", "def unsupervised_loss(")
"""In the blocks that compute for seconds."""


@pytest.mark.parametrize(
    ("page", "block"),
    [
        pytest.param(*x, id=x[0], marks=[pytest.mark.slow] * any(words in x[1] for words in LONG))
        for x in blocks("python")
    ],
)
def test_python_blocks_run(page, block, calibrated, small_bert, small_set, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("chest.jpg", *re.findall(r'"(data/\S+\.jpg)"', block)):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((90, 70), 30).save(name)
    for run in ("demo", "dcl_lm"):
        if f"runs/{run}" in block:
            shutil.copytree(calibrated, tmp_path / "runs" / run)
    (tmp_path / "data").mkdir(exist_ok=True)
    for name in ("mimic_cxr", "phantom"):
        (tmp_path / "data" / name).symlink_to(small_set)
    if "demo_language_model" in block:
        (tmp_path / "runs/demo_language_model").mkdir(parents=True)
        (tmp_path / "runs/demo_language_model/language_model").symlink_to(small_bert)
    if "mimic_cxr_shards" in block:
        main(["shard", str(small_set), "--output", "data/mimic_cxr_shards"])
    capsys.readouterr()
    exec(compile(block, page, "exec"), {})
    if shown := shown_below(page, block):
        assert capsys.readouterr().out == shown


def in_process(words: list[str]) -> None:
    main(words[1:])


def installed(words: list[str]) -> None:
    """The console script of this environment, which does not search the working directory by itself."""
    subprocess.run([Path(sys.executable).with_name(words[0]), *words[1:]], check=True)


@pytest.mark.parametrize(
    ("run", "file", "text", "commands"),
    [pytest.param(installed, *extension, marks=pytest.mark.slow, id=extension[0]) for extension in EXTENSIONS]
    + [pytest.param(in_process, *EXTENSIONS[0], id="in this process")],
)
def test_extensions_work_from_the_working_directory(
    run, file, text, commands, small_set, small_bert, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    monkeypatch.setitem(sys.modules, file.removesuffix(".py"), None)
    del sys.modules[file.removesuffix(".py")]  # and its end forgets what is imported here
    (tmp_path / file).write_text(text)
    Image.effect_noise((90, 70), 30).save("chest.jpg")
    for source, name in (
        (small_set, "data/phantom"),
        (small_bert, "runs/demo_language_model/language_model"),
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).symlink_to(source)
    short = (
        "--trainer.max_steps 1 --untrained false --data.init_args.image_size 48 --data.init_args.crop_size 32"
    )
    if "runs/demo/" in commands:
        main(["fit", "--config", "demo", "--config", "objective/infonce", *short.split()])
    for line in commands.replace("\\\n", " ").splitlines():
        words = shlex.split(line)
        run([*words, *short.split()] if words[1] == "fit" else words)
    if file == "my_rules.py":
        eta = pd.read_parquet("runs/two_levels/class_probability.parquet")["eta"]
        assert eta.max() == pytest.approx(0.2) and eta.isin([0.0, eta.max()]).all()
    elif file == "my_encoders.py":
        assert pd.read_csv("scores.csv")["error"].isna().tolist() == [True]
    else:
        results = json.loads(Path("runs/demo/results.json").read_text())
        assert results["metrics"]["image_norm"]["mean"] > 0


def test_columns_of_metrics_are_described():
    curves = yaml.safe_load((ROOT / "medclip_dcl/report/curves.yaml").read_text())
    page = (ROOT / "docs/mimic_cxr.md").read_text("utf-8")
    assert [name for names in curves.values() for name in names if f"`{name}`" not in page] == []


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    return {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)", text, re.M)
    }


@pytest.mark.parametrize("page", [*PAGES, RESULTS, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_and_named_files_exist(page):
    text = page.read_text(encoding="utf-8")
    for link, anchor in re.findall(r"\]\(((?!http)[^)#]*)#?([^)]*)\)", text):
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), f"{link}#{anchor}"
    for path in re.findall(r"(?:configs|tests|medclip_dcl|data_prep)/[\w/]+\.(?:yaml|sbatch|py|md)", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("notebook", sorted(ROOT.glob("notebooks/*.ipynb")), ids=lambda file: file.stem)
def test_links_of_notebooks_exist(notebook):
    text = "".join(
        line
        for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "markdown"
        for line in cell["source"]
    )
    for link, anchor in re.findall(r"\]\(((?!http)[^)#]*)#?([^)]*)\)", text):
        target = notebook.parent / link
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), f"{link}#{anchor}"


def test_start_page_lists_every_page_and_notebook_once():
    listed = re.findall(r"^- \[[^]]*\]\(([^)#]+)\)", (ROOT / "docs/index.md").read_text("utf-8"), re.M)
    pages = {page.name for page in PAGES[1:]} - {"index.md"}
    notebooks = {f"../notebooks/{file.name}" for file in ROOT.glob("notebooks/*.ipynb")}
    assert pages | notebooks <= {*listed}
    assert len(listed) == len({*listed})


def site_script(name: str) -> Any:
    """A script of docs/site."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/site/{name}.py")
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_site_finds_what_browsers_load_from_other_hosts(tmp_path):
    """Sources, style sheets and imports count, links to click do not."""
    build = site_script("build")
    own = (
        '<a href="https://a.org">a</a> <link rel="canonical" href="https://a.org"> <img src="_images/a.png">'
    )
    (tmp_path / "own.html").write_text(own)
    assert build.loaded_from_elsewhere(tmp_path) == []
    (tmp_path / "page.html").write_text(
        '<script async="async" src="https://cdn.org/a.js"></script><img alt="x" src=//cdn.org/a.png>'
        '<link rel="preload stylesheet" href="http://cdn.org/a.css"><img srcset="https://cdn.org/b.png 2x">'
    )
    (tmp_path / "style.css").write_text(
        '@import "https://cdn.org/a.css"; a {src: url(https://cdn.org/a.woff)}'
    )
    (tmp_path / "a.js").write_text('fetch("https://cdn.org/search.json")')
    found = build.loaded_from_elsewhere(tmp_path)
    assert [place.partition(":")[0] for place in found] == ["a.js", *["page.html"] * 4, *["style.css"] * 2]


def test_each_table_and_benchmark_is_named():
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    tables = [file.name for file in ROOT.glob("docs/results/*.csv")]
    assert [name for name in tables if f"results/{name})" not in pages] == []
    named = set(re.findall(r"tests/benchmarks/(\w+)\.py", RESULTS.read_text(encoding="utf-8")))
    assert named == {file.stem for file in RESULTS.parent.glob("*_*.py")} - {"results_file"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_measured_numbers_are_those_of_their_tables(page: Path) -> None:
    """`make numbers` writes them."""
    numbers, text = site_script("measured_numbers"), page.read_text(encoding="utf-8")
    assert numbers.written(page) == text
    assert {name for name, _ in numbers.MARKED.findall(text)} == numbers.queries(page).keys()


def test_a_marked_number_follows_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = site_script("measured_numbers")
    (tmp_path / "results/quoted").mkdir(parents=True)
    (tmp_path / "results/a.csv").write_text(
        "model,quantity,value,significant\nx,mean,0.5,\nx,difference,-0.25,yes\ny,difference,0.0001,no\n"
    )
    monkeypatch.setattr(numbers, "DOCS", tmp_path)
    page, quoted = tmp_path / "page.md", tmp_path / "results/quoted/page.yaml"

    def number(words: str) -> str:
        quoted.write_text(f"gain: 'a.csv {words}'")
        page.write_text("It is <!--gain-->9<!--/-->.")
        return numbers.written(page).partition("-->")[2].removesuffix("<!--/-->.")

    assert number("model=x quantity=difference => {value:+.2f}{significant:*}") == "−0.25*"
    assert number("model=y => {value:+.2f}{significant:*}") == "0.00"
    assert number("model=x => {value.min:.2f} to {value.max:.2f}") == "0.25 to 0.50"
    for wrong in ("model=z => {value:.2f}", "model=x => {value:.2f}", "model=x quantity=mean => {other:.2f}"):
        with pytest.raises(SystemExit, match="page.md"):
            number(wrong)
    quoted.write_text(
        "all: |-\n  table a.csv\n  rows model: x, y (why)\n  V: quantity=difference => {value:+.1f}"
    )
    page.write_text("<!--all--><!--/-->")
    table = numbers.written(page).splitlines()[1:]
    assert table == ["| | V |", "|---|---|", "| x | −0.2 |", "| why | 0.0 |", "<!--/-->"]


def test_the_reference_has_a_page_of_each_verb() -> None:
    pages = site_script("reference").commands()
    assert pages.keys() == VERBS.keys() and "| `--classify`" in pages["ask"]
