"""Two processes clip the gradient of both, and both stop at a loss that is not finite in one of them."""

from __future__ import annotations

import json
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from medclip_dcl.command.cli import main
from medclip_dcl.models.image_text import ImageTextModel
from tests.processes import in_processes
from tests.training.test_clipping import CLIP, fit

pytestmark = pytest.mark.slow


def process(rank: int, folder: Path, small_set: Path, small_bert: Path, arguments: list[str]) -> None:
    clipped = fit(str(folder), str(small_set), str(small_bert), "bf16-mixed", devices=2)
    torch.save({"values": clipped.values, "weights": clipped.weights}, folder / f"{rank}.pt")
    training_step, broken_ids = ImageTextModel.training_step, []

    def broken(self: ImageTextModel, batch: Any, batch_index: int) -> Tensor:
        loss = training_step(self, batch, batch_index)
        if rank == 1 and self.global_step == 7:
            broken_ids.extend(batch["dicom_id"])
            return loss + loss.detach() * float("nan")  # no gradient tells the other process
        return loss

    ImageTextModel.training_step = broken  # type: ignore[method-assign]
    errors = (folder / f"{rank}.txt").open("w")
    with errors, redirect_stderr(errors), pytest.raises(SystemExit) as stopped:
        main(["fit", *arguments])
    (folder / f"{rank}.json").write_text(json.dumps({"status": stopped.value.code, "ids": broken_ids}))


@pytest.fixture(scope="module")
def folder(small_set, small_bert, tmp_path_factory, arguments) -> Path:
    """Folder with what both processes left."""
    folder = tmp_path_factory.mktemp("two")
    more = ["--trainer.callbacks", "[]", "--trainer.devices", "2", "--trainer.strategy", "ddp"]
    more += ["--data.init_args.batch_size", "4"]
    in_processes(2, process, folder, small_set, small_bert, arguments(folder / "run", *more))
    return folder


def test_both_clip_the_gradient_of_both(folder):
    first, second = (torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    # The same gradient in both, of which the norm is bounded: a clip of each process's own would leave them apart.
    assert first["values"] == second["values"]
    for before, after in first["values"]:
        assert before > CLIP and after == pytest.approx(CLIP, rel=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(first["weights"], second["weights"], strict=True))


def test_both_stop_at_one_process_nan(folder):
    ended = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert [one["status"] for one in ended] == [2, 2] and len(ended[1]["ids"]) == 2
    for rank in (0, 1):
        said = (folder / f"{rank}.txt").read_text()
        assert "medclip-dcl fit: error: training stopped at epoch 1, step 7: the loss is not finite" in said
        assert f"Batch of process 1, loss nan:\n  dicom_id: {', '.join(ended[1]['ids'])}\n" in said
        assert "Batch of process 0" not in said
    last = torch.load(folder / "run/checkpoints/last.ckpt", weights_only=True)
    assert last["global_step"] == 6 and all(value.isfinite().all() for value in last["state_dict"].values())
