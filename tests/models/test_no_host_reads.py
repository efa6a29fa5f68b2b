"""A step of training reads no value of its device on the host, and mixes no devices.

On the meta device every read is an error; forward and backward run on it. Fake tensors of a GPU also refuse two
devices in one operation, but only forward: torch's backward asks the GPU's driver.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import checkpoint

from medclip_dcl.data.reports import ReportsDataModule
from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.models.masked_language import BertArchitecture, MaskedLanguageModel
from medclip_dcl.networks.image_encoder import ResNetRegions
from medclip_dcl.networks.pretrained_regions import TransformersRegions
from medclip_dcl.networks.similarity import GlobalCosine, LSENonLocal
from medclip_dcl.networks.text_encoder import BertSentences
from medclip_dcl.objectives import LanguageModelClassProbability
from medclip_dcl.training import progress
from medclip_dcl.training.averaging import AveragedWeights
from medclip_dcl.training.finite import FiniteCheck
from medclip_dcl.training.last_checkpoint import in_order
from medclip_dcl.training.progress import TimeLeft, progress_bar
from medclip_dcl.training.throughput import Throughput
from tests.models.test_image_text import data_of, first_batch
from tests.small import PatchRegions

OPTIONS: dict[str, dict[str, Any]] = {
    "masked language": {"masked_language_weight": 0.5},
    "gradient cache": {"masked_language_weight": 0.5, "contrastive_batch": 8},
    "frozen": {"frozen": True},
    "vision transformer": {},
}
NAMES = [
    pytest.param(name, marks=[pytest.mark.slow] * (name in ("masked language", "vision transformer")))
    for name in OPTIONS
]
"""Of the other two, the gradient cache has the masked language loss as well."""
VIT = {
    "model_type": "dinov2_with_registers",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
VIT |= {"patch_size": 8, "image_size": 24}


def model_and_batch(name: str, small_bert: Any, small_set: Any) -> tuple[ImageTextModel, dict[str, Any]]:
    options = dict(OPTIONS[name])
    contrastive_batch = options.pop("contrastive_batch", None)
    text = BertSentences(str(small_bert), dim=16, masked_language_head="masked_language_weight" in options)
    model = ImageTextModel(
        TransformersRegions(dim=16, architecture=VIT)
        if name == "vision transformer"
        else ResNetRegions(depth=18, dim=16, stride=16, width=8),
        text,
        GlobalCosine() if name == "vision transformer" else LSENonLocal(dim=16),
        LanguageModelClassProbability(),
        image_to_text=0.3,
        **options,
    )
    data = data_of(small_set, batch_size=4, sentences="all", contrastive_batch=contrastive_batch)
    return model, first_batch(model, data)


def moved(batch: Any, device: str) -> Any:
    return apply_to_collection(batch, Tensor, lambda values: values.to(device))


@pytest.fixture
def meta(monkeypatch):
    """torch.autocast, and the generator's state in a recomputed part, do not know the meta device."""
    real = torch.autocast

    def autocast(device_type, **options):
        return nullcontext() if device_type == "meta" else real(device_type, **options)

    monkeypatch.setattr(torch, "autocast", autocast)
    monkeypatch.setattr(checkpoint, "_infer_device_type", lambda *arguments: "cpu")


@pytest.mark.parametrize("name", NAMES)
def test_a_step_reads_nothing(name, small_bert, small_set, meta):
    model, batch = model_and_batch(name, small_bert, small_set)
    model.to("meta").train()
    loss, _, figures = model._losses(moved(batch, "meta"), step=3)
    loss.backward()
    assert loss.is_meta and all(figure.is_meta for figure in figures.values())
    assert all(p.grad is not None and p.grad.is_meta for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x != "frozen")) for x in OPTIONS]
)
def test_a_step_mixes_no_devices(name, small_bert, small_set):
    model, batch = model_and_batch(name, small_bert, small_set)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = {
            key: mode.from_tensor(value).to("cuda")
            for key, value in [*model.named_parameters(), *model.named_buffers()]
        }
        on_gpu = moved(apply_to_collection(batch, Tensor, mode.from_tensor), "cuda")
        state = {f"model.{key}": value for key, value in fake.items()}
        assert torch.func.functional_call(_Loss(model), state, on_gpu).device.type == "cuda"
        left_behind = {**on_gpu, "image_index": mode.from_tensor(batch["image_index"])}
        with pytest.raises(RuntimeError, match="device"):
            torch.func.functional_call(_Loss(model), state, left_behind)


class _Loss(nn.Module):
    """`functional_call` calls `forward`."""

    def __init__(self, model: ImageTextModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.model._losses(batch, step=3)[0]


def test_a_step_logs_no_numbers(small_bert, small_set, monkeypatch, tmp_path):
    """Lightning copies them to the device at each step, and waits for it."""
    logged: dict[str, Any] = {}
    real = LightningModule.log

    def log(self: LightningModule, name: str, value: Any, *rest: Any, **options: Any) -> None:
        logged[name] = value
        real(self, name, value, *rest, **options)

    monkeypatch.setattr(LightningModule, "log", log)
    monkeypatch.setattr(progress, "_FIRST_SECONDS", 0.0)
    text = BertSentences(str(small_bert), dim=16)
    model = ImageTextModel(PatchRegions(), text, LSENonLocal(dim=16), warmup_steps=1, text_learning_rate=1e-4)
    data = data_of(small_set, batch_size=4)
    throughput = Throughput()
    watching = [FiniteCheck(), TimeLeft(), throughput.arrival, throughput, *progress_bar(True)]
    options: dict[str, Any] = {"max_steps": 3, "limit_val_batches": 0, "log_every_n_steps": 50}
    options |= {"logger": False, "enable_checkpointing": False, "default_root_dir": tmp_path}
    Trainer(accelerator="cpu", callbacks=in_order(watching), **options).fit(model, data)
    assert {"train/loss", "train/learning_rate", "train/learning_rate_text", "minutes_left"} <= logged.keys()
    assert {name for name, value in logged.items() if not isinstance(value, Tensor)} == set()


def test_a_language_model_reads_nothing(small_set, meta):
    data = ReportsDataModule(str(small_set), batch_size=8, vocabulary_size=100)
    model = MaskedLanguageModel(architecture=BertArchitecture(hidden_size=32))
    data.connect(model.requirements())
    data.setup("fit")
    model.use_data(data.provided(), "fit")
    model.to("meta")
    losses = model._losses(moved(next(iter(data.train_dataloader())), "meta"))
    losses.mean().backward()
    assert losses.is_meta and all(p.grad is not None for p in model._model.bert.parameters())


def test_the_average_reads_nothing(small_bert, small_set, monkeypatch):
    model, _ = model_and_batch("frozen", small_bert, small_set)
    model.to("meta")
    average = AveragedWeights(0.9)
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    monkeypatch.setattr(Trainer, "estimated_stepping_batches", 100)
    average.on_fit_start(trainer, model)
    for step in (1, 2):
        monkeypatch.setattr(Trainer, "global_step", step)
        average.on_train_batch_end(trainer, model, None, None, step)
    assert average._average_model is not None and int(average._average_model.n_averaged) == 2
