"""Prepare and run the replicates of the label study.

    export PYTHONPATH=tests/benchmarks/false_negatives_study
    python tests/benchmarks/label_study/label_replicates.py tune --folder FOLDER [--start frozen]
    python tests/benchmarks/label_study/label_replicates.py test --folder FOLDER [--start scratch] [--until SEED]
    python tests/benchmarks/label_study/label_replicates.py smoke --folder FOLDER

Run by hand, never in CI: docs/label_study.md has the core-hours. A replicate is a phantom with its own language model,
image encoder and networks (plan.yaml, frozen.yaml, scratch.yaml). The same command keeps what is finished and continues
what was killed; several of `test` may run on one folder. `tune` writes tuning.csv and prints the settings that validate
reports choose, which go into the plan as `chosen`; `test` refuses a plan without them, and writes rows_START/SEED.csv,
which reading.py of the study of false negatives reads. `smoke` runs every arm for a few steps on the first tuning seed
and prints seconds; it keeps no number.
"""

from __future__ import annotations

import argparse
import resource
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial, reduce
from operator import getitem
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pandas as pd
import torch
from label_arms import Sentences, write_terms
from reading import plan_hash, read_plan
from replicates import (
    by_outcome,
    each_in_its_folder,
    experiment,
    filled,
    prepare_encoded,
    prepare_texts,
    run,
    study,
    write_rows,
)
from scipy.special import expit

from data_prep.phantom.catalogue import catalogue
from data_prep.phantom.reports import Statement, chexpert_labels
from medclip_dcl.common.files import write_text
from medclip_dcl.data.image_text import ImageTextDataModule
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.data.ranking import NEVER_TRUE, Ranking
from medclip_dcl.data.vectors import write_vectors
from medclip_dcl.encoding.rank_reports import Reports, posterior_vectors, reports_of, tfidf_rows

HERE = Path(__file__).resolve().parent
STARTS = ("frozen", "scratch")
TUNING = HERE / "tuning.csv"
# Of c: mentions that the mean over all mentions counts for, and the quantile (choices of the plan).
SHRUNK_BY, QUANTILE = 5, 0.8

_MRR = {"mrr": ("own_sentences/mrr", "own_mrr"), "mrr_within": ("own_sentences/mrr_within", "own_mrr_within")}
OF_SENTENCES = {
    **{name: f"sentences/{name}/auc" for name in ("common", "middle", "rare")},
    **{name: f"by_mentions/{name}" for name in ("rare_often", "rare_seldom", "rare_never", "seen", "unseen")},
    **{"all": "sentences/auc", "p_at_10": "sentences/precision_at_10"},
}
OF_PAIRS = {
    "chex5": "classification/auc",
    "recall": "report_retrieval/image_report/recall",
    "cnr": "grounding/cnr",
}
"""Outcomes of the test -> their paths in results.json; those of `OF_PAIRS` need image-text scores."""


def files_of(start: str) -> list[Path]:
    return [HERE / "plan.yaml", HERE / f"{start}.yaml"]


def read_start(start: str) -> dict[str, Any]:
    return read_plan(files_of(start))


# Preparation


@cache
def statements() -> dict[str, Statement]:
    """Of each wording of the phantom."""
    return {w.text: Statement(c, w) for c in catalogue().classes for w in c.wordings}


def misread(seed: int, share: float) -> dict[str, Statement]:
    """Statements as a labeller reads them that takes present for absent, and absent for present, in some wordings.

    It errs in whole wordings, in every report alike.
    """
    read, draws = dict(statements()), np.random.default_rng([seed, 15])
    for text in draws.choice([*read], round(share * len(read)), replace=False):
        one = read[text]
        turned = {column: 1.0 - value for column, value in one.finding.labels.items()}
        read[text] = replace(one, finding=replace(one.finding, labels=turned))
    return read


def misread_labels(prepared: PreparedSet, seed: int, share: float) -> pd.DataFrame:
    """CheXpert labels by study_id of training reports, as such a labeller gives them."""
    read = misread(seed, share)
    texts = prepared.table("sentences").set_index("sentence_id")["text"]
    said = prepared.table("reports")
    said = said[said["study_id"].isin(prepared.studies("train"))]
    of_reports = said["sentence_id"].map(texts).groupby(said["study_id"])
    rows = {study_id: chexpert_labels([read[text] for text in found]) for study_id, found in of_reports}
    return pd.DataFrame.from_dict(rows, orient="index")


def write_misread_release(folder: Path, seed: int, share: float) -> None:
    """pairs_raw as errors_raw, with `misread_labels` in place of the labels of training reports."""
    raw, out = folder / "pairs_raw", folder / "errors_raw"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    for file in raw.iterdir():
        (out / file.name).symlink_to(Path("../pairs_raw") / file.name)
    name = "mimic-cxr-2.0.0-chexpert.csv.gz"
    table = pd.read_csv(raw / name, dtype={"subject_id": str})
    found = misread_labels(PreparedSet(folder / "set"), seed, share)
    is_read = table["study_id"].isin(found.index)
    columns = table.columns[2:]
    table.loc[is_read, columns] = found.reindex(table.loc[is_read, "study_id"], columns=columns).to_numpy()
    (out / name).unlink()
    table.to_csv(out / name, index=False)


def write_c(prepared: PreparedSet, stem: str) -> None:
    """Posteriors shrunk and quantile: those of `rank --posterior` with another c_x."""
    found, train = prepared.ranking(stem, "posterior"), reports_of(prepared, "train")
    reports = found.reports[np.searchsorted(found.study_id, train.study_id)]
    for name, c in other_c(found, reports, train.says.toarray() > 0).items():
        is_known = found.sentences[:, -1] < NEVER_TRUE
        log_c = np.where(is_known, np.log(c), NEVER_TRUE).astype(np.float32)[:, None]
        of_sentences = {
            "sentence_id": found.sentence_id,
            "vector": found.sentences[:, :-1].copy(),
            "log_c": log_c,
        }
        seal = prepared.seal_of_reports() | prepared.seal_of_labels()
        of_reports = {"study_id": found.study_id, "vector": found.reports}
        for kind, part in {"posterior_reports": of_reports, "posterior": of_sentences}.items():
            write_vectors([part], prepared.folder / kind / f"{name}.parquet", seal)


def other_c(found: Ranking, reports: np.ndarray, says: np.ndarray) -> dict[str, np.ndarray]:
    """c of each sentence by name; `reports` and `says` (report, sentence) are of training."""
    g = expit(found.sentences[:, :-1].astype(np.float64) @ reports.T)
    mentions = says.T.sum(1)
    mean = g[says.T].mean()
    shrunk = ((g * says.T).sum(1) + SHRUNK_BY * mean) / (mentions + SHRUNK_BY)
    return {"shrunk": shrunk, "quantile": np.quantile(g, QUANTILE, axis=1)}


def mention_model(prepared: PreparedSet) -> dict[str, Any]:
    """Arrays of `label_arms.MentionScores`, from the mention model that `rank --posterior` learns of this set.

    The model is linear in a report's labels: those of reports with one label each show its weights.
    """
    sentences = prepared.table("sentences").sort_values("sentence_id")
    train = reports_of(prepared, "train")
    is_said = np.asarray(train.says.sum(0))[0] > 0
    terms = tfidf_rows(sentences["text"].to_numpy(dtype=object), is_said, prepared.folder)
    labels = prepared.table("labels").set_index("study_id").sort_index()
    names = [str(name) for name in labels]
    one_label = np.vstack([np.eye(len(names)), -np.eye(len(names)), np.zeros((1, len(names)))])
    probes = pd.DataFrame(one_label, columns=labels.columns, index=-1 - np.arange(len(one_label)))
    others = Reports(probes.index.to_numpy(), train.says[:0])
    ids = sentences["sentence_id"].to_numpy()
    vectors, parts = posterior_vectors(terms, ids, [train, others], pd.concat([labels, probes]))
    present, uncertain, silent = np.split(vectors[len(train.study_id) :], [len(names), 2 * len(names)])
    share = (labels.reindex(train.study_id) == -1).mean().to_numpy()
    return {
        "finding": np.array(names),
        "sentence_id": ids,
        "sentence": np.concatenate([part["vector"] for part in parts]).astype(np.float32),
        "silent": (silent[0] + share @ (uncertain - silent)).astype(np.float32),
        "of_finding": (present - silent).astype(np.float32),
    }


def prepare(
    folder: Path, seed: int, plan: dict[str, Any], with_errors: bool = False
) -> dict[str, dict[str, Any]]:
    """Names and numbers that settings of arms refer to, of the set and of the one with errors of the labeller."""
    is_frozen = plan["read"]["start"] == "heads"
    facts = (prepare_encoded if is_frozen else prepare_texts)(folder, seed, plan)
    if is_frozen:
        run(folder, "embed set --model lm/language_model --pooling mean", "set/text_embedding/*.parquet")
        facts["text_embedding"] = next((folder / "set/text_embedding").glob("*.parquet")).stem
    if not (folder / "mentions.parquet").is_file():
        prepared = PreparedSet(folder / "set")
        train = reports_of(prepared, "train")
        sentences = prepared.table("sentences").sort_values("sentence_id")
        n_train = np.asarray(train.says.sum(0))[0].astype(int)
        write_terms(sentences["text"][n_train > 0].tolist(), folder / "terms.json")
        np.savez(folder / "mention_model.npz", **mention_model(prepared))
        table = pd.DataFrame({"sentence_id": sentences["sentence_id"], "n_train": n_train})
        table.to_parquet(folder / "mentions.parquet")
    if with_errors:
        if not (folder / "errors_raw").is_dir():
            write_misread_release(folder, seed, plan["misread"])
        run(
            folder,
            f"prepare mimic-cxr --source errors_raw --output set_errors --size 160 --workers 1 {plan['set_options']}",
            "set_errors/dataset.json",
        )
    if is_frozen:
        run(
            folder,
            "fit --import label_arms --config start/config.yaml --run_folder start_tfidf "
            "--model.init_args.text_encoder label_arms.TfidfSentences "
            "--model.init_args.text_encoder.init_args.file terms.json",
            "start_tfidf/fit.json",
        )
    of_sets = {}
    for name in ("set", *(["set_errors"] if with_errors else [])):
        for start, features in (("start", "frozen"), ("start_tfidf", "tfidf")) if is_frozen else ():
            run(
                folder,
                f"encode {start}/checkpoints/untrained.ckpt {name} --name {features} --import label_arms",
                f"{name}/features/{features}/features.json",
            )
        run(folder, f"rank {name} --posterior", f"{name}/posterior/labels-*.parquet")
        stem = next((folder / name / "posterior").glob("labels-*.parquet")).stem
        if not (folder / name / "posterior/quantile.parquet").is_file():
            write_c(PreparedSet(folder / name), stem)
        of_sets[name] = {
            **facts,
            "posterior": stem,
            "posterior_shrunk": "shrunk",
            "posterior_quantile": "quantile",
        }
    return of_sets


# Arms


def level(
    plan: dict[str, Any], of_sets: Mapping[str, Any], similarity: str, arm: str, chosen: list[str]
) -> dict[str, Any]:
    """Files and settings of an arm, with the chosen rate and what follows it."""
    one = plan["arms"][arm]
    settings = {**plan["similarities"][similarity], **one.get("settings", {})}
    for name in chosen:
        if name in plan["rates"]:
            settings |= dict.fromkeys(plan["rate"], plan["rates"][name])
        else:
            settings |= plan["tuned"]["settings"][name]
    name = "set_errors" if one.get("errors") else "set"
    settings |= {"data.init_args.folder": name}
    return {"configs": list(one["configs"]), "settings": filled(settings, of_sets[name])}


def arms_of(plan: dict[str, Any], similarity: str, number: int = 0) -> dict[str, dict[str, Any]]:
    """Arms of the replicate with this number, from 0."""
    return {
        name: arm
        for name, arm in plan["arms"].items()
        if arm.get("only", similarity) == similarity and number < arm.get("replicates", number + 1)
    }


def chosen_of(plan: dict[str, Any], similarity: str, arm: str) -> list[str]:
    """Rate, what follows it, and c of the arm that it was chosen for."""
    one, chosen = plan["arms"][arm], plan["chosen"][similarity]
    own = chosen[one.get("as", arm)]
    of_c = plan["arms"][one.get("as", arm)].get("c_as")
    return [*own, *([] if of_c is None else [x for x in chosen[of_c] if x.startswith("c_")])]


def first_levels(plan: dict[str, Any], similarity: str) -> Iterator[tuple[str, list[str]]]:
    """Arm and rate, of all arms that are tuned for themselves."""
    for arm, one in arms_of(plan, similarity).items():
        if "as" not in one:
            yield from ((arm, [rate]) for rate in plan["rates"])


def later_levels(
    plan: dict[str, Any], similarity: str, rates: Mapping[str, str]
) -> Iterator[tuple[str, list[str]]]:
    """Arm, its chosen rate, and a setting that follows it."""
    for arm in arms_of(plan, similarity):
        yield from ((arm, [rates[arm], name]) for name in plan["tuned"]["then"].get(arm, []))


def experiments(
    plan: dict[str, Any],
    of_sets: Mapping[str, Any],
    similarity: str,
    levels: list[tuple[str, list[str]]],
    steps: list[int],
    test: bool,
) -> dict[str, dict[str, Any]]:
    """Experiments of arms scored by pairs and of those scored by labels, by a suffix of their names."""
    found = {}
    for suffix, is_scored in (("", False), ("_by_labels", True)):
        mine = [x for x in levels if bool(plan["arms"][x[0]].get("scored")) == is_scored]
        if not mine:
            continue
        by = {"by_labels": "mention_model.npz"} if is_scored else {}
        callbacks: list[dict[str, Any]] = [{"class_path": "label_arms.OwnSentences", "init_args": by}]
        outcomes = dict(_MRR)
        if test:
            sentences = {"mentions": "mentions.parquet", **by}
            callbacks += [{"class_path": "label_arms.Sentences", "init_args": sentences}]
            of_pairs = {} if is_scored else OF_PAIRS
            outcomes |= {
                name: (path, "own_mrr_within") for name, path in {**OF_SENTENCES, **of_pairs}.items()
            }
            of_images = "medclip_dcl.evaluation.ZeroShotClassification"
            for name in (of_images, "label_arms.ReportRetrieval", "label_arms.Contrast"):
                callbacks += [{"class_path": name}] if of_pairs else []
        checkpoint = {"checkpoint.monitor": "validate/own_mrr_within", "checkpoint.mode": "max"}
        settings = {"trainer.callbacks": callbacks, **checkpoint}
        arms = {
            "-".join([arm, *names]) if not test else arm: level(plan, of_sets, similarity, arm, names)
            for arm, names in mine
        }
        commands = ["fit", "test"] if test else ["fit"]
        content = experiment(of_sets["set"], arms, steps, commands, outcomes, settings)
        content["folder"] = ""
        found[suffix] = content
    return found


def results(folder: Path, name: str, of_suffix: Mapping[str, dict[str, Any]]) -> pd.DataFrame:
    """Rows of `by_outcome` of experiments that are run here, or were."""
    options = "--import label_arms"
    tables = [by_outcome(study(folder, name + suffix, x, options)) for suffix, x in of_suffix.items()]
    return pd.concat(tables, ignore_index=True)


# Phases


def tune(folder: Path, plan: dict[str, Any], start: str, seeds: range) -> None:
    """Run both stages of all tuning seeds, side by side, and print what they choose.

    The rows of an arm are written to tuning.csv when a seed has them, and are not run again.
    """
    of_sets, chosen, one_writes = {}, {}, Lock()

    def prepared(seed: int, of_seed: Path) -> None:
        of_sets[seed] = prepare(of_seed, seed, plan)

    def tuned(seed: int, similarity: str, levels: list[tuple[str, list[str]]]) -> None:
        rows = tuning_rows(start, similarity)
        there = set(rows.loc[rows["replicate"] == seed, "arm"])
        left = [(arm, names) for arm, names in levels if "-".join([arm, *names]) not in there]
        for arm in dict.fromkeys(arm for arm, _ in left):
            mine = [level for level in left if level[0] == arm]
            each = experiments(plan, of_sets[seed], similarity, mine, plan["kept_steps"], test=False)
            name = "-".join([f"tune_{start}_{similarity}_{arm}", *mine[-1][1]])
            table = results(folder / str(seed), name, each)
            with one_writes:
                keep_tuning_rows(table.assign(replicate=seed, start=start, similarity=similarity))

    each_in_its_folder(prepared, seeds, folder, len(seeds))
    for similarity in plan["similarities"]:
        levels = [*first_levels(plan, similarity)]
        for _ in ("rates", "what follows them"):
            with ThreadPoolExecutor(len(seeds)) as pool:
                [*pool.map(partial(tuned, similarity=similarity, levels=levels), seeds)]
            choice = chosen_settings(tuning_rows(start, similarity))
            levels = [*later_levels(plan, similarity, {arm: names[0] for arm, names in choice.items()})]
        chosen[similarity] = choice
    print("chosen:", *(f"  {name}: {one}" for name, one in chosen.items()), sep="\n")


def tuning_rows(start: str, similarity: str) -> pd.DataFrame:
    """Rows of tuning.csv, whose arms are named with their settings."""
    table = pd.read_csv(TUNING)
    table["arm"] += "-" + table["setting"]
    return table[(table["start"] == start) & (table["similarity"] == similarity)]


def keep_tuning_rows(table: pd.DataFrame) -> None:
    """Add rows of arms, named with their settings, to tuning.csv."""
    names, there = table["arm"].str.split("-", n=1), pd.read_csv(TUNING)
    table = table.assign(arm=names.str[0], setting=names.str[1]).round(5)[[*there]]
    write_text(pd.concat([there, table]).to_csv(index=False), TUNING)


def chosen_settings(table: pd.DataFrame) -> dict[str, list[str]]:
    """By arm: the best mean over replicates of the best validate `mrr_within` over steps; the first of equal ones."""
    best = table.groupby(["arm", "replicate"], sort=False)["validate mrr_within"].max()
    means = best.groupby("arm", sort=False).mean()
    arms = means.index.str.split("-").str[0]
    return {str(arm): str(means[arms == arm].idxmax()).split("-")[1:] for arm in dict.fromkeys(arms)}


def test(folder: Path, seed: int, plan: dict[str, Any], rows: Path, hashed: str) -> None:
    number, found = seed - plan["tested"][0], []
    of_arms = {similarity: arms_of(plan, similarity, number) for similarity in plan["similarities"]}
    has_errors = any(arm.get("errors") for arms in of_arms.values() for arm in arms.values())
    of_sets = prepare(folder, seed, plan, has_errors)
    for similarity, arms in of_arms.items():
        levels = [(arm, chosen_of(plan, similarity, arm)) for arm in arms]
        each = experiments(plan, of_sets, similarity, levels, plan["kept_steps"], test=True)
        table = results(folder, f"{plan['read']['start']}_{similarity}", each)
        if any(plan["arms"][arm].get("scored") for arm in arms):
            row = {"arm": "report_labels", "step": plan["fixed_end"], **of_report_labels(folder)}
            table = pd.concat([table, pd.DataFrame([row])], ignore_index=True)
        found.append(table.assign(similarity=similarity))
    write_rows(tested_rows(pd.concat(found, ignore_index=True)), rows, seed, plan, hashed)


def of_report_labels(folder: Path) -> dict[str, float | None]:
    """Outcomes of g with the labels of the test images' own reports: what a label head without error would have."""
    tables = ImageTextDataModule(str(folder / "set"), image_size=160).evaluation("test")
    evaluation = Sentences(*(str(folder / name) for name in ("mentions.parquet", "mention_model.npz")))
    needed = evaluation.prepare(tables, "test")
    images = tables.images[tables.images["dicom_id"].isin(needed)]
    labels = PreparedSet(folder / "set").table("labels").set_index("study_id").reindex(images["study_id"])
    present = torch.from_numpy((labels == 1).to_numpy(np.float32))
    assert evaluation.by is not None
    scores = evaluation.by.of_chances(present, [*labels], evaluation.sentence_ids).T.numpy()
    values = dict(zip(images["dicom_id"], scores, strict=True))
    network: Any = None  # not needed for values that are there
    found: Any = {name: x.metrics for name, x in evaluation.summarise(network, values, tables).items()}
    return {f"test {name}": reduce(getitem, path.split("/"), found) for name, path in OF_SENTENCES.items()}


def tested_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Without the truth on validate images, and with the mean of the three bands."""
    names = [x for x in map(str, table) if not x.startswith("validate") or x.startswith("validate mrr")]
    bands = table[[f"test {band}" for band in ("common", "middle", "rare")]].mean(axis=1, skipna=False)
    table = table[names].assign(**{"test bands": bands})
    if "test cnr" in table:
        table["test cnr"] /= 10  # rows hold numbers from 0 to 1
    return table


SMOKE = {
    **{"studies": 400, "pairs": 128, "tuning": [291, 291]},
    "language_model_options": "--trainer.max_epochs 1",
    "encoder_options": "--trainer.max_epochs 1 --trainer.check_val_every_n_epoch 1",
}


def smoke(folder: Path, seed: int) -> None:
    """Every arm with its test, for few steps on a small phantom; core-seconds, and the outcomes without a number."""
    for start in STARTS:
        plan = {**read_start(start), **SMOKE}
        with core_seconds(f"{start}: preparation"):
            of_sets = prepare(folder, seed, plan, with_errors=True)
        for similarity in plan["similarities"]:
            levels = [(arm, ["usual"]) for arm in arms_of(plan, similarity)]
            each = experiments(plan, of_sets, similarity, levels, [2, 4], test=True)
            with core_seconds(f"{start}, {similarity}: {len(levels)} arms"):
                table = tested_rows(results(folder, f"smoke_{start}_{similarity}", each))
            lacks = [column for column in map(str, table) if table[column].isna().all()]
            print(f"  {len(table)} rows, without any number: {', '.join(lacks) or 'none'}", flush=True)


@contextmanager
def core_seconds(what: str) -> Iterator[None]:
    """Print how long this process and its children had a core."""

    def used() -> float:
        uses = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(use.ru_utime + use.ru_stime for use in uses)

    before = used()
    yield
    print(f"{what}: {used() - before:.1f} core-seconds", flush=True)


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("phase", choices=["tune", "test", "smoke"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--start", choices=STARTS, default="frozen")
    parser.add_argument("--until", type=int, help="last seed (that of the plan)")
    options = parser.parse_args()
    folder, plan = options.folder.absolute(), read_start(options.start)
    first, last = plan["tested" if options.phase == "test" else "tuning"]
    seeds = range(first, min(options.until or last, last) + 1)
    if options.phase == "smoke":
        smoke(folder / str(first), first)
    elif options.phase == "tune":
        tune(folder, plan, options.start, seeds)
    elif "chosen" not in plan:
        parser.error(
            f"{options.start}.yaml: expected `chosen`, found none; run tune and commit what it chooses"
        )
    else:
        rows, hashed = HERE / f"rows_{options.start}", plan_hash(files_of(options.start))

        def work(seed: int, of_seed: Path) -> None:
            if not (rows / f"{seed}.csv").is_file():
                test(of_seed, seed, plan, rows, hashed)

        each_in_its_folder(work, seeds, folder, 1)


if __name__ == "__main__":
    main()
