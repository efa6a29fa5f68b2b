"""Effect of the objective on the phantom: the evaluations of the demo, and a classifier on top of the encoder.

    python tests/benchmarks/study_phantom.py --folder runs/study [--seeds 3] [--lanes 2]

Run by hand, never in CI: about three hours of one core. By the README's commands, each in a process of its own:

1. the phantom, its language model and scores, as in `make demo`;
2. for each seed and objective (infonce, dcl_lm) the demo's fit and test;
3. for each seed, start (nothing, infonce, dcl_lm of that seed) and share of the labels (1%, 10%, 100%) a linear probe
   and a full fine-tuning, tested. The seed draws the training, the labels and the classifier alike, so that the
   objectives are compared in pairs.

With few labels there are more passes over them (PASSES). A network that starts from nothing learns at the linear
layer's rate in all its parts, and as a probe it is a random network under a trained linear layer. Finished steps are
not repeated; a killed run continues. Prints the tables and replaces the section of this file in RESULTS.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

import torch
from results_file import write_section

from medclip_dcl.report.saved_results import read_results, value_at

PROJECT = Path(__file__).resolve().parents[2]
TITLE = "What the objective is worth on the phantom"
OBJECTIVES = ("infonce", "dcl_lm")
STARTS = ("nothing", *OBJECTIVES)
FRACTIONS = (0.01, 0.1, 1.0)
PASSES = {"probe": {0.01: 300, 0.1: 100, 1.0: 40}, "fine-tuning": {0.01: 75, 0.1: 25, 1.0: 8}}
"""Epochs by share of the labels (choice): 150 to 1,000 steps of 16 images."""
EVALUATIONS = {
    "AUC": ("classification/auc", 3),
    "ACC": ("classification/acc", 3),
    "CNR": ("grounding/cnr", 2),
    "signed CNR": ("grounding/cnr_signed", 2),
    "mIoU": ("grounding/miou", 3),
    "Recall": ("retrieval/recall", 3),
    "MedR": ("retrieval/medr", 0),
}
NUMBERS = {
    "AUC": "finding_classification/auc",
    "average precision": "finding_classification/average_precision",
}


class Study:
    """The files and commands of the study in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.raw, self.set = self.folder / "phantom_raw", self.folder / "phantom"
        self.language_model = self.folder / "language_model"

    def run(self, *command: object, log: str) -> None:
        """One command of the program, its output in a file.

        Raises:
            RuntimeError: it failed; the message names the file.
        """
        file = self.folder / "logs" / f"{log}.log"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as output:
            done = subprocess.run(
                [sys.executable, "-m", *map(str, command)],
                cwd=PROJECT,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        if done.returncode:
            raise RuntimeError(f"{' '.join(map(str, command))}: exit status {done.returncode}, see {file}")

    def prepare(self) -> None:
        """Phantom, prepared set, language model, scores and (a, k), as `make demo` makes them."""
        run = partial(self.run, log="prepare")
        run("data_prep.phantom", "--output", self.raw, "--studies", 2600, "--seed", 0)
        boxes = self.raw / "MS_CXR_Local_Alignment_v1.0.0.json"
        run("data_prep.mimic_cxr", "--source", self.raw, "--output", self.set, "--ms_cxr", boxes)
        data = ("--data.init_args.folder", self.set)
        config = PROJECT / "configs/language_model_small.yaml"
        run("medclip_dcl", "fit", "--config", config, "--run_folder", self.language_model, *data)
        run(
            "data_prep.score_sentences", "--data", self.set, "--model", self.language_model / "language_model"
        )
        run("data_prep.eta_report", "--data", self.set)

    def pretrained(self, objective: str, seed: int) -> Path:
        """The run folder of a contrastive training."""
        return self.folder / f"{objective}_{seed}"

    def pretrain(self, job: tuple[int, str]) -> None:
        """Train with one objective and one seed, and evaluate."""
        seed, objective = job
        run = self.pretrained(objective, seed)
        if (run / "results.json").is_file():
            return
        configs = ["configs/demo.yaml", f"configs/objective/{objective}.yaml"]
        if objective == "dcl_lm":
            configs.append(str(self.set / "eta/class_probability.yaml"))
        self.run(
            *("medclip_dcl", "fit", *(part for config in configs for part in ("--config", config))),
            *("--run_folder", run, "--data.init_args.folder", self.set),
            *("--seed_everything", seed, "--data.init_args.seed", seed),
            *("--model.init_args.text_encoder.init_args.pretrained", self.language_model / "language_model"),
            log=run.name,
        )
        self.run("medclip_dcl", "test", "--config", run / "config.yaml", log=run.name)

    def classifier(self, job: tuple[int, str, str, float]) -> Path:
        """The run folder of a classifier."""
        seed, start, way, fraction = job
        return self.folder / f"{way}_{start}_{fraction:g}_{seed}"

    def classify(self, job: tuple[int, str, str, float]) -> None:
        """Train a classifier from one start on one share of the labels, and test it."""
        seed, start, way, fraction = job
        run = self.classifier(job)
        if (run / "results.json").is_file():
            return
        passes = PASSES[way][fraction]
        options: list[object] = ["--config", "configs/finetune.yaml"]
        if way == "probe":
            options += ["--config", "configs/linear_probe.yaml"]
        if start == "nothing":
            options += ["--model.init_args.image_encoder", "medclip_dcl.encoders.image.ResNetRegions"]
            encoder = "--model.init_args.image_encoder.init_args"
            options += [f"{encoder}.stride", 16, f"{encoder}.width", 32]  # as configs/demo.yaml
            options += ["--model.init_args.encoder_learning_rate", "null"]
        else:
            best = self.pretrained(start, seed) / "checkpoints/best.ckpt"
            options += ["--model.init_args.init_from", best]
        self.run(
            *("medclip_dcl", "fit", *options, "--run_folder", run, "--data.init_args.folder", self.set),
            *("--seed_everything", seed, "--data.init_args.seed", seed, "--data.init_args.label_seed", seed),
            *("--data.init_args.label_fraction", fraction, "--data.init_args.batch_size", 16),
            *("--data.init_args.image_size", 128, "--data.init_args.num_workers", 0),
            *(
                "--data.init_args.crop_size",
                "null" if way == "probe" else 112,
                "--data.init_args.cache_images",
                "true",
            ),
            *("--trainer.max_epochs", passes, "--trainer.check_val_every_n_epoch", max(1, passes // 8)),
            log=run.name,
        )
        self.run("medclip_dcl", "test", "--config", run / "config.yaml", log=run.name)

    def evaluations(self, seeds: Sequence[int]) -> list[str]:
        """The table of the evaluations; runs that are not finished are dashes."""
        lines = [
            "| metric | untrained | infonce | dcl_lm | dcl_lm - infonce, by seed |",
            "|---|---|---|---|---|",
        ]
        for name, (path, digits) in EVALUATIONS.items():
            columns = [[self._number(self.pretrained("dcl_lm", seed), path, "_untrained") for seed in seeds]]
            columns += [
                [self._number(self.pretrained(objective, seed), path) for seed in seeds]
                for objective in OBJECTIVES
            ]
            lines.append(_row(name, columns, digits))
        return lines

    def classifiers(self, seeds: Sequence[int], path: str) -> list[str]:
        """The table of the classifiers for one number."""
        lines = [
            "| | labels | nothing | infonce | dcl_lm | dcl_lm - infonce, by seed |",
            "|---|---|---|---|---|---|",
        ]
        for way, fraction in product(PASSES, FRACTIONS):
            columns = [
                [self._number(self.classifier((seed, start, way, fraction)), path) for seed in seeds]
                for start in STARTS
            ]
            lines.append(_row(f"{way} | {fraction:.0%}", columns, 3))
        return lines

    def _number(self, run: Path, path: str, suffix: str = "") -> float | None:
        results = read_results(run, suffix)
        return None if results is None else value_at(results["metrics"], path)


def _row(name: str, columns: Sequence[Sequence[float | None]], digits: int) -> str:
    """Means of the starts over the seeds, each seed's value in brackets, and the paired differences of the last two."""
    cells = [_cell(values, digits) for values in columns]
    pairs = [None if None in (a, b) else b - a for a, b in zip(columns[-2], columns[-1], strict=True)]  # type: ignore[operator]
    return "| " + " | ".join([name, *cells, _cell(pairs, digits, "+")]) + " |"


def _cell(values: Sequence[float | None], digits: int, sign: str = "") -> str:
    shown = " ".join("-" if value is None else f"{value:{sign}.{digits}f}" for value in values)
    known = [value for value in values if value is not None]
    return f"{statistics.fmean(known):{sign}.{digits}f} ({shown})" if len(known) == len(values) else shown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lanes", type=int, default=2, help="commands at once, one thread each")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    seeds = range(arguments.seeds)
    study = Study(arguments.folder)
    study.prepare()
    with ThreadPoolExecutor(arguments.lanes) as lanes:
        for seed in seeds:
            list(lanes.map(study.pretrain, [(seed, objective) for objective in OBJECTIVES]))
            list(lanes.map(study.classify, product([seed], STARTS, PASSES, FRACTIONS)))
    lines = [
        f"CPU, 1 thread, {platform.machine()}; torch {torch.__version__}; mixed bfloat16; means over the"
        " training seeds, each seed in brackets; same phantom, same language model."
        f" `python tests/benchmarks/study_phantom.py --folder runs/study --seeds {arguments.seeds}`",
        *("", "The demo's evaluations:", "", *study.evaluations(seeds)),
    ]
    for name, path in NUMBERS.items():
        lines += [
            "",
            f"Classifiers of CheX5's findings on test images, {name}:",
            "",
            *study.classifiers(seeds, path),
        ]
    print("\n".join(lines))
    write_section(TITLE, lines)


if __name__ == "__main__":
    main()
