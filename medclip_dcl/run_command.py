"""LightningCLI with run folders: what ``python -m medclip_dcl`` runs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from pytorch_lightning.utilities import rank_zero_info

from medclip_dcl.evaluation.class_probability import ClassProbabilityTable
from medclip_dcl.evaluation.predictions import PredictionWriter
from medclip_dcl.evaluation.results import ResultsWriter
from medclip_dcl.run_folder import (
    UNTRAINED_CHECKPOINT,
    AtomicCheckpointIO,
    MetricsFile,
    RunFolder,
    RunRecord,
)


def run(args: Sequence[str] | None = None) -> None:
    """Run one command from command-line arguments (None: those of the process)."""
    # Lightning's own use of a deprecated test, at every step of the user's program.
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
    try:
        MedclipCLI(args=None if args is None else list(args))
    except FinishedRun as finished:
        rank_zero_info(str(finished))


class FinishedRun(Exception):
    """`fit` was asked for a run that has come to its end: there is nothing to do."""


class MedclipCLI(LightningCLI):
    """LightningCLI in which a run folder (`run`) holds one run and is never mixed with another."""

    def __init__(self, args: list[str] | None = None) -> None:
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=None,
            auto_configure_optimizers=False,
            seed_everything_default=0,
            args=args,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--run", type=str, required=True, help="Folder of this run, e.g. runs/NAME.")
        parser.link_arguments("run", "trainer.default_root_dir")
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
        parser.link_arguments("run", "checkpoint.dirpath", compute_fn=_checkpoint_folder)

    def _parse_ckpt_path(self) -> None:
        """Settings come from the configuration alone; Lightning would let a checkpoint's override them unseen."""

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        self.run = RunFolder(config.run)
        if self.subcommand == "fit":
            if int(os.environ.get("LOCAL_RANK", "0")) == 0 and int(os.environ.get("SLURM_PROCID", "0")) == 0:
                self._dump_config()
                self.run.claim(self.config_dump)
            if self.run.is_finished:
                raise FinishedRun(f"{self.run.folder} is finished: nothing to do")
            resume = self.run.checkpoint_to_resume()
            if config.ckpt_path is None and resume is not None:
                rank_zero_info(f"continuing {self.run.folder} from {resume}")
                config.ckpt_path = str(resume)
        elif config.ckpt_path is None:
            config.ckpt_path = str(self.run.checkpoint_to_test())

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self.config_init[self.subcommand].trainer
        loggers = config.logger if isinstance(config.logger, list) else [config.logger]
        plugins = config.plugins if isinstance(config.plugins, list) else [config.plugins]
        kwargs["logger"] = [
            MetricsFile(self.run.folder),
            *(x for x in loggers if x not in (None, True, False)),
        ]
        kwargs["plugins"] = [AtomicCheckpointIO(), *(x for x in plugins if x is not None)]
        if config.precision is None:
            kwargs["precision"] = best_precision(config.accelerator)
        self.results = ResultsWriter()
        config.callbacks = [
            *(config.callbacks or []),
            ClassProbabilityTable(),
            PredictionWriter(),
            RunRecord(self.run),
            self.results,
        ]
        trainer = super().instantiate_trainer(**kwargs)
        # After the checkpoint of the best: its state goes into this one. ModelCheckpoint's own `save_last` leaves
        # out every epoch that is not the best so far.
        trainer.callbacks.append(  # type: ignore[attr-defined]
            ModelCheckpoint(
                dirpath=self.run.checkpoints,
                filename="last",
                save_on_train_epoch_end=True,
                enable_version_counter=False,
            )
        )
        return trainer

    def test(self, model: LightningModule, **kwargs: Any) -> None:
        """Evaluate the untrained network (once), then the checkpoint."""
        untrained = self.run.checkpoints / UNTRAINED_CHECKPOINT
        if untrained.is_file() and not (self.run.folder / "results_untrained.json").is_file():
            rank_zero_info("evaluating the network before its first step")
            self.results.file_name = "results_untrained.json"
            self.trainer.test(model, **{**kwargs, "ckpt_path": str(untrained)})
        self.results.file_name = "results.json"
        self.trainer.test(model, **kwargs)
        rank_zero_info(f"results: {self.run.folder / 'results.json'}")


def best_precision(accelerator: Any = "auto") -> str:
    """Mixed bfloat16 where the device computes in it, else float32 ("trainer.precision: null")."""
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16-mixed" if has_bf16 else "32-true"


def _checkpoint_folder(run: str) -> str:
    return str(Path(run) / "checkpoints")
