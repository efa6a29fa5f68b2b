"""What two processes find that share a machine, or stand on two machines with a copy of the set each."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pandas as pd
import pytest
import torch

from medclip_dcl.common.errors import UserError
from medclip_dcl.data.image_text import ImageTextDataModule
from medclip_dcl.data.link import ImageTextRequirements
from medclip_dcl.data.prepared import PreparedDataError
from medclip_dcl.networks.text_encoder import BertSentences


def datamodule(folder: Path, small_bert: Path, fields: str | None = None) -> ImageTextDataModule:
    data = ImageTextDataModule(str(folder), image_size=40, batch_size=8, num_workers=0, fields=fields)
    encoder = BertSentences(str(small_bert))
    requirements = ImageTextRequirements(encoder.tokenize, ("log_p",), tokenizer=encoder.tokenizer_identity())
    data.connect(requirements)
    return data


def find(rank: int, folder: Path, small_set: Path, small_bert: Path) -> None:
    """What a process of two finds, as FOLDER/machines_RANK.json; a process group stands."""
    with patch.dict("os.environ", {"LOCAL_RANK": "0"}):
        own = shutil.copytree(small_set, folder / f"machine_{rank}/set")
        datamodule(own, small_bert).setup("fit")
        if rank:
            labels = pd.read_parquet(own / "labels.parquet")
            labels.assign(Edema=0.0).to_parquet(own / "labels.parquet", index=False)
        stale = datamodule(own, small_bert)
        with pytest.raises(PreparedDataError) as refused:
            stale.setup("fit")
        found = {"refusal": str(refused.value), "fingerprint": stale.prepared.fingerprint}
        shutil.copyfile(small_set / "labels.parquet", own / "labels.parquet")
        for damage in (lambda scores: scores.assign(log_p=-1.0), None):
            for file in (own / "log_p").glob("*.parquet") if rank else ():
                damage(pd.read_parquet(file)).to_parquet(file) if damage else file.unlink()
            with pytest.raises(
                PreparedDataError, match="log_p digest .* stale" if damage else "no sentence scores"
            ):
                datamodule(own, small_bert).setup("fit")
        mine = own.parent / "mine.parquet"
        if rank == 0:
            pd.DataFrame({"sentence_id": range(9), "mood": 1}).to_parquet(mine)
        with pytest.raises(UserError, match="data.fields: .*machine_1/mine.parquet is not readable"):
            datamodule(own, small_bert, str(mine)).setup("fit")
    # One machine: the first process looks at the set, and computes its arrays.
    shared = folder / "shared_set"
    data = datamodule(shared, small_bert)
    if rank == 0:
        shutil.copytree(small_set, shared)
        shutil.rmtree(shared / "arrays", ignore_errors=True)
    data.of_machine(lambda: None)
    fails = AssertionError("the second process looks at the set itself")
    with ExitStack() as patches:
        for look in ("prepared.current_content", "arrays.write_arrays") if rank else ():
            patches.enter_context(patch(f"medclip_dcl.data.{look}", side_effect=fails))
        data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    with pytest.raises(ZeroDivisionError):
        data.of_machine(lambda: 1 / 0)
    found |= {"images": batch["dicom_id"], "log_p": batch["anchor"]["log_p"].tolist()}
    (folder / f"machines_{rank}.json").write_text(json.dumps(found))


def check(folder: Path, small_set: Path, small_bert: Path) -> None:
    first, second = (json.loads((folder / f"machines_{rank}.json").read_text()) for rank in (0, 1))
    assert first["refusal"] == second["refusal"]
    assert f"{folder}/machine_1/set on " in first["refusal"] and "copy the set anew" in first["refusal"]
    for fingerprint in {first["fingerprint"], second["fingerprint"]}:
        assert fingerprint in first["refusal"]
    assert first["fingerprint"] != second["fingerprint"]
    whole = datamodule(small_set, small_bert)
    whole.setup("fit")
    batch = next(iter(whole.train_dataloader()))
    assert first["images"] + second["images"] == batch["dicom_id"]
    assert torch.equal(torch.tensor(first["log_p"] + second["log_p"]), batch["anchor"]["log_p"])
