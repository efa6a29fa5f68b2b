"""Two processes with a GPU each, against one on the CPU: a step of every objective, gathers by NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.models.test_two_processes import OBJECTIVES, batch, build, part_of, step
from tests.processes import in_processes

pytestmark = pytest.mark.gpu


def process(rank: int, folder: Path, kind: str) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/init", rank=rank, world_size=2)
    for name in OBJECTIVES:
        found = step(build(name).to(device), part_of(batch(name), rank), world=2)
        if rank == 0:
            torch.save({key: value.cpu() for key, value in found.items()}, folder / f"{name}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def of_two_processes(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with what two processes found."""
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices, found {torch.cuda.device_count()}")
    folder = tmp_path_factory.mktemp("processes")
    in_processes(2, process, folder, device.type)
    return folder


@pytest.mark.parametrize("name", OBJECTIVES)
def test_step_equals_one_process_on_the_cpu(name, of_two_processes):
    found = torch.load(of_two_processes / f"{name}.pt", weights_only=True)
    expected = step(build(name), batch(name))
    assert found.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], rtol=1e-8, atol=1e-10, msg=key)
