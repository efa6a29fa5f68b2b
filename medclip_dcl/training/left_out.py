"""The negatives that a text ranking leaves out, measured when training starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_info

from medclip_dcl.common.files import write_json
from medclip_dcl.data.fields import FieldFiles, image_field
from medclip_dcl.data.image_text import ImageTextDataModule
from medclip_dcl.data.link import trainer_data
from medclip_dcl.metrics.false_negatives import auc_within_anchors
from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.objectives import RankedByText
from medclip_dcl.runs.run_folder import LEFT_OUT_FILE

_IMAGES = 1_000


class LeftOutNegatives(Callback):
    """Writes left_out.json when training with `RankedByText` starts, on a sample of pairs of training images.

    1,000 images (seed 0), each with one sentence of its report, are the anchors, and the candidates of all others. On a
    phantom, precision, recall and AUC within anchors say which of the pairs left out are false negatives.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data = trainer_data(trainer)
        if not (isinstance(pl_module, ImageTextModel) and isinstance(data, ImageTextDataModule)):
            return
        rule = pl_module.objective.negative_weights
        if isinstance(rule, RankedByText) and trainer.is_global_zero:
            found = left_out_negatives(rule, data)
            rank_zero_info("negatives left out: " + ", ".join(f"{name} {x:.3g}" for name, x in found.items()))
            if not trainer.fast_dev_run:  # type: ignore[attr-defined]
                write_json(found, Path(trainer.default_root_dir) / LEFT_OUT_FILE)


@torch.no_grad()
def left_out_negatives(rule: RankedByText, data: ImageTextDataModule) -> dict[str, Any]:
    """Shares of the sampled pairs, and of anchors, by name."""
    examples = data.training_examples
    draws = np.random.default_rng(0)
    images = draws.permutation(len(examples))[:_IMAGES].tolist()
    sentences = [draws.choice(examples.reported["sentences"][image]) for image in images]
    device = rule.log_c.device
    anchor = {name: rows[sentences].to(device) for name, rows in examples.anchor.items()}
    candidate = {name: rows[images].to(device) for name, rows in examples.candidate.items()}
    study = examples.reported["study_id"][images]
    is_other = study[:, None] != study
    is_left_out = (rule.pair_weights(anchor, candidate, None) == 0).cpu().numpy() & is_other
    found = {
        "mean_share": float(rule.share(anchor).mean()),
        "left_out": is_left_out.sum() / max(is_other.sum(), 1),
        "c": float(rule.log_c.exp()),
        "images": len(images),
    }
    if data.prepared.has("image_classes"):
        class_id = data.sentence_fields(["class_id"])["class_id"][sentences].tolist()
        rows = data.prepared.table("images").iloc[examples.reported["place"][images]]
        fits = image_field(data.prepared, "image_classes", FieldFiles(), rows)["value"][:, class_id].T == 1
        is_false = fits & is_other
        found["false_negatives"] = is_false.sum() / max(is_other.sum(), 1)
        found["precision"] = (is_left_out & is_false).sum() / max(is_left_out.sum(), 1)
        found["recall"] = (is_left_out & is_false).sum() / max(is_false.sum(), 1)
        if rule.random_seed is None:
            scores = rule.scores(anchor, candidate).cpu().numpy()
            found["auc_within_anchors"] = auc_within_anchors(scores, fits, np.eye(len(images), dtype=bool))
    return {
        name: value if isinstance(value, int) else round(float(value), 4) for name, value in found.items()
    }
