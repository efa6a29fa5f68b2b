"""Training, resuming and exporting a masked language model."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor

from medclip_dcl.command.cli import main
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import write_json
from medclip_dcl.data.prepared import FORMAT_VERSION, write_table
from medclip_dcl.data.reports import ReportsDataModule
from medclip_dcl.models.masked_language import BertArchitecture, MaskedLanguageModel
from medclip_dcl.networks.bert_folder import weights_fingerprint
from medclip_dcl.networks.image_text import pad_tokens
from medclip_dcl.networks.language_model import load_language_model, load_masked_tokenizer
from medclip_dcl.networks.masked_language import IGNORED
from medclip_dcl.networks.text_encoder import TransformersSentences
from medclip_dcl.scoring import pseudo_log_likelihood
from tests.text_models import write_text_model

MASKED = ("bert", "distilbert", "roberta", "mpnet", "modernbert", "deberta", "deberta-v2", "electra")
OTHERS = [name for name in MASKED if name != "roberta"]
ROOT = Path(__file__).resolve().parents[2]
SMALL = BertArchitecture(
    layers=1, hidden_size=32, attention_heads=2, intermediate_size=40, max_positions=40, dropout=0.1
)
FINDINGS = ["pneumothorax", "pleural effusion", "consolidation", "pulmonary edema", "rib fracture"]


def write_set(folder: Path) -> Path:
    """Reports of a language so regular that a small model learns it: "No X." often, "Left|Right X." seldom."""
    texts = [f"{start} {finding}." for start in ("No", "Left", "Right") for finding in FINDINGS]
    rows = []
    for study in range(60):
        rows += [(study, f) for f in range(len(FINDINGS)) if (study + f) % 5]
        rows.append((study, 5 + study % 10))
    reports = pd.DataFrame(rows, columns=["study_id", "sentence_id"])
    reports.insert(1, "section", "findings")
    reports.insert(2, "position", reports.groupby("study_id").cumcount())
    images = pd.DataFrame(
        {"dicom_id": [f"i{s}" for s in range(60)], "subject_id": range(60), "study_id": range(60)}
    )
    use = ["validate" if study % 6 == 5 else "train" for study in range(60)]
    images = images.assign(view="PA", official_split="train", use=use, path="none.jpg", height=9, width=7)
    sentences = pd.DataFrame({"sentence_id": range(len(texts)), "text": texts, "n_reports": 1})
    for name, table in (("images", images), ("reports", reports), ("sentences", sentences)):
        write_table(table, folder / f"{name}.parquet", name)
    write_json({"format_version": FORMAT_VERSION, "phantom": True}, folder / "dataset.json")
    return folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_set(tmp_path_factory.mktemp("masked_language") / "set")


def build(prepared: Path, **options: Any) -> tuple[MaskedLanguageModel, ReportsDataModule]:
    torch.manual_seed(1)
    arguments = {"architecture": SMALL, "learning_rate": 5e-3, "warmup_steps": 3, **options}
    vocabulary_size = 80 if arguments["architecture"] is not None else None
    data = ReportsDataModule(str(prepared), batch_size=16, max_tokens=20, vocabulary_size=vocabulary_size)
    return MaskedLanguageModel(**arguments), data


def trainer(run: Path, epochs: int, *callbacks: Callback, mode: str = "min", **options: Any) -> Trainer:
    best = ModelCheckpoint(run / "checkpoints", "best", monitor="validate/loss", mode=mode, save_last=True)
    return Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        callbacks=[best, *callbacks],
        default_root_dir=run,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )


def checkpoint_weights(file: Path) -> dict[str, Tensor]:
    return torch.load(file, weights_only=True)["state_dict"]


@pytest.fixture(scope="module")
def finished(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 epochs."""
    run = tmp_path_factory.mktemp("finished")
    model, data = build(prepared)
    trainer(run, 12).fit(model, datamodule=data)
    return run


@pytest.mark.slow
def test_it_learns_the_language(finished: Path) -> None:
    """A sentence of the reports is far more probable than the same words in another order, and common above rare."""
    folder = finished / "language_model"
    sentences = ["No pneumothorax.", "Left pneumothorax.", "pneumothorax no.", "fracture pleural."]
    scores = pseudo_log_likelihood(load_language_model(folder)[0], load_masked_tokenizer(folder), sentences)
    usual, rare, *nonsense = scores["log_p"]
    assert usual > rare > max(nonsense)


@pytest.mark.parametrize(
    "family", ["roberta", "scratch", *(pytest.param(x, marks=pytest.mark.slow) for x in OTHERS)]
)
def test_every_masked_family_is_trained(family: str, prepared: Path, tmp_path: Path) -> None:
    """The loss is the library's mean over masked tokens; the export scores, and starts a text encoder."""
    options: dict[str, Any] = {}
    if family != "scratch":
        options = {"architecture": None, "pretrained": str(write_text_model(family, tmp_path / "source"))}
    model, data = build(prepared, **options)
    run = trainer(tmp_path, 1, limit_train_batches=3)
    run.fit(model, datamodule=data)
    (found,) = run.validate(model, datamodule=data, verbose=False)
    network, tokenizer = load_language_model(tmp_path / "language_model")
    network.eval()
    total, count = 0.0, 0
    for batch in data.val_dataloader():
        assert len(batch["sentence_id"]) == len(batch["tokens"])  # `FiniteCheck` names them
        for tokens, length, labels in zip(batch["tokens"], batch["lengths"], batch["labels"], strict=True):
            with torch.no_grad():
                log_probability = network(tokens[None, :length]).logits[0].log_softmax(-1)
            for position in (labels != IGNORED).nonzero().flatten().tolist():
                total -= log_probability[position, labels[position]].item()
                count += 1
    assert found["validate/loss"] == pytest.approx(total / count, rel=1e-4)
    assert found["validate/perplexity"] == pytest.approx(math.exp(found["validate/loss"]), rel=1e-5)
    texts = ["No pneumothorax.", "Left pneumothorax."]
    assert pseudo_log_likelihood(network, tokenizer, texts)["log_p"].lt(0).all()
    encoder = TransformersSentences(str(tmp_path / "language_model"), dim=8).eval()
    ids = tokenizer(texts)["input_ids"]
    assert encoder.tokenize(texts) == ids and encoder(*pad_tokens(ids)).isfinite().all()


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("gpt2", "expected a masked language model, found a causal one, GPT2LMHeadModel"),
        ("clip", "found 'clip'"),
    ],
)
def test_other_models_are_one_line(family: str, words: str, prepared: Path, tmp_path: Path) -> None:
    model, data = build(
        prepared, architecture=None, pretrained=str(write_text_model(family, tmp_path / family))
    )
    with pytest.raises(UserError, match=words) as error:
        trainer(tmp_path, 1).fit(model, datamodule=data)
    assert "\n" not in str(error.value)


def test_export_is_the_best_not_the_last(prepared: Path, tmp_path: Path) -> None:
    """With the mode turned round, the best is the first epoch."""
    model, data = build(prepared)
    trainer(tmp_path, 2, mode="max").fit(model, datamodule=data)
    exported = load_language_model(tmp_path / "language_model")[0].state_dict()
    best = checkpoint_weights(tmp_path / "checkpoints" / "best.ckpt")
    assert all(
        torch.equal(value, exported[name.removeprefix("language_model.")]) for name, value in best.items()
    )
    last = {name.removeprefix("language_model."): value for name, value in model.state_dict().items()}
    assert not any(torch.equal(value, exported[name]) for name, value in last.items() if value.dim() > 1)


def test_a_run_killed_before_export_exports_later(prepared: Path, tmp_path: Path) -> None:
    """Also where its folder was moved in between."""
    model, data = build(prepared)
    trainer(tmp_path / "old", 1, limit_train_batches=3).fit(model, datamodule=data)
    expected = weights_fingerprint(load_language_model(tmp_path / "old" / "language_model")[0])
    shutil.rmtree(tmp_path / "old" / "language_model")
    run = tmp_path / "new"
    shutil.move(tmp_path / "old", run)
    model, data = build(prepared)
    last = str(run / "checkpoints" / "last.ckpt")
    trainer(run, 1, limit_train_batches=3).fit(model, datamodule=data, ckpt_path=last)
    assert weights_fingerprint(load_language_model(run / "language_model")[0]) == expected


def test_another_tokenizer_than_the_checkpoints_is_refused(prepared: Path, tmp_path: Path) -> None:
    model, data = build(prepared)
    trainer(tmp_path, 1, limit_train_batches=3).fit(model, datamodule=data)
    model, _ = build(prepared)
    data = ReportsDataModule(str(prepared), batch_size=16, max_tokens=20, vocabulary_size=81)
    with pytest.raises(ValueError, match="trained with another tokenizer than this run's"):
        trainer(tmp_path, 2).fit(
            model, datamodule=data, ckpt_path=str(tmp_path / "checkpoints" / "last.ckpt")
        )


@pytest.mark.slow
def test_two_processes_train_the_model_of_one(prepared: Path, tmp_path: Path) -> None:
    """Same batches, same masking, and a mean over the hidden word pieces of all processes (their numbers differ)."""
    processes: dict[str, dict[str, Any]] = {"one": {}, "two": {"devices": 2, "strategy": "ddp_spawn"}}
    for name, options in processes.items():
        model, data = build(prepared, architecture=replace(SMALL, dropout=0.0))
        trainer(tmp_path / name, 1, **options).fit(model, datamodule=data)
    one, two = (
        load_language_model(tmp_path / name / "language_model")[0].state_dict() for name in ("one", "two")
    )
    for name, value in one.items():
        assert torch.allclose(value, two[name], atol=2e-5), name


def test_sentences_longer_than_the_models_positions_are_refused(prepared: Path, tmp_path: Path) -> None:
    model, _ = build(prepared)
    data = ReportsDataModule(str(prepared), batch_size=16, max_tokens=41, vocabulary_size=80)
    with pytest.raises(ValueError, match="data.max_tokens 41 is more than the 40 positions of the model"):
        trainer(tmp_path, 1).fit(model, datamodule=data)


@pytest.mark.slow
def test_both_configurations_run_from_the_command_line(prepared: Path, tmp_path: Path) -> None:
    """From scratch, then fine-tuned from what that exported; each ends in a folder that scores."""
    options = f"""--data.init_args.folder {prepared} --data.init_args.batch_size 16 --data.init_args.num_workers 0
        --model.init_args.warmup_steps 2 --trainer.max_epochs 1 --trainer.accelerator cpu
        --trainer.enable_progress_bar false""".split()

    def fit(config: str, name: str, *further: str) -> Path:
        file = str(ROOT / "configs" / config)
        main(["fit", "--config", file, "--run_folder", str(tmp_path / name), *options, *further])
        return tmp_path / name / "language_model"

    first = fit("language_model_small.yaml", "small", "--data.init_args.vocabulary_size", "90")
    second = fit("language_model.yaml", "tuned", "--model.init_args.pretrained", str(first))
    models = [load_language_model(folder)[0] for folder in (first, second)]
    assert weights_fingerprint(models[0]) != weights_fingerprint(models[1])
    assert models[1].config.num_hidden_layers == 2
    metrics = pd.read_csv(tmp_path / "tuned" / "metrics.csv")
    assert {"validate/loss", "validate/perplexity"} <= set(metrics.columns)
