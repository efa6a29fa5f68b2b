"""Evaluation of sentence encoders: logistic regression on frozen features, cross-validated or split (DCL, table 2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor

from medclip_dcl.common.distributed import gather_with_grad
from medclip_dcl.common.errors import UserError, check_range
from medclip_dcl.data.link import trainer_data
from medclip_dcl.evaluation.callback import Evaluation, EvaluationResult


class SentenceEvaluation(Evaluation):
    """Accuracy and AUC of logistic regression on the features of texts, cross-validated, for each task of the data.

    A case has the mean features of its texts, standardised by a fold's training cases (choice). Classes with fewer
    groups or distinct cases than folds are left out, tasks with fewer than two classes are not evaluated. Accuracy is
    the mean over folds, AUC that of the predictions of all folds together, each class against the rest and averaged
    over classes. A published split is one fold, of which nothing is left out: its test cases are predicted. The
    features of a pair (u, v) are ``|u - v|`` and u * v (Quick-Thought's code), and it has F1 of class 1, too.

    Args:
        folds: 10 (DCL); stratified by class, with a group's cases in one fold. Training cases with the texts of a case
            of the fold are left out (choice).
        c: inverse strength of scikit-learn's L2 penalty (choice; Quick-Thought's code chooses it in each fold).
        seed: of the folds.
    """

    section = "texts"

    def __init__(self, folds: int = 10, c: float = 1.0, seed: int = 0) -> None:
        super().__init__()
        check_range("SentenceEvaluation", "[2, inf)", folds=folds)
        check_range("SentenceEvaluation", "[0, inf)", seed=seed)
        check_range("SentenceEvaluation", "(0, inf)", c=c)
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
            is_split = "use" in task
            is_pair = is_split and len(task["texts"].iloc[0]) == 2
            table = self._classified(_features(by_text, task["texts"], is_pair), task)
            others = (task["use"] == "train").sum() if is_split else len(task) - len(table)
            result.counts[name] = {"cases": len(table), "training" if is_split else "left_out": int(others)}
            if table.empty:
                result.notes.append(
                    f"{name} was not evaluated: fewer than two classes "
                    + ("are in both files" if is_split else f"have {self.folds} groups of distinct cases")
                )
                continue
            result.metrics[name] = _metrics(table, is_pair)
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
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        model = make_pipeline(StandardScaler(), LogisticRegression(C=self.c, max_iter=1000))
        label, tables = task["label"].to_numpy().astype(str), [pd.DataFrame()]
        for number, (train, test) in enumerate(self._folds(task)):
            model.fit(features[train], label[train])
            found = model.predict_proba(features[test])
            described = {"case": test, "fold": number, "label": label[test]}
            table = pd.DataFrame({**described, "predicted": model.classes_[found.argmax(1)]})
            tables.append(table.join(pd.DataFrame(found, columns=model.classes_).add_prefix("p ")))
        table = pd.concat(tables)
        return table if table.empty else table.fillna(0.0).sort_values("case", ignore_index=True)

    def _folds(self, task: pd.DataFrame) -> list[tuple[Any, Any]]:
        """Training and tested cases of each fold; none without two classes in it."""
        from sklearn.model_selection import StratifiedGroupKFold

        label = task["label"].to_numpy().astype(str)
        if "use" in task:
            train, test = (np.flatnonzero(task["use"] == use) for use in ("train", "test"))
            return [(train, test)] if len({*label[train]} & {*label[test]}) > 1 else []
        text = pd.factorize(task["texts"].map(tuple))[0]
        sizes = task.assign(text=text).groupby("label")[["group", "text"]].nunique().min(axis=1)
        case = np.flatnonzero(task["label"].map(sizes) >= self.folds)
        if len({*label[case]}) < 2:
            return []
        folds = StratifiedGroupKFold(self.folds, shuffle=True, random_state=self.seed)
        splits = folds.split(case, label[case], task["group"].iloc[case])
        cases = ((case[train], case[test]) for train, test in splits)
        return [(train[~np.isin(text[train], text[test])], test) for train, test in cases]


def _features(by_text: np.ndarray, texts: pd.Series, is_pair: bool) -> Float[np.ndarray, "case feature"]:
    """Mean features of the texts of each case; of a pair ``|u - v|`` and u * v."""
    if not is_pair:
        return np.stack([by_text[numbers].mean(0) for numbers in texts])
    u, v = by_text[np.stack([*texts]).T]
    return np.hstack([np.abs(u - v), u * v])


def _metrics(table: pd.DataFrame, is_pair: bool) -> dict[str, float]:
    from sklearn.metrics import f1_score, roc_auc_score

    is_right = table["predicted"] == table["label"]
    is_class = {name: table["label"] == name[2:] for name in map(str, table) if name.startswith("p ")}
    aucs = [roc_auc_score(positive, table[name]) for name, positive in is_class.items() if positive.any()]
    accuracy = float(is_right.groupby(table["fold"]).mean().mean())
    f1 = {"f1": float(f1_score(table["label"] == "1", table["predicted"] == "1"))} if is_pair else {}
    return {"accuracy": accuracy, "auc": float(np.mean(aucs)), **f1}
