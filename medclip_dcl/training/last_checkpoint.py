"""last.ckpt and previous.ckpt of a run: writing them, keeping two, finding a readable one."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins import TorchCheckpointIO
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import BaseFinetuning, Checkpoint, ModelCheckpoint, WeightAveraging
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities import rank_zero_info
from torch.optim.lr_scheduler import LambdaLR

from medclip_dcl.common.distributed import gather_objects, greatest_of_all, is_distributed
from medclip_dcl.common.errors import UserError, check_range
from medclip_dcl.common.files import replacing, sync_folder
from medclip_dcl.data.samplers import ENDS, SAVES, ResumableLoader, at_sigterm
from medclip_dcl.runs.checkpoint_files import NEW, ResumeError, remove_leftovers, rotate
from medclip_dcl.training.throughput import Arrival, Throughput

_WEIGHTS = ("state_dict", "optimizer_states", "current_model_state")
"""Large entries of a checkpoint, which hold tensors alone."""

_MADE_OF = "made_of"
"""Entry of a checkpoint: digests of the files, beside a prepared set, that its training read."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""SLURM announces the end of a job's time by SIGUSR1."""

_SECONDS_BEFORE_VALIDATION = 60.0
"""Max interval of saving before a validation, which may be long."""


class Stopped(SystemExit):
    """Training was asked to stop, saved what it had, and stopped; the exit status is 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints under a temporary name and renames them: a kill or a power cut leaves the old one.

    It refuses states of callbacks that could not be loaded by `weights_only`.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        path = Path(path)
        states = {name: part for name, part in checkpoint.items() if name not in _WEIGHTS}
        for name, state in (checkpoint.get("callbacks", {}) | states).items():
            stream = io.BytesIO()
            try:
                torch.save(state, stream)
                torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
            except Exception as error:  # whatever the states of other people's classes make the pickler say
                raise UserError(
                    f"checkpoint: the state of {name.partition('{')[0]} could not be loaded again; expected tensors "
                    "and plain values, such as float(x) for a number of NumPy and str(x) for a path"
                ) from error
        with replacing(path, one_writer=True) as file:
            torch.save(checkpoint, file)
        sync_folder(path.parent)


class StopSignals:
    """Records the signal that asks training to stop; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.requested = 0
        self._before: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Handle the signals; Lightning would save in the middle of a step at SIGUSR1, and not at all at SIGTERM."""
        self.requested = 0
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._remember) for number in STOP_SIGNALS}
            at_sigterm.value = SAVES

    def restore(self) -> None:
        """Restore the handlers of before."""
        at_sigterm.value = ENDS
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _remember(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT and self.requested == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = number


class LastCheckpoint(Checkpoint):
    """Keeps last.ckpt and previous.ckpt, from which a run continues exactly as if it had not been stopped.

    Saves between two optimiser steps every `minutes`; before a validation; at the end of each epoch; and at SIGTERM,
    SIGUSR1 or Ctrl-C, after which training ends with `Stopped`. In the middle of an epoch it saves only if the training
    loader is a `ResumableLoader`: any other would start the epoch again.
    """

    def __init__(self, folder: str | Path, minutes: float = 15.0) -> None:
        check_range("", "[0, inf]", checkpoint_minutes=minutes)
        self.folder, self.seconds = Path(folder), 60 * minutes
        self._signals = StopSignals()
        self._saved_at = 0.0
        self._has_validated = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Lightning would begin a run with max_steps that stopped between two epochs by ending the finished one again: a
        # batch and a step would be lost.
        trainer.fit_loop._iteration_based_training = lambda: False  # type: ignore[method-assign]

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse files beside the set that changed; of another run's callbacks take averaged weights alone.

        The best score of a run folder that was moved is kept: ModelCheckpoint drops it if its folder differs.
        """
        here = os.path.realpath(self.folder)
        if not self._is_own(trainer):
            is_fit = trainer.state.fn == TrainerFn.FITTING
            # Averages belong to the weights, and what unfreezes layers to the moments.
            kept = (ModelCheckpoint, WeightAveraging, BaseFinetuning)
            for callback in trainer.callbacks if is_fit else ():  # type: ignore[attr-defined]
                if not isinstance(callback, kept):
                    checkpoint.get("callbacks", {}).pop(callback.state_key, None)
            return
        before, now = checkpoint.get(_MADE_OF, {}), _made_of(trainer)
        changed = [name for name, digest in before.items() if now.get(name) != digest]
        if changed and trainer.state.fn == TrainerFn.FITTING:
            raise ResumeError(
                f"{trainer.ckpt_path}: the files of {', '.join(sorted(changed))} have changed since the run began; put "
                "them back, or choose another --run_folder"
            )
        for key, state in checkpoint.get("callbacks", {}).items():
            has_paths = key.startswith(("BestCheckpoint", "ModelCheckpoint"))
            if has_paths and state.get("dirpath") not in (None, here):
                checkpoint["callbacks"][key] = _moved(state, state["dirpath"], here)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[_MADE_OF] = _made_of(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._has_validated = False
        self._saved_at = time.monotonic()
        starts = gather_objects((Path(trainer.ckpt_path or "").name, trainer.global_step))
        if len(set(starts)) > 1:
            raise ResumeError(
                f"expected all processes to resume from the same checkpoint, found (file, step) {starts}; see that all "
                "of them read the same files"
            )
        self._follow_schedule(trainer)
        was_asked = trainer.received_sigterm
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            remove_leftovers(self.folder)
        self._signals.install()
        if was_asked:
            self._signals.requested = signal.SIGTERM

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        after_validation, self._has_validated = self._has_validated, False
        can_save = isinstance(trainer.train_dataloader, ResumableLoader)
        # Right after a validation in the middle of an epoch Lightning would count a step twice; save at the next one.
        if batch_idx % trainer.accumulate_grad_batches or (can_save and after_validation):
            return
        self._save_or_stop(trainer, self.seconds, _before_this_batch if can_save and batch_idx else None)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not _is_in_training(trainer):
            return
        batches = trainer.fit_loop.epoch_loop.batch_progress
        has_stepped = batches.current.ready % trainer.accumulate_grad_batches == 0
        is_resumable = isinstance(trainer.train_dataloader, ResumableLoader)
        can_save = batches.is_last_batch or (has_stepped and is_resumable)
        if can_save and _is_begun_again(trainer):
            self._save_or_stop(
                trainer, min(self.seconds, _SECONDS_BEFORE_VALIDATION), _before_this_validation
            )

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        # No collective here: processes have different numbers of batches.
        if _is_in_training(trainer) and self._signals.requested:
            # The processes that this one started would wait for it.
            kill = getattr(trainer.strategy.launcher, "kill", None)
            if kill is not None:
                kill(self._signals.requested)
            self._stop(trainer, self._signals.requested)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._has_validated = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        is_whole = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        is_resumable = isinstance(trainer.train_dataloader, ResumableLoader)
        # Set Lightning's counters to an epoch that max_steps, or a callback, has ended before its last batch.
        is_within = is_resumable and not is_whole
        with _one_less(trainer.fit_loop.epoch_progress, "processed") if is_within else nullcontext():
            self._save(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._has_validated = False
        self._save_or_stop(trainer, self.seconds, None)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._signals.restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._signals.restore()

    def _is_own(self, trainer: Trainer) -> bool:
        """True for a checkpoint of this run."""
        return os.path.realpath(Path(trainer.ckpt_path or "").parent) == os.path.realpath(self.folder)

    def _follow_schedule(self, trainer: Trainer) -> None:
        """Set rates and decay by this run's settings and schedule; say if the checkpoint has another rate."""
        for config in trainer.lr_scheduler_configs:
            schedule = config.scheduler
            if not isinstance(schedule, LambdaLR):
                continue
            if configured := getattr(schedule.optimizer, "configured", None):
                for group, own in zip(schedule.optimizer.param_groups, configured, strict=True):
                    group.update(own)
                schedule.base_lrs = [own["initial_lr"] for own in configured]
            rates = [
                base * factor(schedule.last_epoch)
                for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
            ]
            if trainer.ckpt_path and not self._is_own(trainer) and not any(rates):
                raise UserError(
                    f"--ckpt_path {trainer.ckpt_path}: expected a checkpoint before the run's last step "
                    f"{trainer.estimated_stepping_batches}, found one of step {trainer.global_step}, where its rate "
                    "is 0; raise trainer.max_epochs or max_steps, or start from its weights (init_from)"
                )
            groups = schedule.optimizer.param_groups
            if rates != [group["lr"] for group in groups]:
                rank_zero_info(
                    f"learning rate at step {trainer.global_step}: {groups[-1]['lr']:.3g} by the settings that the "
                    f"checkpoint was trained with, {rates[-1]:.3g} from here on by this run's, of "
                    f"{trainer.estimated_stepping_batches} steps"
                )
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def _save_or_stop(
        self, trainer: Trainer, seconds: float, moment: Callable[[Trainer], AbstractContextManager] | None
    ) -> None:
        """Save at a moment if the first process's clock says so; stop if any process received a signal."""
        is_due = trainer.is_global_zero and time.monotonic() - self._saved_at >= seconds
        greatest = 2 * self._signals.requested + is_due
        if is_distributed():  # one process need not wait for its GPU
            greatest = int(greatest_of_all(torch.tensor(greatest, device=trainer.strategy.root_device)))
        if greatest and moment is not None:
            with moment(trainer):
                self._save(trainer)
        if greatest >= 2:
            self._stop(trainer, greatest // 2)

    def _save(self, trainer: Trainer) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        trainer.save_checkpoint(self.folder / NEW, weights_only=False)
        if trainer.is_global_zero:
            rotate(self.folder)
        # A launcher could kill the first process if another one ended before the files are renamed.
        trainer.strategy.barrier("last checkpoint")
        self._saved_at = time.monotonic()

    def _stop(self, trainer: Trainer, number: int) -> None:
        rank_zero_info(f"{signal.Signals(number).name} at step {trainer.global_step}: training stops here")
        raise Stopped(number)


def _made_of(trainer: Trainer) -> dict[str, str]:
    """`LinkedDataModule.made_of`; empty for other data."""
    return dict(getattr(trainer.datamodule, "made_of", {}))  # type: ignore[attr-defined]


def _is_in_training(trainer: Trainer) -> bool:
    return trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking


def _is_begun_again(trainer: Trainer) -> bool:
    """True if Lightning repeats this validation when resumed at its start.

    It does not after max_steps, nor if `LastEpoch` validates between two validations of an epoch.
    """
    if _is_last_step(trainer):
        return False
    batches, interval = trainer.fit_loop.epoch_loop.batch_progress, trainer.val_check_batch
    if interval == float("inf"):
        return True
    count = batches.total if trainer.check_val_every_n_epoch is None else batches.current
    return interval is not None and count.ready % interval == 0


@contextmanager
def _before_this_batch(trainer: Trainer) -> Iterator[None]:
    """Set Lightning's counters to the state before this batch, which they count already."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    is_last, progress.is_last_batch = progress.is_last_batch, False
    with _one_less(progress, "ready"):
        yield
    progress.is_last_batch = is_last


@contextmanager
def _one_less(progress: Any, name: str) -> Iterator[None]:
    counters = progress.total, progress.current
    for counter in counters:
        setattr(counter, name, getattr(counter, name) - 1)
    try:
        yield
    finally:
        for counter in counters:
            setattr(counter, name, getattr(counter, name) + 1)


@contextmanager
def _before_this_validation(trainer: Trainer) -> Iterator[None]:
    """Set Lightning's counters to a validation that has begun: a resumed run repeats it from its start.

    In a resumed validation they count the batch that the checkpoint had begun, hence no `+= 1`.
    """
    total: Any = trainer.fit_loop.epoch_loop.val_loop.batch_progress.total
    total.ready = total.started = total.completed + 1
    try:
        yield
    finally:
        total.ready = total.started = total.completed


def _moved(value: Any, old: str, new: str) -> Any:
    """The state of a ModelCheckpoint with its paths moved to another folder."""
    if isinstance(value, str):
        return new + value[len(old) :] if value == old or value.startswith(old + os.sep) else value
    if isinstance(value, Mapping):
        return {_moved(key, old, new): _moved(item, old, new) for key, item in value.items()}
    return value


class LastEpoch(Callback):
    """Training ends with a validation and a row of metrics, also of a run shorter than their intervals."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A run resumed in the middle of its last epoch has no on_train_epoch_start.
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if _is_last_epoch(trainer):
            validate_in_this_epoch(trainer)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if (trainer.is_last_batch and _is_last_epoch(trainer)) or _is_last_step(trainer):
            # At a stop Lightning logs and, in an epoch with validation, validates.
            trainer.should_stop = True
        if trainer.should_stop:  # as well of a Timer
            validate_in_this_epoch(trainer)


def _is_last_step(trainer: Trainer) -> bool:
    return 0 <= trainer.max_steps <= trainer.global_step


def _is_last_epoch(trainer: Trainer) -> bool:
    return trainer.current_epoch + 1 == trainer.max_epochs


def validate_in_this_epoch(trainer: Trainer) -> None:
    """Let Lightning validate in this epoch, whatever its interval."""
    if trainer.check_val_every_n_epoch is not None:  # None: by batches, in every epoch
        trainer.check_val_every_n_epoch = 1


def in_order(callbacks: Iterable[Callback]) -> list[Callback]:
    """Sort callbacks where the order matters; otherwise as given.

    - `Arrival` first and `Throughput` last: the time of other callbacks is not waiting for a batch.
    - Averaged weights after all evaluations, so that these have summarised before the weights are swapped back.
    - Then checkpoints, then `LastEpoch` (after a Timer).
    """
    return sorted(callbacks, key=_place)


def _place(callback: Callback) -> int:
    if isinstance(callback, Arrival):
        return -1
    kinds = (WeightAveraging, Checkpoint, LastEpoch, Throughput)
    return next((1 + place for place, kind in enumerate(kinds) if isinstance(callback, kind)), 0)
