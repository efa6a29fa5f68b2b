"""Prepare and run the replicates of the study of false negatives.

    python tests/benchmarks/false_negatives_study/replicates.py tune --folder FOLDER [--workers N]
    python tests/benchmarks/false_negatives_study/replicates.py test --folder FOLDER [--workers N] [--until SEED]

Run by hand, never in CI: a quarter of an hour of a core for each replicate. A replicate is a phantom with
its own language model, image encoder and heads (plan.yaml); one process works on it, with one thread. The same command
keeps what is finished and continues what was killed; several may run on one folder. `test` writes rows/SEED.csv, which
reading.py describes. `tune` prints the validate numbers of all settings; plan.yaml has the best of each as `chosen`.
--described pairs_1500.yaml (or scratch.yaml) replaces keys of the plan, in FOLDER/pairs_1500; rows_pairs_1500/SEED.csv
has intervals and no test.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from reading import PLAN, plan_hash, read_plan
from scipy.optimize import brentq

from medclip_dcl.common.files import write_text
from medclip_dcl.data.eta import anchors_of_sentences, shuffled_eta, with_eta
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.objectives import LanguageModelClassProbability

HERE = Path(__file__).resolve().parent
ROWS = HERE / "rows"
MAX_ETA, MAX_RHO = 0.3, 0.8
# Outcome -> its path in results.json, its number of the validation.
OUTCOMES = {
    "common": ("sentences/common/auc", "sentences_common_auc"),
    "middle": ("sentences/middle/auc", "sentences_middle_auc"),
    "rare": ("sentences/rare/auc", "sentences_rare_auc"),
    "all": ("sentences/auc", "sentences_auc"),
    "p_at_10": ("sentences/precision_at_10", "sentences_precision_at_10"),
    "chex5": ("classification/auc", "auc"),
    "recall": (
        "report_retrieval/image_report/recall",
        "sentences_common_auc",
    ),  # the step is chosen by common
}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
}


def run(folder: Path, words: str, product: str, is_due: bool = False) -> None:
    """A command of the program in a folder, unless a file of that pattern is there."""
    if not is_due and any(folder.glob(product)):
        return
    with (folder / "log.txt").open("a") as log:
        print(f"medclip-dcl {words}", file=log, flush=True)
        command = [sys.executable, "-m", "medclip_dcl", *shlex.split(words)]
        path = os.pathsep.join([str(HERE.parents[2]), *sys.path])  # classes of --import, too
        environment = {**ENVIRONMENT, **os.environ, "PYTHONPATH": path}
        done = subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, check=False)
    if done.returncode or not any(folder.glob(product)):
        raise SystemExit(f"{folder}: medclip-dcl {words.split()[0]} failed, see {folder / 'log.txt'}")


def split_patients(folder: Path, pairs: int) -> None:
    """Divide the training patients: pairs_raw, a release with so many pairs; drawn.csv, the classes of the others."""
    raw, out = folder / "raw", folder / "pairs_raw"
    tables = {
        name: pd.read_csv(raw / f"mimic-cxr-2.0.0-{name}.csv.gz", dtype=str)
        for name in ("split", "metadata", "chexpert", "negbio")
    }
    is_frontal = tables["metadata"].set_index("dicom_id")["ViewPosition"].isin(("PA", "AP"))
    split = tables["split"][tables["split"]["dicom_id"].map(is_frontal)]
    train = split[split["split"] == "train"]
    kept, left = set[str](), pairs
    for patient, images in (
        train["subject_id"].value_counts(sort=False).sample(frac=1, random_state=0).items()
    ):
        if images <= left:
            kept.add(str(patient))
            left -= images
    others = set(tables["split"].loc[tables["split"]["split"] == "train", "subject_id"]) - kept
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    for name, table in tables.items():
        mine = table[~table["subject_id"].isin(others)]
        mine.to_csv(out / f"mimic-cxr-2.0.0-{name}.csv.gz", index=False)
    for name in ("files", "patients.csv.gz", "phantom_truth"):
        (out / name).symlink_to(Path("../raw") / name)
    true = pd.read_csv(raw / "phantom_truth/image_classes.csv")
    names = pd.read_csv(raw / "phantom_truth/classes.csv").set_index("class_id")["name"]
    drawn = pd.crosstab(true["dicom_id"], "class_" + true["class_id"].map(names)).clip(upper=1)
    rows = split[split["subject_id"].isin(others) | (split["split"] == "validate")]
    classes = drawn.reindex(rows["dicom_id"], fill_value=0)
    share = classes[(rows["split"] == "train").to_numpy()].mean()
    classes = classes.loc[:, (share > 0.02) & (share < 0.98)]
    table = rows[["subject_id", "study_id", "split"]].set_axis(["patient", "study", "split"], axis=1)
    ids = zip(table["patient"], table["study"], rows["dicom_id"], strict=True)
    table.insert(0, "image", [f"p{one[:2]}/p{one}/s{study}/{image}.jpg" for one, study, image in ids])
    table = pd.concat([table.reset_index(drop=True), classes.reset_index(drop=True)], axis=1)
    table.to_csv(folder / "drawn.csv", index=False)


def prepare_texts(folder: Path, seed: int, plan: dict[str, Any]) -> dict[str, Any]:
    """The set of pairs and the language model, with its scores; names and numbers that settings of arms refer to."""
    folder.mkdir(parents=True, exist_ok=True)
    run(
        folder,
        f"phantom --output raw --studies {plan['studies']} --seed {seed} --size 256 --workers 1",
        "raw/phantom_truth/phantom.json",
    )
    if not (folder / "drawn.csv").is_file():
        split_patients(folder, plan["pairs"])
    run(
        folder,
        "prepare mimic-cxr --source raw --output reports --size 64 --workers 1",
        "reports/dataset.json",
    )
    run(
        folder,
        f"prepare mimic-cxr --source pairs_raw --output set --size 160 --workers 1 {plan.get('set_options', '')}",
        "set/dataset.json",
    )
    run(
        folder,
        f"fit --config language_model_small --run_folder lm --data.init_args.folder reports --seed_everything {seed} "
        + plan.get("language_model_options", ""),
        "lm/fit.json",
    )
    run(folder, "score set --model lm/language_model", "set/log_p/language_model-*.parquet")
    stem = next((folder / "set/log_p").glob("language_model-*.parquet")).stem
    return {"seed": seed, "log_p": stem, "folder": "."}


def prepare_encoded(folder: Path, seed: int, plan: dict[str, Any]) -> dict[str, Any]:
    """What `prepare_texts` makes, the image encoder, and the features of both encoders."""
    facts = prepare_texts(folder, seed, plan)
    names = pd.read_csv(folder / "drawn.csv", nrows=0).columns[4:].tolist()
    run(
        folder,
        "prepare folder --table drawn.csv --images raw/files --output drawn --size 160 --workers 1 --label_columns "
        + " ".join(names),
        "drawn/dataset.json",
    )
    run(
        folder,
        f"fit --config finetune --config {HERE}/encoder.yaml --run_folder encoder --data.init_args.folder drawn "
        f"--seed_everything {seed} --model.init_args.findings [{','.join(names)}] {plan.get('encoder_options', '')}",
        "encoder/fit.json",
    )
    run(
        folder,
        f"fit --config demo --config heads --config objective/infonce --config {HERE}/heads.yaml --run_folder start "
        f"--seed_everything {seed} --untrained true --trainer.max_steps 1 --trainer.limit_val_batches 0 "
        "--trainer.callbacks [] --checkpoint.monitor validate/loss --model.init_args.init_from encoder "
        "--model.init_args.init_parts [image_encoder.backbone] "
        "--model.init_args.text_encoder.init_args.pretrained lm/language_model "
        "--data.init_args.folder set --data.init_args.features null",
        "start/fit.json",
    )
    run(
        folder,
        "encode start/checkpoints/untrained.ckpt set --name frozen",
        "set/features/frozen/features.json",
    )
    return facts


def prepare(folder: Path, seed: int, plan: dict[str, Any]) -> dict[str, Any]:
    """Everything that heads are trained on; names and numbers that settings of arms refer to."""
    facts = prepare_encoded(folder, seed, plan)
    run(folder, "rank set", "set/ranking/rest_labels-*.parquet")
    run(folder, "rank set --rest_alone", "set/ranking/rest-*.parquet")
    prepared = PreparedSet(folder / "set")
    sentences = prepared.table("sentences").merge(prepared.log_p(facts["log_p"]), on="sentence_id")
    sentences = sentences.merge(
        prepared.table("classes")[["sentence_id", "rho"]], on="sentence_id", how="left"
    )
    anchors = anchors_of_sentences(prepared).reindex(sentences["sentence_id"], fill_value=0.0).to_numpy()
    chances = anchors / anchors.sum()
    eta = with_eta(sentences, LanguageModelClassProbability(a=0.2, k=0.35, max_eta=MAX_ETA))
    rho = sentences["rho"].fillna(0).clip(upper=MAX_RHO).to_numpy()
    mean_rho = float(chances @ rho)
    probability = np.exp(0.35 * sentences["log_p"].to_numpy())
    factor = brentq(lambda a: float(chances @ np.minimum(a * probability, MAX_RHO)) - mean_rho, 1e-6, 1e6)
    scaled = eta.assign(eta=np.minimum(factor * probability, MAX_RHO))[["sentence_id", "eta"]]
    for name, table in {"eta_shuffled": shuffled_eta(prepared, eta, seed), "eta_scaled": scaled}.items():
        table.to_parquet(folder / f"{name}.parquet")
    true = sentences[["sentence_id", "n_tokens"]].assign(
        log_p=np.log(sentences["rho"].fillna(0).clip(lower=1e-4))
    )
    true.to_parquet(folder / "set/log_p/true_rho.parquet")
    return {
        **facts,
        "mean_eta": float(chances @ eta["eta"].to_numpy()),
        "mean_rho": mean_rho,
        "ranking": next((folder / "set/ranking").glob("rest_labels-*.parquet")).stem,
        "rest_alone": next((folder / "set/ranking").glob("rest-*.parquet")).stem,
    }


def filled(value: Any, facts: dict[str, Any]) -> Any:
    """The settings of an arm with the replicate's numbers and names."""
    if isinstance(value, dict):
        return {key: filled(one, facts) for key, one in value.items()}
    if isinstance(value, str) and value.startswith("{") and value.endswith("}"):
        return facts[value[1:-1]]
    return value.format(**facts) if isinstance(value, str) else value


def experiment(
    facts: dict[str, Any],
    arms: dict[str, Any],
    steps: Sequence[int],
    commands: Sequence[str],
    outcomes: Mapping[str, tuple[str, str]] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """An experiment of one replicate, `settings` over its own; with its test it measures retrieval, of 200 reports.

    Args:
        outcomes: in place of `OUTCOMES`, of which those of retrieval need the test.
    """
    test = "test" in commands
    if outcomes is None:
        outcomes = OUTCOMES if test else {name: x for name, x in OUTCOMES.items() if name != "recall"}
    retrieval: dict[str, Any] = {
        "trainer.callbacks": [
            {"class_path": f"medclip_dcl.evaluation.{name}"}
            for name in ("ZeroShotClassification", "SentenceClassification", "Retrieval")
        ],
        "data.init_args.test_reports": 200,
    }
    return {
        "folder": "",
        "commands": list(commands),
        "configs": ["demo", "heads", str(HERE / "heads.yaml")],
        "settings": {
            **steps_of(steps),
            "model.init_args.init_from": "start",
            "model.init_args.text_encoder.init_args.pretrained": "lm/language_model",
            "data.init_args.folder": "set",
            "data.init_args.log_p": facts["log_p"],
            "data.init_args.ranking": facts.get("ranking"),
            **(retrieval if test else {}),
            **(settings or {}),
        },
        "axes": {
            "arm": {"levels": arms},
            "seed": {"set": ["seed_everything", "data.init_args.seed"], "values": [facts["seed"]]},
        },
        "checkpoints": "delete",
        "outcomes": {
            name: {
                "path": path if test else f"validate/{validate}",
                "validate": f"validate/{validate}",
                "step": "best",
                "higher_is_better": True,
            }
            for name, (path, validate) in outcomes.items()
        },
    }


def steps_of(steps: Sequence[int]) -> dict[str, Any]:
    return {
        "trainer.max_steps": steps[-1],
        "trainer.val_check_interval": steps[-1],
        "kept_steps": list(steps),
    }


def level(
    plan: dict[str, Any], facts: dict[str, Any], similarity: str, name: str, *more: dict[str, Any]
) -> dict[str, Any]:
    """Files and settings of an arm, `more` over its own."""
    arm, settings = plan["arms"][name], dict(plan["similarities"][similarity])
    for own in (arm.get("settings", {}), *more):
        settings |= own
    return {"configs": list(arm["configs"]), "settings": filled(settings, facts)}


def arms_of(plan: dict[str, Any], similarity: str, more: bool) -> list[str]:
    arms = [(name, arm) for name, arm in plan["arms"].items() if name in plan.get("only_arms", plan["arms"])]
    return [
        x for x, arm in arms if arm.get("only", similarity) == similarity and (more or not arm.get("more"))
    ]


def tuned_levels(plan: dict[str, Any], facts: dict[str, Any], similarity: str) -> dict[str, Any]:
    """Each arm that is tuned for itself, with each setting."""
    tuned, levels = plan["tuned"], {}
    for name in arms_of(plan, similarity, more=False):
        at_4 = name == "infonce_gamma4" or "class8" in name
        for choice in [] if "as" in plan["arms"][name] else tuned["at_4" if at_4 else "usual"]:
            levels[f"{name}-{choice}"] = level(plan, facts, similarity, name, tuned["settings"][choice])
    return levels


def chosen_levels(plan: dict[str, Any], facts: dict[str, Any], similarity: str, more: bool) -> dict[str, Any]:
    """The arms with their chosen settings; some of them to the fixed end."""
    levels, chosen = {}, plan["chosen"][similarity]
    for name in arms_of(plan, similarity, more):
        settings = [plan["tuned"]["settings"][chosen[plan["arms"][name].get("as", name)]]]
        if name in plan["late"].get(similarity, []):
            settings.append(steps_of([*plan["kept_steps"], *plan["late_steps"]]))
        levels[name] = level(plan, facts, similarity, name, *settings)
    return levels


def study(folder: Path, name: str, content: dict[str, Any], options: str = "") -> pd.DataFrame:
    """Run an experiment in the folder of its replicate, with further options of the command; its table."""
    done = folder / name / "done"
    if not done.is_file():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**content, "folder": name}, sort_keys=False))
        words = f"study {name}.yaml --workers 1 --device cpu {options}"
        run(folder, words, f"{name}/results.parquet", is_due=True)
        done.touch()
    return pd.read_parquet(folder / name / "results.parquet")


def tuning(folder: Path, seed: int, plan: dict[str, Any]) -> None:
    """Runs of a tuning replicate: settings of each arm, the end; once these are chosen, shares of the ranked arm."""
    facts, tuned = prepare(folder, seed, plan), plan["tuned"]
    for similarity in plan["similarities"]:
        levels = tuned_levels(plan, facts, similarity)
        study(folder, f"tune_{similarity}", experiment(facts, levels, tuned["steps"], ["fit"]))
    end = tuned["end"]
    own = level(plan, facts, end["similarity"], end["arm"], tuned["settings"][end["setting"]])
    study(folder, "tune_end", experiment(facts, {end["arm"]: own}, end["steps"], ["fit"]))
    for similarity, chosen in plan.get("chosen", {}).items():
        weights = "model.init_args.negative_weights.init_args."
        levels = {
            f"ranked-{share}_{k}": level(
                *(plan, facts, similarity, "ranked", tuned["settings"][chosen["ranked"]]),
                {f"{weights}mean_share": share, f"{weights}k": k},
            )
            for share, k in itertools.product(tuned["mean_share"], tuned["k"])
        }
        study(folder, f"tune_share_{similarity}", experiment(facts, levels, tuned["steps"], ["fit"]))


def choices(folder: Path, plan: dict[str, Any], name: str) -> pd.DataFrame:
    """Best validate number of common of each arm and setting, mean of the tuning replicates, in points."""
    first, last = plan["tuning"]
    files = [folder / str(seed) / name / "results.parquet" for seed in range(first, last + 1)]
    table = pd.concat([pd.read_parquet(file) for file in files])
    best = table[(table["outcome"] == "common") & table["chosen"]].reset_index()
    best[["arm", "setting"]] = best["arm"].str.rsplit("-", n=1, expand=True)
    return 100 * best.groupby(["arm", "setting"])["value"].mean().unstack()


def at_floor(study: Path, arm: str, seed: int, steps: Sequence[int]) -> pd.DataFrame:
    """Share of anchors at the floor, or stopped, in the last step logged before each kept one; NaN: no arm with one."""
    logged = pd.read_csv(study / "runs" / f"arm={arm},seed={seed}" / "metrics.csv")
    logged = logged.reindex(columns=["step", "train/at_floor"]).dropna().assign(step=lambda x: x["step"] + 1)
    kept = pd.DataFrame({"step": steps})
    found = pd.merge_asof(kept, logged.astype({"step": "int64"}), on="step")
    return found.rename(columns={"train/at_floor": "train at_floor"}).assign(arm=arm)


def by_outcome(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each arm and step of an experiment's table, with "validate OUTCOME" and "test OUTCOME" beside them."""
    table = table.drop_duplicates(["arm", "step", "outcome"])
    wide = table.pivot(index=["arm", "step"], columns="outcome", values=["validate", "value"])
    wide.columns = wide.columns.map(" ".join).str.replace("value ", "test ")
    return wide.reset_index()


def write_rows(table: pd.DataFrame, rows: Path, seed: int, plan: dict[str, Any], plan_hash: str) -> None:
    """Write ROWS/SEED.csv, which reading.py reads, from `by_outcome` with the column similarity."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=True
    )
    first = {
        "replicate": seed,
        "pairs": plan["read"]["pairs"],
        "start": plan["read"]["start"],
        "commit": commit.stdout.strip()[:8],
        "plan_hash": plan_hash,
    }
    table = table.round(5).assign(**first)
    order, last = ["replicate", "similarity", "pairs", "start", "arm", "step"], ["commit", "plan_hash"]
    table = table[[*order, *(name for name in sorted(map(str, table)) if name not in order + last), *last]]
    rows.mkdir(exist_ok=True)
    write_text(table.to_csv(index=False), rows / f"{seed}.csv")


def testing(folder: Path, seed: int, plan: dict[str, Any], plan_hash: str, rows: Path) -> None:
    facts = prepare(folder, seed, plan)
    is_more = plan["more"][0] <= seed <= plan["more"][1]
    found = []
    for similarity in plan["similarities"]:
        levels = chosen_levels(plan, facts, similarity, is_more)
        table = study(folder, similarity, experiment(facts, levels, plan["kept_steps"], ["fit", "test"]))
        wide = by_outcome(table).drop(columns="validate recall")
        floor = pd.concat(
            [
                at_floor(folder / similarity, arm, seed, [*plan["kept_steps"], *plan["late_steps"]])
                for arm in levels
            ]
        )
        found.append(wide.merge(floor, on=["arm", "step"], how="left").assign(similarity=similarity))
    write_rows(pd.concat(found, ignore_index=True), rows, seed, plan, plan_hash)
    for name in ("raw", "pairs_raw", "reports", "drawn", "set", "encoder"):  # 0.3 GB
        shutil.rmtree(folder / name, ignore_errors=True)


def each_in_its_folder(
    work: Callable[[int, Path], None], seeds: Iterable[int], base: Path, workers: int
) -> None:
    """Call `work` with each seed and its folder, some at a time; a seed of which another command has hold is left."""

    def locked(seed: int) -> None:
        folder = base / str(seed)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"{seed} is worked on by another command", flush=True)
                return
            work(seed, folder)
        print(f"{time.strftime('%H:%M:%S')} {seed} is done", flush=True)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(locked, seeds))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("phase", choices=["tune", "test"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--until", type=int, help="last seed (that of the plan; --size of reading.py may ask for more)"
    )
    parser.add_argument("--described", type=Path, help="file over the plan, for rows that are not tested")
    options = parser.parse_args()
    files = [*PLAN, options.described] if options.described else PLAN
    plan, rows, base = read_plan(files), ROWS, options.folder.absolute()
    if options.described:
        rows, base = ROWS.with_name(f"rows_{options.described.stem}"), base / options.described.stem
    first, last = plan["tuning" if options.phase == "tune" else "tested"]
    most = first + plan["size"]["max"] - 1 if options.phase == "test" else last
    seeds = range(first, min(options.until or last, most) + 1)

    def work(seed: int, folder: Path) -> None:
        if options.phase == "tune":
            tuning(folder, seed, plan)
        elif not (rows / f"{seed}.csv").is_file():
            testing(folder, seed, plan, plan_hash(files), rows)

    each_in_its_folder(work, seeds, base, options.workers)
    if options.phase == "tune":
        names = [f"tune_{x}" for x in plan["similarities"]] + [
            f"tune_share_{x}" for x in plan.get("chosen", {})
        ]
        for name in names:
            print(name, choices(options.folder, plan, name).round(2).to_string(), sep="\n")
        files = [options.folder / str(seed) / "tune_end" / "results.parquet" for seed in seeds]
        curve = pd.concat([pd.read_parquet(file) for file in files])
        print(curve[curve["outcome"] == "all"].groupby("step")["value"].mean().round(4).to_string())


if __name__ == "__main__":
    main()
