"""Linear probes: softmax classifiers on frozen features, several draws of labels at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy


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
