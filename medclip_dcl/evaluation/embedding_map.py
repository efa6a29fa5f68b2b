"""A map of the image embeddings: t-SNE, coloured by finding (the counterpart of SSD's figure 4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.figure import Figure
from sklearn.manifold import TSNE
from torch.nn.functional import normalize

from medclip_dcl.common.errors import check_range
from medclip_dcl.common.findings import CHEX5
from medclip_dcl.data.image_text import EvaluationTables
from medclip_dcl.evaluation.callback import EvaluationCallback, EvaluationResult, Results, Values, subject_ids
from medclip_dcl.networks.described import Encoded
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.pictures.plots import embedding_map_figure

COLUMNS = ["dicom_id", "subject_id", "group", "x", "y"]
SEVERAL, NONE = "several", "none of them"
_PERPLEXITY = 30.0
"""Approximate number of neighbours of an image."""


class EmbeddingMap(EvaluationCallback):
    """t-SNE of the image vector (global, else the mean region) of each test image with a case of CheX5.

    Normalised; van der Maaten & Hinton, 2008.

    An image is coloured by its CheX5 finding if it has exactly one. It is not a measurement: distances between groups
    mean little.

    Args:
        max_images: of more images, this many are drawn at random.
    """

    section = "embedding_map"
    measures_images = True
    stages = ("test",)
    options = ("max_images",)

    def __init__(self, max_images: int = 3000) -> None:
        super().__init__()
        check_range("EmbeddingMap", "[1, inf)", max_images=max_images)
        self.max_images = max_images
        self._drawn: set[str] = set()

    def prepare(self, tables: EvaluationTables, stage: str) -> set[str]:
        cases = tables.cases[tables.cases["finding"].isin(CHEX5)]
        labelled = np.array(sorted(cases["dicom_id"].unique()), dtype=object)
        if len(labelled) > self.max_images:
            labelled = np.random.default_rng(0).choice(labelled, self.max_images, replace=False)
        self._drawn = set(labelled)
        return self._drawn

    def measure(self, network: ImageTextNetwork, encoded: Encoded, dicom_ids: Sequence[str]) -> Values:
        vectors = network.image_vectors(encoded)
        of_batch = zip(dicom_ids, normalize(vectors, dim=-1).cpu().numpy(), strict=True)
        return {dicom_id: vector for dicom_id, vector in of_batch if dicom_id in self._drawn}

    def summarise(self, network: ImageTextNetwork, values: Values, tables: EvaluationTables) -> Results:
        dicom_ids = pd.Series(list(values), dtype=object)
        places = embedding_map(np.array(list(values.values())), _PERPLEXITY, 0)
        groups = groups_of_images(tables.cases).reindex(dicom_ids)
        cases = pd.DataFrame(
            {
                "dicom_id": dicom_ids,
                "subject_id": subject_ids(tables, dicom_ids),
                "group": groups.to_numpy(dtype=object),
                "x": places[:, 0],
                "y": places[:, 1],
            }
        )
        result = EvaluationResult(
            metrics={},
            counts={"images": len(cases), "by_group": cases["group"].value_counts().sort_index().to_dict()},
            predictions=cases[COLUMNS],
        )
        return {self.section: result}

    def figures(self, load_image: Any) -> Iterator[tuple[str, Figure]]:
        """One point for each image."""
        predictions = self.results[self.section].predictions
        if len(predictions):
            yield "embedding_map", embedding_map_figure(predictions)


def embedding_map(
    vectors: Float[np.ndarray, "image dim"] | np.ndarray, perplexity: float, seed: int
) -> Float[np.ndarray, "image 2"]:
    """t-SNE in two dimensions, started from the principal components; fewer than four images all lie at 0."""
    if len(vectors) < 4:
        return np.zeros((len(vectors), 2), dtype=np.float32)
    # As scikit-learn: fewer neighbours than images.
    fewer = min(perplexity, (len(vectors) - 1) / 3)
    return TSNE(perplexity=fewer, init="pca", random_state=seed).fit_transform(vectors)


def groups_of_images(cases: pd.DataFrame) -> pd.Series:
    """By dicom_id: the finding of an image that has exactly one of CheX5, else "several" or "none of them"."""
    positive = cases[(cases["label"] == 1) & cases["finding"].isin(CHEX5)]
    count = positive.groupby("dicom_id")["finding"].nunique().reindex(cases["dicom_id"].unique()).fillna(0)
    only = positive.drop_duplicates("dicom_id").set_index("dicom_id")["finding"].reindex(count.index)
    return only.where(count == 1, np.where(count > 1, SEVERAL, NONE))
