"""Pieces of the label study by their right values, its arms as experiments, and the reading of its plan."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from label_arms import (
    Contrast,
    LabelCosine,
    MentionScores,
    NoContrast,
    ShuffledPosterior,
    TfidfSentences,
    TrueTargets,
    further_means,
    mean_reciprocal_rank,
    write_terms,
)
from label_open_i import compared, sentences_of
from label_replicates import (
    STARTS,
    arms_of,
    chosen_of,
    chosen_settings,
    experiments,
    first_levels,
    later_levels,
    mention_model,
    misread,
    misread_labels,
    of_report_labels,
    other_c,
    read_start,
    statements,
)
from reading import NOT_READ, UNDECIDED, read
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics import roc_auc_score

from data_prep.phantom.options import Options
from data_prep.phantom.release import write_phantom
from medclip_dcl.command.config_files import allow_imports
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.data.ranking import Ranking
from medclip_dcl.encoding.options import Rank
from medclip_dcl.encoding.rank_reports import rank_reports, reports_of
from medclip_dcl.evaluation import Grounding
from medclip_dcl.evaluation.regions import Region
from medclip_dcl.networks import ImageTextNetwork, ResNetRegions
from medclip_dcl.networks.image_text import pad_tokens
from medclip_dcl.objectives.anchor_losses import Anchors
from medclip_dcl.pictures.geometry import Seen
from medclip_dcl.studies.grid_plan import check_cells, read_experiment
from tests.program import verb

# Parts


def test_tfidf_of_a_sentence_is_that_of_scikit_learn(tmp_path):
    texts = [
        "No pleural effusion.",
        "Small pleural effusion.",
        "No large effusion, no pneumothorax.",
        "A line.",
    ]
    write_terms(texts, tmp_path / "terms.json")
    encoder = TfidfSentences(str(tmp_path / "terms.json"), 3)
    options = {"token_pattern": r"\b\w+\b", "ngram_range": (1, 3), "min_df": 2}
    expected = TfidfVectorizer(**options).fit(texts)
    new = [*texts, "effusion effusion no", "unknown"]
    found = encoder.states(*pad_tokens(encoder.tokenize(new)))
    order = [expected.vocabulary_[term] for term in json.loads(encoder.terms)]
    np.testing.assert_allclose(found.numpy(), expected.transform(new).toarray()[:, order], atol=1e-6)
    again = TfidfSentences(**encoder.config())
    again.load_state_dict(encoder.state_dict())
    tokens = pad_tokens(encoder.tokenize(new))
    torch.testing.assert_close(again(*tokens), encoder(*tokens))


def anchors(fields, of_candidates, n=3, m=5):
    logits = torch.randn(n, m, generator=torch.Generator().manual_seed(0))
    is_positive = torch.eye(n, m, dtype=torch.bool)
    is_negative = ~is_positive
    is_negative[0, 4] = False
    weights = is_negative.float()
    return Anchors(
        *(logits, is_positive, is_negative, weights, 0.0, torch.tensor(4.0), True, fields, of_candidates)
    )


def test_true_targets_share_among_images_of_the_class():
    classes = torch.tensor([[1, 0], [0, 1], [1, 1], [1, 0], [1, 1]], dtype=torch.uint8)
    found = TrueTargets().targets(anchors({"class_id": torch.tensor([0, 1, 1])}, {"image_classes": classes}))
    expected = [[1 / 3, 0, 1 / 3, 1 / 3, 0], [0, 1 / 3, 1 / 3, 0, 1 / 3], [0, 1 / 3, 1 / 3, 0, 1 / 3]]
    torch.testing.assert_close(found, torch.tensor(expected))


def test_shuffled_keeps_the_negatives_of_an_anchor():
    random = torch.Generator().manual_seed(1)
    fields = {"sentence_posterior": torch.randn(3, 5, generator=random)}
    given = anchors(fields, {"report_posterior": torch.randn(5, 4, generator=random)})
    one = ShuffledPosterior()
    before = super(ShuffledPosterior, one).posterior(given)
    torch.manual_seed(0)
    drawn = torch.stack([one.posterior(given) for _ in range(300)])
    for row in range(3):
        is_negative = given.is_negative[row]
        same = drawn[:, row, is_negative].sort(1).values
        torch.testing.assert_close(same, before[row, is_negative].sort().values.expand_as(same))
        assert drawn[:, row, is_negative].mean(0).std() < 0.1 * before[row, is_negative].std() + 0.02


def test_cosine_of_labels_takes_statements_and_doubts_apart():
    nan = float("nan")
    labels = torch.tensor([[1, nan, 0], [1, 1, nan], [-1, 0, 0], [nan, nan, 0], [0, 1, nan]])
    given = anchors({"labels": labels[:3]}, {"labels": labels})
    cosine = torch.tensor([[1, 0.5**0.5, 0, 0], [0.5**0.5, 1, 0, 0, 0.5**0.5], [0, 0, 1, 0, 0]][1:])
    found = LabelCosine(0.5).targets(given)
    torch.testing.assert_close(found[1:], (cosine / 0.5).softmax(1))
    torch.testing.assert_close(found[0, :4], (torch.tensor([1, 0.5**0.5, 0, 0]) / 0.5).softmax(0))
    assert found[0, 4] == 0


def test_no_contrast_has_no_loss_and_a_gradient_of_zero():
    given = anchors({}, {})
    logits = given.logits.requires_grad_()
    loss = NoContrast()(given._replace(logits=logits)).sum()
    loss.backward()
    assert loss == 0 and (logits.grad == 0).all()


def test_reciprocal_ranks_by_hand():
    scores = np.array([[3.0, 1.0, 2.0], [0.0, 5.0, 5.0]])
    own = np.array([[True, True, False], [False, False, True]])
    assert mean_reciprocal_rank(scores, own) == pytest.approx(((1 + 1 / 3) / 2 + 1 / 1.5) / 2)


def test_means_of_rare_and_new_sentences():
    random = np.random.default_rng(0)
    sentence = pd.DataFrame({"sentence_id": range(5), "class": [0, 0, 1, 2, 3], "rho": [0.05] * 4 + [0.5]})
    cases = sentence.merge(pd.DataFrame({"image": range(30)}), how="cross")
    cases = cases.assign(label=random.integers(0, 2, 150), score=random.integers(0, 9, 150))
    found = further_means(cases, pd.Series({0: 4, 1: 2, 2: 1, 4: 9}))
    auc = [roc_auc_score(x["label"], x["score"]) for _, x in cases.groupby("sentence_id")]
    expected = {
        "rare_often": (auc[0] + auc[1]) / 2,
        "rare_seldom": auc[2],
        "rare_never": auc[3],
        "seen": np.mean([(auc[0] + auc[1]) / 2, auc[2], auc[4]]),
        "unseen": auc[3],
    }
    assert found == pytest.approx(expected)


def test_contrast_is_that_of_grounding():
    heat_map = torch.rand(40, 50, generator=torch.Generator().manual_seed(0))
    regions = [Region(3, (5.0, 8.0, 10.0, 20.0)), Region(7, (0.0, 0.0, 50.0, 12.0))]
    given = heat_map, regions, (40, 50), Seen(0, 36, 4, 50)
    expected, found = (x.compared(*given)["boxes"] for x in (Grounding(), Contrast()))
    assert [*found] == [3, 7]
    for row, agreement in expected.items():
        assert found[row].cnr_signed == pytest.approx(agreement.cnr_signed, abs=1e-12)


# Labels


def test_other_c_by_loops():
    random = np.random.default_rng(0)
    sentences = random.normal(size=(4, 3)).astype(np.float32)
    reports, says = random.normal(size=(6, 2)).astype(np.float32), random.random((6, 4)) < 0.5
    found = other_c(Ranking(np.arange(4), sentences, np.arange(6), reports), reports, says)
    g = 1 / (1 + np.exp(-(sentences[:, :2].astype(float) @ reports.T)))
    every = np.mean([g[x, r] for r in range(6) for x in range(4) if says[r, x]])
    for x in range(4):
        own = [g[x, r] for r in range(6) if says[r, x]]
        assert found["shrunk"][x] == pytest.approx((sum(own) + 5 * every) / (len(own) + 5))
        assert found["quantile"][x] == pytest.approx(np.quantile(g[x], 0.8))


@pytest.fixture(scope="module")
def phantom(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phantom")
    write_phantom(folder / "raw", Options(160, 3, 64))
    words = [
        "--source",
        str(folder / "raw"),
        "--output",
        str(folder / "set"),
        "--size",
        "64",
        "--workers",
        "1",
    ]
    verb("prepare mimic-cxr")(words)
    return folder


@pytest.mark.slow
def test_a_labeller_errs_in_whole_wordings(phantom):
    prepared = PreparedSet(phantom / "set")
    labels = prepared.table("labels").set_index("study_id").astype(float)
    exact = misread_labels(prepared, 1, 0.0)
    kept = labels.loc[exact.index, exact.columns]
    pd.testing.assert_frame_equal(exact, kept, check_names=False)
    assert set(exact.index) == set(prepared.studies("train")) & set(prepared.table("reports")["study_id"])
    read, right = misread(1, 0.15), statements()
    turned = {text for text, one in read.items() if one is not right[text]}
    assert len(turned) == round(0.15 * len(right))
    column, text = next((c, t) for t in turned for c in read[t].finding.labels)
    assert read[text].finding.labels[column] == 1 - right[text].finding.labels[column]
    differs = (
        misread_labels(prepared, 1, 0.15).reindex(columns=exact.columns).fillna(9) != exact.fillna(9)
    ).any(axis=1)
    texts = prepared.table("sentences").set_index("sentence_id")["text"]
    said = prepared.table("reports")
    has_turned = said["sentence_id"].map(texts).isin(turned).groupby(said["study_id"]).any()
    assert differs.any() and has_turned.reindex(differs.index)[differs].all()


@pytest.mark.slow
def test_label_head_scores_are_those_of_the_mention_model(phantom, tmp_path):
    """With a report's labels as chances; of a report without an uncertain label, in a set with none."""
    prepared = PreparedSet(phantom / "set")
    stem = rank_reports(Rank(data=phantom / "set", posterior=True)).stem
    ranking, train = prepared.ranking(stem, "posterior"), reports_of(prepared, "train")
    np.savez(tmp_path / "model.npz", **mention_model(prepared))
    model = MentionScores(str(tmp_path / "model.npz"))
    labels = prepared.table("labels").set_index("study_id").reindex(train.study_id)
    uncertain = (labels == -1).mean().to_numpy()
    present = (labels == 1).to_numpy(dtype=float)
    found = model.silent.numpy() + present @ model.of_finding.numpy()
    # A report's own doubts in place of their mean.
    reports = ranking.reports[np.searchsorted(ranking.study_id, train.study_id)]
    names = labels.columns[(labels == -1).any()]
    doubts = (labels[names] == -1).to_numpy(dtype=float) - uncertain[labels.columns.isin(names)]
    left = reports - found
    fitted = doubts @ np.linalg.lstsq(doubts, left, rcond=None)[0]
    np.testing.assert_allclose(left, fitted, atol=2e-5)
    np.testing.assert_allclose(model.sentences.numpy(), ranking.sentences[:, :-1], atol=1e-6)
    text = TfidfSentences(dim=16, terms='{"no": 1.0}')
    network = ImageTextNetwork(ResNetRegions(dim=16, stride=16, width=8), text, image_size=32).eval()
    network.set_label_head(model.finding[:3])
    assert network.label_head is not None
    torch.nn.init.normal_(network.label_head.weight)
    encoded = network.encode(torch.rand(2, 3, 32, 32))
    of_labels = [model.finding.index(one) for one in network.label_findings]
    chances = torch.sigmoid(network.label_logits(encoded)).detach()
    expected = model.sentences[:2] @ (model.silent + chances @ model.of_finding[of_labels]).T
    ids = prepared.table("sentences").sort_values("sentence_id")["sentence_id"].tolist()[:2]
    torch.testing.assert_close(model(network, encoded, ids).detach(), expected)


@pytest.mark.slow
def test_labels_of_reports_score_sentences_by_g(phantom):
    prepared = PreparedSet(phantom / "set")
    model = mention_model(prepared)
    np.savez(phantom / "mention_model.npz", **model)
    ids = model["sentence_id"]
    pd.DataFrame({"sentence_id": ids, "n_train": 0}).to_parquet(phantom / "mentions.parquet")
    images = prepared.table("images")
    images = images[images["use"] == "test"]
    labels = prepared.table("labels").set_index("study_id").reindex(images["study_id"])
    scores = model["sentence"] @ (model["silent"] + (labels == 1).to_numpy(float) @ model["of_finding"]).T
    true = prepared.table("image_classes")
    by_class: dict[int, list[float]] = {}
    classes = prepared.table("classes")
    for sentence_id, one in zip(classes["sentence_id"], classes["class_id"], strict=True):
        holds = images["dicom_id"].isin(true.loc[true["class_id"] == one, "dicom_id"]).to_numpy()
        if min(holds.sum(), (~holds).sum()) >= 10:
            row = int(np.searchsorted(ids, sentence_id))
            by_class.setdefault(one, []).append(roc_auc_score(holds, scores[row]))
    found = of_report_labels(phantom)
    assert found["test all"] == pytest.approx(np.mean([np.mean(x) for x in by_class.values()]))
    assert found["test seen"] is None and found["test unseen"] == pytest.approx(found["test all"])


# The plan


@pytest.fixture
def imported():
    allow_imports(["label_arms"])
    yield
    allow_imports(())


FACTS = {"seed": 291, "log_p": "lm", "text_embedding": "lm-mean"}
FACTS |= {"posterior": "labels", "posterior_shrunk": "shrunk", "posterior_quantile": "quantile"}


@pytest.mark.slow
@pytest.mark.parametrize(("start", "similarity"), [("frozen", "lm"), ("frozen", "tfidf"), ("scratch", "lm")])
@pytest.mark.parametrize("is_tested", [False, True])
def test_arms_are_experiments(start, similarity, is_tested, tmp_path, monkeypatch, imported):
    monkeypatch.chdir(tmp_path)
    plan, of_sets = read_start(start), {"set": FACTS, "set_errors": FACTS}
    Path("terms.json").write_text('{"no": 1.0}')
    pd.DataFrame({"sentence_id": [1], "n_train": [1]}).to_parquet("mentions.parquet")
    sizes = {"sentence": (1, 17), "silent": 17, "of_finding": (1, 17)}
    arrays = {name: np.zeros(size, np.float32) for name, size in sizes.items()}
    np.savez("mention_model.npz", finding=np.array(["Edema"]), sentence_id=np.array([1]), **arrays)
    rates = [*first_levels(plan, similarity)]
    levels = [*rates, *later_levels(plan, similarity, {arm: "fast" for arm, _ in rates})]
    if is_tested:
        plan["chosen"] = {similarity: {arm: ["fast", "c_quantile"] for arm, _ in rates}}
        levels = [(arm, chosen_of(plan, similarity, arm)) for arm in arms_of(plan, similarity)]
    runs = 0
    for content in experiments(plan, of_sets, similarity, levels, plan["kept_steps"], is_tested).values():
        Path("arms.yaml").write_text(yaml.safe_dump({**content, "folder": "arms"}))
        experiment = read_experiment(tmp_path / "arms.yaml")
        check_cells(experiment)
        runs += len(experiment.runs())
    assert runs == len(levels) > 8


def test_settings_are_chosen_by_the_mean_of_the_best_steps():
    mrr = {
        "a-slow": ([0.1, 0.5], [0.3, 0.2]),
        "a-fast": ([0.2, 0.4], [0.45, 0.1]),
        "b-slow-w3": ([0.1], [0.1]),
    }
    rows = [
        {"arm": arm, "replicate": seed, "validate mrr_within": value}
        for arm, of_seeds in mrr.items()
        for seed, values in enumerate(of_seeds)
        for value in values
    ]
    assert chosen_settings(pd.DataFrame(rows)) == {"a": ["fast"], "b": ["slow", "w3"]}


def test_shares_of_alpha_sum_to_a_twentieth():
    hypotheses = [one for start in STARTS for one in read_start(start)["hypotheses"].values()]
    assert sum(one.get("share", 0) for one in hypotheses) == pytest.approx(0.05)
    tested = {seed for start in STARTS for seed in read_start(start)["tested"]}
    assert not tested & {*range(291, 293)} and max(tested) == 324


def simulated(start, points, n):
    """Rows with exact means of points above InfoNCE, by arm, or by (similarity, arm, step rule)."""
    plan, random = read_start(start), np.random.default_rng(0)
    steps = plan["kept_steps"]
    best, rows = steps[1], []
    for similarity in plan["similarities"]:
        for arm in arms_of(plan, similarity):
            noise = random.standard_normal(n)
            noise = (noise - noise.mean()) / noise.std(ddof=1) / 2
            for step, replicate in itertools.product(steps, range(n)):
                rule = "best" if step == best else "end"
                mean = points.get((similarity, arm, rule), points.get(arm, 0.0))
                row = {"similarity": similarity, "arm": arm, "step": step, "replicate": replicate}
                row |= {"pairs": 300, "start": plan["read"]["start"], "commit": "c", "plan_hash": "h"}
                rows.append(
                    {**row, "split": "test", "outcome": "all", "value": 0.6 + (mean + noise[replicate]) / 100}
                )
                rows.append(
                    {
                        **row,
                        "split": "validate",
                        "outcome": "mrr_within",
                        "value": 0.5 - (step - best) ** 2 / 1e6,
                    }
                )
    return pd.DataFrame(rows), plan


ALL_GAIN: dict[Any, float] = {"posterior": 4.0, "truth": 4.0}


@pytest.mark.parametrize(
    ("start", "points", "expected"),
    [
        ("frozen", ALL_GAIN, {"G-lm": "passes", "H1-1": "holds", "H1-4": "holds", "H4": "gain"}),
        # Not at both steps, or not with both text inputs.
        (
            "frozen",
            {**ALL_GAIN, ("lm", "posterior", "end"): 0.0},
            {"H1-1": UNDECIDED, "H1-2": NOT_READ, "H4": "gain"},
        ),
        (
            "frozen",
            {**ALL_GAIN, ("tfidf", "truth", "best"): -1.0},
            {"G-lm": "passes", "H1-1": NOT_READ, "H4": NOT_READ},
        ),
        (
            "frozen",
            {**ALL_GAIN, ("lm", "truth", "end"): -1.0},
            {"G-lm": "fails", "H1-1": NOT_READ, "H4": "gain"},
        ),
        # A chain: shuffled is not read after a difference that is not shown.
        ("frozen", {**ALL_GAIN, "soft_labels": 4.0}, {"H1-2": "holds", "H1-3": UNDECIDED, "H1-4": NOT_READ}),
        ("frozen", {**ALL_GAIN, "label_head": 9.0}, {"H4": "cost"}),
        ("frozen", {**ALL_GAIN, "label_head": 4.0}, {"H4": "equal"}),
        (
            "frozen",
            {**ALL_GAIN, ("tfidf", "label_head", "end"): 9.0, ("tfidf", "label_head", "best"): 4.0},
            {"H4": UNDECIDED},
        ),
        (
            "scratch",
            {"posterior": 2.0, "posterior_bce": 5.0, "infonce_bce": 2.0},
            {"H2": "holds", "H3": "equal"},
        ),
        (
            "scratch",
            {"posterior": 0.0, "posterior_bce": 2.0, "infonce_bce": 2.0},
            {"H2": UNDECIDED, "H3": "cost"},
        ),
    ],
)
def test_a_difference_holds_at_both_steps_and_text_inputs(start, points, expected):
    rows, plan = simulated(start, points, 24 if start == "frozen" else 16)
    found = read(rows, plan)
    assert {name: found.decisions[name].state for name in expected} == expected
    # One of G and H1, one of H4; one of H2 and H3, two where H2 holds.
    states = {name: decision.state for name, decision in found.decisions.items()}
    is_second = states["H4"] != NOT_READ if start == "frozen" else states["H2"] == "holds"
    assert len(found.sentences) == 1 + is_second
    assert not any("nan" in one for one in found.sentences)


@pytest.mark.parametrize("start", STARTS)
def test_nothing_is_read_before_the_last_replicate(start):
    rows, plan = simulated(start, ALL_GAIN, 15)
    found = read(rows, plan)
    assert not found.p and set(x.state for x in found.decisions.values()) == {NOT_READ}


# Real text


def test_sentences_of_findings_and_their_sign():
    texts = [
        "No pleural effusion.",
        "Small left effusion.",
        "No effusion or pneumothorax.",
        "Heart size is normal.",
    ]
    texts += ["Pericardial effusion.", "Possible effusion."]
    found = sentences_of("Pleural Effusion", np.array(texts, dtype=object))
    assert found["named"].tolist() == [True, True, True, False, False, True]
    assert found["denied"].tolist() == [True, False, False, False, False, False]
    assert found["denying"].tolist() == [True, False, True, False, False, False]
    assert found["stated"].tolist() == [False, True, False, False, False, False]


def test_a_denial_fits_reports_that_deny():
    groups = {"denying": np.array([1, 1, 0, 0, 0]) > 0, "positive": np.array([0, 0, 1, 1, 0]) > 0}
    groups["silent"] = np.array([0, 0, 0, 0, 1]) > 0
    p = np.array([[0.9, 0.5, 0.5, 0.1, 0.2], [0.1, 0.1, 0.9, 0.9, 0.4]])
    found = compared(p, groups, "denied")
    assert found == pytest.approx({"auc": 0.4375, "p_denying": 0.4, "p_positive": 0.6, "p_silent": 0.3})
    assert compared(p, groups, "stated")["auc"] == pytest.approx(1 - 0.4375)
