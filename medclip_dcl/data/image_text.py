"""Batches of radiographs and report sentences from a prepared data set, and the tables of its evaluations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import pandas as pd
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader

from medclip_dcl.common.distributed import rank_and_size
from medclip_dcl.common.errors import UserError, check_choice, check_range
from medclip_dcl.common.findings import CHEX5, in_order
from medclip_dcl.data.arrays import Arrays
from medclip_dcl.data.correction import CorrectionImages, correction_arrays
from medclip_dcl.data.examples import ReportedExamples, expected_anchors, reported_arrays, token_arrays
from medclip_dcl.data.features import EncodedImages, Features, FeaturesInfo
from medclip_dcl.data.fields import (
    IMAGE_FIELDS,
    SENTENCE_FIELDS,
    FieldFiles,
    FieldRows,
    OwnFields,
    check_fields,
    image_field,
    made_of,
    read_own_fields,
    sentence_field,
)
from medclip_dcl.data.images import EvaluatedImages, ImagesDataModule, usual_crop
from medclip_dcl.data.labelled import LabelPolicy
from medclip_dcl.data.link import ImageTextData, ImageTextRequirements
from medclip_dcl.data.masking import Masking
from medclip_dcl.data.prepared import TABLES, PreparedDataError, PreparedSet, case_table
from medclip_dcl.data.samplers import (
    EpochSampler,
    FixedBatches,
    ShardSampler,
    as_it_is,
    require_whole_batches,
)
from medclip_dcl.networks.text_encoder import share_of_truncated
from medclip_dcl.pictures.geometry import View

# Sentences of the training reports whose fields are checked.
_CHECKED_SENTENCES = 10_000
_CASE_COLUMNS = ["dicom_id", "finding", "label"]


@dataclass(frozen=True)
class EvaluationTables(EvaluatedImages):
    """Tables of the image-text evaluations of a stage.

    Attributes:
        cases: dicom_id, finding, label (1 / 0), of every finding that the set labels.
        boxes: with a phrase: dicom_id, category, phrase, x, y, w, h in original pixels, and their reader where the set
            names it; empty on validate.
        sentences: dicom_id, sentence_id, text: distinct sentences of each report; on test, of the retrieved reports.
        view: the part of each image that the model sees.
        findings: labelled by the set, even without a case in this stage.
        reports_in_words: description of the retrieved reports.
        regions: all boxes, with or without a phrase, and with their reader where the set names it; empty on validate.
        masks: rows of the set's table; empty on validate.
        sentence_classes: sentence_id, text, class_id, rho (the share of images of which the class is true) of all
            sentences of a set whose truth is known (a phantom); else empty.
        image_classes: dicom_id, class_id: the classes that are true of an image; empty as well.
        tuning: dicom_ids of the validate images that are among those of test for their regions and masks.
        sentence_states: input of the text encoder's projection by sentence_ids, from `data.features`; None without.
        blank: `blank_cases` of the cases.
    """

    cases: pd.DataFrame
    boxes: pd.DataFrame
    sentences: pd.DataFrame
    view: View = View()
    findings: Sequence[str] = ()
    reports_in_words: str = "all"
    regions: pd.DataFrame = field(default_factory=lambda: _no_rows("boxes"))
    masks: pd.DataFrame = field(default_factory=lambda: _no_rows("masks"))
    sentence_classes: pd.DataFrame = field(default_factory=lambda: _no_rows("classes").assign(text=""))
    image_classes: pd.DataFrame = field(default_factory=lambda: _no_rows("image_classes"))
    tuning: frozenset[str] = frozenset()
    sentence_states: Callable[[Sequence[int]], Tensor] | None = None
    blank: str = "ignore"

    @property
    def labelled(self) -> list[str]:
        """`findings`, and those of the cases."""
        return list(dict.fromkeys([*self.findings, *self.cases["finding"]]))


class ImageTextDataModule(ImagesDataModule[ImageTextRequirements]):
    """Images with sentences of their reports, for training, validation, test and prediction.

    A batch is a dict: images, grey levels (view, 1, H, W), first views of all images first; image_scale (view, 3):
    their brightness, contrast and mean (`pictures.transforms.to_input`); view_of (view,): of which image; tokens
    (sentence, token), lengths (sentence,); image_index (sentence,): which image of the batch is the sentence's
    positive; dicom_id and study_id of the images, image_key: their rows among the images of the use; sentence_id;
    anchor and candidate: the fields of sentences and of images that the objective asked for; masked_tokens and
    masked_labels (sentence, token) and masked_by_length where it asked for them; by_length, the places of distinct
    sentences that are encoded together (`data.by_length`), and row_of_sentence (sentence,), the row of each
    among them. An objective with `correction_images` has images of the correction behind the views, first those
    drawn first, and has_others (image,), False where they are the image itself. A model with `label_weight` has
    labels (image, finding): 1, 0, or NaN for an entry that is left out, as all of a study without labels. Test and
    prediction batches hold images only. With `features` a batch holds features (image, channel, row, column) in place
    of images, and states (distinct, hidden) in place of tokens.

    Args:
        folder: the prepared data set.
        image_size: side in pixels to which the whole image is scaled; the shorter one of a set that was prepared with
            geometry shortest, of which evaluation sees the middle square. null: 512; on the command line the size at
            which the checkpoint, or what training starts from, was trained.
        crop_size: side of the random training crop, in pixels; at most image_size. null: 15/16 of image_size (SSD's
            480 of 512); with image_size null on the command line the crop of that training.
        batch_size: images per batch, of all processes together.
        contrastive_batch: images that are contrasted in a step, of all processes together, a multiple of batch_size:
            they are encoded batch_size at a time, and again for their gradients (GradCache), so that they need not
            fit into memory. BatchNorm's statistics are those of batch_size images. null for batch_size.
        views: views of each image, all of them positives of its sentences (M of DCL): the image, other frontal images
            of its study, the image again, each augmented by itself. With several, other images of its study are not
            negatives.
        sentences: "one" draws one sentence per image and step (choice, not from the paper), "all" takes every
            sentence of the report as an anchor.
        brightness: factor varies in 1 +- brightness (choice: 0.2).
        contrast: factor varies in 1 +- contrast (choice: 0.2).
        log_p: which sentence scores, the stem of a file in log_p/; null for the only one there.
        text_embedding: which sentence embeddings, the stem of a file in text_embedding/; null for the only one there.
        ranking: which ranking of reports, the stem of a file in ranking/; null for the only one there.
        posterior: which posterior of reports, the stem of a file in posterior/; null for the only one there.
        fields: a Parquet file with further fields for an objective of your own: a column sentence_id (or dicom_id) and
            numeric columns, which a class probability or a negative weight requires by name; null for none.
        mask_probability: share of tokens that are masked, where the objective models masked language, in (0, 1).
        num_workers: loader processes; 0 loads in the training process.
        cache_images: True keeps all images at image_size in memory (bytes = images * image_size^2), or their features.
        predict_use: which images `predict` takes: "test", all of that use and all that `test` evaluates; or train,
            validate, grounding.
        seed: of the order, the crops and the sentence choice.
        evaluation_crop: validation, test and prediction see the middle of the image, a square of so many pixels; null
            for the whole image, from which no box can fall (choice: SSD does not say).
        test_reports: most reports that `test` retrieves; of more, so many studies are drawn, the same in every run.
        features: which features of a frozen model's encoders are served in place of images and tokens, a folder in
            features/ (`medclip-dcl encode`); null: none. They are those of the image as evaluation sees it, so that
            nothing varies: crop_size must be image_size or null, brightness and contrast 0, views 1; and batch_size is
            as cheap as contrastive_batch, which must be null.
        uncertain: what a label of -1 counts as for the model's `label_weight`, as in `LabelledDataModule`.
        blank: what no mention counts as there.
        blank_cases: what no mention counts as in classification, of validation and test: "ignore", no case (SSD), or
            "zeros", a negative case, of a study with a label.
    """

    accepts = ImageTextRequirements

    def __init__(
        self,
        folder: str,
        image_size: int | None = None,
        crop_size: int | None = None,
        batch_size: int = 64,
        sentences: Literal["one", "all"] = "one",
        brightness: float = 0.2,
        contrast: float = 0.2,
        log_p: str | None = None,
        num_workers: int = 4,
        cache_images: bool = False,
        predict_use: Literal["train", "validate", "test", "grounding"] = "test",
        seed: int = 0,
        contrastive_batch: int | None = None,
        views: int = 1,
        text_embedding: str | None = None,
        mask_probability: float = 0.15,
        evaluation_crop: int | None = None,
        fields: str | None = None,
        test_reports: int = 5000,
        features: str | None = None,
        ranking: str | None = None,
        uncertain: Literal["ones", "zeros", "ignore"] = "ignore",
        blank: Literal["zeros", "ignore"] = "zeros",
        posterior: str | None = None,
        blank_cases: Literal["ignore", "zeros"] = "ignore",
    ) -> None:
        super().__init__(
            *(folder, image_size, crop_size, batch_size, brightness, contrast),
            *(num_workers, cache_images, predict_use, seed),
            usual_crop=usual_crop if features is None else lambda side: side,
        )
        check_range("data", "[1, inf)", test_reports=test_reports, views=views)
        seen = self.image_size if evaluation_crop is None else evaluation_crop
        check_range("data", f"[1, {self.image_size}]", evaluation_crop=seen)
        self.view = View(seen, self.image_size)
        self.test_reports = test_reports
        check_choice("data.sentences", sentences, ("one", "all"))
        if contrastive_batch is not None and (contrastive_batch < 1 or contrastive_batch % batch_size):
            raise UserError(
                f"data.contrastive_batch {contrastive_batch} must be a multiple of data.batch_size {batch_size}"
            )
        check_range("data", "(0, 1)", mask_probability=mask_probability)
        if features is not None and (views > 1 or contrastive_batch is not None):
            raise UserError(
                "data.features are of one view of each image, and need no batch that is encoded in parts: set "
                f"data.views: 1 and data.contrastive_batch: null (got {views}, {contrastive_batch})"
            )
        self.features_name, self.sentences = features, sentences
        self.contrastive_batch, self.views = contrastive_batch or batch_size, views
        self.mask_probability, self.fields_file = mask_probability, fields
        self._names = (log_p, text_embedding, ranking, posterior)
        self.policy = LabelPolicy(uncertain, blank)
        self.case_policy = LabelPolicy("ignore", blank_cases)
        self._needs_labels = False
        self._train: ReportedExamples | None = None
        self._validate: ReportedExamples | None = None
        self._evaluation: dict[str, EvaluationTables] = {}

    def provided(self) -> ImageTextData:
        encoders = None if self.features is None else self.features.info.encoders
        images = replace(self.image_settings(), encoded_by=encoders)
        findings = map(str, self._label_targets if self._needs_labels else ())
        return ImageTextData(images, None if self._train is None else self.contrastive_batch, tuple(findings))

    @cached_property
    def features(self) -> Features | None:
        """Features that stand in place of images and tokens."""
        if self.features_name is None:
            return None
        return Features(self.prepared, self.features_name, self.cache_images)

    def load(self, stage: str) -> None:
        """Check the set against the requirements of the run."""
        self.of_machine(lambda: self.prepared.check("images"))
        if self.features is not None:
            self._require_fitting_features(self.features)
        if stage == "fit":
            self.of_machine(self._require_images_to_fit)
        self._needs_labels = stage in ("fit", "validate") and self.requirements.labels
        if stage in ("fit", "validate"):
            self._train = self._validate = None  # of another model, perhaps
        if stage != "fit":
            return
        self.of_machine(lambda: self._own_fields is None)  # what one machine cannot read is an error on all
        reported = self._reported("train")
        if not len(reported["place"]):
            raise PreparedDataError(
                f"{self.folder} has no reports of its training images: an image-text model learns from images and "
                "sentences; train a classifier (--config finetune), or prepare a set with reports"
            )
        if self.views > 1 and not self.varies and reported["images"].lengths.max() == 1:
            raise PreparedDataError(
                f"data.views {self.views}: all views of an image would be equal, because nothing is augmented "
                f"(crop_size = image_size, brightness = contrast = 0) and no study of {self.folder} has several "
                "frontal images; lower crop_size, or set views: 1"
            )
        self._train = self._examples(reported, augmented=True)
        require_whole_batches(len(self._train), self.batch_size, rank_and_size()[1], "images")
        validate = self._reported("validate")
        if not len(validate["place"]):
            raise PreparedDataError(f"{self.folder} has no validate images with a sentence of a report")
        self._validate = self._examples(validate, augmented=False)
        self.prepared.forget_tables()

    def _require_fitting_features(self, features: Features) -> None:
        """Refuse features of other images, or for a model or settings that need the images themselves."""
        if not self.requirements.is_frozen:
            raise UserError(
                f"data.features {self.features_name}: a model whose encoders are trained needs the images; set "
                "model.init_args.frozen: true, or data.features: null"
            )
        self._require_no_augmentation(f"data.features {self.features_name} are of whole images")
        there = asdict(features.info)
        here = asdict(FeaturesInfo.of(features.info.encoders, self.prepared, self.view))
        others = [f"{name} {x} (here: {here[name]})" for name, x in there.items() if x != here[name]]
        if others:
            raise UserError(
                f"data.features {self.features_name} are of other images, with {', '.join(others)}; set the data's "
                "options to these, or encode anew: medclip-dcl encode"
            )

    def _reported(self, use: str) -> Arrays:
        return self.arrays({"of": "images", "use": use}, lambda: reported_arrays(self.prepared, use))

    def _tokens(self) -> FieldRows:
        required = self.requirements
        what, make = {"of": "tokens", "tokenizer": required.tokenizer}, partial(token_arrays, self.prepared)
        tokens = self.arrays(what, lambda: make(required)) if required.tokenizer else Arrays(make(required))
        if cut := share_of_truncated(int(tokens["truncated"][0]), len(tokens["key"])):
            rank_zero_warn(f"{cut} (model.init_args.text_encoder.init_args.max_tokens)")
        return FieldRows(tokens)

    def sentence_fields(self, names: Sequence[str]) -> dict[str, FieldRows]:
        """Fields of sentences by name and sentence_id: of training as the objective gets them, others from the set."""

        def of_set(name: str) -> FieldRows:
            return FieldRows(Arrays(sentence_field(self.prepared, name, self._files)))

        there = {} if self._train is None else self._train.anchor
        return {name: there.get(name) or of_set(name) for name in names}

    def _image_fields(self, names: Sequence[str], use: str, reported: Arrays) -> dict[str, FieldRows]:
        def of_images(prepared: PreparedSet, name: str, files: FieldFiles) -> dict[str, np.ndarray]:
            images = prepared.table("images").iloc[reported["place"]]
            return image_field(prepared, name, files, images)

        return {name: self._field(f"images of {use}", name, of_images) for name in names}

    def _field(self, of: str, name: str, make: Callable[..., Any]) -> FieldRows:
        fields = SENTENCE_FIELDS if of == "sentences" else IMAGE_FIELDS
        file = self.of_machine(partial(made_of, self.prepared, fields, name, self._files))
        self._require_same(f"{name} digest", file)
        if file and name != "signs":  # those are of this package's rules
            self.made_of[name] = file
        what = {"of": of, "field": name, "file": file}
        return FieldRows(self.arrays(what, partial(make, self.prepared, name, self._files)))

    @property
    def _files(self) -> FieldFiles:
        return FieldFiles(*self._names, self._own_fields)

    @cached_property
    def _own_fields(self) -> OwnFields | None:
        return None if self.fields_file is None else read_own_fields(self.fields_file)

    @cached_property
    def _label_targets(self) -> pd.DataFrame:
        """Targets of the labelled studies, by study_id, in the columns with both values among those of training."""
        targets = self.policy.of_studies(self.prepared.rows("labels"))
        training = targets[targets.index.isin(self._reported("train")["study_id"])]
        columns = in_order(map(str, targets))
        found = [column for column in columns if training[column].nunique() > 1]
        if not found:
            raise PreparedDataError(
                f"model.label_weight: expected a label column of {self.folder} with positive and negative training "
                f"studies (data.uncertain {self.policy.uncertain}, data.blank {self.policy.blank}), found none of "
                f"{len(columns)}; prepare the set from a source with labels, or set model.init_args.label_weight: 0"
            )
        left_out = ", ".join(column for column in columns if column not in found) or "none"
        note = ", exact readings of a phantom's reports" * self.prepared.is_phantom
        rank_zero_info(
            f"model.label_weight: {len(found)} of {len(columns)} label columns{note}; left out, without both values "
            f"among {len(training):,} labelled training studies: {left_out}"
        )
        return targets[found]

    def _labels(self, use: str, reported: Arrays) -> FieldRows:
        targets, ids = self._label_targets, reported["study_id"]
        what = {"of": f"labels of {use}", **asdict(self.policy)}
        return FieldRows(self.arrays(what, lambda: {"value": targets.reindex(ids).to_numpy()}))

    def _examples(self, reported: Arrays, augmented: bool) -> ReportedExamples:
        required = self.requirements
        of_sentences, of_images = required.sentence_fields, required.image_fields
        findings = self.prepared.findings if of_images else []
        check_fields(of_sentences, of_images, self._own_fields, findings)
        anchor = {name: self._field("sentences", name, sentence_field) for name in of_sentences}
        candidate = self._image_fields(of_images, "train" if augmented else "validate", reported)
        if augmented and required.check_image_fields is not None:
            every = range(len(reported["place"]))
            required.check_image_fields({name: rows[every] for name, rows in candidate.items()})
        if augmented and required.check_sentence_fields is not None:
            every_sentence = reported["sentences"].flat
            number = min(len(every_sentence), _CHECKED_SENTENCES)
            sample = every_sentence[np.random.default_rng(0).choice(len(every_sentence), number)]
            required.check_sentence_fields({name: rows[sample] for name, rows in anchor.items()})
        if augmented and required.prepare is not None:
            sentences, anchors = expected_anchors(reported, self.sentences == "one")
            required.prepare(anchors, {name: anchor[name][sentences] for name in required.prepared_fields})
        masking, extra, tokens = None, {}, None
        if self.features is None:
            tokens = self._tokens() if augmented or self._train is None else self._train.tokens
        if required.masked_vocabulary is not None:
            masking = Masking(required.masked_vocabulary, self.mask_probability)
        if augmented and self.contrastive_batch > self.batch_size:
            extra = {"encode_at_once": self.batch_size // rank_and_size()[1]}
        return ReportedExamples(
            reported,
            self.features or self._scaled(reported["path"]),
            tokens,
            views=self.views if augmented else 1,
            show=self.show(augmented),
            draws_one=self.sentences == "one",
            seed=self.seed,
            anchor=anchor,
            candidate=candidate,
            masking=masking,
            extra=extra,
            labels=self._labels("train" if augmented else "validate", reported) if required.labels else None,
            correction=self._correction(),
        )

    def _correction(self) -> CorrectionImages | None:
        """Training images from which the objective's correction draws; None where it has the anchor's own."""
        kind, count = self.requirements.correction_images, self.requirements.correction_count
        if kind == "own":
            return None
        if self._train is not None:
            return self._train.correction
        options = (self.sentences, self.views, self.contrastive_batch)
        if options != ("one", 1, self.batch_size):
            raise UserError(
                f"model.correction_images {kind}: expected data.sentences one, data.views 1 and data.contrastive_batch "
                f"null, found {', '.join(map(str, options))}; set these, or model.init_args.correction_images: own"
            )
        if kind == "class":
            rank_zero_info(
                "model.correction_images class draws by the phantom's truth: an oracle, not a method"
            )
        if self.features is None:
            rank_zero_warn(
                f"model.correction_count {count}: a step encodes {1 + count} times the images of data.batch_size; "
                "data.features (medclip-dcl encode) of frozen encoders need no encoding"
            )
        training = self._reported("train")
        what = {"of": "correction", "kind": kind}
        arrays = self.arrays(what, lambda: correction_arrays(self.prepared, kind, training))
        images = self.features or self._scaled(training["path"])
        return CorrectionImages(arrays, training, images, count)

    # Loaders

    def train_dataloader(self) -> DataLoader:
        assert self._train is not None
        sampler = EpochSampler(len(self._train), self.contrastive_batch, self.seed)
        own = self.contrastive_batch // sampler.num_replicas
        options = self._loader_options(own, self._train.collate)
        return self.training_loader(self._train, sampler, drop_last=True, **options)

    def val_dataloader(self) -> DataLoader:
        # Whole blocks of images, so that the loss has the same candidates on any number of processes.
        examples = self._validate or self._examples(self._reported("validate"), augmented=False)
        blocks = FixedBatches(examples, self.batch_size)
        return self._loader(blocks, ShardSampler(range(len(blocks))), None, None)

    def _image_loader(self, dicom_ids: Sequence[str]) -> DataLoader:
        if self.features is None:
            return super()._image_loader(dicom_ids)
        encoded = EncodedImages(self.features, dicom_ids)
        return self._loader(encoded, ShardSampler(range(len(encoded))), self.batch_size, as_it_is)

    # Evaluation

    def evaluation(self, stage: str) -> EvaluationTables:
        """Tables of the evaluations on "validate" or "test".

        Test: the images of cases (official test split), every image outside training with a box or a mask, and, for the
        retrieval of reports, the images of the official test split whose report has a sentence, with a box or without.
        Validate: the images of validate patients.
        """
        if stage not in self._evaluation:
            self._evaluation[stage] = self._evaluation_tables(stage)
        return self._evaluation[stage]

    def _evaluation_tables(self, stage: str) -> EvaluationTables:
        cases = self.prepared.rows("cases", use=[stage])
        if self.case_policy.blank == "zeros":
            if self.prepared.info["options"].get("cases") == "balanced":
                rank_zero_warn("data.blank_cases zeros: all cases, not those of the set, which are balanced")
            every = self.case_policy.of_studies(self.prepared.rows("labels"))[self.prepared.findings]
            cases = case_table(self.prepared.table("images"), every.reset_index()).query("use == @stage")
        regions, masks = _no_rows("boxes"), _no_rows("masks")
        if stage == "validate":
            images = measured = self.prepared.rows("images", use=["validate"])
            reported, in_words = self._with_reports(images), "all"
        else:
            images = self.prepared.rows("images")
            evaluable = images.loc[images["use"].isin(("test", "grounding", "validate")), "dicom_id"]
            regions, masks = (
                rows[rows["dicom_id"].isin(evaluable)].reset_index(drop=True)
                for rows in map(self._rows_if_any, ("boxes", "masks"))
            )
            measured = pd.concat([cases["dicom_id"], regions["dicom_id"], masks["dicom_id"]]).to_frame()
            reported, in_words = self._retrieved()
            if measured.empty and reported.empty:
                raise PreparedDataError(
                    f"{self.folder} has nothing to test on: no image of the test split has a report or a label, and "
                    "there is no box; prepare it again with test patients (a column split, or --split_shares, of "
                    "medclip-dcl prepare folder; the split file of MIMIC-CXR)"
                )
        evaluated = set(measured["dicom_id"]) | set(reported["dicom_id"])
        validate = set(images.loc[images["use"] == "validate", "dicom_id"])
        tuning = validate & {*regions["dicom_id"], *masks["dicom_id"]}
        boxes = regions[(regions["phrase"] != "") & ~regions["dicom_id"].isin(tuning)]
        # Images of CheX5 and of boxes first, so that their order does not depend on other findings and reports.
        of_chex5 = cases.loc[cases["finding"].isin(CHEX5), "dicom_id"]
        is_later = ~images["dicom_id"].isin({*of_chex5, *boxes["dicom_id"]}) & (stage == "test")
        images = images.assign(_later=is_later)[images["dicom_id"].isin(evaluated)]
        images = images.sort_values(["_later", "dicom_id"]).reset_index(drop=True)
        shown = images.loc[images["dicom_id"].isin(reported["dicom_id"]), ["dicom_id", "study_id"]]
        said = shown.merge(self._said(shown).drop_duplicates(), on="study_id")
        classes = self._rows_if_any("classes")
        ids = pd.concat([said["sentence_id"], classes["sentence_id"]]).unique()
        texts = self.prepared.rows("sentences", ["sentence_id", "text"], sentence_id=ids)
        sentences = said.merge(texts, on="sentence_id")
        return EvaluationTables(
            images=images[["dicom_id", "subject_id", "study_id", "height", "width"]],
            cases=cases.loc[cases["dicom_id"].isin(evaluated), _CASE_COLUMNS].reset_index(drop=True),
            findings=self.prepared.findings,
            boxes=boxes.reset_index(drop=True),
            sentences=sentences[["dicom_id", "sentence_id", "text"]],
            view=self.fitted_view,
            reports_in_words=in_words,
            regions=regions,
            masks=masks,
            sentence_classes=classes.merge(texts, on="sentence_id"),
            image_classes=self._rows_if_any("image_classes"),
            tuning=frozenset(tuning),
            sentence_states=None if self.features is None else self.features.of_sentences,
            blank=self.case_policy.blank,
        )

    def _rows_if_any(self, table: str) -> pd.DataFrame:
        return self.prepared.table(table) if self.prepared.has(table) else _no_rows(table)

    def _said(self, images: pd.DataFrame) -> pd.DataFrame:
        """study_id and sentence_id of each mention in the reports of images."""
        studies = images["study_id"].unique()
        return self.prepared.rows("reports", ["study_id", "sentence_id"], study_id=studies)

    def _with_reports(self, images: pd.DataFrame) -> pd.DataFrame:
        """The images whose report has a sentence."""
        return images[images["study_id"].isin(self._said(images)["study_id"])]

    def _retrieved(self) -> tuple[pd.DataFrame, str]:
        """Test images whose reports are retrieved, and which these are."""
        images = self._with_reports(self.test_images)
        studies = np.sort(images["study_id"].unique())
        if len(studies) <= self.test_reports:
            return images, "all"
        # Not by `seed`: runs of several seeds are compared on the same reports.
        drawn = np.random.default_rng(0).choice(studies, self.test_reports, replace=False)
        in_words = f"{self.test_reports:,} of {len(studies):,}, studies drawn at random (seed 0)"
        return images[images["study_id"].isin(drawn)], in_words

    def predict_dataloader(self) -> DataLoader:
        if self.predict_use != "test":
            return super().predict_dataloader()
        # Beside those of `test` the images that it has no use for.
        tested = self.evaluation("test").images["dicom_id"].tolist()
        images = self.prepared.rows("images", ["dicom_id"], use=["test"])["dicom_id"]
        return self._image_loader([*tested, *sorted(set(images) - set(tested))])


def _no_rows(table: str) -> pd.DataFrame:
    return pd.DataFrame(columns=list(TABLES[table]))
