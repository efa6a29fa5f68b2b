"""Cross-modal retrieval: boxes and phrases of MS-CXR (SSD, table 5), images and their reports, images and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from scipy.sparse import csr_matrix
from scipy.special import gammaln
from torch import Tensor
from torchvision.ops import roi_align

from medclip_dcl.data.image_text import EvaluationTables
from medclip_dcl.evaluation.callback import (
    EvaluationCallback,
    EvaluationResult,
    Results,
    Values,
    embed_anew,
    embed_texts,
    subject_ids,
)
from medclip_dcl.evaluation.grounding import NO_BOXES
from medclip_dcl.evaluation.regions import boxes_by_case, image_sizes
from medclip_dcl.metrics import cosine_retrieval_ranks, retrieval_ranks, summaries
from medclip_dcl.metrics.table import DIRECTIONS, KS
from medclip_dcl.networks.described import Encoded
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.pictures.geometry import View
from medclip_dcl.pictures.plots import rank_figure

COLUMNS = ["direction", "dicom_id", "subject_id", "phrase", "box", "rank", "rank_tolerant", "n_candidates"]
REPORT_COLUMNS = ["task", "direction", "query", "subject_id", "rank", "rank_tolerant", "n_candidates"]
_IMAGES_PER_CHUNK = 512


class Retrieval(EvaluationCallback):
    """Recall at 10, 50 and 100 and the median rank, from image to text and from text to image.

    On test a query is a box or the phrase of a box, see :class:`BoxesAndPhrases`, and, in the section report_retrieval
    of results.json, an image, a report or a sentence, see :class:`ImagesAndReports`; on validate, to monitor training,
    an image or a sentence of a report, see :class:`ImagesAndSentences`.

    Logs of boxes ``test/recall`` (mean of the six recalls), ``test/medr`` (mean of the two median ranks), both also
    with ``_tolerant``, ``test/<direction>_recall_at_<k>`` and ``test/<direction>_medr`` with the directions
    image_to_text and text_to_image; of reports ``test/image_report_recall``, ``test/image_sentence_recall`` and
    ``_medr`` of both; on validate ``validate/retrieval_recall``, ``validate/medr`` and ``validate/<direction>_medr``.
    """

    section = "retrieval"
    measures_images = True

    def __init__(self) -> None:
        super().__init__()
        self._items: list[BoxesAndPhrases | ImagesAndReports | ImagesAndSentences] = []

    def prepare(self, tables: EvaluationTables, stage: str) -> set[str]:
        if stage == "test":
            self._items = [BoxesAndPhrases(tables), ImagesAndReports(tables)]
        else:
            self._items = [ImagesAndSentences(tables)]
        return set().union(*(items.images for items in self._items))

    def measure(self, network: ImageTextNetwork, encoded: Encoded, dicom_ids: Sequence[str]) -> Values:
        found = [items.measure(network, encoded, dicom_ids) for items in self._items]
        measured = dict.fromkeys(dicom_id for of_images in found for dicom_id in of_images)
        return {dicom_id: [of_images.get(dicom_id) for of_images in found] for dicom_id in measured}

    def summarise(self, network: ImageTextNetwork, values: Values, tables: EvaluationTables) -> Results:
        results: dict[str, EvaluationResult] = {}
        for i, items in enumerate(self._items):
            of_items = {dicom_id: value[i] for dicom_id, value in values.items() if value[i] is not None}
            results |= items.summarise(network, of_items, tables)
        return results

    def figures(self, load_image: Any) -> Iterator[tuple[str, Figure]]:
        """Histograms of the ranks in both directions."""
        predictions = self.results[self.section].predictions
        if not predictions.empty:
            yield "ranks", rank_figure(predictions)


class BoxesAndPhrases:
    """Retrieval of the phrase for a box and of the box for a phrase (SSD, section 3.2 and table 5).

    The feature of a box is the RoIAlign (1 x 1, aligned; size: choice, not from the paper) of the projected feature
    map; candidates are ranked by its cosine with the phrase. Only the paired item is correct; the duplicate-tolerant
    variant accepts every item with the same phrase.
    """

    def __init__(self, tables: EvaluationTables) -> None:
        by_phrase = boxes_by_case(tables, tables.boxes, "phrase")
        self._boxes = {dicom_id: sum(found.values(), []) for dicom_id, found in by_phrase.items()}
        self._sizes = image_sizes(tables)
        self._view = tables.view
        self.images = set(self._boxes)

    def measure(self, network: ImageTextNetwork, encoded: Encoded, dicom_ids: Sequence[str]) -> Values:
        found, feature_map = {}, encoded.feature_map
        for index, dicom_id in enumerate(dicom_ids):
            if boxes := self._boxes.get(dicom_id):
                corners = torch.tensor([box.box for box in boxes]).to(feature_map)
                features = box_features(feature_map[index], corners, self._sizes[dicom_id], self._view)
                of_image = zip(boxes, features.cpu().numpy(), strict=True)
                found[dicom_id] = {box.row: feature for box, feature in of_image}
        return found

    def summarise(self, network: ImageTextNetwork, values: Values, tables: EvaluationTables) -> Results:
        by_box = {box: feature for value in values.values() for box, feature in value.items()}
        boxes = tables.boxes[tables.boxes.index.isin(by_box)]
        boxes = boxes.assign(
            subject_id=subject_ids(tables, boxes["dicom_id"]),
            box=boxes.index.astype("int64"),
            n_candidates=len(boxes),
        )
        queries = pd.DataFrame(columns=COLUMNS)
        has_choice = boxes["phrase"].nunique() > 1
        note = NO_BOXES if boxes.empty else _nothing_to_tell(len(boxes), "boxes have")
        if has_choice:
            features = torch.tensor(np.stack([by_box[index] for index in boxes.index]))
            phrase_id, phrases = pd.factorize(boxes["phrase"])
            phrase = torch.tensor(phrase_id)
            texts = embed_texts(network, list(phrases)).cpu()[phrase]
            both = zip(DIRECTIONS, ((features, texts), (texts, features)), strict=True)
            of_directions = [
                boxes.assign(
                    direction=direction,
                    rank=cosine_retrieval_ranks(*items).numpy(),
                    rank_tolerant=cosine_retrieval_ranks(*items, groups=(phrase, phrase)).numpy(),
                )
                for direction, items in both
            ]
            queries = pd.concat(of_directions)[COLUMNS].reset_index(drop=True)
        metrics = summaries.values_of(summaries.retrieval(queries, summaries.once(queries)))
        scalars = {"recall": metrics["recall"], "medr": metrics["medr"]}
        for direction in DIRECTIONS:
            scalars |= {f"{direction}_recall_at_{k}": metrics[direction][f"R@{k}"] for k in KS}
            scalars[f"{direction}_medr"] = metrics[direction]["MedR"]
        scalars |= {f"{name}_tolerant": metrics["tolerant"][name] for name in ("recall", "medr")}
        result = EvaluationResult(
            metrics=metrics,
            scalars=scalars if has_choice else {},
            counts={
                "boxes": len(boxes),
                "phrases": int(boxes["phrase"].nunique()),
                "patients": int(boxes["subject_id"].nunique()),
            },
            notes=[] if has_choice else [note],
            predictions=queries,
        )
        return {"retrieval": result}


class ImagesAndSentences:
    """Retrieval between images and the distinct sentences of their reports, by the image-sentence score.

    All sentences of an image's report are correct, and all images whose report holds a sentence. An image without a
    sentence is a candidate but not a query.
    """

    def __init__(self, tables: EvaluationTables) -> None:
        pairs = tables.sentences.merge(tables.images[["dicom_id", "study_id", "subject_id"]], on="dicom_id")
        self._pairs = pairs.sort_values(["study_id", "dicom_id", "sentence_id"])
        self._texts = pairs.drop_duplicates("sentence_id").set_index("sentence_id")["text"].sort_index()
        self._embedded: Tensor | None = None
        self.images = set(pairs["dicom_id"])

    def measure(self, network: ImageTextNetwork, encoded: Encoded, dicom_ids: Sequence[str]) -> Values:
        """Scores of all sentences for each image."""
        if self._texts.empty:
            return {}
        if self._embedded is None:
            # Not batched with phrases and prompts, which would change the last bits.
            self._embedded = embed_anew(network, self._texts.tolist())
        by_image = network.scores(encoded, self._embedded).T.contiguous().numpy()
        return dict(zip(dicom_ids, by_image, strict=True))

    def summarise(self, network: ImageTextNetwork, values: Values, tables: EvaluationTables) -> Results:
        pairs = self._pairs[self._pairs["dicom_id"].isin(values)]
        if pairs.empty:
            note = "no image has a sentence: image-sentence retrieval is not measured"
            return {"retrieval": EvaluationResult({}, notes=[note])}
        images, said = pd.Index(values), pd.Index(pairs["sentence_id"].unique()).sort_values()
        similarities = torch.from_numpy(np.stack(list(values.values()))[:, self._texts.index.isin(said)])
        correct = torch.zeros(similarities.shape, dtype=torch.bool)
        place = (
            images.get_indexer(pd.Index(pairs["dicom_id"])),
            said.get_indexer(pd.Index(pairs["sentence_id"])),
        )
        correct[place] = True
        is_query = correct.any(dim=1)
        if correct[is_query].all():
            note = _nothing_to_tell(int(is_query.sum()), "images have")
            return {"retrieval": EvaluationResult({}, notes=[note])}
        ranks = (
            retrieval_ranks(similarities[is_query], correct[is_query]),
            retrieval_ranks(similarities.T, correct.T),
        )
        queries = pd.concat(
            pd.DataFrame({"direction": direction, "rank": of_direction.numpy()})
            for direction, of_direction in zip(DIRECTIONS, ranks, strict=True)
        )
        metrics = summaries.values_of(summaries.recalls(queries, summaries.once(queries)))
        result = EvaluationResult(
            metrics=metrics,
            scalars={
                "retrieval_recall": metrics["recall"],
                "medr": metrics["medr"],
                **{f"{direction}_medr": metrics[direction]["MedR"] for direction in DIRECTIONS},
            },
            counts={"images": len(images), "sentences": len(said)},
        )
        return {"retrieval": result}


class ImagesAndReports(ImagesAndSentences):
    """Retrieval between test images and their reports, and between images and the distinct sentences of the reports.

    The score of an image and a report is the mean of the image's scores with the report's distinct sentences (choice).
    Correct for an image is its own report, or any sentence of it; for a report any image of the study; for a sentence
    any image whose report holds it. The duplicate-tolerant variant accepts every report of the same sentences.

    The predictions' `query` is the dicom_id, study_id or sentence_id of the query. Every process holds the scores of
    all images of ``EvaluationTables.sentences`` with all sentences (4 bytes each, briefly twice).
    """

    def measure(self, network: ImageTextNetwork, encoded: Encoded, dicom_ids: Sequence[str]) -> Values:
        """Scores of all sentences for each image that has a report."""
        rows = [row for row, dicom_id in enumerate(dicom_ids) if dicom_id in self.images]
        if not rows:
            return {}
        some = encoded.each(lambda tensor: tensor[rows])
        return super().measure(network, some, [dicom_ids[row] for row in rows])

    def summarise(self, network: ImageTextNetwork, values: Values, tables: EvaluationTables) -> Results:
        pairs = self._pairs[self._pairs["dicom_id"].isin(values)]
        if self._pairs.empty:
            note = "the set has no test reports: retrieval of reports is not measured"
            none = pd.DataFrame(columns=REPORT_COLUMNS)
            return {"report_retrieval": EvaluationResult({}, notes=[note], predictions=none)}
        if pairs.empty:
            return {}
        ids, place, patients = {}, {}, {}
        for name in ("dicom_id", "study_id", "sentence_id"):
            ids[name], first, place[name] = np.unique(
                pairs[name].to_numpy(), return_index=True, return_inverse=True
            )
            patients[name] = pairs["subject_id"].to_numpy()[first]
        of_sentences = np.stack([values[dicom_id] for dicom_id in ids["dicom_id"]])
        if len(ids["sentence_id"]) < len(self._texts):
            of_sentences = of_sentences[:, self._texts.index.isin(ids["sentence_id"])]
        is_said = torch.zeros(of_sentences.shape, dtype=torch.bool)
        is_said[place["dicom_id"], place["sentence_id"]] = True
        if is_said.all():
            note, empty = _nothing_to_tell(len(is_said), "images have"), pd.DataFrame(columns=REPORT_COLUMNS)
            return {"report_retrieval": EvaluationResult({}, notes=[note], predictions=empty)}
        report, sentence = np.unique(np.stack([place["study_id"], place["sentence_id"]]), axis=1)
        of_reports = _report_scores(of_sentences, report, sentence)
        own = torch.zeros(len(ids["dicom_id"]), dtype=torch.int64)
        own[place["dicom_id"]] = torch.from_numpy(place["study_id"])
        # Reports that consist of the same sentences have the same number.
        group = torch.from_numpy(pd.factorize(pd.Series(sentence).groupby(report).agg(tuple))[0])
        is_own = own[:, None] == torch.arange(len(group))
        is_like_own = group[own][:, None] == group
        chance: dict[str, Any] = {}
        parts: list[pd.DataFrame] = []
        for task, text, of_texts, correct, alike in (
            ("image_report", "study_id", of_reports, is_own, is_like_own),
            ("image_sentence", "sentence_id", of_sentences, is_said, is_said),
        ):
            similarities = torch.from_numpy(of_texts)
            both = (("dicom_id", similarities, correct, alike), (text, similarities.T, correct.T, alike.T))
            chance[task] = {}
            for direction, (asked, of_queries, is_correct, is_alike) in zip(DIRECTIONS, both, strict=True):
                ranks = retrieval_ranks(of_queries, is_correct).numpy()
                tolerant = ranks if alike is correct else retrieval_ranks(of_queries, is_alike).numpy()
                n_candidates = of_queries.shape[1]
                chance[task][direction] = by_chance(is_correct.numpy().sum(axis=1), n_candidates)
                part = {"task": task, "direction": direction, "query": ids[asked].astype(str)}
                part |= {"subject_id": patients[asked], "rank": ranks, "rank_tolerant": tolerant}
                parts.append(pd.DataFrame({**part, "n_candidates": n_candidates}))
        queries = pd.concat(parts, ignore_index=True)
        found = summaries.values_of(summaries.report_retrieval(queries, summaries.once(queries)))
        result = EvaluationResult(
            metrics=found,
            scalars={f"{task}_{name}": found[task][name] for task in found for name in ("recall", "medr")},
            protocol={"reports": tables.reports_in_words},
            counts={
                "images": len(ids["dicom_id"]),
                "patients": len(np.unique(patients["dicom_id"])),
                "reports": len(ids["study_id"]),
                "distinct_reports": int(group.max()) + 1,
                "sentences": len(ids["sentence_id"]),
                "by_chance": chance,
            },
            predictions=queries,
        )
        return {"report_retrieval": result}


def _nothing_to_tell(n: int, items_have: str) -> str:
    return f"retrieval is not measured: all {n:,} {items_have} the same text; there is nothing to tell apart"


def _report_scores(
    of_images: Float[np.ndarray, "image sentence"], report: np.ndarray, sentence: np.ndarray
) -> Float[np.ndarray, "image report"]:
    """Mean score of each report's sentences, given as pairs of positions; equal reports tie exactly."""
    n_sentences = np.bincount(report)
    share = (1 / n_sentences)[report].astype(np.float32)
    means = csr_matrix((share, (report, sentence)), shape=(len(n_sentences), of_images.shape[1]))
    chunks = range(0, len(of_images), _IMAGES_PER_CHUNK)
    return np.concatenate([(means @ of_images[i : i + _IMAGES_PER_CHUNK].T).T for i in chunks])


def by_chance(n_correct: np.ndarray, n_candidates: int) -> dict[str, float]:
    """Expected R@K and median rank of a random order of the candidates.

    Args:
        n_correct: number of correct candidates of each query, at least 1; the best-ranked counts.
        n_candidates: number of ranked candidates.
    """
    numbers, counts = np.unique(n_correct, return_counts=True)
    ranks = np.arange(1, n_candidates + 1)
    within = np.zeros(n_candidates)
    for number, count in zip(numbers, counts, strict=True):
        # All correct candidates lie beyond rank r: C(n - r, m) / C(n, m).
        left = (n_candidates - ranks).clip(min=number)
        log_beyond = (
            gammaln(left + 1) - gammaln(left - number + 1)
            - gammaln(n_candidates + 1) + gammaln(n_candidates - number + 1)
        )  # fmt: skip
        within += count * (1 - np.where(n_candidates - ranks < number, 0.0, np.exp(log_beyond)))
    within /= counts.sum()
    middle = [ranks[within >= 0.5 - 1e-9][0], ranks[within > 0.5 + 1e-9][0]]
    return {**{f"R@{k}": float(within[min(k, n_candidates) - 1]) for k in KS}, "MedR": float(np.mean(middle))}


def box_features(
    feature_map: Float[Tensor, "dim region_row region_column"],
    boxes: Float[Tensor, "box 4"],
    image_size: tuple[int, int],
    view: View,
) -> Float[Tensor, "box dim"]:
    """RoIAlign of boxes on the feature map (He et al. 2017), one value for each box and channel.

    Of a box that extends beyond the view, only the part inside counts; a box outside gets the zero vector.

    Args:
        feature_map: covers the view, however it was scaled.
        boxes: x, y, w, h in pixels of the original image.
        image_size: (height, width) of the original image, pixels.
    """
    height, width = image_size
    rows, columns = feature_map.shape[1:]
    x, y, w, h = boxes.unbind(dim=1)
    square = view.of(height, width)
    corners = torch.stack([x, y, x + w, y + h], dim=1) - boxes.new_tensor([square.left, square.top] * 2)
    if view != View():
        corners = corners.clamp(min=0).minimum(boxes.new_tensor([square.width, square.height] * 2))
    is_seen = (corners[:, 2:] > corners[:, :2]).all(dim=1)
    across, down = columns / square.width, rows / square.height
    corners = corners * corners.new_tensor([across, down, across, down])
    features = roi_align(feature_map[None], [corners], output_size=1, aligned=True)[:, :, 0, 0]
    return features * is_seen[:, None]
