"""LightningCLI with run folders: what ``python -m medclip_dcl`` runs."""

from __future__ import annotations

import importlib
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from jsonargparse import Namespace
from jsonargparse.typing import NonNegativeFloat, OpenUnitInterval
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from pytorch_lightning.utilities import rank_zero_info, rank_zero_only, rank_zero_warn
from pytorch_lightning.utilities.exceptions import MisconfigurationException, SIGTERMException

from medclip_dcl.command.config_errors import ConfigParser
from medclip_dcl.command.output import plain_output
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.errors import UserError
from medclip_dcl.evaluation.predictions import FindingPredictionWriter, PredictionWriter
from medclip_dcl.evaluation.results import RESULTS_FILE, UNTRAINED_FILE, ResultsWriter
from medclip_dcl.models.classifier import Classifier
from medclip_dcl.models.seeded_batches import SeededBatches
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.training import AveragedWeights, FiniteCheck, LastEpoch, Throughput, in_order
from medclip_dcl.training.class_probability import ClassProbabilityTable
from medclip_dcl.training.image_sizes import Source, fill_image_sizes, image_settings, other_images
from medclip_dcl.training.last_checkpoint import AtomicCheckpointIO, LastCheckpoint, ResumeError, Stopped
from medclip_dcl.training.run_folder import (
    UNTRAINED_CHECKPOINT,
    MetricsFile,
    RunFolder,
    RunRecord,
)
from medclip_dcl.training.sharing import check_loggers, place_loggers

_TERMINATED = 128 + signal.SIGTERM


def run(args: Sequence[str] | None = None) -> None:
    """Run one command from command-line arguments (None: those of the process).

    Raises:
        SystemExit: with status 128 + the signal's number if `fit` was stopped by one before its end, so that a batch
            system does not take the run for completed: 143 for SIGTERM, 138 for SIGUSR1, 130 for Ctrl-C.
    """
    with plain_output():
        try:
            MedclipCLI(args=None if args is None else list(args))
        except FinishedRun as finished:
            rank_zero_info(str(finished))


class FinishedRun(Exception):
    """`fit` was asked for a run that has come to its end: there is nothing to do."""


class MedclipCLI(LightningCLI):
    """LightningCLI in which a run folder holds one run and is never mixed with another."""

    def __init__(self, args: list[str] | None = None) -> None:
        self.exported: Path | None = None
        self.source: Source | None = None
        self.has_claimed = self.continues = False
        try:
            super().__init__(
                LightningModule,
                LightningDataModule,
                subclass_mode_model=True,
                subclass_mode_data=True,
                save_config_callback=None,
                auto_configure_optimizers=False,
                seed_everything_default=0,
                parser_class=ConfigParser,
                args=args,
            )
        except BaseException:
            if self.has_claimed:
                self.run.give_up_claim()
            raise

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--run_folder", type=str, required=True, help="Folder of this run, e.g. runs/NAME."
        )
        parser.add_argument(
            "--ema_decay",
            type=OpenUnitInterval | None,
            default=None,
            help="Evaluate and keep an average of the weights that decays by this factor a step; null: none.",
        )
        parser.add_argument(
            "--share_patient_data",
            type=bool,
            default=False,
            help="Let loggers that use a network have images and texts of patients.",
        )
        parser.add_argument(
            "--checkpoint_minutes",
            type=NonNegativeFloat,
            default=15.0,
            help="Minutes of training that a kill may cost; last.ckpt is also written at each epoch's end.",
        )
        parser.add_argument(
            "--prompts",
            type=str | None,
            default=None,
            help="YAML file of finding: [negative, positive] prompts, in place of those of ZeroShotClassification.",
        )
        parser.add_argument(
            "--prediction_format",
            type=Literal["parquet", "csv"],
            default="parquet",
            help="Format of the tables that `predict` writes; in CSV an embedding is a column for each number.",
        )
        parser.link_arguments("run_folder", "trainer.default_root_dir")
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.set_defaults(
            {
                "checkpoint.monitor": "validate/loss",
                "checkpoint.mode": "min",
                "checkpoint.filename": "best",
                "checkpoint.auto_insert_metric_name": False,
                "checkpoint.enable_version_counter": False,
            }
        )
        parser.link_arguments("run_folder", "checkpoint.dirpath", compute_fn=_checkpoint_folder)

    def _parse_ckpt_path(self) -> None:
        """Settings come from the configuration alone; Lightning would let a checkpoint's override them unseen."""

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        self.run = RunFolder(config.run_folder)
        # Lightning's default would unpickle whatever a checkpoint holds.
        config.weights_only = True
        check_loggers(config.trainer.logger, config.share_patient_data or _is_phantom(config))
        if self.subcommand == "fit":
            self._fill_image_sizes(config)
        if self.subcommand == "fit" and not config.trainer.fast_dev_run:
            self._claim_folder(config)
        # When the configuration is on disk as the user wrote it: a run folder may move.
        place_loggers(config.trainer.logger, self.run.folder)
        if config.prompts is not None:
            _use_prompts(config.prompts, config.trainer.callbacks)
        if self.subcommand == "fit":
            _require_own_checkpoints(config)
            if self.continues:
                # The configuration is the run's own; what its parts once came from may be gone by now.
                _take_network_from(Source.read(config.ckpt_path), config.model)
            elif config.ckpt_path is not None:
                _take_missing_encoder_from(Source.read(config.ckpt_path), config.model)
                _forget_initial_weights(config.model)
            return
        if config.ckpt_path is None:
            config.ckpt_path = str(self.run.checkpoint_to_test())
        self.source = Source.read(config.ckpt_path)
        _take_network_from(self.source, config.model)
        fill_image_sizes(config, self.source.network, trains=False)
        if self.source.path.is_dir():
            # Lightning reads checkpoints only: the weights are put into the model when it is there.
            self.exported, config.ckpt_path = self.source.path, None

    def _fill_image_sizes(self, config: Namespace) -> None:
        """Sizes that are null are those of the run that goes on, or of the training that a new one starts from."""
        if saved := self.run.saved_config():
            fill_image_sizes(config, saved.get("data", {}).get("init_args", {}))
            return
        path = config.ckpt_path or config.model.get("init_args", Namespace()).get("init_from")
        if path is not None and Path(path).expanduser().exists():  # one that is missing is named later
            self.source = Source.read(path)
        fill_image_sizes(config, {} if self.source is None else self.source.network)

    def _claim_folder(self, config: Namespace) -> None:
        """Check on every process, before any waits for another; then the first writes."""
        self._dump_config()
        data = {"fingerprint": _data_fingerprint(config)}
        is_longer = self.run.check(self.config_dump, data, self._completed)
        if self.run.is_finished and not is_longer:
            raise FinishedRun(
                f"{self.run.folder} is finished: nothing to do; a larger --trainer.max_epochs (it had "
                f"{config.trainer.max_epochs}) trains it longer"
            )
        if getattr(rank_zero_only, "rank", 0) == 0:  # known from the environment before any process group
            if is_longer:
                if self.run.is_finished:
                    rank_zero_info(
                        f"{self.run.folder} was finished and goes on to {config.trainer.max_epochs} epochs; results, "
                        "predictions, figures and report of its earlier end get their number of epochs in their "
                        "names; the learning rate follows the schedule of the new length from here on"
                    )
                self.run.extend(self.config_dump)
            else:
                self.has_claimed = self.run.claim(self.config_dump, data)
        resume = self._checkpoint_to_resume(config.ckpt_path)
        if resume is not None:
            instead = "" if config.ckpt_path is None else f", where it has come to since {config.ckpt_path}"
            rank_zero_info(f"continuing {self.run.folder} from {resume}{instead}")
            config.ckpt_path, self.continues = str(resume), True

    def _checkpoint_to_resume(self, given: str | None) -> Path | None:
        """The run's last checkpoint; None if there is none, or none that can be read and another is given."""
        try:
            return self.run.checkpoint_to_resume()
        except ResumeError as error:
            if given is None:
                raise
            rank_zero_warn(f"{error}; continuing from {given}")
            return None

    def _completed(self, config: dict[str, Any]) -> dict[str, Any]:
        """A run's configuration with the defaults of options that came after it."""
        parser = self._parser(self.subcommand)
        parsed = parser.parse_object(config)
        return yaml.safe_load(parser.dump(parsed, skip_link_targets=False, skip_none=False, format="yaml"))

    def instantiate_classes(self) -> None:
        super().instantiate_classes()
        if self.source is not None:
            for warning in other_images(self.source, image_settings(self.datamodule)):
                rank_zero_warn(warning)
            self.results.trained_on = self.source.images()
        if self.exported is not None:
            self.model.network = ImageTextNetwork.from_pretrained(self.exported)
            self.results.exported = self.exported

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self.config_init[self.subcommand].trainer
        loggers = config.logger if isinstance(config.logger, list) else [config.logger]
        plugins = config.plugins if isinstance(config.plugins, list) else [config.plugins]
        # What a test finds stands in results.json; metrics.csv is the history of training.
        own = [MetricsFile(self.run.folder)] if self.subcommand == "fit" else []
        kwargs["logger"] = [*own, *(x for x in loggers if x not in (None, True, False))] or False
        kwargs["plugins"] = [AtomicCheckpointIO(), *(x for x in plugins if x is not None)]
        if config.precision is None:
            kwargs["precision"] = best_precision(config.accelerator)
        options = self.config_init[self.subcommand]
        self.results = ResultsWriter(share_patient_data=options.share_patient_data)
        self.record, throughput = RunRecord(self.run), Throughput()
        config.callbacks = [
            *(config.callbacks or []),
            SeededBatches(),
            ClassProbabilityTable(),
            PredictionWriter(options.prediction_format),
            FindingPredictionWriter(options.prediction_format),
            self.record,
            self.results,
            FiniteCheck(),
            LastEpoch(),
            throughput.arrival,
            throughput,
            *([] if options.ema_decay is None else [AveragedWeights(options.ema_decay)]),
        ]
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, ModuleNotFoundError, ValueError) as error:
            # An accelerator that is not there, an unknown strategy, options that exclude others.
            raise UserError(f"trainer: {' '.join(str(error).split())}") from error
        # After the checkpoint of the best: its state goes into this one. ModelCheckpoint's own `save_last` leaves
        # out every epoch that is not the best so far, and what it saves in an epoch lacks the row of metrics.
        last = LastCheckpoint(self.run.checkpoints, self.config_init[self.subcommand].checkpoint_minutes)
        trainer.callbacks = in_order([*trainer.callbacks, last])  # type: ignore[attr-defined]
        return trainer

    def fit(self, model: LightningModule, **kwargs: Any) -> None:
        """Train; a signal that asks to stop ends the program with its own status, and the run goes on later."""
        try:
            self.trainer.fit(model, **kwargs)
        except (Stopped, SIGTERMException) as stopped:
            rank_zero_info(f"{self.run.folder} is unfinished: the same command continues it")
            raise SystemExit(stopped.code or _TERMINATED) from stopped

    def after_fit(self) -> None:
        """The run is finished only where training, and all that follows it, came to an end."""
        if self.config[self.subcommand].trainer.fast_dev_run:
            return
        if self.trainer.is_global_zero:
            self.run.finish(self.record.record(self.trainer, self.model))

    def test(self, model: LightningModule, **kwargs: Any) -> None:
        """Evaluate the checkpoint and, unless that was done in the same way before, the untrained network."""
        self.results.file_name = RESULTS_FILE
        self.trainer.test(model, **kwargs)
        untrained = self.run.checkpoints / UNTRAINED_CHECKPOINT
        results, before = self.run.folder / RESULTS_FILE, self.run.folder / UNTRAINED_FILE
        # One process decides for all: another may look while the file is being replaced.
        is_own = self.exported is None  # an exported model has no beginning in this run
        is_wanted = is_own and untrained.is_file() and not _is_comparable(results, before)
        if self.trainer.strategy.broadcast(is_wanted):
            rank_zero_info("evaluating the network before its first step")
            self.results.file_name = UNTRAINED_FILE
            self.trainer.loggers = []  # they have the trained network's figures under the same names
            self.trainer.test(
                model, verbose=False, **{**_without(kwargs, "verbose"), "ckpt_path": str(untrained)}
            )
        rank_zero_info(f"results: {results}")

    def predict(self, model: LightningModule, **kwargs: Any) -> None:
        """Predictions go to disk, by PredictionWriter; Lightning would keep every feature map in memory."""
        before = _states_of(self.run.folder / "predictions")
        self.trainer.predict(model, **{**kwargs, "return_predictions": False})
        now = _states_of(self.run.folder / "predictions")
        written = sorted(str(file) for file, state in now.items() if before.get(file) != state)
        rank_zero_info(f"predictions: {', '.join(written)}" if written else "predictions: none were written")


def best_precision(accelerator: Any = "auto") -> str:
    """Mixed bfloat16 where the device computes in it, else float32 ("trainer.precision: null")."""
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16-mixed" if has_bf16 else "32-true"


def _take_network_from(source: Source, model: Namespace) -> None:
    """Let encoders and similarity be built as the checkpoint describes them, not from where they first came from.

    The language model's folder may be gone or hold another model by now; the checkpoint has all of it.
    """
    described = source.network
    if not described:
        return
    if ("findings" in described) != _is_classifier(model):
        there, here = (
            "a classifier" if is_classifier else "an image-text model"
            for is_classifier in ("findings" in described, _is_classifier(model))
        )
        raise UserError(
            f"{source.path} is of {there}, this configuration of {here} (model: {model.class_path}); to train a "
            "classifier that starts from an image-text model, give it as model.init_args.init_from to fit"
        )
    for part in ("image_encoder", "text_encoder", "similarity"):
        if part in described:
            model.init_args[part] = Namespace(
                class_path=described[part]["class_path"], init_args=Namespace(**described[part]["init_args"])
            )
    if _is_classifier(model):
        model.init_args.findings = described["findings"]
    _forget_initial_weights(model)


def _take_missing_encoder_from(source: Source, model: Namespace) -> None:
    """A classifier that is configured without an encoder has that of the checkpoint."""
    if not _is_classifier(model) or model.init_args.get("image_encoder") is not None:
        return
    if "image_encoder" in source.network:
        part = source.network["image_encoder"]
        model.init_args.image_encoder = Namespace(
            class_path=part["class_path"], init_args=Namespace(**part["init_args"])
        )


def _require_own_checkpoints(config: Namespace) -> None:
    """best.ckpt is the best by validation and last.ckpt the last: Lightning would write other things into them.

    Raises:
        ValueError: names the option.
    """
    for name in ("save_last", "save_on_exception"):
        if config.checkpoint.get(name):
            raise UserError(
                f"checkpoint.{name}: last.ckpt is written anyway, every checkpoint_minutes, at each epoch's end and at "
                "a signal; remove this option"
            )


def _use_prompts(file: str, callbacks: Any) -> None:
    """The file is ZeroShotClassification's option; here it need not be written into the list of all callbacks."""
    listed = callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []
    found = [one for one in listed if one.class_path.endswith(".ZeroShotClassification")]
    if not found:
        raise UserError(f"--prompts {file}: no ZeroShotClassification among trainer.callbacks would use them")
    for callback in found:
        callback.init_args.prompts = file


def _forget_initial_weights(model: Namespace) -> None:
    """The weights come from a checkpoint of the run: what its training once started from may be gone by now."""
    for name in ("init_from", "init_parts"):
        if name in model.init_args:
            model.init_args[name] = None


def _is_classifier(model: Namespace) -> bool:
    module, _, name = model.class_path.rpartition(".")
    return issubclass(getattr(importlib.import_module(module), name), Classifier)


def _data_fingerprint(config: Namespace) -> str | None:
    """Fingerprint of the prepared data set that the configuration names; None where it names none."""
    folder = config.get("data", Namespace()).get("init_args", Namespace()).get("folder")
    return None if folder is None else PreparedSet(folder).info.get("fingerprint")


def _is_phantom(config: Namespace) -> bool:
    """True if the configuration names a prepared data set that shows no patients."""
    folder = config.get("data", Namespace()).get("init_args", Namespace()).get("folder")
    return folder is not None and PreparedSet(folder).is_phantom


def _is_comparable(results: Path, untrained: Path) -> bool:
    """True if both were measured in the same way on the same data."""
    if not (results.is_file() and untrained.is_file()):
        return False
    a, b = (json.loads(file.read_text(encoding="utf-8")) for file in (results, untrained))
    keys = ("format_version", "protocol", "dataset", "images", "counts", "precision")
    return all(a.get(key) == b.get(key) for key in keys)


def _states_of(folder: Path) -> dict[Path, tuple[int, int]]:
    """Which file stands under each name of a folder: another one after it was written anew."""
    return {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in folder.glob("*.*")}


def _without(arguments: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if key != name}


def _checkpoint_folder(run_folder: str) -> str:
    return str(Path(run_folder) / "checkpoints")
