"""The command line: ``medclip-dcl fit | validate | test | predict``.

A run folder holds one run: `fit` continues an unfinished run, leaves a finished one alone and refuses another's
folder. `test` evaluates the untrained network beside the trained one.
"""

from __future__ import annotations

import functools
import gc
import importlib
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from types import ModuleType

from yaml.representer import RepresenterError

from medclip_dcl.common.command_line import take_imports
from medclip_dcl.common.errors import UserError, needs_extra


def main(args: Sequence[str] | None = None, *, are_typed: bool = True) -> None:
    """Run one command; a mistake of the user ends with one line and status 2.

    `are_typed`: a class path among the arguments imports its module; else ``--import`` alone does, as in files.
    """
    args = sys.argv[1:] if args is None else args
    program = " ".join(["medclip-dcl", *args[:1]])
    modules, args = take_imports(args, program)
    try:
        lightning_cli().run(args, [*modules, *(_class_paths(args) if are_typed else ())])
        return
    except Exception as error:
        about_input = _about_input(error)
        if about_input is not None:
            print(f"{program}: error: {about_input}", file=sys.stderr)
            raise SystemExit(2) from error
        # The error that a constructor raised, without the parser's, which repeats the configuration.
        fault = next(x for x in _causes(error) if not (x.__cause__ and _is_of(x, "jsonargparse")))
    # A bug of this program or of a user's class keeps its traceback.
    raise fault


@functools.cache
def lightning_cli() -> ModuleType:
    """The module of the commands, imported without garbage collection: looking through Lightning takes 2 s."""
    gc.collect()  # what is garbage by now would be kept, too
    enabled = gc.isenabled()
    gc.disable()
    try:
        module = importlib.import_module("medclip_dcl.command.lightning_cli")
    finally:
        if enabled:
            gc.enable()
    gc.freeze()
    return module


def _class_paths(args: Sequence[str]) -> list[str]:
    """Dotted names among the arguments, without names of files."""
    values = [
        word for word, before in zip(args, ["", *args], strict=False) if before not in ("--config", "-c")
    ]
    return re.findall(r"(?<![\w./-])[^\W\d]\w*(?:\.\w+)+(?![\w./-])", "\n".join(values))


def _about_input(error: Exception) -> UserError | None:
    """The line for a mistake of the user or a fault of the machine; None for a bug."""
    for cause in sorted(_causes(error), key=lambda one: not isinstance(one, UserError)):
        if isinstance(cause, UserError):
            return cause
        if isinstance(cause, RepresenterError):
            return UserError(
                f"trainer: config.yaml cannot hold {cause.args[-1]!r}; give it as text (of a Timer: interval: step), "
                "or set trainer.max_time instead of a Timer"
            )
        if str(cause).startswith("DataLoader timed out"):
            return UserError(
                f"data.num_workers: {cause}; see why reading waits (disk, memory), then give the same command, with "
                "which fit goes on from its last checkpoint"
            )
        for extra in ("tensorboard", "wandb"):
            if isinstance(cause, ModuleNotFoundError) and extra in str(cause):
                return UserError(needs_extra("trainer.logger", extra, extra))
        if _is_about_settings(cause):
            return UserError(f"trainer: {' '.join(str(cause).split())}")
    return None


def _is_about_settings(error: BaseException) -> bool:
    """True for Lightning's own errors about its settings, metrics and packages, such as a metric that is not logged."""
    kinds = (ValueError, RuntimeError, ModuleNotFoundError)
    is_of_kind = isinstance(error, kinds) or "Misconfiguration" in type(error).__name__
    return is_of_kind and _is_of(error, "pytorch_lightning", "lightning_fabric")


def _is_of(error: BaseException, *libraries: str) -> bool:
    modules = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(modules) and modules[-1].split(".")[0] in libraries  # none of a cause that was never raised


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and its causes; the parser wraps errors of the classes that it builds."""
    while error is not None:
        yield error
        error = error.__cause__
