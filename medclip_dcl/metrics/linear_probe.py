"""Linear probes on frozen features: softmax classifiers, several draws of labels at once, and logistic regressions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from medclip_dcl.metrics.weighted import weighted_auc


@dataclass(frozen=True)
class LinearProbe:
    """Softmax classifiers of the same features, one for each draw of labels."""

    weight: Float[Tensor, "draw feature class"]
    bias: Float[Tensor, "draw 1 class"]

    def logits(self, features: Float[Tensor, "image feature"]) -> Float[Tensor, "draw image class"]:
        """Logits of each draw's classifier."""
        return features @ self.weight + self.bias


def fit_linear_probes(
    features: Float[Tensor, "image feature"],
    labels: Int[Tensor, " image"],
    drawn: Int[Tensor, "draw labelled"],
    n_classes: int,
    *,
    epochs: int,
    learning_rate: float,
    weight_decay: float,
    batch_size: int,
    seed: int,
) -> LinearProbe:
    """Train a softmax classifier on each draw of labelled images, by minibatch Adam on their cross entropy.

    All draws are trained at once: they share no parameter, and Adam treats each number by itself, so that the result
    of a draw does not depend on the others. Weights start at 0 (choice: no random draw; the problem is convex).

    Args:
        features: of all images.
        labels: class of each image, from 0.
        drawn: places of the images whose labels a draw uses.
        n_classes: of the classifier.
        epochs: passes over the drawn images.
        learning_rate: of Adam, constant.
        weight_decay: of Adam.
        batch_size: images in a step; the last one of an epoch may have fewer.
        seed: of the order, which is another in each draw and epoch.
    """
    n_draws, count = drawn.shape
    # Not (seed, draw), the stream of the drawn labels.
    generators = [np.random.default_rng([seed, draw, 1]) for draw in range(n_draws)]
    # Lightning evaluates in inference mode, in which nothing can be trained.
    with torch.inference_mode(False), torch.enable_grad():
        weight = features.new_zeros(n_draws, features.shape[1], n_classes).requires_grad_()
        bias = features.new_zeros(n_draws, 1, n_classes).requires_grad_()
        optimizer = torch.optim.Adam([weight, bias], lr=learning_rate, weight_decay=weight_decay)
        for _ in range(epochs):
            order = torch.from_numpy(np.stack([generator.permutation(count) for generator in generators]))
            for batch in drawn.gather(1, order.to(drawn.device)).split(batch_size, dim=1):
                logits = torch.baddbmm(bias, features[batch], weight)
                losses = cross_entropy(logits.flatten(0, 1), labels[batch].flatten(), reduction="sum")
                optimizer.zero_grad()
                (losses / batch.shape[1]).backward()
                optimizer.step()
    return LinearProbe(weight.detach(), bias.detach())


def draw_labelled(
    labels: Int[np.ndarray, " image"], fraction: float, draws: int, seed: int
) -> Int[np.ndarray, "draw labelled"]:
    """Places of the images whose labels each draw uses: this fraction of every class, at least one image of each.

    With the same seed a smaller fraction, in (0, 1], lies within a larger one. Images with labels below 0 are never
    drawn; draws are independent.
    """
    classes = np.unique(labels[labels >= 0])
    found = []
    for draw in range(draws):
        generator = np.random.default_rng([seed, draw])
        parts = []
        for one in classes:
            places = generator.permutation(np.flatnonzero(labels == one))
            parts.append(places[: max(1, round(fraction * len(places)))])
        found.append(np.sort(np.concatenate(parts)))
    return np.stack(found)


def standardisation(
    features: Float[Tensor, "image feature"],
) -> tuple[Float[Tensor, " feature"], Float[Tensor, " feature"]]:
    """Mean and deviation of each feature, by which a linear layer sees them shifted and scaled.

    Deviations are clamped at 1% of their mean, so that nearly constant features are not amplified.
    """
    deviation = features.std(dim=0, correction=0)
    least = 0.01 * deviation.mean()
    return features.mean(dim=0), deviation.clamp_min(least) if least > 0 else torch.ones_like(deviation)


def logistic_probes(
    features: Float[np.ndarray, "image feature"], targets: Float[np.ndarray, "image finding"], strength: float
) -> tuple[Float[np.ndarray, "finding feature"], Float[np.ndarray, " finding"]]:
    """Weights and biases of scikit-learn's logistic regression (L2, C, L-BFGS) of each finding; NaN is left out."""
    from sklearn.linear_model import LogisticRegression

    found = []
    for target in targets.T:
        known = ~np.isnan(target)
        model = LogisticRegression(C=strength, max_iter=1000)
        found.append(model.fit(features if known.all() else features[known], target[known]))
    return np.concatenate([one.coef_ for one in found]), np.concatenate([one.intercept_ for one in found])


def finding_aucs(
    scores: Float[np.ndarray, "image finding"], targets: Float[np.ndarray, "image finding"], min_cases: int
) -> Float[np.ndarray, " finding"]:
    """AUC of each finding without its targets of NaN; NaN with fewer than `min_cases` images of a class."""
    found = np.full(targets.shape[1], np.nan)
    for place, (score, target) in enumerate(zip(scores.T, targets.T, strict=True)):
        positive, known = target == 1, ~np.isnan(target)
        if min(positive.sum(), (target == 0).sum()) >= min_cases:
            found[place] = weighted_auc(score[known], positive[known], np.ones((1, known.sum())))[0]
    return found
