"""Evaluation of unimodal features: linear probes, nearest neighbours, the mean classifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor
from torch.nn.functional import normalize

from medclip_dcl.common.distributed import gather_with_grad
from medclip_dcl.common.errors import UserError, check_range
from medclip_dcl.data.link import trainer_data
from medclip_dcl.evaluation.callback import Evaluation, EvaluationResult
from medclip_dcl.evaluation.embedding_map import embedding_map
from medclip_dcl.metrics.linear_probe import draw_labelled, fit_linear_probes, standardisation
from medclip_dcl.unimodal.mean_classifier import (
    average_k_metrics,
    average_k_of_scores,
    check_number_of_tasks,
    class_means,
    intraclass_deviation,
)
from medclip_dcl.unimodal.neighbours import neighbour_predictions

MAP = "embedding_map"
_MAP_IMAGES, _PERPLEXITY = 2000, 30.0
_PROBE = {"weight_decay": 1e-6, "batch_size": 128}
"""Of Adam, as SSD's; and of its steps (choice)."""


class UnimodalEvaluation(Evaluation):
    """Accuracy of classifiers on the frozen features of the encoder, before the projection.

    On validation: ``validate/knn_accuracy``, each training image classified by its nearest neighbours among the others.
    On test, trained on features of the training images without augmentation, and measured on the test images: softmax
    linear probes on all labels and on fractions of them (SSD, figure 2), weighted nearest neighbours, and CURL's mean
    classifier, its average over tasks of k + 1 classes, and the intraclass deviation. CURL's see features of length 1:
    contrastive losses compare directions, and its theory bounds the norm (choice). Training images without a label are
    left out.

    Args:
        label_fractions: shares of the training labels on which linear probes are trained, each in (0, 1]; every class
            keeps at least one image.
        label_draws: draws of the labels of a fraction below 1; the accuracy is their mean.
        label_seed: of the draws and of the order of the probes' minibatches.
        probe_epochs: passes over the drawn images (SSD: 100).
        probe_learning_rate: of Adam, constant (SSD: 1e-3).
        standardise: true: the probe sees features with mean 0 and deviation 1 among the training images, because
            contrastive objectives leave their scale free (choice; the papers do not).
        k: nearest neighbours (DCL's public code: 200); all where there are fewer.
        temperature: of the neighbours' weights.
        average_k: rivals k of the average supervised loss, over tasks of k + 1 classes (at most 1,000 a class, drawn).
        mean_labels: labels of each class for a further mean classifier, in `label_draws` draws (CURL: 5). With it, or
            another `top_k` than 1, ``classifiers`` has CURL's table 1: accuracies avg_K of tasks of K classes, for
            K - 1 in `average_k`, and top_K of all classes, by the linear probe and the mean classifiers.
        top_k: classes with the highest scores among which a case's own counts as correct.
        embedding_map: true: t-SNE of test images, at most 2,000 (choice), into predictions/embedding_map.parquet (SSD,
            figure 4).
    """

    section = "unimodal"

    def __init__(
        self,
        label_fractions: Sequence[float] = (1.0,),
        label_draws: int = 1,
        label_seed: int = 0,
        probe_epochs: int = 100,
        probe_learning_rate: float = 1e-3,
        standardise: bool = True,
        k: int = 200,
        temperature: float = 0.5,
        average_k: Sequence[int] = (1,),
        mean_labels: int | None = None,
        top_k: Sequence[int] = (1,),
        embedding_map: bool = False,
    ) -> None:
        super().__init__()
        part, counts = "UnimodalEvaluation", {"label_draws": label_draws, "mean_labels": mean_labels}
        check_range(part, "[1, inf)", k=k, top_k=min(top_k, default=1), probe_epochs=probe_epochs, **counts)
        check_range(part, "[0, inf)", label_seed=label_seed)
        check_range(part, "(0, inf)", probe_learning_rate=probe_learning_rate, temperature=temperature)
        for fraction in label_fractions:
            check_range(part, "(0, 1]", label_fractions=fraction)
        check_range(f"{part}.label_fractions", "[1, inf)", number=len(label_fractions))
        self.label_fractions = sorted({float(x) for x in label_fractions}, reverse=True)
        self.label_draws, self.label_seed = label_draws, label_seed
        self.probe: dict[str, Any] = {"epochs": probe_epochs, "learning_rate": probe_learning_rate, **_PROBE}
        self.standardise = standardise
        self.k, self.temperature, self.average_k = k, temperature, sorted(set(average_k))
        self.mean_labels, self.top_k = mean_labels, sorted(set(top_k))
        self.embedding_map = embedding_map
        self._parts: list[_Images] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the number of tasks before anything is computed; the datamodule is set up by now."""
        classes = _dataset(trainer)["classes"]
        for k in self.average_k:
            check_number_of_tasks(len(classes), k)

    # Collecting

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        images = self._gathered()
        if trainer.sanity_checking or len(images.place) < 2:
            return
        found = self._neighbours(images, None)
        accuracy = (found == images.class_id).double().mean()
        pl_module.log("validate/knn_accuracy", accuracy.float(), sync_dist=True, batch_size=1, prog_bar=True)

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._parts, self.results = [], {}

    def on_test_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self._parts.append(
            _Images(outputs["features"].float(), outputs["index"], outputs["class_id"], outputs["is_test"])
        )

    on_validation_epoch_start = on_test_epoch_start
    on_validation_batch_end = on_test_batch_end  # type: ignore[assignment]

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        images = self._gathered()
        self.results = self._evaluated(images, _dataset(trainer))
        self.log_results(pl_module, "test", self.results)

    def _gathered(self) -> _Images:
        """All images of all processes, each once, by index."""
        parts, self._parts = self._parts, []
        own = _Images(*map(torch.cat, zip(*parts, strict=True)))
        # MPS has no float64, in which neighbours and means are computed.
        own = _Images(*(x.cpu() if x.device.type == "mps" else x for x in own))
        features = gather_with_grad(own.features)
        numbers = gather_with_grad(torch.stack([own.place, own.class_id, own.is_test.long()], 1))
        # A padded loader serves images twice.
        places = {int(index): place for place, index in enumerate(numbers[:, 0].tolist())}
        rows = torch.tensor([places[index] for index in sorted(places)], device=features.device)
        index, class_id, is_test = numbers[rows].T
        images = _Images(features[rows], index, class_id, is_test.bool())
        if not images.features.isfinite().all():
            raise UserError("the features of some images are not finite: training has diverged")
        return images

    # Evaluating

    def _evaluated(self, images: _Images, dataset: Mapping[str, Any]) -> dict[str, EvaluationResult]:
        classes = list(dataset["classes"])
        train, test = images.of(~images.is_test), images.of(images.is_test)
        result = EvaluationResult(
            metrics={},
            protocol={
                "linear_probe": {
                    **self.probe,
                    "standardised": self.standardise,
                    "label_draws": self.label_draws,
                    "label_seed": self.label_seed,
                },
                "knn": {"k": self.k, "temperature": self.temperature},
            },
            counts={"training_images": len(train.place), "test_images": len(test.place)},
        )
        results = {self.section: result}
        for part, key in ((train, "train_images"), (test, "test_images")):
            expected = sum(dataset[key][one] for one in classes)
            if len(part.place) < expected:
                result.notes.append(
                    f"{self.section}: {expected - len(part.place)} of {expected} {key.replace('_', ' ')} were not "
                    "evaluated: the run was limited to some batches"
                )
        if any(len(part.class_id.unique()) < len(classes) for part in (train, test)):
            result.notes.append(f"{self.section}: not evaluated, since classes are without images")
            return results
        is_selected = torch.isin(
            test.class_id, test.class_id.new_tensor([classes.index(x) for x in dataset["selected"]])
        )
        logits = self._probe(train, test, is_selected, len(classes), result)
        probed = logits.argmax(1)
        neighbours = self._neighbours(train, test)
        directions, tested = (normalize(part.features, dim=1) for part in (train, test))
        means = class_means(directions, train.class_id, len(classes))
        of_means = (tested.double() @ means.double().T).argmax(1)
        metrics = average_k_metrics(tested, test.class_id, means, len(classes) - 1)
        result.metrics |= {
            "knn": {"accuracy": float((neighbours == test.class_id).double().mean())},
            "mean_classifier": metrics._asdict(),
            "average_k": {
                str(k): average_k_metrics(tested, test.class_id, means, k)._asdict() for k in self.average_k
            },
            "intraclass_deviation": intraclass_deviation(tested, test.class_id),
        }
        scores = {"linear_probe": logits[None], "mean": (tested @ means.T)[None]}
        if self.mean_labels:
            result.protocol["mean_labels"] = self.mean_labels
            few = self._few_labelled_means(directions, train.class_id, len(classes))
            scores[f"mean_{self.mean_labels}"] = tested @ few.mT
        if self.mean_labels or max(self.top_k, default=1) > 1:
            result.metrics["classifiers"] = {
                name: self._task_accuracies(draws, test.class_id) for name, draws in scores.items()
            }
        result.scalars = {
            "linear_probe_accuracy": result.metrics["linear_probe"][str(self.label_fractions[0])]["accuracy"],
            "knn_accuracy": result.metrics["knn"]["accuracy"],
            "mean_classifier_accuracy": metrics.accuracy,
        }
        names = np.array(classes, dtype=object)
        result.predictions = pd.DataFrame(
            {
                "index": test.place.cpu().numpy(),
                "class": names[test.class_id.cpu().numpy()],
                "linear_probe": names[probed.cpu().numpy()],
                "knn": names[neighbours.cpu().numpy()],
                "mean_classifier": names[of_means.cpu().numpy()],
            }
        )
        if self.embedding_map:
            results[MAP] = self._map(test, is_selected, names)
        return results

    def _probe(
        self,
        train: _Images,
        test: _Images,
        is_selected: Bool[Tensor, " image"],
        n_classes: int,
        result: EvaluationResult,
    ) -> Float[Tensor, "image class"]:
        """Add the accuracy of the linear probes; logits of the first of those with the most labels."""
        shift, scale = torch.zeros(()), torch.ones(())
        if self.standardise:
            shift, scale = standardisation(train.features)
        features, tested = ((part.features - shift) / scale for part in (train, test))
        labels = train.class_id.cpu().numpy()
        first = None
        groups = {
            "linear_probe": torch.ones_like(is_selected),
            "linear_probe_selected": is_selected,
            "linear_probe_others": ~is_selected,
        }
        result.metrics |= {name: {} for name in groups}
        result.counts["labels"] = {}
        for fraction in self.label_fractions:
            # All labels can be drawn in one way.
            draws = 1 if fraction == 1 else self.label_draws
            drawn = torch.from_numpy(draw_labelled(labels, fraction, draws, self.label_seed))
            probes = fit_linear_probes(
                features,
                train.class_id,
                drawn.to(features.device),
                n_classes,
                seed=self.label_seed,
                **self.probe,
            )
            logits = probes.logits(tested)
            first = logits[0] if first is None else first
            is_right = logits.argmax(2) == test.class_id
            for name, of_group in groups.items():
                by_draw = is_right[:, of_group].double().mean(1).tolist() if of_group.any() else []
                accuracy = float(np.mean(by_draw)) if by_draw else None
                result.metrics[name][str(fraction)] = {"accuracy": accuracy, "by_draw": by_draw}
            result.counts["labels"][str(fraction)] = drawn.shape[1]
        assert first is not None
        return first

    def _few_labelled_means(
        self, directions: Float[Tensor, "image feature"], labels: Int[Tensor, " image"], n_classes: int
    ) -> Float[Tensor, "draw class feature"]:
        """Class means of `mean_labels` drawn images of each class."""
        means = []
        for draw in range(self.label_draws):
            generator = np.random.default_rng([self.label_seed, draw, 2])
            order = torch.from_numpy(generator.permutation(len(labels))).to(labels.device)
            drawn = torch.cat([order[labels[order] == c][: self.mean_labels] for c in range(n_classes)])
            means.append(class_means(directions[drawn], labels[drawn], n_classes))
        return torch.stack(means)

    def _task_accuracies(
        self, scores: Float[Tensor, "draw image class"], labels: Int[Tensor, " image"]
    ) -> dict[str, float]:
        """CURL's avg_K and top_K, means over draws."""
        rows = []
        for of_draw in scores:
            averages = {
                f"avg_{k + 1}": average_k_of_scores(of_draw, labels, k).accuracy for k in self.average_k
            }
            best = of_draw.topk(min(max(self.top_k), of_draw.shape[1])).indices == labels[:, None]
            rows.append(
                averages | {f"top_{k}": best[:, :k].any(1).double().mean().item() for k in self.top_k}
            )
        return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}

    def _neighbours(self, train: _Images, test: _Images | None) -> Int[Tensor, " image"]:
        queries = None if test is None else test.features
        return neighbour_predictions(
            queries, train.features, train.class_id, k=self.k, temperature=self.temperature
        )

    def _map(self, test: _Images, is_selected: Bool[Tensor, " image"], names: np.ndarray) -> EvaluationResult:
        count = len(test.place)
        drawn = np.random.default_rng(self.label_seed).permutation(count)[:_MAP_IMAGES]
        drawn.sort()
        vectors = normalize(test.features, dim=1).cpu().numpy()[drawn]
        places = embedding_map(vectors, _PERPLEXITY, self.label_seed)
        predictions = pd.DataFrame(
            {
                "index": test.place.cpu().numpy()[drawn],
                "class": names[test.class_id.cpu().numpy()[drawn]],
                "is_selected": is_selected.cpu().numpy()[drawn],
                "x": places[:, 0],
                "y": places[:, 1],
            }
        )
        protocol = {"perplexity": _PERPLEXITY, "max_images": _MAP_IMAGES, "seed": self.label_seed}
        return EvaluationResult({}, {}, protocol, {"images": len(drawn)}, predictions=predictions)


class _Images(NamedTuple):
    """Features of images, their places among training and test images, and their classes."""

    features: Float[Tensor, "image feature"]
    place: Int[Tensor, " image"]
    class_id: Int[Tensor, " image"]
    is_test: Bool[Tensor, " image"]

    def of(self, rows: Bool[Tensor, " image"]) -> _Images:
        return _Images(*(values[rows] for values in self))


def _dataset(trainer: Trainer) -> dict[str, Any]:
    """Description of the images, as `UnimodalDataModule` gives it."""
    data: Any = trainer_data(trainer)
    return data.dataset()
