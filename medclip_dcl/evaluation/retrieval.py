"""Cross-modal retrieval: boxes and phrases of MS-CXR on test (SSD, table 5), images and sentences on validate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor
from torchvision.ops import roi_align

from medclip_dcl.data.image_text import EvaluationTables
from medclip_dcl.evaluation.base import (
    EvaluationCallback,
    Findings,
    check_choice,
    embed_texts,
    punctuation,
    scores,
    subject_ids,
)
from medclip_dcl.evaluation.figures import rank_figure
from medclip_dcl.evaluation.grounding import (
    NO_BOXES,
    REGION_CENTRES,
    boxes_by_image,
    image_sizes,
    region_centre,
)
from medclip_dcl.geometry import View
from medclip_dcl.metrics import cosine_retrieval_ranks, retrieval_ranks, summarise_ranks
from medclip_dcl.network import ImageTextNetwork

KS = (10, 50, 100)
WHOLE = View()
DIRECTIONS = ("image_to_text", "text_to_image")
COLUMNS = ["direction", "dicom_id", "subject_id", "phrase", "box", "rank", "rank_tolerant", "n_candidates"]


class Retrieval(EvaluationCallback):
    """Recall at 10, 50 and 100 and the median rank, from image to text and from text to image.

    On test a query is a box or the phrase of a box, see :class:`BoxesAndPhrases`; on validate, to watch training,
    an image or a sentence of a report, see :class:`ImagesAndSentences`.

    Logs on test ``test/recall`` (mean of the six recalls), ``test/medr`` (mean of the two median ranks),
    ``test/<direction>_recall_at_<k>`` and ``test/<direction>_medr`` with the directions image_to_text and
    text_to_image, and ``test/recall_tolerant``, ``test/medr_tolerant``; on validate ``validate/retrieval_recall``,
    ``validate/medr`` and ``validate/<direction>_medr``.

    Args:
        region_centres: where a region lies, for the features of boxes; see :class:`Grounding`.

    Raises:
        ValueError: another word than those.
    """

    section = "retrieval"
    stages = ("validate", "test")

    def __init__(self, region_centres: str = "cell") -> None:
        super().__init__()
        check_choice("Retrieval", "region_centres", region_centres, REGION_CENTRES)
        self.region_centres = region_centres
        self._items: BoxesAndPhrases | ImagesAndSentences | None = None

    def prepare(self, tables: EvaluationTables, stage: str) -> set[str]:
        if stage == "test":
            self._items = BoxesAndPhrases(tables, self.region_centres)
        else:
            self._items = ImagesAndSentences(tables)
        return self._items.images

    def measure(
        self,
        network: ImageTextNetwork,
        feature_map: Float[Tensor, "image dim region_row region_column"],
        dicom_ids: Sequence[str],
    ) -> Mapping[str, Any]:
        assert self._items is not None
        return self._items.measure(network, feature_map, dicom_ids)

    def summarise(
        self, network: ImageTextNetwork, values: Mapping[str, Any], tables: EvaluationTables
    ) -> Findings:
        assert self._items is not None
        return self._items.summarise(network, values, tables)

    def figures(self, load_image: Any) -> Iterator[tuple[str, Figure]]:
        """Histograms of the ranks in both directions."""
        assert self.found is not None
        if not self.found.predictions.empty:
            yield "ranks", rank_figure(self.found.predictions)


class BoxesAndPhrases:
    """Retrieval of the phrase for a box and of the box for a phrase (SSD, section 3.2 and table 5).

    The feature of a box is the RoIAlign (1 x 1, aligned; size: choice, not from the paper) of the projected feature
    map; candidates are ranked by its cosine with the phrase. Correct is the paired item only; beside it the
    duplicate-tolerant variant accepts every item with the same phrase.

    Raises:
        ValueError: see :func:`medclip_dcl.evaluation.grounding.boxes_by_image`.
    """

    def __init__(self, tables: EvaluationTables, region_centres: str = "cell") -> None:
        self.region_centres = region_centres
        self._boxes = boxes_by_image(tables)
        self._sizes = image_sizes(tables)
        self._view = tables.view
        self.images = set(self._boxes)

    def measure(
        self,
        network: ImageTextNetwork,
        feature_map: Float[Tensor, "image dim region_row region_column"],
        dicom_ids: Sequence[str],
    ) -> dict[str, dict[int, np.ndarray]]:
        """Features of the boxes of each image, by the boxes' row number."""
        found = {}
        centre = region_centre(network, self.region_centres)
        for index, dicom_id in enumerate(dicom_ids):
            if dicom_id in self._boxes:
                boxes = self._boxes[dicom_id]
                corners = torch.tensor([[box.x, box.y, box.w, box.h] for box in boxes])
                features = box_features(
                    feature_map[index], corners.to(feature_map), self._sizes[dicom_id], centre, self._view
                )
                found[dicom_id] = {
                    box.row: feature for box, feature in zip(boxes, features.cpu().numpy(), strict=True)
                }
        return found

    def summarise(
        self, network: ImageTextNetwork, values: Mapping[str, Any], tables: EvaluationTables
    ) -> Findings:
        by_box = {box: feature for value in values.values() for box, feature in value.items()}
        boxes = tables.boxes[tables.boxes.index.isin(by_box)]
        protocol = {
            "view": str(tables.view),
            "phrase_punctuation": punctuation(network),
            "box_feature": "RoIAlign 1 x 1, aligned, of the projected feature map",
            "region_centres": REGION_CENTRES[self.region_centres],
            "score": "cosine",
            "correct": "the paired item; tolerant: every item with the same phrase",
            "ties": "mean rank of the tied",
            "recall": "mean of R@10, R@50, R@100 of both directions",
            "medr": "mean of both directions' median ranks",
        }
        counts = {
            "boxes": len(boxes),
            "phrases": int(boxes["phrase"].nunique()),
            "patients": int(subject_ids(tables, boxes["dicom_id"]).nunique()),
        }
        if boxes.empty:
            metrics = {**_no_summary(), "tolerant": _no_summary()}
            return Findings(metrics, {}, protocol, counts, [NO_BOXES], pd.DataFrame(columns=COLUMNS))
        features = torch.tensor(np.stack([by_box[index] for index in boxes.index]))
        phrase_id, phrases = pd.factorize(boxes["phrase"])
        phrase = torch.tensor(phrase_id)
        texts = embed_texts(network, list(phrases)).cpu()[phrase]
        ranks = {
            direction: (
                cosine_retrieval_ranks(*of_both),
                cosine_retrieval_ranks(*of_both, groups=(phrase, phrase)),
            )
            for direction, of_both in zip(DIRECTIONS, ((features, texts), (texts, features)), strict=True)
        }
        paired = summarise_directions({direction: pair[0] for direction, pair in ranks.items()})
        tolerant = summarise_directions({direction: pair[1] for direction, pair in ranks.items()})
        queries = [
            boxes.assign(
                direction=direction,
                subject_id=subject_ids(tables, boxes["dicom_id"]),
                box=boxes.index.astype("int64"),
                rank=pair[0].numpy(),
                rank_tolerant=pair[1].numpy(),
                n_candidates=len(boxes),
            )
            for direction, pair in ranks.items()
        ]
        return Findings(
            metrics={**paired, "tolerant": tolerant},
            scalars={
                **_scalars(paired),
                "recall_tolerant": tolerant["recall"],
                "medr_tolerant": tolerant["medr"],
            },
            protocol=protocol,
            counts=counts,
            predictions=pd.concat(queries)[COLUMNS].reset_index(drop=True),
        )


class ImagesAndSentences:
    """Retrieval between images and the distinct sentences of their reports.

    Candidates are ranked by the model's image-sentence score; correct are all sentences of an image's report, and
    all images whose report holds a sentence; the best-ranked correct candidate counts.
    """

    def __init__(self, tables: EvaluationTables) -> None:
        distinct = tables.sentences.drop_duplicates("sentence_id").sort_values("sentence_id")
        self.images = set(tables.sentences["dicom_id"])
        self._texts = dict(zip(distinct["sentence_id"].tolist(), distinct["text"].tolist(), strict=True))

    def measure(
        self,
        network: ImageTextNetwork,
        feature_map: Float[Tensor, "image dim region_row region_column"],
        dicom_ids: Sequence[str],
    ) -> dict[str, np.ndarray]:
        """Scores of all sentences for each image."""
        if not self._texts:
            return {}
        by_image = scores(network, feature_map, embed_texts(network, list(self._texts.values()))).T.numpy()
        return dict(zip(dicom_ids, by_image, strict=True))

    def summarise(
        self, network: ImageTextNetwork, values: Mapping[str, Any], tables: EvaluationTables
    ) -> Findings:
        pairs = tables.sentences[tables.sentences["dicom_id"].isin(values)]
        if pairs.empty:
            note = "no image has a sentence: image-sentence retrieval is not measured"
            return Findings(metrics=_no_summary(), scalars={}, notes=[note])
        # An image without a sentence has no correct candidate: it stays a candidate and is no query.
        row = {dicom_id: index for index, dicom_id in enumerate(values)}
        kept = sorted(set(pairs["sentence_id"]))
        column = {sentence: index for index, sentence in enumerate(kept)}
        position = {sentence: index for index, sentence in enumerate(self._texts)}
        similarities = torch.tensor(np.stack(list(values.values())))[:, [position[s] for s in kept]]
        correct = torch.zeros(similarities.shape, dtype=torch.bool)
        correct[pairs["dicom_id"].map(row).tolist(), pairs["sentence_id"].map(column).tolist()] = True
        queries = correct.any(dim=1)
        summary = summarise_directions(
            {
                "image_to_text": retrieval_ranks(similarities[queries], correct[queries]),
                "text_to_image": retrieval_ranks(similarities.T, correct.T),
            }
        )
        return Findings(
            metrics=summary,
            scalars={
                "retrieval_recall": summary["recall"],
                "medr": summary["medr"],
                **{f"{direction}_medr": summary[direction]["MedR"] for direction in DIRECTIONS},
            },
            counts={"images": len(row), "sentences": len(kept)},
        )


def box_features(
    feature_map: Float[Tensor, "dim region_row region_column"],
    boxes: Float[Tensor, "box 4"],
    image_size: tuple[int, int],
    region_centre: float = 0.5,
    view: View = WHOLE,
) -> Float[Tensor, "box dim"]:
    """RoIAlign of boxes on the feature map (He et al. 2017), one value for each box and channel.

    Of a box that reaches out of the view, the part that is seen counts; a box outside has the zero vector, which
    is as near to every phrase.

    Args:
        feature_map: covers the view, however it was scaled.
        boxes: x, y, w, h in pixels of the original image.
        image_size: (height, width) of the original image, pixels.
        region_centre: where a region lies in its cell, see ``RegionEncoder.region_centre``.
    """
    height, width = image_size
    rows, columns = feature_map.shape[1:]
    x, y, w, h = boxes.unbind(dim=1)
    square = view.of(height, width)
    corners = torch.stack([x, y, x + w, y + h], dim=1) - boxes.new_tensor([square.left, square.top] * 2)
    if view != WHOLE:
        corners = corners.clamp(min=0).minimum(boxes.new_tensor([square.width, square.height] * 2))
    is_seen = (corners[:, 2:] > corners[:, :2]).all(dim=1)
    across, down = columns / square.width, rows / square.height
    corners = corners * corners.new_tensor([across, down, across, down])
    # roi_align takes the regions to lie in the middle of their cells.
    corners = corners + (0.5 - region_centre)
    features = roi_align(feature_map[None], [corners], output_size=1, aligned=True)[:, :, 0, 0]
    return features * is_seen[:, None]


def summarise_directions(ranks: Mapping[str, Float[Tensor, "query"]]) -> dict[str, Any]:
    """R@K and MedR of both directions; Recall = mean of the six recalls, MedR = mean of the two (SSD, table 1)."""
    by_direction = {direction: summarise_ranks(ranks[direction], KS) for direction in DIRECTIONS}
    recalls = [found[f"R@{k}"] for found in by_direction.values() for k in KS]
    return {
        "recall": sum(recalls) / len(recalls),
        "medr": sum(found["MedR"] for found in by_direction.values()) / len(by_direction),
        **by_direction,
    }


def _no_summary() -> dict[str, Any]:
    nothing = {**{f"R@{k}": None for k in KS}, "MedR": None}
    return {"recall": None, "medr": None, **{direction: dict(nothing) for direction in DIRECTIONS}}


def _scalars(summary: dict[str, Any]) -> dict[str, float]:
    found = {"recall": summary["recall"], "medr": summary["medr"]}
    for direction in DIRECTIONS:
        found |= {f"{direction}_recall_at_{k}": summary[direction][f"R@{k}"] for k in KS}
        found[f"{direction}_medr"] = summary[direction]["MedR"]
    return found
