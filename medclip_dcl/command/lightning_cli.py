"""LightningCLI with run folders, behind ``medclip-dcl``."""

from __future__ import annotations

import json
import os
import signal
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import Namespace
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import ProgressBar
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.plugins.environments import LightningEnvironment
from pytorch_lightning.utilities import rank_zero_info, rank_zero_only, rank_zero_warn
from pytorch_lightning.utilities.exceptions import MisconfigurationException, SIGTERMException
from pytorch_lightning.utilities.model_helpers import is_overridden

from medclip_dcl.command import config_files, network_of_checkpoint
from medclip_dcl.command.config_errors import ConfigParser, imported
from medclip_dcl.command.output import plain_output
from medclip_dcl.common.devices import best_precision, without_tf32
from medclip_dcl.common.errors import UserError, check_range
from medclip_dcl.common.files import digest, write_json
from medclip_dcl.common.find_model import LAST, find_model, may_be_repository
from medclip_dcl.common.findings import prompt_texts, read_prompts, require_labelled
from medclip_dcl.common.packaged import find_configuration
from medclip_dcl.common.weight_files import SavedModel, read_model
from medclip_dcl.data.fields import IMAGE_FIELDS, SENTENCE_FIELDS, FieldFiles, image_field
from medclip_dcl.data.image_text import ImageTextDataModule
from medclip_dcl.data.images import shown_images
from medclip_dcl.data.lineage import Lineage
from medclip_dcl.data.link import PreparedDataModule
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.evaluation.predictions import PredictionWriter
from medclip_dcl.evaluation.results import RESULTS_FILE, UNTRAINED_FILE, ResultsWriter
from medclip_dcl.models.seeded_batches import SeededBatches
from medclip_dcl.networks.described import ImageNetwork
from medclip_dcl.networks.image_encoder import IMAGENET
from medclip_dcl.runs import run_folder
from medclip_dcl.runs.checkpoint_files import ResumeError
from medclip_dcl.runs.loggers import MetricsFile, check_loggers, listed, place_loggers
from medclip_dcl.runs.saved import (
    STEPS,
    SavedRun,
    command_of_test,
    describe_checkpoint,
    differing_settings,
    measured_alike,
    read_json,
)
from medclip_dcl.training import last_checkpoint
from medclip_dcl.training.averaging import AveragedWeights
from medclip_dcl.training.best_checkpoint import BestCheckpoint, check_callbacks, complete_selection
from medclip_dcl.training.class_probability import ClassProbabilityTable
from medclip_dcl.training.finite import FiniteCheck
from medclip_dcl.training.image_sizes import fill_image_sizes, other_images, trained_images
from medclip_dcl.training.kept_steps import KeptSteps
from medclip_dcl.training.progress import TimeLeft, progress_bar
from medclip_dcl.training.record import RunRecord
from medclip_dcl.training.throughput import Throughput

_WITH_PROMPTS = ("ZeroShotClassification", "Localisation")
_TERMINATED = 128 + signal.SIGTERM
# Weights stay in float32: in bfloat16 or float16 most steps of AdamW would round to nothing.
Trainer.__init__.__annotations__["precision"] = Literal["16-mixed", "32-true", "bf16-mixed"] | None
# typing may give Union[float, int], cached by another package, for Union[int, float]: then 1, one batch, is 1.0, all.
for _part in ("train", "val", "test", "predict"):
    Trainer.__init__.__annotations__[f"limit_{_part}_batches"] = int | float | None
Trainer.__init__.__annotations__["overfit_batches"] = int | float
# Without one, --trainer.logger=TensorBoardLogger needs a further option; `place_loggers` puts it into the run folder.
for _logger in (TensorBoardLogger, CSVLogger):
    _logger.__init__.__defaults__ = (".", *(_logger.__init__.__defaults__ or ()))


def run(args: Sequence[str], modules: Sequence[str] = ()) -> None:
    """Run one command, whose configurations may name classes of the packages of `modules`, too."""
    config_files.allow_imports(modules)
    args, origins = config_files.with_packaged_files(args)
    with plain_output(), config_files.unambiguous_files():
        for line in origins:
            rank_zero_info(line)
        try:
            MedclipCLI(args, origins)
        except FinishedRun as finished:
            rank_zero_info(str(finished))


def check(
    runs: Mapping[str, Sequence[str]], modules: Sequence[str] = (), needs_sources: bool = False
) -> None:
    """Parse the command lines of runs by name, all of one command, and run nothing; one error names all mistakes.

    `needs_sources`: data, what an objective reads of it, prompts and weights to start from must be there.
    """
    config_files.allow_imports(modules)
    with plain_output(), config_files.unambiguous_files(), suppress(FinishedRun):
        _Check(runs, needs_sources)


class FinishedRun(Exception):
    """There is nothing to do: `fit` of a finished run, or a check."""


@dataclass(kw_only=True)
class RunOptions:
    """Options of a run.

    Attributes:
        run_folder: Folder of this run, e.g. runs/NAME.
        ema_decay: Evaluate and keep an average of the weights that decays by this factor a step; null: none.
        share_patient_data: Let loggers that use a network have images and texts of patients.
        checkpoint_minutes: Minutes of training that a kill may cost; last.ckpt is also written at each epoch's end.
        kept_steps: Optimiser steps after each of which `fit` validates and keeps the weights (checkpoints/step_N.ckpt);
            `test` writes steps/N/results.json of each, without predictions, beside that of the best checkpoint.
            null: none.
        untrained: Keep the weights before the first step, and let `test` evaluate them beside the trained ones.
        prompts: YAML file of finding: [negative, positive], or a packaged one by its name, public or chexpert14; for
            ZeroShotClassification and Localisation.
        ensemble: Of several prompts a side, for ZeroShotClassification: scores or embeddings; null: the callback's.
        prediction_format: Of the tables that `predict` writes; in CSV an embedding is a column for each number.
    """

    run_folder: str
    ema_decay: float | None = None
    share_patient_data: bool = False
    checkpoint_minutes: float = 15.0
    kept_steps: list[int] | None = None
    untrained: bool = True
    prompts: Mapping[str, tuple[str | list[str], str | list[str]]] | str | None = None
    ensemble: Literal["scores", "embeddings"] | None = None
    prediction_format: Literal["parquet", "csv"] = "parquet"


class MedclipCLI(LightningCLI):
    """LightningCLI in which a run folder holds one run."""

    def __init__(self, args: Sequence[str] = (), origins: Sequence[str] = ()) -> None:
        self.origins = list(origins)
        self.exported: Path | None = None
        self.source: SavedModel | None = None
        self.lock = ExitStack()
        self.has_claimed = self.continues = self.sets_aside = self.goes_on = False
        self.command = next(iter(args), "")
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
                args=list(args),
            )
        except BaseException:
            if self.has_claimed:
                self.run.give_up_claim()
            raise
        finally:
            self.lock.close()

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """The given command alone, or all of them for the help: Lightning builds the parser of each."""
        known = LightningCLI.subcommands()
        return {self.command: known[self.command]} if self.command in known else known

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_class_arguments(RunOptions, instantiate=False)
        parser.link_arguments("run_folder", "trainer.default_root_dir")
        parser.add_lightning_class_args(BestCheckpoint, "checkpoint")
        parser.set_defaults(
            {
                "checkpoint.monitor": "validate/loss",
                "checkpoint.filename": "best",
                "checkpoint.auto_insert_metric_name": False,
                "checkpoint.enable_version_counter": False,
            }
        )
        parser.link_arguments("run_folder", "checkpoint.dirpath", compute_fn=_checkpoint_folder)

    def _parse_ckpt_path(self) -> None:
        """Do nothing: Lightning would let the checkpoint's settings silently override the configuration."""

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        for line in _take_prompt_texts(config):
            rank_zero_info(line)
            self.origins.append(line)
        self.run = run_folder.RunFolder(config.run_folder)
        self.environment = _own_environment(config.trainer)
        check_range("trainer", "[1, inf)", accumulate_grad_batches=config.trainer.accumulate_grad_batches)
        # Never unpickle code from a checkpoint.
        config.weights_only = True
        folder = config.get("data", Namespace()).get("init_args", Namespace()).get("folder")
        self.prepared = None if folder is None else PreparedSet(folder)
        if self.prepared is not None and _is_first_process() and self.prepared.changes:
            rank_zero_warn(self.prepared.changes)
        is_phantom = self.prepared is not None and self.prepared.is_phantom
        check_loggers(config.trainer.logger, config.share_patient_data or is_phantom)
        if self.subcommand == "fit":
            if config.ckpt_path and Path(config.ckpt_path).expanduser().is_dir():
                raise UserError(
                    f"--ckpt_path: expected a checkpoint, found the folder {config.ckpt_path}; --run_folder continues "
                    "a run, --model.init_args.init_from starts from its weights"
                )
            complete_selection(config.checkpoint)
            # At the end of an epoch a score could be that of earlier weights.
            if config.kept_steps and str(config.checkpoint.monitor).startswith("validate/"):
                config.checkpoint.save_on_train_epoch_end = False
            if self.prepared is not None:
                self._fill_image_sizes(config)
            if not config.trainer.fast_dev_run:
                self._claim_folder(config)
        else:
            if config.ckpt_path is None and not self.run.checkpoints.is_dir():
                raise run_folder.RunFolderError(
                    f"{self.run.folder} holds no checkpoints; train first, or give --ckpt_path MODEL"
                )
            self.tests_steps = config.ckpt_path is None
            config.ckpt_path = str(find_model(config.ckpt_path or self.run.folder, "--ckpt_path").path)
        if self.subcommand in ("test", "predict"):
            config.trainer.default_root_dir = str(self._folder_of_results(config))
        # After config.yaml is written, which keeps relative paths: a run folder may move.
        place_loggers(config.trainer.logger, Path(config.trainer.default_root_dir))
        if config.prompts is not None:
            _hand_on("prompts", config.prompts, _WITH_PROMPTS, config.trainer.callbacks)
        if config.ensemble is not None:
            _hand_on("ensemble", config.ensemble, ("ZeroShotClassification",), config.trainer.callbacks)
        if self.subcommand == "fit":
            if config.ckpt_path is None:
                return
            saved = read_model(config.ckpt_path)
            if problem := ImageNetwork.unit_problem(saved.network):
                raise UserError(f"{saved.path}: {problem}, and train anew")
            if "optimizer_states" not in saved.checkpoint:
                raise UserError(
                    f"--ckpt_path {config.ckpt_path}: expected a checkpoint from which training goes on, found weights "
                    "alone; an image-text model or classifier starts from them by --model.init_args.init_from "
                    f"{config.ckpt_path}"
                )
            if self.continues:
                # The files that the encoders were built from may be gone.
                network_of_checkpoint.take_network_from(saved, config.model)
            else:
                network_of_checkpoint.take_missing_encoder_from(saved, config.model)
                network_of_checkpoint.forget_initial_weights(config.model)
            return
        self.source = read_model(config.ckpt_path)
        described = describe_checkpoint({"file": config.ckpt_path, **self.source.progress})
        rank_zero_info(f"{self.subcommand}: {described}")
        network_of_checkpoint.take_network_from(self.source, config.model)
        if self.prepared is not None:
            fill_image_sizes(config, self.source.network, trains=False)
        if self.source.path.is_dir():
            # Lightning reads checkpoints only: the weights are put into the model when it is there.
            self.exported, config.ckpt_path = self.source.path, None

    def _folder_of_results(self, config: Namespace) -> Path:
        """The run's folder; another for a checkpoint that is not its own, or for a set that it was not trained on."""
        self.is_own = self.run.is_own(Path(config.ckpt_path))
        if self.prepared is None:  # data that their settings identify
            saved, data = self.run.saved_config().get("data"), config.data.as_dict()
            is_other = bool(saved and differing_settings(saved, data, "data"))
            name = digest(json.dumps(data, sort_keys=True, default=str).encode())[:8]
        else:
            # Results are written by the first process; `PreparedDataModule.setup` compares the machines.
            stored = str(self.prepared.info.get("fingerprint"))
            now = self.prepared.fingerprint if _is_first_process() else stored
            is_other = self.run.data().get("fingerprint", now) != now
            name = f"{self.prepared.folder.resolve().name}_{now[:8]}"
        folder = self.run.folder_of_test(Path(config.ckpt_path), name if is_other else "")
        if folder != self.run.folder:
            rank_zero_info(
                f"the {'set' if is_other else 'checkpoint'} is not that of the run in {self.run.folder}, whose results "
                f"stay; these go to {folder}"
            )
        return folder

    def _fill_image_sizes(self, config: Namespace) -> None:
        """Take image sizes that are null from this run, or from the training that a new run starts from."""
        if saved := self.run.saved_config():
            fill_image_sizes(config, saved.get("data", {}).get("init_args", {}))
            return
        path = config.ckpt_path or config.model.get("init_args", Namespace()).get("init_from")
        if path is not None:
            setting = "--ckpt_path" if config.ckpt_path else "model.init_args.init_from"
            self.source = read_model(find_model(path, setting).path)
        fill_image_sizes(config, {} if self.source is None else self.source.network)

    def _claim_folder(self, config: Namespace) -> None:
        """Check on every process, before any waits for another; the first process then writes.

        It alone looks at the content of the set now; `PreparedDataModule.setup` compares that of the other machines.
        """
        self._dump_config()
        is_first = _is_first_process()
        data: dict[str, Any] = (
            {"fingerprint": self.prepared and self.prepared.fingerprint} if is_first else {}
        )
        images = None
        if self.prepared is not None and is_first and not self.run.saved_config():
            encoder = (config.model.get("init_args", {}).get("image_encoder") or {}).get("init_args", {})
            published = {encoder.get("pretrained"), encoder.get("weights")} - {None, IMAGENET}
            lineage = Lineage.of(self.source)
            data, images = lineage.after(self.prepared, bool(published))
            if elsewhere := lineage.of_set(self.prepared).elsewhere:
                unknown = "whose patients cannot be compared with those of the held-out images"
                rank_zero_warn(
                    f"{lineage.where} was trained on {elsewhere}, {unknown} of {self.prepared.folder}"
                )
        is_longer = self.run.check(self.config_dump, data)
        if self.run.is_finished and not is_longer:
            raise FinishedRun(f"{self.run.folder} is finished: nothing to do; {self.run.advice_to_go_on()}")
        if is_longer:
            self.run.require_last()
        if is_first:
            if earlier := self.lock.enter_context(self.run.locked()):
                rank_zero_warn(
                    f"{self.run.folder} was trained by {earlier}, which did not come to an end: this process goes on "
                    "with it; if that one still runs, stop it"
                )
            if is_longer:
                if self.run.is_finished:
                    rank_zero_info(
                        f"{self.run.folder} was finished and goes on to {run_folder.length_in_words(self.config_dump)}"
                        "; results, predictions, figures and report of its earlier end get their number of epochs or "
                        "steps in their names; the learning rate follows the schedule of the new length from here on"
                    )
                self.goes_on = True
            else:
                self.has_claimed = self.run.claim(self.config_dump, data, images, self.origins)
        try:
            resume = self.run.checkpoint_to_resume()
        except ResumeError as error:
            if config.ckpt_path is None:
                raise
            rank_zero_warn(f"{error}; continuing from {config.ckpt_path}")
            self.sets_aside = True
            return
        if resume is not None:
            instead = "" if config.ckpt_path is None else f", where it has come to since {config.ckpt_path}"
            rank_zero_info(f"continuing {self.run.folder} from {resume}{instead}")
            config.ckpt_path, self.continues, self.sets_aside = str(resume), True, True

    def instantiate_classes(self) -> None:
        super().instantiate_classes()
        self.record.begin = partial(
            _begin, self.run, self.config_dump if self.goes_on else None, self.sets_aside
        )
        if isinstance(self.datamodule, PreparedDataModule) and self.prepared is not None:
            self.datamodule.prepared = self.prepared  # whose content is known already
            self.prepared.forget_tables()
        if self.source is not None:
            for warning in other_images(self.source, shown_images(self.datamodule)):
                rank_zero_warn(warning)
            self.results.trained_on = trained_images(self.source)
            self.results.lineage = Lineage.of(self.source)
            self.source = None  # its tensors need not stay mapped
        if self.exported is not None:
            self.model.network = type(self.model.network).from_pretrained(self.exported)
            self.results.exported = self.exported

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self.config_init[self.subcommand].trainer
        # metrics.csv is the history of training; results of a test are in results.json.
        own = [MetricsFile(self.run.folder)] if self.subcommand == "fit" else []
        kwargs["logger"] = [*own, *listed(config.logger)] or False
        kwargs["plugins"] = [last_checkpoint.AtomicCheckpointIO(), *self.environment, *listed(config.plugins)]
        if self.subcommand != "fit":
            without_tf32()
        if config.precision is None:
            kwargs["precision"] = (
                best_precision(config.accelerator) if self.subcommand == "fit" else "32-true"
            )
        # Unless asked for: without an example input Lightning's summary ends with "Total FLOPs: 0".
        kwargs["enable_model_summary"] = bool(config.enable_model_summary)
        options = self.config_init[self.subcommand]
        self.predictions = PredictionWriter(options.prediction_format)
        self.results = ResultsWriter(share_patient_data=options.share_patient_data)
        self.record, throughput = RunRecord(self.run, options.untrained), Throughput()
        given = listed(config.callbacks)
        if not any(isinstance(x, ProgressBar) for x in given):
            bar = progress_bar(config.enable_progress_bar)
            given, kwargs["enable_progress_bar"] = [*given, *bar], bool(bar)
        config.callbacks = [
            *given,
            SeededBatches(),
            ClassProbabilityTable(),
            self.predictions,
            self.record,
            self.results,
            KeptSteps(self.run.checkpoints, options.kept_steps or ()),
            FiniteCheck(),
            last_checkpoint.LastEpoch(),
            TimeLeft(),
            throughput.arrival,
            throughput,
            *([] if options.ema_decay is None else [AveragedWeights(options.ema_decay)]),
        ]
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, ModuleNotFoundError, RuntimeError, TypeError, ValueError) as error:
            # An accelerator that this machine lacks, options that exclude each other, tasks of SLURM without devices.
            raise UserError(f"trainer: {' '.join(str(error).split())}") from error
        # After ModelCheckpoint, whose state it saves. ModelCheckpoint's `save_last` skips epochs that are not the best.
        last = last_checkpoint.LastCheckpoint(self.run.checkpoints, options.checkpoint_minutes)
        trainer.callbacks = last_checkpoint.in_order([*trainer.callbacks, last])  # type: ignore[attr-defined]
        if self.subcommand == "fit":
            check_callbacks(trainer.callbacks)  # type: ignore[attr-defined]
            is_on_cpus = trainer.world_size > 1 and trainer.strategy.root_device.type == "cpu"
            if config.sync_batchnorm and is_on_cpus:
                raise UserError(
                    "trainer.sync_batchnorm: expected false on CPUs, which torch does not support; found true"
                )
        return trainer

    def fit(self, model: LightningModule, **kwargs: Any) -> None:
        """Train; a stop signal ends the program with status 128 + its number, and the run can be continued."""
        try:
            self.trainer.fit(model, **kwargs)
        except (last_checkpoint.Stopped, SIGTERMException) as stopped:
            rank_zero_info(f"{self.run.folder} is unfinished: the same command continues it")
            raise SystemExit(stopped.code or _TERMINATED) from stopped

    def after_fit(self) -> None:
        """Mark the run as finished, by fit.json; name the checkpoint to use, and the next command."""
        options = self.config_init[self.subcommand]
        if not self.trainer.is_global_zero or options.trainer.fast_dev_run:
            return
        if not (file := self.run.checkpoints / LAST).is_file():
            raise UserError(
                "fit: no step was trained; raise trainer.max_epochs, max_steps, max_time or limit_train_batches"
            )
        try:
            last = read_model(file)
        except UserError:  # damaged, and no step was left after the checkpoint that was given instead
            if (given := self.config[self.subcommand].ckpt_path) is None:
                raise
            last = read_model(given)
        record = self.record.record(self.trainer, last)
        selected = options.checkpoint.selected(last.checkpoint)
        write_json({**record, "best": selected}, self.run.folder / run_folder.FIT_FILE)
        rank_zero_info(options.checkpoint.describe(selected, record["epochs"]))
        imports = config_files.import_options(self.config[self.subcommand])
        next_command = getattr(self.model, "next_command", lambda run: command_of_test(run) + imports)
        rank_zero_info(f"next: {next_command(self.run.folder)}")

    def test(self, model: LightningModule, **kwargs: Any) -> None:
        """Evaluate kept steps, the checkpoint, and the untrained network unless its results are there already."""
        if self.tests_steps:
            self._test_kept_steps(model, kwargs)
        self.results.file_name = RESULTS_FILE
        self.trainer.test(model, **kwargs)
        if self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        untrained = self.run.checkpoints / run_folder.UNTRAINED_CHECKPOINT
        folder = self.results.folder or Path(self.trainer.default_root_dir)
        results, before = folder / RESULTS_FILE, folder / UNTRAINED_FILE
        has_untrained = self.config[self.subcommand].untrained and untrained.is_file() and self.is_own
        is_wanted = self.exported is None and has_untrained and not _is_comparable(results, before)
        # One process decides for all: another may look while the file is being replaced.
        if self.trainer.strategy.broadcast(is_wanted):
            rank_zero_info("evaluating the network before its first step")
            self.results.file_name = UNTRAINED_FILE
            self.results.figures = False  # they would show noise
            self.trainer.loggers = []  # the names are those of the trained network's numbers
            self.trainer.test(model, **{**kwargs, "verbose": False, "ckpt_path": str(untrained)})
        if self.results.folder is not None:  # something was evaluated
            rank_zero_info(f"results: {results}")

    def _test_kept_steps(self, model: LightningModule, kwargs: dict[str, Any]) -> None:
        """Evaluate the weights kept at chosen steps; results.json, which is written last, says that all are there."""
        folder, loggers = self.trainer.default_root_dir, self.trainer.loggers
        self.trainer.loggers, self.results.writes_all = [], False
        limit = self.trainer.limit_test_batches  # 1.0 for all; 1 for the first
        is_whole = isinstance(limit, float) and limit == 1.0 and not self.trainer.fast_dev_run  # type: ignore[attr-defined]
        for step, file in self.run.kept_steps().items():
            rank_zero_info(f"evaluating step {step}")
            self.trainer._default_root_dir = os.path.join(folder, STEPS, str(step))  # type: ignore[attr-defined]
            self.trainer.test(model, **{**kwargs, "verbose": False, "ckpt_path": str(file)})
            if self.trainer.is_global_zero and is_whole:
                (Path(folder) / RESULTS_FILE).unlink(missing_ok=True)  # of an earlier test
        self.trainer._default_root_dir = folder  # type: ignore[attr-defined]
        self.trainer.loggers, self.results.writes_all = loggers, True

    def predict(self, model: LightningModule, **kwargs: Any) -> None:
        """Predict; PredictionWriter writes to disk, whereas Lightning would keep all features in memory."""
        if not is_overridden("predict_dataloader", self.datamodule):
            raise UserError(
                f"predict: {type(self.datamodule).__name__} has no images to predict; `test` writes the predicted "
                f"classes of test images to {self.run.folder / 'predictions'}"
            )
        self.trainer.predict(model, **{**kwargs, "return_predictions": False})
        if not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_info(f"predictions: {self.predictions.folder}")


class _Check(MedclipCLI):
    """Parses runs one after the other by one parser, whose making takes longer than a parse."""

    def __init__(self, runs: Mapping[str, Sequence[str]], needs_sources: bool) -> None:
        self.runs, self.needs_sources = runs, needs_sources
        super().__init__(next(iter(runs.values())))

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        runs_of = defaultdict[str, list[str]](list)
        for name, arguments in self.runs.items():
            try:
                words, origins = config_files.with_packaged_files(arguments)
                for line in origins:
                    if line not in self.origins:
                        rank_zero_info(line)
                        self.origins.append(line)
                parsed = parser.parse_args(words)
                if self.needs_sources:
                    _require_sources(parsed[parsed.subcommand])
                    _require_inputs(parsed[parsed.subcommand])
            except UserError as error:
                runs_of[str(error)].append(name)
        if runs_of:
            named = {x: names if len(names) < len(self.runs) else names[:1] for x, names in runs_of.items()}
            raise UserError(" | ".join(f"{', '.join(names)}: {error}" for error, names in named.items()))
        raise FinishedRun


def _require_sources(config: Namespace) -> None:
    """Refuse files and folders that are not there: data, prompts, weights to start from. Nothing is downloaded."""
    _take_prompt_texts(config)
    for key, value in config.items():
        name = key.rpartition(".")[2]
        if value is None:
            continue
        is_remote = name in ("init_from", "pretrained") and may_be_repository(str(value))
        if name == "init_from" and not (is_remote and "/" in value):
            find_model(value, key)
        is_source = key.startswith(("model.", "data.")) and name in ("folder", "files")
        is_source |= name == "pretrained" and not is_remote
        if is_source and not Path(value).expanduser().exists():
            raise UserError(f"{key}: no file or folder {value}")


def _require_inputs(config: Namespace) -> None:
    """Refuse a set without fields of the objective or labels of the prompts, and a local BERT without its head."""
    kind = config.get("data.class_path")
    if kind is None or not issubclass(imported(kind), ImageTextDataModule):
        return
    model, data = config.model.init_args, config.data.init_args
    prepared, text = PreparedSet(data.folder), model.get("text_encoder.init_args", {})
    parts = [model.get(name) for name in ("class_probability", "negative_weights", "loss", "near_texts")]
    if text.get("masked_language_head") and Path(str(text.get("pretrained"))).is_dir():
        parts.append(model.text_encoder)
    for part in filter(None, parts):
        built = imported(part.class_path)(**part.get("init_args", Namespace()).as_dict())
        for name in chain(*(getattr(built, f"{of}requires", ()) for of in ("", "anchor_", "candidate_"))):
            table = SENTENCE_FIELDS.get(name) or IMAGE_FIELDS.get(name)
            if table in FieldFiles._fields:
                prepared.file_of_model(table, data[table])
            elif table == "labels":
                image_field(prepared, name, FieldFiles(), prepared.rows("images", use=["train"]))
            elif table:
                prepared.table(table)
    for callback in listed(config.trainer.callbacks):
        prompts = config.prompts or callback.get("init_args", {}).get("prompts")
        if prompts and _name(callback) == "ZeroShotClassification":
            require_labelled(prompts, prepared.findings, "prompts")


def _take_prompt_texts(config: Namespace) -> list[str]:
    """Replace names and paths of prompts by the texts, which stay with the run; return the origins of packaged ones."""
    callbacks = [one for one in listed(config.trainer.callbacks) if _name(one) in _WITH_PROMPTS]
    origins = []
    owners = [(config, "--prompts"), *((one.get("init_args", {}), _name(one)) for one in callbacks)]
    for settings, setting in owners:
        if isinstance(given := settings.get("prompts"), str):
            found = find_configuration(given, "prompts", setting)
            origins += [found.origin] if found.origin else []
            settings["prompts"] = prompt_texts(read_prompts(found.path, setting))
    return origins


def _own_environment(trainer: Namespace) -> list[LightningEnvironment]:
    """An environment without other tasks for a training of one process, which Lightning would take for one of several.

    Each task that SLURM or torchrun starts is then the first and only process of its own job.
    """
    devices, nodes = trainer.devices, trainer.num_nodes
    count = len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdecimal() else 0
    one_cpu = devices == "auto" and (trainer.accelerator == "cpu" or not torch.accelerator.is_available())
    processes, tasks = count * nodes, int(os.environ.get("SLURM_NTASKS", 1))
    if 0 < (processes or one_cpu * nodes) < (started := int(os.environ.get("WORLD_SIZE", 1))):
        raise UserError(
            f"trainer.devices: expected all {started} processes that torchrun started (WORLD_SIZE), found fewer; set "
            f"--trainer.devices {max(1, started // nodes)} (of each node) --trainer.strategy ddp, or start the command "
            "without torchrun"
        )
    if processes == 1:
        rank_zero_only.rank = 0  # type: ignore[attr-defined]
    if 0 < processes < tasks:
        rank_zero_warn(
            f"SLURM_NTASKS is {tasks}, trainer.devices * trainer.num_nodes {processes}: with `srun` the command runs "
            f"{tasks} times; start as many tasks as devices (--ntasks-per-node), with --trainer.strategy ddp"
        )
    return [LightningEnvironment()] if processes == 1 < tasks else []


def _is_first_process() -> bool:
    """True in the first of all processes; known from the environment before any process group."""
    return getattr(rank_zero_only, "rank", 0) == 0 == int(os.environ.get("NODE_RANK", 0))


def _name(callback: Namespace) -> str:
    return callback.class_path.rpartition(".")[2]


def _hand_on(option: str, value: Any, users: Sequence[str], callbacks: Any) -> None:
    """Hand an option to the callbacks that have it, so that the list of callbacks need not be repeated."""
    found = [one for one in listed(callbacks) if _name(one) in users]
    if not found:
        raise UserError(f"--{option}: no {' or '.join(users)} among trainer.callbacks would use it")
    for callback in found:
        callback.init_args[option] = value


def _begin(run: run_folder.RunFolder, config: Mapping[str, Any] | None, sets_aside: bool) -> None:
    """Change the folder of a run that goes on, once its checkpoint has been accepted; `config` of a longer one."""
    if config is not None:
        run.extend(config)
    if sets_aside and (names := run.set_aside("unfinished")):
        rank_zero_info(f"measured before training goes on, and renamed to ..._unfinished: {', '.join(names)}")


def _is_comparable(results: Path, untrained: Path) -> bool:
    """True if both were measured in the same way on the same data, and the predictions of both are there."""
    if not (results.is_file() and untrained.is_file()):
        return False
    a, b = (read_json(file) for file in (results, untrained))
    of_sections = [
        {section for section in a["metrics"] if SavedRun(results.parent, suffix).file_of(section).is_file()}
        for suffix in ("", "_untrained")
    ]
    return of_sections[0] <= of_sections[1] and measured_alike(a, b)


def _checkpoint_folder(folder: str) -> str:
    return str(Path(folder) / "checkpoints")
