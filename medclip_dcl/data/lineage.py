"""Lineage: the images that a model was trained on, in its own training and in those before it.

data.json has names, fingerprints and counts of the sets. It travels with the model: in its run folder, its checkpoints
and its exports. The images, with file names and patients, stay in the run folder (data_images.parquet). Without them
the answer is by set, or "not known".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import digest
from medclip_dcl.common.find_model import FoundModel
from medclip_dcl.common.weight_files import SavedModel
from medclip_dcl.data.identity import IMAGE_DIGESTS
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.runs.run_folder import DATA_FILE, IMAGES_FILE, LINEAGE, UNTRAINED_CHECKPOINT, RunFolder
from medclip_dcl.runs.saved import read_parquet

IMAGES_OF = "images_of"
"""Entry of data.json: name of the set of the training, of sets whose images it has, then those of the trainings before.

None stands for images that are not known, as those of a published image encoder."""
START = "start"
"""Entry of data.json: the content of data.json of the model whose weights the training began with."""


class Answer(NamedTuple):
    """Images of a prepared set in the training of a model.

    Attributes:
        train_images: True if the training had images of this set, in whatever way these were prepared.
        elsewhere: name of another set that the model was trained on and that has images of this one; "" for none.
        is_known: True if all images of the training are known.
    """

    train_images: bool
    elsewhere: str
    is_known: bool

    def __str__(self) -> str:
        found = ["train patients of this set"] * self.train_images
        found += [f"images of this set elsewhere ({self.elsewhere})"] * bool(self.elsewhere)
        if not self.is_known:
            found.append("others not known" if found else "not known")
        return "; ".join(found) or "no images of this set"


class Lineage:
    """The images that a model was trained on.

    Args:
        where: the model, as errors name it.
        record: content of data.json; empty where it is not known.
        images: rows of `PreparedSet.image_digests`; None where they are not at hand.
    """

    def __init__(self, where: Path, record: Mapping[str, Any], images: pd.DataFrame | None = None) -> None:
        self.where, self.record = where, record
        self.fingerprint: str | None = record.get("fingerprint")
        self.sets: list[str | None] = record.get(IMAGES_OF, [None])
        if not isinstance(self.sets, list):
            raise UserError(f"{where / DATA_FILE}: {IMAGES_OF}: expected a list of sets, found {self.sets!r}")
        self.images = pd.DataFrame(columns=IMAGE_DIGESTS) if images is None else images
        if "patient" not in self.images:  # written before: numbers, which are names where no set has others
            numbers = self.images["subject_id"].astype(str)
            self.images = self.images.assign(patient=[digest(x.encode()) for x in numbers], family=None)
        self.is_known = None not in self.sets and (not self.sets or not self.images.empty)

    @classmethod
    def of(cls, model: SavedModel | None) -> Lineage:
        """Lineage of a saved model: of its run or exported folder, else of the checkpoint; of None, no images."""
        if model is None:
            return cls(Path(), {IMAGES_OF: []})
        folder, own = FoundModel(model.path).folder, model.checkpoint.get(LINEAGE) or {}
        record = RunFolder(folder).data() if folder else {}
        if folder not in (None, model.path) and model.path.name == UNTRAINED_CHECKPOINT:
            return cls(model.path, record.get(START, {}))
        if folder is None or (own and own != record):  # a checkpoint outside its run
            return cls(model.path, own)
        file = folder / IMAGES_FILE
        return cls(folder, record, read_parquet(file) if file.is_file() else None)

    def of_set(self, prepared: PreparedSet) -> Answer:
        """Say which images of a set the model was trained on."""
        images, is_trained, people, same, is_told = self._compared(prepared)
        is_own = self.fingerprint == prepared.fingerprint
        is_trained |= images["patient"].isin(people.get("train", ()))
        train_images = is_own or bool(is_trained.any() or (same["use_there"] == "train").any())
        source, *others = own_sets(prepared)
        here = {*others, *([] if is_told else [source])}
        # Copies in another release have other files: only patients tell, if every training on the family names them.
        there = self.images[self.images["family"].isin([prepared.family, None])]
        if prepared.family and prepared.names_patients and len(there) and not there.isna().any(axis=None):
            here = set()
        names = self.sets[1 + len(others) :] if is_own else self.sets
        elsewhere = next((name for name in names if name in here), None) or ""
        return Answer(train_images, elsewhere, self.is_known or (is_own and not names))

    def _compared(
        self, prepared: PreparedSet
    ) -> tuple[pd.DataFrame, pd.Series, dict[str, set[str]], pd.DataFrame, bool]:
        """Images of a set, which are training images, patients by use of the training, same originals, if these tell.

        Names are compared within the family of the set, and where the images that both have are of the same names.
        """
        images, trained = prepared.image_digests(), self.images.query("use == 'train'")
        is_trained, families = images["digest"].isin(trained["digest"]), {prepared.family} - {""}
        both = images.merge(self.images, on="dicom_id", suffixes=("", "_there"))
        same = both[both["original"] == both["original_there"]]
        shared = [images.merge(self.images.drop_duplicates("digest"), on="digest", suffixes=("", "_there"))]
        # The same originals, prepared in another way. Phantoms of one seed have the same names, and other images.
        if len(same) > len(both) / 2:
            is_trained |= images["dicom_id"].isin(trained["dicom_id"])
            shared.append(same)
        for rows in shared:
            if (rows["patient"] == rows["patient_there"]).all():
                families |= {*rows["family_there"]}
        comparable = self.images[self.images["family"].isin(families)].dropna(subset="patient")
        people = {str(use): {*names} for use, names in comparable.groupby("use")["patient"]}
        is_told = len(same) > 0 and (not prepared.names_patients or families >= {*same["family_there"]})
        return images, is_trained, people, same, is_told

    def require_untrained(self, prepared: PreparedSet, evaluated: Iterable[str]) -> None:
        """Refuse to evaluate images (dicom_id) that the model was trained on, or other images of these patients."""
        if self.fingerprint == prepared.fingerprint:
            return
        images, is_trained, people, *_ = self._compared(prepared)
        is_of_people = images["subject_id"].isin(images.loc[is_trained, "subject_id"])
        is_of_people |= images["patient"].isin(people.get("train", ()))
        # A checkpoint and thresholds were chosen on validate patients.
        is_tested = images["use"].isin(("test", "grounding"))
        is_of_people |= is_tested & images["patient"].isin(people.get("validate", ()))
        is_evaluated = images["dicom_id"].isin(list(evaluated))
        of_people = images[is_evaluated & is_of_people]
        if len(of_people):
            raise UserError(
                f"{prepared.folder}: {int((is_evaluated & is_trained).sum()):,} of {int(is_evaluated.sum()):,} images "
                f"to evaluate are training images of {self.where}, and {len(of_people):,} are of its training "
                f"patients, or validate patients (first: {of_people['dicom_id'].iloc[0]}); use a set with the split of "
                f"the training, or train on a set prepared with --keep_out {prepared.folder}"
            )

    def after(self, prepared: PreparedSet, is_published: bool) -> tuple[dict[str, Any], pd.DataFrame]:
        """Content of data.json and data_images.parquet of a training on a set that starts from this model.

        Args:
            prepared: set of the training; held-out images of it that the model was trained on are refused.
            is_published: True if a part starts from weights whose images are not known.
        """
        images = prepared.image_digests()
        held_out = images[images["use"].isin(("validate", "test", "grounding"))]
        self.require_untrained(prepared, held_out["dicom_id"])
        own, sets = own_sets(prepared), self.sets
        if None not in sets and (is_published or images.empty or not self.is_known):
            sets = [*sets, None]
        is_again = self.fingerprint == prepared.fingerprint and sets[: len(own)] == own
        by_use = (prepared.table("images") if prepared.has("images") else images).groupby("use")
        record = {
            "fingerprint": prepared.fingerprint,
            "source": prepared.info["source"],
            "images": by_use.size().to_dict(),
            "patients": by_use["subject_id"].nunique().to_dict(),
            IMAGES_OF: sets if is_again else [*own, *sets],
            START: {**self.record, IMAGES_OF: sets},
        }
        return record, pd.concat([images, self.images.query("use == 'train'")])


def own_sets(prepared: PreparedSet) -> list[str | None]:
    """Names of a set and of the sets whose images it has."""
    return [prepared.info["source"], *prepared.info["options"].get(IMAGES_OF, [])]
