"""Functions in fresh processes, forked from a server that imports the program once."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import socket
from collections.abc import Callable
from typing import Any

import torch
from pytorch_lightning.utilities import rank_zero_only

FRESH = multiprocessing.get_context("forkserver")
# Of one server for all tests: the last list that a program sets is that of its only server.
FRESH.set_forkserver_preload(
    [
        *("medclip_dcl.command.lightning_cli", "sklearn.metrics", "sklearn.linear_model"),
        *("transformers.models.bert.modeling_bert", "transformers.models.bert.tokenization_bert"),
        *(
            "data_prep.mimic_cxr",
            "data_prep.folder",
            "data_prep.openi",
            "medclip_dcl.encoding.score_sentences",
            "pytest",
        ),
    ]
)


def in_processes(count: int, function: Callable[..., None], *arguments: Any) -> None:
    """Run ``function(rank, *arguments)`` in processes that find each other by the environment."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    several = {"WORLD_SIZE": count, "MASTER_ADDR": "localhost", "MASTER_PORT": port, "NODE_RANK": 0}
    processes = []
    for rank in range(count):
        environment = {**several, "LOCAL_RANK": rank, "RANK": rank} if count > 1 else {}
        processes.append(FRESH.Process(target=_run, args=(rank, environment, function, arguments)))
    for process in processes:
        process.start()
    try:
        while (alive := [x for x in processes if x.is_alive()]) and not any(x.exitcode for x in processes):
            if not multiprocessing.connection.wait([x.sentinel for x in alive], timeout=240):
                break
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert [process.exitcode for process in processes] == [0] * count


def _run(
    rank: int, environment: dict[str, int | str], function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    rank_zero_only.rank = rank  # type: ignore[attr-defined]  # as the environment says, where it is imported first
    function(rank, *arguments)
