"""Weighted metrics against scikit-learn and numpy on repeated rows; which findings have a number."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit, softmax
from sklearn.metrics import accuracy_score, average_precision_score, balanced_accuracy_score, roc_auc_score

from medclip_dcl.metrics.summaries import classification, once, prompts, recalls, sentences, values_of
from medclip_dcl.metrics.weighted import (
    weighted_auc,
    weighted_average_precision,
    weighted_mean,
    weighted_median,
    weighted_precision,
)


@pytest.mark.parametrize("n", [2, 7, 77])
@pytest.mark.parametrize("decimals", [0, 1, 6])
def test_weighted_metrics_are_those_of_repeated_rows(n, decimals):
    """Weights of 1, weights that leave rows out, and a draw that loses every positive row; with ties."""
    random = np.random.default_rng(n + decimals)
    positive = random.random(n) < 0.3
    positive[:2] = True, False
    scores = np.round(30 * random.normal(size=n) + positive, decimals)
    weights = np.stack([np.ones(n), *random.integers(0, 4, (13, n)), ~positive]).astype(float)
    auc, precision = (f(scores, positive, weights) for f in (weighted_auc, weighted_average_precision))
    with_nan = np.where(np.arange(n) == 0, np.nan, scores)
    means, medians = weighted_mean(with_nan, weights), weighted_median(scores, weights)
    assert np.isnan(auc[-1]) and np.isnan(precision[-1])
    for draw, of_rows in enumerate(weights):
        rows = np.repeat(np.arange(n), of_rows.astype(int))
        if positive[rows].any():
            assert precision[draw] == pytest.approx(average_precision_score(positive[rows], scores[rows]))
            if not positive[rows].all():
                assert auc[draw] == pytest.approx(roc_auc_score(positive[rows], scores[rows]))
        if (rows > 0).any():
            assert means[draw] == pytest.approx(scores[rows[rows > 0]].mean())
        if len(rows):
            assert medians[draw] == np.median(scores[rows])
    nothing = np.zeros((1, n))
    assert np.isnan(weighted_mean(scores, nothing)).all() and np.isnan(weighted_median(scores, nothing)).all()


def test_unweighted_means_are_numpys_to_the_bit():
    values = np.random.default_rng(0).normal(size=1003)
    assert weighted_mean(values, np.ones((1, 1003)))[0] == values.mean()


def cases_of(finding: str, labels: list[int], **scores) -> pd.DataFrame:
    return pd.DataFrame({"finding": finding, "label": labels, "subject_id": range(len(labels)), **scores})


def test_zero_shot_numbers_are_the_score_differences():
    random = np.random.default_rng(3)
    labels = random.integers(0, 2, 83)
    positive, negative = random.normal(size=(2, 83)) + 5
    cases = cases_of("Edema", labels.tolist(), score_positive=positive, score_negative=negative)
    found = values_of(classification(cases, once(cases)))
    expected = {
        "auc": roc_auc_score(labels, positive - negative),
        "acc": accuracy_score(labels, positive > negative),
        "balanced_acc": balanced_accuracy_score(labels, positive > negative),
        "average_precision": average_precision_score(labels, positive - negative),
        "pos": roc_auc_score(labels, positive),
        "neg": roc_auc_score(1 - labels, negative),
    }
    expected["gain"] = expected["auc"] - expected["pos"]
    # As Bi-MCQ (arXiv 2601.22696) forms it: the sigmoid of the softmax over both prompts.
    assert expected["auc"] == roc_auc_score(labels, expit(softmax([positive, negative], axis=0)[0]))
    assert found["by_finding"]["Edema"] == pytest.approx(expected) and found["acc"] == expected["acc"]


def test_means_over_bands_are_of_their_findings():
    random = np.random.default_rng(5)
    bands = {"Edema": "head", "Mass": "tail", "Hernia": "tail", "Few": "tail"}
    cases = []
    for finding, band in bands.items():
        labels = random.integers(0, 2, 40).tolist() if finding != "Few" else [1] * 4 + [0] * 36
        scores = dict(zip(("score_positive", "score_negative"), random.normal(size=(2, 40)), strict=True))
        cases.append(cases_of(finding, labels, **scores).assign(band=band))
    found = values_of(classification(pd.concat(cases), np.ones((1, 160))))
    for name in ("auc", "average_precision", "pos", "neg"):
        each = {finding: found["by_finding"][finding][name] for finding in bands}
        assert found["head"][name] == each["Edema"] and found["middle"][name] is None
        assert found["tail"][name] == pytest.approx((each["Mass"] + each["Hernia"]) / 2)
    assert found["tail"].keys() == {"auc", "average_precision", "pos", "neg"}


def test_single_prompts_are_scikit_learns_in_each_draw():
    random, weights = np.random.default_rng(6), np.random.default_rng(7).integers(0, 4, (5, 90))
    parts = [
        cases_of("Mass", random.integers(0, 2, 30).tolist(), score=random.normal(size=30)).assign(
            side=side, prompt=text
        )
        for side, text in (("negative", "No mass"), ("positive", "Mass"), ("negative", "No mass/nodule"))
    ]
    found = prompts(pd.concat(parts), weights.astype(float))["by_finding"]["Mass"]
    assert [*found["wordings"]] == ["No mass", "No mass/nodule"]
    for draw, counts in enumerate(weights.reshape(5, 3, 30)):
        expected = [
            roc_auc_score(1 - one["label"], one["score"], sample_weight=count)
            for one, count in zip(parts, counts, strict=True)
            if one["side"].iloc[0] == "negative"
        ]
        each = [values[draw] for values in found["wordings"].values()]
        assert each == pytest.approx(expected)
        assert found["neg_lowest"][draw] == min(each) and found["neg_median"][draw] == np.mean(each)


def test_logits_have_average_precision_and_zero_is_absence():
    logits = [2.0, -1.0, 0.0, 0.5, -3.0]
    cases = cases_of("Edema", [1, 1, 1, 0, 0], logit=logits)
    found = values_of(classification(cases, once(cases), 2))
    assert found["auc"] == pytest.approx(4 / 6) and found["acc"] == pytest.approx(2 / 5)
    assert found["average_precision"] == pytest.approx(average_precision_score(cases["label"], logits))


@pytest.mark.parametrize(("positives", "negatives"), [(4, 50), (50, 4), (0, 9), (0, 0)])
def test_findings_of_few_cases_have_no_number(positives, negatives):
    few = [1] * positives + [0] * negatives
    enough = [1, 0] * 5
    cases = pd.concat(
        [
            cases_of("Few", few, logit=np.zeros(len(few))),
            cases_of("Enough", enough, logit=np.array(enough) * 2.0 - 1),
        ]
    )
    found = values_of(classification(cases, once(cases), findings=["Few", "Enough"]))
    assert set(found["by_finding"]["Few"].values()) == {None}
    assert found["by_finding"]["Enough"]["auc"] == found["auc"] == found["average_precision"] == 1.0
    nothing = values_of(classification(cases[:0], once(cases[:0]), findings=["Few"]))
    assert nothing["auc"] is None and nothing["by_finding"]["Few"]["acc"] is None


def test_recalls_by_hand():
    ranks = [1.0, 10.0, 10.5, 51.0, 100.0, 101.0]
    queries = pd.DataFrame({"direction": ["image_to_text"] * 6 + ["text_to_image"], "rank": [*ranks, 1.0]})
    found = values_of(recalls(queries, once(queries)))
    recall_at = {"R@1": 1 / 6, "R@5": 1 / 6, "R@10": 2 / 6, "R@50": 3 / 6, "R@100": 5 / 6}
    assert found["image_to_text"] == {**recall_at, "MedR": 30.75}
    # The mean is the paper's: over 10, 50 and 100 alone.
    assert found["recall"] == pytest.approx((10 / 6 + 3) / 6) and found["medr"] == 15.875


def sentence_cases(random, n_images=37):
    """Three classes of one to three wordings, a common, a rare and a middle one; scores tie."""
    patients = np.sort(random.integers(0, 19, n_images))
    rows = []
    for name, (rho, wordings) in {7: (0.4, 2), 2: (0.09, 1), 5: (0.1, 3)}.items():
        label = (random.random(n_images) < max(rho, 0.2)).astype(int)
        for wording in range(wordings):
            score = np.round(random.normal(size=n_images) + label, 1).astype("float32")
            columns = {"dicom_id": np.arange(n_images).astype(str), "subject_id": patients, "label": label}
            rows.append(
                pd.DataFrame(
                    {"sentence_id": 10 * name + wording, "class": name, "rho": rho, **columns, "score": score}
                )
            )
    return pd.concat(rows, ignore_index=True)


def test_sentences_are_scikit_learns_in_each_draw():
    """Means over wordings, then over the classes of a band; of a draw as of repeated rows."""
    random = np.random.default_rng(3)
    cases = sentence_cases(random)
    of_image = np.concatenate([np.ones((1, 37)), random.integers(0, 4, (6, 37))])
    found = sentences(cases, np.tile(of_image, (1, 6)))
    for draw, weights in enumerate(of_image.astype(int)):
        by_class = {}
        for name, of_class in cases.groupby("class"):
            wordings = [one.loc[one.index.repeat(weights)] for _, one in of_class.groupby("sentence_id")]
            by_class[name] = np.mean([roc_auc_score(one["label"], one["score"]) for one in wordings])
        bands = {"common": [7], "rare": [2], "middle": [5]}
        assert found["auc"][draw] == pytest.approx(np.mean([*by_class.values()]))
        for band, names in bands.items():
            assert found[band]["auc"][draw] == pytest.approx(np.mean([by_class[name] for name in names]))
    unknown = values_of(sentences(cases.assign(rho=np.nan), once(cases)))
    assert unknown["auc"] == pytest.approx(found["auc"][0]) and unknown["common"]["auc"] is None


@pytest.mark.parametrize("decimals", [0, 6])
def test_precision_is_the_mean_over_orders_of_ties(decimals):
    random = np.random.default_rng(decimals)
    scores, positive = np.round(random.normal(size=200), decimals), random.random(200) < 0.3
    weights = np.stack([np.ones(200), random.integers(0, 3, 200), np.arange(200) == 5]).astype(float)
    found = weighted_precision(scores, positive, weights, 10)
    for draw, of_rows in enumerate(weights):
        rows = np.repeat(np.arange(200), of_rows.astype(int))
        orders = [
            sorted(random.permutation(rows), key=lambda row: -scores[row])[:10]
            for _ in range(4000 if decimals == 0 else 1)
        ]
        assert found[draw] == pytest.approx(np.mean([positive[order].mean() for order in orders]), abs=0.01)
