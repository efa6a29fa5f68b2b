"""Evaluation of sentence encoders: cross-validated logistic regression on frozen features (DCL, table 2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor

from medclip_dcl.common.distributed import gather_with_grad
from medclip_dcl.common.errors import UserError, check_min, check_options
from medclip_dcl.data.link import trainer_data
from medclip_dcl.evaluation.callback import Evaluation, EvaluationResult


class SentenceEvaluation(Evaluation):
    """Accuracy and AUC of logistic regression on the features of texts, cross-validated, for each task of the data.

    A case has the mean features of its texts, standardised by a fold's training cases (choice). Classes with fewer
    groups or distinct cases than folds are left out, tasks with fewer than two classes are not evaluated. Accuracy is
    the mean over folds, AUC that of the predictions of all folds together, each class against the rest and averaged
    over classes.

    Args:
        folds: 10 (DCL); stratified by class, with a group's cases in one fold. Training cases with the texts of a case
            of the fold are left out (choice).
        c: inverse strength of scikit-learn's L2 penalty (choice; Quick-Thought's code chooses it in each fold).
        seed: of the folds.
    """

    section = "texts"

    def __init__(self, folds: int = 10, c: float = 1.0, seed: int = 0) -> None:
        super().__init__()
        check_min("SentenceEvaluation", {"folds": (folds, 2), "seed": (seed, 0)})
        check_options({"c": c}, {})
        self.folds, self.c, self.seed = folds, c, seed
        self._parts: list[tuple[Tensor, Tensor]] = []

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._parts, self.results = [], {}

    def on_test_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self._parts.append((outputs["features"].float(), outputs["document"]))

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        features, text = (gather_with_grad(torch.cat(part)) for part in zip(*self._parts, strict=True))
        if not features.isfinite().all():
            raise UserError("the features of some texts are not finite: training has diverged")
        data: Any = trainer_data(trainer)
        result = EvaluationResult({}, protocol={"folds": self.folds, "c": self.c, "seed": self.seed})
        if len(text) < len(data.texts):
            result.notes.append("no task was evaluated: the test was limited to some batches")
        by_text = features[text.argsort()].cpu().numpy()
        tables = []
        for name, task in ({} if result.notes else data.tasks).items():
            table = self._classified(np.stack([by_text[texts].mean(0) for texts in task["texts"]]), task)
            result.counts[name] = {"cases": len(table), "left_out": len(task) - len(table)}
            if table.empty:
                result.notes.append(
                    f"{name} was not evaluated: fewer than two classes have {self.folds} groups of distinct cases"
                )
                continue
            result.metrics[name] = _metrics(table)
            tables.append(table[["case", "fold", "label", "predicted"]].assign(task=name))
        if tables:
            result.metrics["mean"] = pd.DataFrame(result.metrics).T.mean().to_dict()
            result.scalars = {f"texts_{number}": value for number, value in result.metrics["mean"].items()}
            result.predictions = pd.concat(tables, ignore_index=True)
        self.results = {self.section: result}
        self.log_results(pl_module, "test", self.results)

    def _classified(self, features: Float[np.ndarray, "case feature"], task: pd.DataFrame) -> pd.DataFrame:
        """Fold, label, predicted class and a probability for each class of the cases of all folds; empty: none."""
        from sklearn.linear_model import LogisticRegression
        from sklearn.model_selection import StratifiedGroupKFold, cross_val_predict
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        task = task.assign(text=pd.factorize(task["texts"].map(tuple))[0])
        sizes = task.groupby("label")[["group", "text"]].nunique().min(axis=1)
        classes = sorted(sizes.index[sizes >= self.folds])
        case = np.flatnonzero(task["label"].isin(classes))
        if len(classes) < 2:
            return pd.DataFrame()
        features, task = features[case], task.iloc[case]
        label, text = task["label"].to_numpy().astype(str), task["text"].to_numpy()
        folds = StratifiedGroupKFold(self.folds, shuffle=True, random_state=self.seed)
        splits = [
            (train[~np.isin(text[train], text[test])], test)
            for train, test in folds.split(features, label, task["group"])
        ]
        model = make_pipeline(StandardScaler(), LogisticRegression(C=self.c, max_iter=1000))
        found = cross_val_predict(model, features, label, cv=splits, method="predict_proba")
        described = pd.DataFrame({"case": case, "fold": 0, "label": label})
        described["predicted"] = np.array(classes)[found.argmax(1)]
        for number, (_, test) in enumerate(splits):
            described.loc[test, "fold"] = number
        return described.join(pd.DataFrame(found, columns=classes).add_prefix("p "))


def _metrics(table: pd.DataFrame) -> dict[str, float]:
    from sklearn.metrics import roc_auc_score

    is_right = table["predicted"] == table["label"]
    names = [str(name) for name in table if str(name).startswith("p ")]
    aucs = [roc_auc_score(table["label"] == name[2:], table[name]) for name in names]
    return {"accuracy": float(is_right.groupby(table["fold"]).mean().mean()), "auc": float(np.mean(aucs))}
