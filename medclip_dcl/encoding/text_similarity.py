"""Print what the similarity of texts finds: images counted as fitting a sentence, and the mass of soft targets."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from medclip_dcl.data.prepared import PreparedDataError, PreparedSet, report_embedding
from medclip_dcl.encoding.model_results import stems_of_model
from medclip_dcl.encoding.options import Similar

THRESHOLDS = (0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 0.98, 0.99)
TEMPERATURES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
# Smallest difference of the first and the last quantile; a BERT-sized network with random weights has .002.
_MIN_SPREAD = 0.01
# FaNe's threshold, on its normalised similarity.
_FANE = 0.95


class Texts(NamedTuple):
    """Sentences of some training images, each with its own image an anchor; vectors of length 1."""

    sentences: Float[np.ndarray, "sentence dim"]
    reports: Float[np.ndarray, "image dim"]
    is_said: Bool[np.ndarray, "sentence image"]
    """The sentence stands in the image's report."""
    study: Int[np.ndarray, " image"]
    sentence: Int[np.ndarray, " anchor"]
    image: Int[np.ndarray, " anchor"]
    fits: Bool[np.ndarray, "sentence image"] | None
    """The truth of a phantom."""

    @property
    def is_other(self) -> Bool[np.ndarray, "anchor image"]:
        """True for images of other studies."""
        return self.study[self.image][:, None] != self.study


def read_texts(settings: Similar) -> Texts:
    """The texts of a sample of the training images."""
    prepared = PreparedSet(settings.data)
    embedding = prepared.text_embedding(_stem(prepared, settings.model))
    reports = prepared.table("reports")[["study_id", "sentence_id"]].drop_duplicates()
    images = prepared.table("images").query("use == 'train'")[["dicom_id", "study_id"]]
    images = images[images["study_id"].isin(reports["study_id"])].sort_values("dicom_id")
    if images["study_id"].nunique() < 2:
        raise PreparedDataError(
            f"{prepared.folder}: fewer than two training reports; there is nothing to compare"
        )
    images = images.sample(min(settings.images, len(images)), random_state=0).reset_index(drop=True)
    studies, of_reports = report_embedding(embedding, reports[reports["study_id"].isin(images["study_id"])])
    said = images.reset_index(names="image").merge(reports, on="study_id")
    ids = np.unique(said["sentence_id"])
    sentence, image = np.searchsorted(ids, said["sentence_id"]), said["image"].to_numpy()
    is_said = np.zeros((len(ids), len(images)), dtype=bool)
    is_said[sentence, image] = True
    return Texts(
        _unit(embedding.embedding[np.searchsorted(embedding.sentence_id, ids)]),
        _unit(of_reports[np.searchsorted(studies, images["study_id"])]),
        is_said,
        images["study_id"].to_numpy(),
        sentence,
        image,
        _truth(prepared, ids, images["dicom_id"]) if prepared.has("image_classes") else None,
    )


def _stem(prepared: PreparedSet, model: str | None) -> str | None:
    """Stem of the only file of embeddings by a model; else the name itself."""
    stems = stems_of_model(prepared.models("text_embedding"), model) if model else []
    return stems[0] if len(stems) == 1 else model  # which lists those of several


def _unit(vectors: Float[np.ndarray, "text dim"]) -> Float[np.ndarray, "text dim"]:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def _truth(prepared: PreparedSet, ids: Int[np.ndarray, " sentence"], images: pd.Series) -> np.ndarray:
    class_of = prepared.table("classes").set_index("sentence_id")["class_id"].loc[ids]
    table = prepared.table("image_classes")
    table = table[table["dicom_id"].isin(images)]
    is_true = pd.crosstab(table["class_id"], table["dicom_id"]).reindex(
        index=class_of, columns=images, fill_value=0
    )
    return is_true.to_numpy() > 0


def best_cosines(texts: Texts) -> Float[np.ndarray, "sentence image"]:
    """Greatest cosine of a sentence with a sentence of each image's report."""
    found = np.empty(texts.is_said.shape, dtype=np.float32)
    for image, rows in enumerate(texts.is_said.T):
        found[:, image] = (texts.sentences @ texts.sentences[rows].T).max(1)
    return found


def _near_share(texts: Texts, threshold: float | None) -> Float[np.ndarray, "sentence image"]:
    """Share of the sentences of each image's report that are near to a sentence; threshold None: equal to it."""
    is_said = texts.is_said.astype(np.float32)
    if threshold is not None:
        is_said = (texts.sentences @ texts.sentences.T > threshold).astype(np.float32) @ is_said
    return is_said / texts.is_said.sum(0)


def near_texts_table(texts: Texts, batch_size: int) -> pd.DataFrame:
    """Images found at each threshold among the other ones; on a phantom the precision, too."""
    is_other = texts.is_other
    fits = None if texts.fits is None else texts.fits[texts.sentence] & is_other
    cosines = {
        "sentences": best_cosines(texts)[texts.sentence],
        "reports": (texts.reports @ texts.reports.T)[texts.image],
    }
    is_equal = texts.is_said[texts.sentence]
    found = [("equal sentences", "", is_equal)]
    found += [(name, f"{t:g}", cosine > t) for name, cosine in cosines.items() for t in THRESHOLDS]
    rows = []
    for name, threshold, is_near in found:
        is_near = is_near & is_other
        share = share_drawn = is_near.sum() / is_other.sum()
        if name != "reports":
            near = _near_share(texts, float(threshold) if threshold else None)[texts.sentence]
            share_drawn = near[is_other].mean()
        row = {
            "compare": name,
            "threshold": threshold,
            "images": f"{share:.2%}",
            "in a batch, all": f"{share * (batch_size - 1):.2f}",
            "one drawn": f"{share_drawn * (batch_size - 1):.2f}",
        }
        if fits is not None:
            row["precision"] = _share(fits, is_near)
            row["precision, further"] = _share(fits, is_near & ~is_equal)
            row["recall"] = f"{(is_near & fits).sum() / fits.sum():.4f}"
        rows.append(row)
    return pd.DataFrame(rows)


def _share(is_right: Bool[np.ndarray, "anchor image"], found: Bool[np.ndarray, "anchor image"]) -> str:
    return f"{is_right[found].mean():.3f}" if found.any() else "-"


def soft_targets_table(texts: Texts, batch_size: int) -> pd.DataFrame:
    """Mean target of an anchor for its own image and for the others of its batch; on a phantom for those that fit."""
    order = np.random.default_rng(0).permutation(len(texts.study))
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    if len(batches) > 1 and len(batches[-1]) < batch_size:  # training leaves it out, too
        del batches[-1]
    cosines, is_other = texts.sentences @ texts.reports.T, texts.is_other
    rows = []
    for temperature in TEMPERATURES:
        masses = []
        for batch in batches:
            anchors = np.flatnonzero(np.isin(texts.image, batch))
            others = is_other[anchors][:, batch]
            own = texts.image[anchors][:, None] == batch
            similarity = np.where(own, 1.0, cosines[texts.sentence[anchors]][:, batch])
            mass = np.where(own | others, np.exp((similarity - 1) / temperature), 0.0)
            mass /= mass.sum(1, keepdims=True)
            fits = others if texts.fits is None else texts.fits[texts.sentence[anchors]][:, batch] & others
            masses += [np.stack([(mass * which).sum(1) for which in (own, fits, others & ~fits)])]
        own_mass, fitting, unfitting = np.concatenate(masses, axis=1).mean(1)
        row = {"temperature": f"{temperature:g}", "own image": f"{own_mass:.3f}"}
        if texts.fits is None:
            row["others"] = f"{fitting:.3f}"
        else:
            row |= {"others that fit": f"{fitting:.3f}", "others that do not": f"{unfitting:.3f}"}
        rows.append(row)
    return pd.DataFrame(rows)


def summary(texts: Texts, batch_size: int) -> str:
    """Both tables and what they are of."""
    lines = [f"{len(texts.sentence):,} sentences of {len(texts.study):,} training images"]
    if texts.fits is not None:
        fits, is_other = texts.fits[texts.sentence], texts.is_other
        lines.append(f"of the other images {fits[is_other].mean():.0%} truly fit a sentence (phantom)")
    if (is_other := texts.study[:, None] != texts.study).any():
        found = np.quantile((texts.reports @ texts.reports.T)[is_other], _QUANTILES)
        named = (f"{share:.0%} {value:.4f}" for share, value in zip(_QUANTILES, found, strict=True))
        lines.append(f"cosine of the reports of two studies, quantiles: {', '.join(named)}")
        if found[-1] - found[0] < _MIN_SPREAD:
            lines.append(
                "  they hardly differ, as with a [CLS] that no task has trained: embed with --pooling mean"
            )
    lines += ["", "near_texts:", near_texts_table(texts, batch_size).to_string(index=False)]
    for name, vectors in (("reports", texts.reports), ("sentences", texts.sentences[texts.sentence])):
        offset = float((vectors @ _unit(vectors.mean(0, keepdims=True))[0]).mean())
        lines.append(
            f"FaNe's {_FANE} on its normalised similarity of {name} is a cosine of {offset + _FANE * (1 - offset):.4f}"
        )
    lines += [
        "",
        f"SoftTargets, batches of {min(batch_size, len(texts.study)):,}"
        + " (all images of the sample: draw more by --images)" * (batch_size > len(texts.study))
        + ":",
        soft_targets_table(texts, batch_size).to_string(index=False),
    ]
    return "\n".join(lines)


def run(options: Similar) -> None:
    """Print what thresholds and temperatures find."""
    texts = read_texts(options)
    if options.model:
        print(f"embeddings: {_stem(PreparedSet(options.data), options.model)}")
    print(summary(texts, options.batch_size))
