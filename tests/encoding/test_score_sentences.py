"""Scores of a prepared set's sentences: right, once, and under the model's name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertTokenizer

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import write_json
from medclip_dcl.data.prepared import FORMAT_VERSION, PreparedDataError, PreparedSet, write_table
from medclip_dcl.encoding import model_results
from medclip_dcl.encoding.model_results import ModelResults, stems_of_model
from medclip_dcl.networks.bert_folder import (
    save_language_model,
    weights_fingerprint,
)
from medclip_dcl.networks.language_model import load_language_model, load_masked_tokenizer
from medclip_dcl.scoring import pseudo_log_likelihood
from tests.processes import in_processes
from tests.program import verb
from tests.scoring import families

main = verb("score")

TEXTS = ["No pneumothorax.", "Heart size is normal.", "no Pneumothorax .", "Small left effusion."]
WORDS = ["no", "pneumo", "##thorax", "heart", "size", "is", "normal", "small", "left", "effusion", "."]


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """A set whose sentence table is not in order."""
    folder = tmp_path / "set"
    sentences = pd.DataFrame({"sentence_id": [7, 2, 5, 3], "text": TEXTS, "n_reports": 1})
    write_table(sentences, folder / "sentences.parquet", "sentences")
    write_json({"format_version": FORMAT_VERSION, "phantom": True}, folder / "dataset.json")
    return folder


def write_model(folder: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    config = BertConfig(
        vocab_size=len(pieces),
        hidden_size=18,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=11,
        max_position_embeddings=8,
    )
    model = BertForMaskedLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    save_language_model(model, BertTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}), folder)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "small_bert")


def score(prepared: Path, model: Path, *options: str) -> Path:
    before = set((prepared / "log_p").glob("*"))
    main([str(prepared), "--model", str(model), "--device", "cpu", *options])
    (written,) = set((prepared / "log_p").glob("*")) - before
    return written


def test_scores_are_pseudo_log_likelihoods_by_id(prepared: Path, model: Path) -> None:
    file = score(prepared, model)
    network = load_language_model(model)[0]
    assert file.name == f"small_bert-{weights_fingerprint(network)[:8]}.parquet"
    found = PreparedSet(prepared).log_p()
    assert found["sentence_id"].tolist() == [2, 3, 5, 7]
    expected = pseudo_log_likelihood(network, load_masked_tokenizer(model), [TEXTS[i] for i in (1, 3, 2, 0)])
    assert found["n_tokens"].tolist() == expected["n_tokens"].tolist() == [5, 4, 4, 4]
    assert found["log_p"].tolist() == expected["log_p"].tolist()
    assert found["log_p"][2] == found["log_p"][3]  # one sentence in two spellings


def test_other_weights_and_masking_get_own_files(prepared: Path, model: Path, tmp_path: Path) -> None:
    first = score(prepared, model)
    second = score(prepared, write_model(tmp_path / "other" / "small_bert", seed=1))
    word_wise = score(prepared, model, "--within_word_l2r")
    assert word_wise.name == f"{first.stem}-within_word_l2r.parquet"
    original, l2r = pd.read_parquet(first), pd.read_parquet(word_wise)
    changed = (original["log_p"] - l2r["log_p"]).abs() > 1e-6
    assert changed.tolist() == [False, False, True, True]  # pneumo ##thorax
    assert not (original["log_p"] == pd.read_parquet(second)["log_p"]).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_another_dtype_differs_by_its_rounding(prepared: Path, model: Path, dtype: str) -> None:
    exact_file, file = score(prepared, model), score(prepared, model, "--dtype", dtype)
    assert file.name == f"{exact_file.stem}-{dtype}.parquet"
    exact, found = pd.read_parquet(exact_file), pd.read_parquet(file)
    # As in tests/gpu/test_scoring.py, which says what the errors are.
    assert ((found["log_p"] - exact["log_p"]).abs() / exact["n_tokens"] < 0.03).all()


@pytest.mark.parametrize("family", ["roberta", "gpt2"])
def test_other_families_score_a_set(
    prepared: Path, tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their settings count as much as their weights."""
    folder = families.write(family, tmp_path / family)
    file = score(prepared, folder)
    found = PreparedSet(prepared).log_p()
    expected = pseudo_log_likelihood(*load_language_model(folder), [TEXTS[i] for i in (1, 3, 2, 0)])
    assert found["log_p"].tolist() == expected["log_p"].tolist()
    assert found["n_tokens"].tolist() == expected["n_tokens"].tolist()
    config = json.loads((folder / "config.json").read_text())
    for changes, is_scored_again in (({"attn_pdrop": 0.3, "attention_probs_dropout_prob": 0.3}, False),
                                     ({"hidden_act": "relu", "activation_function": "relu"}, True)):  # fmt: skip
        config |= changes
        write_json(config, folder / "config.json")
        main([str(prepared), "--model", str(folder), "--device", "cpu"])
        assert ("are computed again" in capsys.readouterr().out) == is_scored_again
    assert not (pd.read_parquet(file)["log_p"] == found["log_p"]).any()


class Stopped(Exception):
    """A run that ends in the middle."""


def stop_after(batches: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on scoring ends with an exception after so many batches; the numbers of those that were scored."""
    import medclip_dcl.scoring.score

    original = medclip_dcl.scoring.score.score_batches
    scored: list[int] = []

    def some(*args, **options):
        for number, values in original(*args, **options):
            if len(scored) == batches:
                raise Stopped
            scored.append(number)
            yield number, values

    monkeypatch.setattr("medclip_dcl.scoring.score.score_batches", some)
    return scored


def test_broken_run_continues_to_the_same_bytes(
    prepared: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--token_budget", "14"]
    expected = score(prepared, model, *options)
    whole = expected.read_bytes()
    expected.unlink()
    with monkeypatch.context() as patch:
        first = stop_after(3, patch)
        with pytest.raises(Stopped):
            score(prepared, model, *options)
        assert not expected.exists()
    with (prepared / "log_p" / f".{expected.stem}.0.progress.jsonl").open("ab") as journal:
        journal.write(b'{"batch": 3, "val')
    with monkeypatch.context() as patch:
        second = stop_after(10**9, patch)
        main([str(prepared), "--model", str(model), "--device", "cpu", *options])
    assert len(first) == 3 and not set(first) & set(second)
    assert expected.read_bytes() == whole
    said = capsys.readouterr().out
    assert f"continuing: 3 of {len(first) + len(second)} batches were done before" in said
    assert [path.name for path in (prepared / "log_p").iterdir()] == [expected.name]


@pytest.mark.parametrize("values", [lambda x: x[:1], lambda x: [*x, -1.0], lambda x: []])
def test_a_batch_of_other_values_is_scored_again(
    prepared: Path, model: Path, monkeypatch: pytest.MonkeyPatch, values: Callable[[list], list]
) -> None:
    options = ["--token_budget", "14"]
    expected = score(prepared, model, *options)
    whole = expected.read_bytes()
    expected.unlink()
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        first = stop_after(3, patch)
        score(prepared, model, *options)
    journal = prepared / "log_p" / f".{expected.stem}.0.progress.jsonl"
    about, *lines = journal.read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    entry = max(entries, key=lambda entry: len(entry["values"]))
    entry["values"] = values(entry["values"])
    journal.write_text("".join(f"{line}\n" for line in (about, *map(json.dumps, entries))))
    with monkeypatch.context() as patch:
        second = stop_after(10**9, patch)
        assert score(prepared, model, *options).read_bytes() == whole
    assert set(first) & set(second) == {entry["batch"]}


def test_parts_of_other_options_are_kept_apart(
    prepared: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for option in ("--token_budget=7", "--dtype=bfloat16"):
        with monkeypatch.context() as patch:
            stop_after(1, patch)
            with pytest.raises(Stopped):
                score(prepared, model, option)
    with pytest.raises(
        UserError, match="0.progress.jsonl differs in token_budget; give the options of before"
    ):
        score(prepared, model)
    main([str(prepared), "--model", str(model), "--device", "cpu", "--token_budget=7"])
    (left,) = (prepared / "log_p").glob(".*")
    assert "-bfloat16." in left.name


def test_a_run_beside_another_that_finishes_first(
    prepared: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one removes the journal while this one writes there."""
    import medclip_dcl.scoring.score

    original = medclip_dcl.scoring.score.score_batches
    files: list[Path] = []

    def meets_another(*args, **options):
        for number, values in original(*args, **options):
            yield number, values
            if not files:
                monkeypatch.setattr("medclip_dcl.scoring.score.score_batches", original)
                files.append(score(prepared, model, "--token_budget", "14"))

    monkeypatch.setattr("medclip_dcl.scoring.score.score_batches", meets_another)
    main([str(prepared), "--model", str(model), "--device", "cpu", "--token_budget", "14"])
    assert [path.name for path in (prepared / "log_p").iterdir()] == [files[0].name]
    assert pd.read_parquet(files[0])["log_p"].notna().all()


def watched_process(rank: int, seen: Path, arguments: list[str]) -> None:
    """One of two processes in the environment that torchrun gives them.

    Writes which batches it scored, and how long it would wait for the other.
    """
    import medclip_dcl.scoring.score

    os.environ |= {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    numbers: list[int] = []
    days: list[int] = []
    score_batches, init = medclip_dcl.scoring.score.score_batches, torch.distributed.init_process_group

    def watched(model, plan, own, **options):
        for number, values in score_batches(model, plan, own, **options):
            numbers.append(number)
            yield number, values

    def waiting(*args, **options):
        days.append(options["timeout"].days)
        return init(*args, **options)

    setattr(medclip_dcl.scoring.score, "score_batches", watched)  # noqa: B010
    setattr(torch.distributed, "init_process_group", waiting)  # noqa: B010
    with (seen / f"{rank}.txt").open("w") as file, redirect_stdout(file):
        main(arguments)
    (seen / f"{rank}.json").write_text(json.dumps({"numbers": numbers, "days": days}))


@pytest.mark.slow
def test_two_processes_share_what_is_left(
    prepared: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import medclip_dcl.scoring.score

    file = score(prepared, model, "--token_budget", "14")
    expected = file.read_bytes()
    file.unlink()
    original = medclip_dcl.scoring.score.score_batches
    batches: list[int] = []

    # As if the second of two processes had been faster, and all had been killed.
    def odd(network, plan, numbers, **options):
        batches.extend(numbers)
        yield from original(network, plan, batches[1::2], **options)
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr("medclip_dcl.scoring.score.score_batches", odd)
        with pytest.raises(Stopped):
            score(prepared, model, "--token_budget", "14")
    seen = tmp_path / "seen"
    seen.mkdir()
    command = [str(prepared), "--model", str(model), "--device", "cpu", "--token_budget", "14"]
    in_processes(2, watched_process, seen, command)
    first, second = (json.loads((seen / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first["numbers"] == batches[0::4] and second["numbers"] == batches[2::4]
    # The default, half an hour, is less than one may be ahead of the other.
    assert first["days"] == second["days"] == [30]
    said = [(seen / f"{rank}.txt").read_text() for rank in (0, 1)]
    assert "".join(said).count("4 sentences, median log p") == 1
    assert file.read_bytes() == expected
    assert [path.name for path in (prepared / "log_p").iterdir()] == [file.name]


@pytest.mark.slow
def test_tasks_share_batches_and_last_one_writes(
    prepared: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--token_budget", "14"]
    expected = score(prepared, model, *options)
    whole = expected.read_bytes()
    expected.unlink()

    def batches_of(task: int, until: int = 10**9) -> list[int]:
        with monkeypatch.context() as patch:
            scored = stop_after(until, patch)
            words = [str(prepared), "--model", str(model), "--device", "cpu", *options]
            with suppress(Stopped):
                main([*words, "--task", str(task), "--tasks", "3"])
        return scored

    with pytest.raises(UserError, match="--task counts from 0: expected less than --tasks 3, found 3"):
        batches_of(3)
    shares = [batches_of(2), batches_of(0, until=1)]
    said = capsys.readouterr().out
    assert "task 2 of 3 has done its share; 5 of 7 batches are left to other tasks" in said
    # As if the task that is being written now had come to the middle of a line.
    (journal,) = (prepared / "log_p").glob(".*.0_of_3_0.progress.jsonl")
    with journal.open("ab") as stream:
        stream.write(b'{"batch": 3, "val')
    before = journal.read_bytes()
    shares.append(batches_of(1))
    assert journal.read_bytes() == before and not expected.exists()
    shares.append(batches_of(0))
    assert shares == [[2, 5], [0], [1, 4], [3, 6]]
    assert expected.read_bytes() == whole
    assert [path.name for path in (prepared / "log_p").iterdir()] == [expected.name]
    assert batches_of(1) == []


@pytest.mark.slow
def test_two_tasks_that_end_at_once(prepared: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one writes the scores and removes the journals before this one has read them."""
    expected = score(prepared, model, "--token_budget", "14")
    whole = expected.read_bytes()
    expected.unlink()
    words = [str(prepared), "--model", str(model), "--device", "cpu", "--token_budget", "14", "--tasks", "2"]
    original = ModelResults.earlier_entries
    calls: list[int] = []

    def late(results, work):
        calls.append(len(calls))
        if calls == [0, 1]:
            main([*words, "--task", "1"])
            assert expected.read_bytes() == whole
        return original(results, work)

    monkeypatch.setattr(ModelResults, "earlier_entries", late)
    main([*words, "--task", "0"])
    assert expected.read_bytes() == whole
    assert [path.name for path in (prepared / "log_p").iterdir()] == [expected.name]


def test_too_long_sentence_is_cut_and_reported(
    prepared: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sentences = pd.read_parquet(prepared / "sentences.parquet")
    sentences.loc[0, "text"] = "no " * 9
    write_table(sentences, prepared / "sentences.parquet", "sentences")
    file = score(prepared, model)
    assert pd.read_parquet(file)["n_tokens"].tolist() == [5, 4, 4, 6]
    said = capsys.readouterr().out
    assert "1 sentences were too long for the model: only their beginning was scored (sentence_id 7)" in said


def _fewer_rows(file: Path, _: Path) -> None:
    pd.read_parquet(file).iloc[1:].to_parquet(file, index=False)


def _other_text(file: Path, _: Path) -> None:
    place = file.parents[1] / "sentences.parquet"
    sentences = pd.read_parquet(place)
    sentences.loc[sentences["sentence_id"] == 2, "text"] = "Heart is normal."
    write_table(sentences, place, "sentences")


def _setting(name: str, value: object) -> Callable[[Path, Path], None]:
    def change(_: Path, model: Path) -> None:
        raw = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**raw, name: value}))

    return change


@pytest.mark.parametrize(
    ("change", "is_again"),
    [
        (_fewer_rows, True),
        (_other_text, True),
        (_setting("hidden_act", "relu"), True),
        (_setting("layer_norm_eps", 1e-3), True),
        (_setting("hidden_dropout_prob", 0.3), False),
        (_setting("use_cache", False), False),
    ],
)
def test_only_what_changes_scores_makes_work(
    prepared: Path, model: Path, change: Callable, is_again: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    file = score(prepared, model)
    before = pd.read_parquet(file)
    change(file, model)
    main([str(prepared), "--model", str(model), "--device", "cpu"])
    said, after = capsys.readouterr().out, pd.read_parquet(file)
    assert ("is of other settings or sentences" in said) == is_again == ("nothing to do" not in said)
    assert len(after) == 4 and (after["log_p"].equals(before["log_p"]) or is_again)


def test_unwritable_set_is_named_before_work(
    prepared: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medclip_dcl.scoring.score.score_batches", None)
    (prepared / "log_p").touch()
    with pytest.raises(FileExistsError, match="log_p"):
        main([str(prepared), "--model", str(model), "--device", "cpu"])


def test_damaged_scores_are_made_again(
    prepared: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = score(prepared, model)
    expected = file.read_bytes()
    footer = len(expected) - 8 - int.from_bytes(expected[-8:-4], "little")
    # Cut, and overwritten in its footer.
    for damaged in (
        expected[: len(expected) // 2],
        expected[:footer] + b"\xff" * 20 + expected[footer + 20 :],
    ):
        file.write_bytes(damaged)
        main([str(prepared), "--model", str(model), "--device", "cpu"])
        assert file.read_bytes() == expected
        assert f"{file} is damaged (" in capsys.readouterr().out


def test_texts_are_not_printed(prepared: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    score(prepared, model)
    captured = capsys.readouterr()
    assert "4 sentences" in captured.out
    assert not any(word in (captured.out + captured.err).lower() for word in ("pneumo", "heart", "effusion"))


def test_weights_that_give_no_number_are_refused(prepared: Path, model: Path) -> None:
    network = load_language_model(model)[0]
    with torch.no_grad():
        network.bert.embeddings.word_embeddings.weight[WORDS.index("size") + 5] = torch.inf
    save_language_model(network, load_masked_tokenizer(model), model)
    with pytest.raises(UserError, match="weights are NaN or infinite in .*word_embeddings"):
        main([str(prepared), "--model", str(model)])


def test_cxr_berts_own_folder_scores(prepared: Path, real_data: Path, tmp_path: Path) -> None:
    """Its config.json and tokenizer files, and small random weights under the published key names."""
    folder = tmp_path / "BiomedVLP-CXR-BERT-specialized"
    shutil.copytree(real_data / "cxr_bert_tokenizer", folder)
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    raw = {**json.loads((folder / "config.json").read_text()), **sizes}
    (folder / "config.json").write_text(json.dumps(raw))
    weights = BertForMaskedLM(BertConfig(**sizes, vocab_size=30522)).state_dict()
    weights["cls_projection_head.dense_to_hidden.weight"] = torch.ones(128, 12)
    torch.save(weights, folder / "pytorch_model.bin")
    scores = pd.read_parquet(score(prepared, folder))
    assert scores["n_tokens"].tolist() == [5, 4, 3, 3]  # "pneumothorax" is one of its word pieces
    # Random weights know nothing: each word piece has about the probability 1 / 30,522.
    assert (scores["log_p"] / scores["n_tokens"]).between(-11.5, -9.5).all()


def test_a_file_of_another_program_is_not_overwritten(tmp_path: Path) -> None:
    network = load_language_model(write_model(tmp_path / "bert"))[0]
    results = model_results.ModelResults(tmp_path, "bert", network, "")
    file = results.file
    pd.DataFrame({"sentence_id": range(3), "mine": 0.5}).to_parquet(file)
    content = file.read_bytes()
    with pytest.raises(PreparedDataError, match="bert-.*parquet was not written by this command; move it"):
        results.exist_for(np.arange(3), "scored", "by")
    assert file.read_bytes() == content


def test_a_run_and_its_language_model_have_one_file(tmp_path: Path) -> None:
    model = load_language_model(folder := write_model(tmp_path / "run/language_model"))[0]
    names = (folder, folder.parent, f"{folder.parent}/")
    files = {ModelResults(tmp_path, str(name), model, "").file for name in names}
    assert len(files) == 1 and stems_of_model([file.stem for file in files], str(folder.parent))
