"""An objective that mends "no", on phantoms whose training reports lack two negative wordings of each finding.

    python tests/benchmarks/study_negations.py FOLDER --demo runs/demo --seeds 331 332 333 334 335
    python tests/benchmarks/study_negations.py FOLDER --demo runs/demo --seeds 331 --from_scratch [--all_wordings]

Run by hand, never in CI, where runs/demo and runs/demo_language_model are; FOLDER keeps phantoms and runs. All forms
write docs/results/negations.csv from all that FOLDER has: a row for each arm, outcome and seed, and for all seeds of an
arm, with the mean and the paired difference from `symmetric`, of all seeds with a 95% t interval.

- heads: new projections on the frozen encoders of the demo, which have read all wordings; scratch: all of the network;
  _all: training reports have all wordings, UNSEEN too.
- symmetric, negations: the files of configs/objective. templates: negations, and each training report has one sentence
  more, of a label of its own drawn at random. candidate, a control: images as anchors, and in place of the opposite
  images the sentences of the batch that are opposite.
- NEG: AUC(1 - y, s-), POS: AUC(y, s+), PNC: AUC(y, s+ - s-), y the labels 1 and 0 of the test images, means over CheX5;
  s-: the mean score of the wordings. paper: the prompts of Wang et al., MLHC 2023; seen, unseen: wordings of the
  catalogue that deny one finding, those of UNSEEN apart. R@10: of boxes by their phrases.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy.stats import t as student
from sklearn.metrics import roc_auc_score

from data_prep.phantom.catalogue import catalogue
from medclip_dcl import load
from medclip_dcl.__main__ import run
from medclip_dcl.common.findings import CHEX5
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.data.signs import signs
from medclip_dcl.objectives import Anchors, Negations
from medclip_dcl.objectives.contrastive import contrastive_loss

OUTPUT = Path(__file__).resolve().parents[2] / "docs/results/negations.csv"
STUDIES, SIDE, EPOCHS = 800, 160, {"heads": 15, "scratch": 30}
"""Of a phantom; steps are those of the demo's heads (150) and nearly those of the demo (1,098)."""
UNSEEN = {
    "Cardiomegaly": [
        "The heart is normal in size.",
        "Within the limitations of this study, there is no evidence of cardiac enlargement.",
    ],
    "Edema": ["There is no interstitial or alveolar edema.", "No overt edema, unchanged from ___."],
    "Pleural Effusion": [
        "No sizable pleural fluid, unchanged from ___.",
        "Both pleural recesses are free of fluid on today's study.",
    ],
    "Pneumonia": ["No signs of pneumonia.", "No evidence of pneumonia or edema."],
    "Pneumothorax": [
        "No pneumothorax is identified on the current study, as on the prior radiograph from ___.",
        "Within the limitations of this study, there is no evidence of effusion or pneumothorax.",
    ],
}
TEMPLATES = {1: ("We see {} here.", "{} is present."), -1: ("We see no {} here.", "{} is not present.")}
NAMES = {"Edema": "pulmonary edema"}
ARMS = {
    "symmetric": "symmetric",
    "negations": "negations",
    "templates": "negations",
    "candidate": "negations",
}


class OppositeCandidate(Negations):
    """The term with images as anchors, and opposite sentences."""

    def forward(self, anchors: Anchors) -> torch.Tensor:
        losses = contrastive_loss(
            anchors.logits, anchors.is_positive, weights=anchors.weights, reduction="none"
        )
        return losses if anchors.is_of_sentences else losses + self.weight * self.term(anchors)

    def _is_opposite(self, anchors: Anchors) -> torch.Tensor:
        if anchors.is_of_sentences:
            return super()._is_opposite(anchors)
        signs_of, states = anchors.of_candidates["signs"], anchors.of_anchors["states"]
        pairs = [(states == y).float() @ (signs_of == sign).float().T for y, sign in ((0, 1), (1, -1))]
        either = pairs[0] + pairs[1] > 0
        return either & anchors.is_negative & ~(either & anchors.is_positive).any(1, keepdim=True)


def wordings() -> dict[str, dict[str, list[str]]]:
    """Finding -> negative wordings by kind: paper, seen, unseen."""
    found = {}
    for finding, unseen in UNSEEN.items():
        alone = [c for c in catalogue().classes if c.labels == {finding: 0.0}]
        seen = [w.text for c in alone for w in c.wordings if w.text not in unseen]
        found[finding] = {"paper": [CHEX5[finding].negative], "seen": seen, "unseen": unseen}
    return found


def make_set(folder: Path, seed: int, all_wordings: bool) -> Path:
    """A phantom, prepared; its training reports lack UNSEEN, or have all wordings."""
    if (folder / "set/dataset.json").exists():
        return folder / "set"
    held = {text for texts in UNSEEN.values() for text in texts if not all_wordings}
    for c in catalogue().classes:  # of this process
        words = tuple(replace(w, held_out=w.held_out or w.text in held) for w in c.wordings)
        object.__setattr__(c, "wordings", words)
    raw = folder / "raw"
    command = ["phantom", "--output", f"{raw}", "--studies", f"{STUDIES}", "--seed", f"{seed}"]
    run([*command, "--size", f"{SIDE}", "--workers", "1"])  # further processes would have the whole catalogue
    boxes = raw / "MS_CXR_Local_Alignment_v1.0.0.json"
    command = ["prepare", "mimic-cxr", "--source", f"{raw}", "--output", f"{folder / 'set'}"]
    run([*command, "--ms_cxr", f"{boxes}"])
    return folder / "set"


def check_unseen(prepared: PreparedSet) -> None:
    """Refuse a phantom whose training reports say a wording of UNSEEN."""
    reports = prepared.table("reports")
    ids = reports.loc[reports["study_id"].isin(prepared.studies("train")), "sentence_id"]
    sentences = prepared.table("sentences").set_index("sentence_id")["text"]
    if said := {*sentences[ids.unique()]} & {text for texts in UNSEEN.values() for text in texts}:
        raise SystemExit(f"{prepared.folder}: training reports say {len(said)} of the unseen wordings")


def with_templates(data: Path, seed: int) -> Path:
    """A copy of the set with a drawn template in each training report that has a label 1 or 0 of CheX5."""
    output = data.with_name("set_templates")
    if output.exists():
        return output
    shutil.copytree(data, output, copy_function=os.link, ignore=shutil.ignore_patterns("arrays", "features"))
    prepared, rng, added = PreparedSet(data), np.random.default_rng(seed), []
    texts = {
        (finding, sign): [_capital(form.format(NAMES.get(finding, finding.lower()))) for form in forms]
        for finding in CHEX5
        for sign, forms in TEMPLATES.items()
    }
    for (finding, sign), some in texts.items():
        assert (signs(some, [finding]) == sign).all()
    flat = [text for some in texts.values() for text in some]
    sentences, reports = prepared.table("sentences"), prepared.table("reports")
    first = int(sentences["sentence_id"].max()) + 1
    images = prepared.table("images")
    labels = prepared.table("labels").set_index("study_id")[[*CHEX5]]
    for study in images.loc[images["use"] == "train", "study_id"].unique():
        known = [(f, 1 if v == 1 else -1) for f, v in labels.loc[study].items() if v in (0, 1)]
        if known:
            text = rng.choice(texts[known[rng.integers(len(known))]])
            added.append((study, "findings", 99, first + flat.index(text)))
    rows = pd.DataFrame(added, columns=["study_id", "section", "position", "sentence_id"])
    counts = rows["sentence_id"].value_counts()
    new = [(first + i, text, int(counts.get(first + i, 0))) for i, text in enumerate(flat)]
    for name in ("classes", "image_classes"):  # whose truth names each sentence, and no arm knows
        (output / f"{name}.parquet").unlink()
    for name, table, more in (
        ("sentences", sentences, pd.DataFrame(new, columns=["sentence_id", "text", "n_reports"])),
        ("reports", reports, rows),
    ):
        more = more[[*table.columns]].astype(table.dtypes)
        (output / f"{name}.parquet").unlink()
        pd.concat([table, more], ignore_index=True).to_parquet(output / f"{name}.parquet", index=False)
    return output


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def train(kind: str, arm: str, data: Path, tested: Path, run_folder: Path, demo: Path, seed: int) -> None:
    epochs = f"{EPOCHS[kind]}"
    words = ["fit", "--import", "study_negations", "--config", "demo"]
    words += ["--config", "heads"] if kind == "heads" else []
    words += ["--config", f"objective/{ARMS[arm]}", "--run_folder", f"{run_folder}"]
    words += ["--seed_everything", f"{seed}", "--data.init_args.seed", f"{seed}"]
    words += ["--data.init_args.folder", f"{data}"]
    words += ["--trainer.max_epochs", epochs, "--trainer.check_val_every_n_epoch", epochs]
    if kind == "heads":
        words += ["--model.init_args.init_from", f"{demo}", "--data.init_args.features", "demo"]
    if arm == "candidate":
        words += ["--model.init_args.loss", "study_negations.OppositeCandidate"]
    run(words)
    test = ["test", "--import", "study_negations", "--config", f"{run_folder / 'config.yaml'}"]
    run([*test, "--data.init_args.folder", f"{tested}"])


def outcomes(run_folder: Path, tested: Path) -> dict[str, float]:
    [file] = run_folder.rglob("results.json")  # in a folder of its own where another set was trained on
    results = json.loads(file.read_text())["metrics"]
    prepared, words = PreparedSet(tested), wordings()
    cases = prepared.rows("cases", use=["test"])
    images = prepared.table("images").set_index("dicom_id")["path"]
    ids = sorted(cases.loc[cases["finding"].isin([*CHEX5]), "dicom_id"].unique())
    texts = [t for kinds in words.values() for some in kinds.values() for t in some]
    texts = [*dict.fromkeys([*texts, *(pair.positive for pair in CHEX5.values())])]
    scores = load(run_folder, "cpu").similarity([tested / "images" / images[i] for i in ids], texts)
    table = pd.DataFrame(np.asarray(scores), index=ids, columns=texts)
    found: dict[str, list[float]] = {}
    for finding, kinds in words.items():
        rows = cases[cases["finding"] == finding]
        y, s = rows["label"].to_numpy(), table.loc[rows["dicom_id"]]
        for kind, some in kinds.items():
            found.setdefault(f"NEG {kind}", []).append(roc_auc_score(1 - y, s[some].mean(axis=1)))
        positive, negative = s[CHEX5[finding].positive], s[CHEX5[finding].negative]
        found.setdefault("POS", []).append(roc_auc_score(y, positive))
        found.setdefault("PNC", []).append(roc_auc_score(y, positive - negative))
        found.setdefault("PNC seen", []).append(roc_auc_score(y, positive - s[kinds["seen"]].mean(axis=1)))
    means = {name: float(np.mean(values)) for name, values in found.items()}
    return means | {"R@10": results["retrieval"]["text_to_image"]["R@10"]}


def summary(folder: Path) -> pd.DataFrame:
    """A row for each kind of weights, arm, outcome and seed, and for all seeds."""
    files = sorted(folder.glob("*/*/outcomes.json"))
    rows = pd.DataFrame([json.loads(file.read_text()) for file in files])
    names, found = [*rows.columns.drop(["kind", "arm", "seed"])], []
    for (kind, arm), some in rows.groupby(["kind", "arm"], sort=False):
        base = rows[(rows["kind"] == kind) & (rows["arm"] == "symmetric")].set_index("seed")[names]
        own = some.set_index("seed")[names]
        difference = own - base.reindex(own.index)
        for name in names:
            key = {"weights": kind, "arm": arm, "outcome": name}
            pairs = zip(own[name].items(), difference[name], strict=True)
            found += [{**key, "seed": seed, "mean": x, "difference": d} for (seed, x), d in pairs]
            line = {**key, "seed": "all", "seeds": len(own), "mean": own[name].mean()}
            if arm != "symmetric" and (n := len(difference)) > 1:
                half = student.ppf(0.975, n - 1) * difference[name].std() / np.sqrt(n)
                mean = difference[name].mean()
                line |= {"difference": mean, "low": mean - half, "high": mean + half}
            found.append(line)
    return pd.DataFrame(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--demo", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[])
    parser.add_argument("--arms", nargs="+", default=[*ARMS])
    parser.add_argument("--from_scratch", action="store_true")
    parser.add_argument("--all_wordings", action="store_true")
    options = parser.parse_args()
    kind = "scratch" if options.from_scratch else "heads"
    suffix = "_all" * options.all_wordings
    for seed in options.seeds:
        folder = options.folder / f"s{seed}{suffix}"
        tested = make_set(folder, seed, options.all_wordings)
        if not options.all_wordings:
            check_unseen(PreparedSet(tested))
        for arm in options.arms:
            run_folder = folder / f"{kind}_{arm}"
            if (run_folder / "outcomes.json").exists():
                continue
            data = with_templates(tested, seed) if arm == "templates" else tested
            for each in {data, tested} if kind == "heads" else ():
                run(["encode", f"{options.demo}", f"{each}", "--name", "demo"])
            train(kind, arm, data, tested, run_folder, options.demo, seed)
            row = {"kind": kind + suffix, "arm": arm, "seed": seed, **outcomes(run_folder, tested)}
            print(row, flush=True)
            (run_folder / "outcomes.json").write_text(json.dumps(row))
    table = summary(options.folder)
    print(table.round(3).to_string())
    table.to_csv(OUTPUT, index=False, float_format="%.4f")


if __name__ == "__main__":
    main()
