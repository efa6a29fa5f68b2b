"""Linear probes of a benchmark: logistic regressions on the features of its image encoders, which stay as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from medclip_dcl.common.command_line import available_cores, progress_bar
from medclip_dcl.common.devices import usable_device
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import digest, replacing, write_json, write_shared_parquet, write_text
from medclip_dcl.common.find_model import CONFIG_FILE
from medclip_dcl.common.weight_files import read_model
from medclip_dcl.data.labelled import LabelPolicy, draw_patients
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.encoding.encode import batches_of
from medclip_dcl.metrics.linear_probe import finding_aucs, logistic_probes, standardisation
from medclip_dcl.networks import TimmRegions, TransformersRegions
from medclip_dcl.networks.bert_folder import read_folder_json
from medclip_dcl.networks.classifier import FindingNetwork
from medclip_dcl.pictures.geometry import View
from medclip_dcl.report.tables import NOTHING, Cell, Column, Row, Table, number
from medclip_dcl.runs.run_folder import ASKED_FILE, DATA_FILE, IMAGES_FILE
from medclip_dcl.studies.benchmark_plan import Model, asked_for
from medclip_dcl.studies.options import Benchmark
from medclip_dcl.use.model import BATCH_SIZE, network_of

STRENGTHS, DEFAULT_STRENGTH, MIN_CASES = (1e-4, 1e-3, 0.01, 0.1, 1.0), 0.01, 5
"""C to choose from, C without validate labels, and images of each class that a finding needs for a fit (choice)."""
DRAWS, _USES = 5, ("train", "validate", "test")


class Probes:
    """The labelled images of a set, and probes on them; `targets` (image, finding) are 1, 0, or NaN, left out."""

    def __init__(self, name: str, prepared: PreparedSet, options: Benchmark) -> None:
        self.name, self.prepared, self.options = name, prepared, options
        labels, self.blank = prepared.rows("labels"), options.counts_blank
        targets = LabelPolicy("ignore", self.blank).of_studies(labels)
        images = prepared.rows("images")
        is_test = (images["official_split"] == "test") & (images["use"] == "grounding")
        images["use"] = images["use"].mask(is_test, "test")
        images = images[images["use"].isin(_USES) & images["study_id"].isin(targets.index)]
        self.images = images.sort_values("dicom_id")
        self.findings = np.array(prepared.findings)
        self.targets = targets.loc[self.images["study_id"], prepared.findings].to_numpy()
        of_images = labels.set_index("study_id").loc[self.images["study_id"], prepared.findings]
        self.n_blank = int(of_images.isna().to_numpy().sum())
        self.train, self.validate, self.test = ((self.images["use"] == use).to_numpy() for use in _USES)

    def each(
        self, models: Sequence[Model], notes: list[str], failures: list[str], every: list[pd.DataFrame]
    ) -> Iterator[Model]:
        """What to test: each model but an encoder alone, then its probe; adds to the lines of the page and the fits."""
        if self.n_blank and self.blank == "zeros":
            notes.append(
                f"{self.name}: {self.n_blank:,} blank labels of images count as negative, in all tests (--blank)"
            )
        for model in models:
            if not model.is_encoder:
                yield model
            where = f"{model.probe} on {self.name}"
            try:
                probe, fits = self._probe(model)
            except UserError as error:
                failures.append(f"{where}: {error}")
                print(failures[-1], flush=True)
                continue
            few = ", ".join(x for x in self.findings if x not in probe.findings) or "none"
            c, auc = fits[["c", "validate_auc"]].iloc[0]
            by = "without validate labels" if np.isnan(auc) else f"by the validate AUC {auc:.3f}"
            notes.append(f"{where}: C {c:g} {by}; findings with too few train images: {few}")
            every.append(fits.assign(set=self.name, model=model.probe))
            yield probe

    def _probe(self, model: Model) -> tuple[Model, pd.DataFrame]:
        """The probe of a model's image encoder, a classifier, and its fits; both are kept."""
        self.prepared.require_separate_patients()
        folder = self.options.output / "probes" / model.name / self.name
        shares = [share for share in self.options.probe_shares if share < 1]
        seen = {"model": model.digest(), "set": self.prepared.fingerprint}
        if asked_for(folder) != (asked := {**seen, "shares": shares, "blank": self.blank}):
            (folder / ASKED_FILE).unlink(missing_ok=True)  # a kill leaves files of two probes
            record, images = model.lineage.after(self.prepared, model.is_encoder)
            is_fitted = self._are_fitted(self.train)
            if not is_fitted.any():
                raise UserError(f"no finding has {MIN_CASES} positive and {MIN_CASES} negative train images")
            network = _around(model, list(self.findings[is_fitted]), *self.prepared.fitting)
            network.blank = self.blank
            file = folder / f"features-{digest(''.join(seen.values()).encode())[:8]}.npz"
            features = self._features(network, file)
            draws = [(share, draw) for share in shares for draw in range(DRAWS)]
            fits = [self._fit(features, 1.0, 0, network), *(self._fit(features, *one) for one in draws)]
            network.save_pretrained(folder)
            write_json(record, folder / DATA_FILE)
            write_shared_parquet(images, folder / IMAGES_FILE)
            write_text(pd.concat(fits).to_csv(index=False), folder / "fits.csv")
            write_json(asked, folder / ASKED_FILE)
        return Model(model.probe, read_model(folder)), pd.read_csv(folder / "fits.csv")

    def _are_fitted(self, rows: np.ndarray) -> np.ndarray:
        return np.isfinite(finding_aucs(self.targets[rows], self.targets[rows], MIN_CASES))

    def _features(self, network: FindingNetwork, file: Path) -> np.ndarray:
        """Features (image, channel) of `images`, float32, which `file` keeps."""
        if not file.is_file():
            network.to(device := usable_device(self.options.device))
            stored, size = self.prepared.stored_images(self.images["path"].tolist()), network.image_size
            workers = 0 if device.type == "cpu" else available_cores()
            batches = batches_of(stored, View(size, size), BATCH_SIZE, workers)
            shown = progress_bar(iterable=batches, desc=f"features of {self.name}", unit=" batches")
            with torch.inference_mode():
                parts = [network.features(*network.inputs_of(batch)).float().cpu() for batch in shown]
            with replacing(file) as stream:
                np.savez(stream, features=torch.cat(parts), dicom_id=self.images["dicom_id"].to_numpy(str))
        return np.load(file)["features"]

    def _fit(
        self, features: np.ndarray, share: float, draw: int, network: FindingNetwork | None = None
    ) -> pd.DataFrame:
        """Fit to a draw of train patients, into `network` if given; a row for each finding."""
        patients = self.images["subject_id"].to_numpy()
        drawn = draw_patients(patients[self.train], share, draw)
        train = self.train & np.isin(patients, drawn)
        about = {"share": share, "draw": draw, "patients": len(drawn), "images": train.sum()}
        if not (is_fitted := self._are_fitted(train)).any():
            return pd.DataFrame({**about, "c": np.nan, "finding": self.findings, "auc": np.nan})
        targets = self.targets[:, is_fitted]
        mean, deviation = standardisation(torch.from_numpy(features[train]))
        scaled = ((torch.from_numpy(features) - mean) / deviation).double().numpy()
        has_validate = np.isfinite(finding_aucs(targets[self.validate], targets[self.validate], 1)).any()
        fits = []
        for c in STRENGTHS if has_validate else [DEFAULT_STRENGTH]:
            weight, bias = logistic_probes(scaled[train], targets[train], c)
            logits = scaled @ weight.T + bias
            aucs = finding_aucs(logits[self.validate], targets[self.validate], 1)
            fits.append((np.nanmean(aucs) if has_validate else np.nan, c, weight, bias, logits))
        # Of equal ones the strongest penalty.
        auc, c, weight, bias, logits = max(fits, key=lambda fit: fit[0])
        if network is not None:
            found = {"feature_mean": mean, "feature_std": deviation, "head.weight": weight, "head.bias": bias}
            state = {name: torch.as_tensor(x, dtype=torch.float32) for name, x in found.items()}
            network.load_state_dict(network.state_dict() | state)
        aucs = finding_aucs(logits[self.test], targets[self.test], MIN_CASES)
        of_finding = {"finding": self.findings[is_fitted], "auc": aucs}
        return pd.DataFrame({**about, "c": c, "validate_auc": auc, **of_finding})


def shares_of(fits: Sequence[pd.DataFrame], output: Path) -> dict[str, Table]:
    """Write probe_shares.csv, and return for each set the mean AUC by share with the range of its draws."""
    write_text((every := pd.concat(fits)).to_csv(index=False), output / "probe_shares.csv")
    return {str(name): _shares_table(of_set) for name, of_set in every.groupby("set", sort=False)}


def _shares_table(fits: pd.DataFrame) -> Table:
    shares, models = sorted(fits["share"].unique()), list(fits["model"].unique())
    aucs = fits.set_index(["share", "model", "draw", "finding"])["auc"].unstack("finding")
    is_fitted = aucs.notna().groupby("share").all()
    has_any = is_fitted.any(axis=1)
    over = list(aucs.columns[is_fitted[has_any].all()])
    means = aucs[over].mean(axis=1).groupby(["share", "model"]).agg(["mean", "min", "max"])
    # The draws of the others are over findings of their own.
    means[~means.index.get_level_values("share").isin(has_any.index[has_any])] = np.nan

    def cell(share: float, model: str) -> Cell:
        mean, *ends = (number(x, 3) for x in means.loc[[(share, model)]].to_numpy()[0])
        return Cell(mean, "[{}, {}]".format(*ends) if share < 1 else "") if mean != "nan" else Cell(NOTHING)

    rows = [Row(f"{x:g}", "plain", [cell(x, model) for model in models]) for x in shares]
    note = f"In brackets: range of {DRAWS} draws of patients. Means are over findings with a fit in all draws, but of "
    note += f"shares without any: {', '.join(over) or 'none'}."
    return Table("Mean AUC of probes by share of train patients", [*map(Column, models)], rows, note)


def _around(model: Model, findings: list[str], geometry: str, prepared_size: int | None) -> FindingNetwork:
    """An untrained classifier with a model's image encoder, for images as the set has them."""
    if not model.is_encoder:
        source = network_of(model.saved)
        encoder, shown = source.image_encoder, source.image_config()
    else:  # in a folder of transformers or timm
        torch.manual_seed(0)  # of its projection, which has no part in a probe
        timm = read_folder_json((folder := model.saved.path) / CONFIG_FILE).get("pretrained_cfg")
        kind = TimmRegions if timm else TransformersRegions
        try:
            encoder = kind(str(folder), global_vector=True)
        except UserError:  # it has no vector of the whole image, or cannot be read, which is said now
            encoder = kind(str(folder))
        side = timm["input_size"][-1] if timm else encoder.backbone.config.image_size
        shown = {"image_size": side // encoder.stride * encoder.stride}
    shown |= {"geometry": geometry, "prepared_size": prepared_size, "crop_size": None}
    return FindingNetwork(encoder, findings, **shown).eval()
