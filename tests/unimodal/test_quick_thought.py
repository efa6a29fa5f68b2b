"""Quick-Thought: its loss against a loop, its documents and tasks, whole runs, a killed one, two processes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
from pytorch_lightning import Callback, Trainer
from torch import Tensor
from torch.nn.functional import cosine_similarity

from medclip_dcl.command.cli import main
from medclip_dcl.common.errors import UserError
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.encoding.embed_sentences import embed_sentences
from medclip_dcl.encoding.options import Embed
from medclip_dcl.networks.text_encoder import BertSentences
from medclip_dcl.training.throughput import _examples
from medclip_dcl.unimodal import GruSentences, QuickThought, SentenceEvaluation, SentencesDataModule
from medclip_dcl.unimodal.quick_thought import SentenceNetwork, quick_thought_loss
from medclip_dcl.unimodal.sentence_evaluation import _features, _metrics
from medclip_dcl.unimodal.sentences import SentencesRequirements
from tests.models.test_resuming import Kill, Killed, assert_same
from tests.unimodal.test_model import assert_same_ends, train

# The loss

DOCUMENT = torch.tensor([4, 4, 4, 4, 4, 7, 2, 2, 2])
POSITION = torch.tensor([0, 1, 2, 3, 4, 0, 0, 1, 2])


def vectors(rows: int = len(DOCUMENT), seed: int = 1) -> tuple[Tensor, Tensor]:
    f, g = torch.randn(2, rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return f, g


def loop_loss(f, g, context, m, gamma2, tau):
    """DCL, eq. 7 and 8, pair by pair in plain numbers."""
    of_anchors = []
    for i in range(len(f)):
        around = sorted(
            (j for j in range(len(f)) if j != i and DOCUMENT[j] == DOCUMENT[i]),
            key=lambda j: (abs(j - i), j > i),
        )
        if context is not None:
            around = [j for j in around if abs(j - i) <= context]
        s = [
            float(f[i] @ y) if gamma2 is None else gamma2 * cosine_similarity(f[i], y, dim=0).item()
            for y in g
        ]
        negatives = [j for j in range(len(f)) if j != i and j not in around]
        losses = []
        for positive in around:
            v = [positive, *(j for j in around if j != positive)][:m]
            mean = sum(math.exp(s[j]) for j in negatives) / len(negatives)
            corrected = (mean - tau * sum(math.exp(s[j]) for j in v) / len(v)) / (1 - tau)
            g_term = max(corrected, 0.0 if gamma2 is None else math.exp(-gamma2))
            losses.append(math.log1p(len(negatives) * g_term / math.exp(s[positive])))
        if losses:
            of_anchors.append(sum(losses) / len(losses))
    return sum(of_anchors) / len(of_anchors)


def test_autocast_does_not_round_the_loss():
    f, g = (x.float() for x in vectors())
    expected, _ = quick_thought_loss(f, g, DOCUMENT, POSITION)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(quick_thought_loss(f, g, DOCUMENT, POSITION)[0], expected)


@pytest.mark.parametrize("gamma2", [None, 3.0])
@pytest.mark.parametrize("tau", [0.0, 0.05, 0.4])
@pytest.mark.parametrize(("context", "m"), [(1, 1), (1, 2), (1, None), (2, 3), (None, None), (None, 2)])
def test_the_loss_equals_the_loop(context, m, tau, gamma2):
    f, g = vectors()
    options = {"context": context, "n_positives": m, "gamma2": gamma2, "class_probability": tau}
    found, statistics = quick_thought_loss(f, g, DOCUMENT, POSITION, **options)
    assert found.item() == pytest.approx(loop_loss(f, g, context, m, gamma2, tau), rel=1e-12)
    assert statistics.class_probability.item() == pytest.approx(tau)


def test_the_correction_turns_an_anchor_with_both_neighbours_alone():
    f, g = vectors()

    def gradients(m: int, tau: float) -> Tensor:
        own = f.clone().requires_grad_()
        options: dict[str, Any] = {"n_positives": m, "gamma2": 1.0, "class_probability": tau}
        loss, _ = quick_thought_loss(own, g, DOCUMENT, POSITION, **options)
        return torch.autograd.grad(loss, own)[0]

    turned = 1 - cosine_similarity(gradients(2, 0.0), gradients(2, 0.05))
    assert turned[[0, 4, 6, 8]].abs().max() < 1e-12  # ends of a document: v = x+, a weight
    assert turned[[1, 2]].min() > 1e-6


# Documents

TEXT = "Cats sleep.\nDogs bark. \n\n \nAlone.\n \nA bird.\nA cat.\nDogs bark.\nCats sleep.\nThe end.\n"


def sentences(file: Path, **options: Any) -> SentencesDataModule:
    found = SentencesDataModule(**{"text_file": str(file), "batch_size": 2, **options})
    found.connect(SentencesRequirements(lambda texts: [[*text.encode()] for text in texts]))
    found.load("fit")
    return found


def test_batches_are_whole_documents_in_their_order(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    data = sentences(tmp_path / "text.txt")
    (batch,) = data.train_dataloader()
    rows = zip(batch["tokens"], batch["lengths"], strict=True)
    texts = [bytes(row[:length].tolist()).decode() for row, length in rows]
    assert len(set(texts)) == len(texts) == 5 and _examples(batch) == ("sentences", 7)
    documents: dict[int, list[str]] = {}
    for row, number, position in zip(
        *(batch[x].tolist() for x in ("row", "document", "position")), strict=True
    ):
        own = documents.setdefault(number, [])
        assert position == len(own)
        own.append(texts[row])
    expected = [["Cats sleep.", "Dogs bark."], ["A bird.", "A cat.", "Dogs bark.", "Cats sleep.", "The end."]]
    assert [documents[number] for number in sorted(documents)] == expected


def test_reports_follow_their_positions_and_training_alone_is_read(small_set):
    data = SentencesDataModule(folder=str(small_set))
    data.load("fit")
    reports = PreparedSet(small_set).table("reports")
    text = PreparedSet(small_set).table("sentences").set_index("sentence_id")["text"]
    own = reports[reports["study_id"].isin(range(5000, 5024))].sort_values(["study_id", "position"])
    expected = [text.loc[x].tolist() for _, x in own.groupby("study_id")["sentence_id"]]
    assert [[data.texts[i] for i in one] for one in data._documents] == expected


def test_labelled_reports_are_those_out_of_training(small_set, tmp_path):
    pd.DataFrame({"text": ["a", "b", "a"], "label": ["x", "y", "x"]}).to_csv(tmp_path / "t.csv")
    data = SentencesDataModule(folder=str(small_set), tasks={"t": str(tmp_path / "t.csv")})
    data.load("test")
    assert [[data.texts[i] for i in one] for one in data.tasks["t"]["texts"]] == [["a"], ["b"], ["a"]]
    assert data.tasks["t"]["group"].tolist() == ["a", "b", "a"]
    edema = data.tasks["Edema"]
    assert edema["label"].tolist() == ["0", "1"] * 9
    assert pd.factorize(edema["group"])[0].tolist() == [i // 2 for i in range(18)]
    reports = PreparedSet(small_set).table("reports")
    text = PreparedSet(small_set).table("sentences").set_index("sentence_id")["text"]
    first = text.loc[reports.loc[reports["study_id"] == 5024, "sentence_id"]].tolist()
    assert [data.texts[i] for i in edema["texts"].iloc[0]] == first
    data.connect(SentencesRequirements(lambda texts: [[*text.encode()] for text in texts]))
    (batch,) = data.test_dataloader()
    assert batch["row"].tolist() == batch["document"].tolist() == [*range(len(data.texts))]


def test_a_task_named_like_a_finding_and_a_source_without_documents_are_refused(small_set, tmp_path):
    pd.DataFrame({"text": ["a", "b"], "label": ["x", "y"]}).to_csv(tmp_path / "t.csv")
    data = SentencesDataModule(folder=str(small_set), tasks={"Edema": str(tmp_path / "t.csv")})
    with pytest.raises(UserError, match=r"data.tasks.Edema: expected another name"):
        data.load("test")
    with pytest.raises(UserError, match=r"data.tasks.mean: expected another name"):
        SentencesDataModule(text_file="-", tasks={"mean": str(tmp_path / "t.csv")}).load("test")
    (tmp_path / "one.txt").write_text("Only one sentence.")
    with pytest.raises(UserError, match="expected documents of two sentences"):
        SentencesDataModule(text_file=str(tmp_path / "one.txt")).load("fit")


# Published splits

HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
PAIRS = [("1", 'He said "no.', "He said no."), ("0", "A \u2028dog", "dogs"), ("1", "A", 'B" x')]


def write_published(folder: Path) -> dict[str, str]:
    """TREC and MSRP in the layout in which they are published, and their tasks."""
    lines = (
        b"DESC:manner How did caf\xe9s begin ?\nHUM:ind Who \x85 ?\n",
        b"HUM:ind Who is : he ?\nDESC:def What ?\n",
    )
    for name, content in zip(("train_5500.label", "TREC_10.label"), lines, strict=True):
        (folder / name).write_bytes(content)
    for name, pairs in (("train", PAIRS[:2]), ("test", PAIRS[2:])):
        text = HEADER + "".join(f"{label}\t12\t34\t{u}\t{v}\r\n" for label, u, v in pairs)
        (folder / f"msr_paraphrase_{name}.txt").write_bytes(text.encode("utf-8-sig"))
    return {"MSRP": str(folder / "msr_paraphrase_train.txt"), "TREC": str(folder / "train_5500.label")}


def test_published_splits_are_read_as_they_are(tmp_path):
    tasks = write_published(tmp_path)
    data = SentencesDataModule(text_file="-", tasks=tasks)
    data.load("test")
    found = {
        name: [
            (*case[:2], *(data.texts[i] for i in case[2])) for case in task[["use", "label", "texts"]].values
        ]
        for name, task in data.tasks.items()
    }
    assert found == {
        "MSRP": [(use, *pair) for use, pair in zip(("train", "train", "test"), PAIRS, strict=True)],
        "TREC": [
            ("train", "DESC", "How did caf\xe9s begin ?"),
            ("train", "HUM", "Who \x85 ?"),
            ("test", "HUM", "Who is : he ?"),
            ("test", "DESC", "What ?"),
        ],
    }
    before = data.dataset()["tasks"]
    (tmp_path / "TREC_10.label").write_bytes(b"HUM:ind Who ?\n")
    assert [name for name in tasks if before[name] != data.dataset()["tasks"][name]] == ["TREC"]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("msr_paraphrase_test.txt", HEADER + "1\t1\t2\tsecret", "line 2: expected 5 columns .*, in 4 column"),
        ("msr_paraphrase_test.txt", "1\t1\t2\tsecret\tb\tc", "line 1: expected 5 columns .*, in 6 column"),
        ("msr_paraphrase_train.txt", HEADER + "2\t1\t2\tsecret\tb", "line 2: expected .* 0 or 1"),
        ("train_5500.label", "\nsecret who ?", "line 2: expected CLASS:subclass question"),
        ("TREC_10.label", "HUM:secret", "line 1: expected CLASS:subclass question"),
        ("TREC_10.label", None, "no file .*TREC_10.label"),
    ],
)
def test_other_forms_of_published_splits_are_refused(file, content, message, tmp_path):
    tasks = write_published(tmp_path)
    (tmp_path / file).unlink() if content is None else (tmp_path / file).write_text(content)
    with pytest.raises(UserError, match=message) as error:
        SentencesDataModule(text_file="-", tasks=tasks).load("test")
    assert "secret" not in str(error.value).replace(file, "") and "\n" not in str(error.value)


# Encoders


def test_a_grus_features_do_not_depend_on_padding_or_other_sentences():
    encoder = GruSentences(8, 5)
    encoder.take_words(["No effusion.", "Heart size is normal."])
    ids = encoder.tokenize(["Heart Size, unknownword", "", "no effusion."])
    assert ids[1] == [1] and ids[0][3] == 1  # the unknown word
    lengths = torch.tensor([len(x) for x in ids])
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(x) for x in ids], batch_first=True)
    found = encoder(tokens, lengths)
    assert found.shape == (3, 16)
    for row, (one, length) in enumerate(zip(tokens, lengths, strict=True)):
        alone = encoder(one[None, :length], length[None])[0]
        torch.testing.assert_close(alone, found[row])
    rebuilt = SentenceNetwork.from_config(json.loads(json.dumps(SentenceNetwork(encoder).config())))
    rebuilt.text_encoder.load_state_dict(encoder.state_dict())
    torch.testing.assert_close(rebuilt.text_encoder(tokens, lengths), found)


def test_given_word_vectors_are_read_and_stay(tmp_path):
    (tmp_path / "v.txt").write_text("heart 1 2\nno -1 .5\neffusion 0 3\n")
    encoder = GruSentences(4, word_vectors=str(tmp_path / "v.txt"))
    assert encoder.tokenize(["No heart"]) == [[3, 2]]
    assert encoder.words.weight[2:].tolist() == [[1, 2], [-1, 0.5], [0, 3]]
    again: Any = SentenceNetwork.from_config(SentenceNetwork(encoder).config())  # as a run continues
    assert not any(x.words.weight.requires_grad for x in (encoder, again.text_encoder))
    (tmp_path / "v.txt").write_text("07 1 2\n12 3 4\n")  # a part of a file with numbers alone
    assert GruSentences(4, word_vectors=str(tmp_path / "v.txt")).tokenize(["12 07"]) == [[3, 2]]
    (tmp_path / "v.txt").write_text("ödem 1 2\nodem 3 4\n", encoding="utf-8")
    assert GruSentences(4, word_vectors=str(tmp_path / "v.txt")).tokenize(["Ödem"]) == [[2]]
    (tmp_path / "v.txt").write_text("heart 1 2\nno -1\n")
    with pytest.raises(UserError, match="v.txt: expected a word and as many numbers in each line"):
        GruSentences(4, word_vectors=str(tmp_path / "v.txt"))


# Evaluation


def test_cross_validation_keeps_groups_together_and_tells_classes_apart():
    generator = np.random.default_rng(0)
    label = np.array(["a", "b", "c"], dtype=object)[np.arange(90) % 3]
    label[0] = "rare"
    features = generator.normal(size=(90, 4)) + 3 * np.eye(3, 4)[np.arange(90) % 3]
    texts = [np.array([i]) for i in range(90)]
    task = pd.DataFrame({"texts": texts, "label": label, "group": np.arange(90) // 2})
    found = SentenceEvaluation(folds=5)._classified(features, task)
    assert len(found) == 89 and 0 not in set(found["case"])
    assert (found.groupby(found["case"] // 2)["fold"].nunique() == 1).all() and found["fold"].nunique() == 5
    assert 0.85 < (found["predicted"] == found["label"]).mean() < 1
    shuffled = task.assign(label=generator.permutation(label))
    by_chance = SentenceEvaluation(folds=5)._classified(features, shuffled)
    assert 0.15 < (by_chance["predicted"] == by_chance["label"]).mean() < 0.55


def test_equal_reports_of_other_patients_are_not_trained_on():
    """Chance by features that tell one text from another and nothing else, each text of three patients."""
    features = np.eye(40).repeat(3, axis=0)
    label = np.random.default_rng(0).permutation(np.arange(40) % 2).repeat(3).astype(str).astype(object)
    texts = [np.array([i // 3]) for i in range(120)]
    task = pd.DataFrame({"texts": texts, "label": label, "group": np.arange(120)})
    found = SentenceEvaluation(folds=5)._classified(features, task)
    assert (found["predicted"] == found["label"]).mean() < 0.6
    few = task.assign(group=np.arange(120) % 4)
    assert SentenceEvaluation(folds=5)._classified(features, few).empty


def split_task(label: list[str], n_training: int) -> pd.DataFrame:
    """Cases of a published split, the first of them for training, with a text each."""
    use = ["train" if i < n_training else "test" for i in range(len(label))]
    return pd.DataFrame({"texts": [np.array([i]) for i in range(len(label))], "label": label, "use": use})


def test_a_published_split_learns_from_training_cases_alone():
    """Test labels are exchanged, but for one of a class that training lacks."""
    features = np.eye(2)[[0, 1] * 4 + [0, 1, 0, 1, 0]].astype("float32")
    task = split_task(["a", "b"] * 4 + ["b", "a", "b", "a", "new"], 8)
    table = SentenceEvaluation()._classified(features, task)
    assert table["case"].tolist() == [8, 9, 10, 11, 12]
    assert table["predicted"].tolist() == ["a", "b", "a", "b", "a"]
    assert _metrics(table, is_pair=False) == pytest.approx({"accuracy": 0.0, "auc": (0 + 0.5 / 3) / 2})
    assert SentenceEvaluation()._classified(features[:10], split_task(["a", "b"] * 4 + ["b", "b"], 8)).empty


def test_pairs_are_told_by_difference_and_product():
    u, v = np.random.default_rng(0).normal(size=(2, 7, 3))
    numbers = pd.Series([np.array([i, 7 + i]) for i in range(7)])
    found = _features(np.concatenate([u, v]), numbers, is_pair=True)
    pairs = [[*zip(a, b, strict=True)] for a, b in zip(u, v, strict=True)]
    expected = [[*(abs(a - b) for a, b in pair), *(a * b for a, b in pair)] for pair in pairs]
    np.testing.assert_allclose(found, expected)


def test_f1_of_the_larger_class_alone_is_that_of_its_share():
    """Without information: accuracy p, F1 2p / (1 + p), AUC 1/2; of MSRP's 1,725 test pairs .665 and .799."""
    task = split_task(["1", "1", "0"] * 4 + ["1"] * 1147 + ["0"] * 578, 12)
    found = _metrics(SentenceEvaluation()._classified(np.zeros((1737, 2)), task), is_pair=True)
    p = 1147 / 1725
    assert found == pytest.approx({"accuracy": p, "auc": 0.5, "f1": 2 * p / (1 + p)})


def test_both_kinds_of_tasks_are_tested_together(tmp_path):
    words = [f"{a} {b}" for a in ("heart", "lung") for b in "abcdefghij"]
    pd.DataFrame({"text": words, "label": ["x"] * 10 + ["y"] * 10}).to_csv(tmp_path / "t.csv")
    evaluation, network = SentenceEvaluation(folds=2), model()
    network.use_data(words, "fit")
    data = SentencesDataModule(
        text_file="-", tasks={"t": str(tmp_path / "t.csv"), **write_published(tmp_path)}
    )
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=[evaluation], enable_progress_bar=False)
    with pytest.warns(UserWarning, match="MSRP was not evaluated: fewer than two classes are in both files"):
        trainer.test(network, data, verbose=False)
    result = evaluation.results["texts"]
    assert result.counts == {
        "t": {"cases": 20, "left_out": 0},
        "MSRP": {"cases": 0, "training": 2},
        "TREC": {"cases": 2, "training": 2},
    }
    means = [result.metrics[name]["accuracy"] for name in ("t", "TREC")]
    assert result.metrics["mean"]["accuracy"] == pytest.approx(np.mean(means))


# Runs


def model() -> QuickThought:
    torch.manual_seed(3)
    return QuickThought(GruSentences(8, 6), class_probability=0.01)


def test_a_resumed_epoch_goes_on_with_its_next_documents(tmp_path):
    lines = [f"sentence {i}" + ("\n" if i % 3 == 2 else "") for i in range(24)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    whole, resumed = (sentences(tmp_path / "text.txt") for _ in range(2))
    loader: Any = whole.train_dataloader()
    loader.sampler.set_epoch(1)
    resumed.load_state_dict({"epoch": 1, "batch": 1})
    expected, found = [*loader][1:], [*resumed.train_dataloader()]
    assert len(found) == len(expected) == 3
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other, "batch")


@pytest.mark.slow
def test_a_killed_run_ends_as_the_whole_one(tmp_path):
    words, generator = [f"word{i}" for i in range(12)], np.random.default_rng(0)
    lines = [" ".join(generator.choice(words, 3)) + ("\n" if i % 4 == 3 else "") for i in range(40)]
    (tmp_path / "text.txt").write_text("\n".join(lines))

    def fit(name: str, *stops: Callback) -> None:
        data = SentencesDataModule(text_file=str(tmp_path / "text.txt"), batch_size=3)
        train(tmp_path / name, model(), data, *stops)

    fit("whole")
    for stop in (Kill("on_train_batch_end", 0, 1), Kill("on_train_batch_start", 2, 1, saved_until=1)):
        with pytest.raises(Killed):
            fit("killed", stop)
        torch.rand(5)  # another process has other random numbers
    fit("killed")
    assert assert_same_ends(tmp_path / "whole", tmp_path / "killed") == 9


def run_whole(folder: Path, *more: str) -> dict[str, Any]:
    """Metrics of `fit` and `test` of the documented configuration."""
    main(["fit", "--config", "unimodal/sentences", "--run_folder", str(folder), *more])
    main(
        ["test", "--config", str(folder / "config.yaml"), "--run_folder", str(folder), "--untrained", "false"]
    )
    return json.loads((folder / "results.json").read_text())["metrics"]["texts"]


SMALL = [
    "--trainer.max_epochs",
    "2",
    "--data.init_args.batch_size",
    "8",
    "--trainer.enable_progress_bar",
    "false",
]


def test_a_bert_is_both_encoders_by_its_projection(small_set, small_bert):
    one = QuickThought(BertSentences(str(small_bert), dim=7, dropout=0.0), context=None)
    data = SentencesDataModule(folder=str(small_set), batch_size=4)
    data.connect(one.requirements())
    data.load("fit")
    batch = next(iter(data.train_dataloader()))
    texts = one.network.text_encoder(batch["tokens"], batch["lengths"])[batch["row"]]
    found = one._loss(batch)[0].item()
    assert texts.shape[1] == 7
    where = batch["document"], batch["position"]
    assert found == pytest.approx(
        quick_thought_loss(texts, texts, *where, context=None, gamma2=10.0)[0].item()
    )


@pytest.mark.slow
def test_the_whole_way_on_a_phantom_with_a_bert(small_set, small_bert, tmp_path):
    rows = [
        (f"{a} {b}", a) for a in ("small", "large") for b in ("left", "right", "effusion", "opacity", "lung")
    ]
    pd.DataFrame(rows, columns=["text", "label"]).to_csv(tmp_path / "size.csv", index=False)
    encoder = {
        "class_path": "medclip_dcl.networks.BertSentences",
        "init_args": {"pretrained": str(small_bert), "final_period": False},
    }
    found = run_whole(
        tmp_path / "run",
        *("--data.init_args.folder", str(small_set), *SMALL),
        *("--data.init_args.tasks", json.dumps({"size": str(tmp_path / "size.csv")})),
        *("--model.init_args.text_encoder", json.dumps(encoder), "--model.init_args.context", "null"),
        *(
            "--trainer.callbacks",
            '[{"class_path": "medclip_dcl.unimodal.SentenceEvaluation", "init_args": {"folds": 2}}]',
        ),
    )
    assert found["size"]["accuracy"] > 0.5 and {"Edema", "mean"} <= found.keys()
    predictions = pd.read_parquet(tmp_path / "run/predictions/texts.parquet")
    assert (predictions["task"] == "size").sum() == 10
    # The folder is what `embed` reads, and its [CLS] is the trained one.
    embedded = embed_sentences(Embed(data=small_set, model=str(tmp_path / "run/text_encoder"), device="cpu"))
    try:
        vectors = PreparedSet(small_set).text_embedding(embedded.stem)
    finally:
        embedded.unlink()
    checkpoint = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)
    network = SentenceNetwork.from_config(checkpoint["network"]).eval()
    network.load_state_dict({x.removeprefix("network."): y for x, y in checkpoint["state_dict"].items()})
    before = BertSentences(str(small_bert), final_period=False).eval()
    texts = PreparedSet(small_set).table("sentences").sort_values("sentence_id")["text"].tolist()
    for row, text in enumerate(texts):
        tokens = torch.tensor(network.text_encoder.tokenize([text]))
        length = torch.tensor([tokens.shape[1]])
        expected, untrained = (
            x.states(tokens, length)[0].detach().numpy() for x in (network.text_encoder, before)
        )
        np.testing.assert_allclose(vectors.embedding[row], expected, atol=1e-5)
        assert np.abs(vectors.embedding[row] - untrained).max() > 1e-3


def test_real_reports_are_documents_of_whole_sentences(real_data, tmp_path):
    file = real_data / "openi/openi_reports.csv"
    found = pd.read_csv(file, usecols=["findings"], nrows=60)["findings"].dropna()
    lines = [[x.strip() for x in one.split(". ") if x.strip()] for one in found]
    (tmp_path / "text.txt").write_text("\n\n".join("\n".join(one) for one in lines))
    data = sentences(tmp_path / "text.txt")
    documents = [[data.texts[i] for i in one] for one in data._documents]
    assert documents == [one for one in lines if len(one) > 1] and len(documents) > 30


@pytest.mark.slow
def test_real_reports_are_learned_from(real_data, tmp_path):
    found = pd.read_csv(real_data / "openi/openi_reports.csv", usecols=["findings"])["findings"].dropna()
    lines = ["\n".join(x.strip() for x in one.split(". ") if x.strip()) for one in found[:300]]
    (tmp_path / "text.txt").write_text("\n\n".join(lines))
    torch.manual_seed(0)
    one = QuickThought(GruSentences(16, 8), class_probability=0.01)
    data = SentencesDataModule(text_file=str(tmp_path / "text.txt"), batch_size=16)
    data.connect(one.requirements())
    data.load("fit")
    one.use_data(data.provided(), "fit")
    first, *others = data.train_dataloader()
    before = one._loss(first)[0].item()
    optimizer = torch.optim.Adam(one.parameters(), lr=1e-2)
    for batch in [*others, *others]:
        optimizer.zero_grad()
        one._loss(batch)[0].backward()
        optimizer.step()
    assert one._loss(first)[0].item() < before - 0.1  # of sentences that it was not trained on


# Two processes


def step(batch: dict[str, Tensor], world: int = 1) -> dict[str, Tensor]:
    """Loss and averaged gradients of a GRU."""
    torch.manual_seed(5)
    one = QuickThought(GruSentences(6, 4, tokenizer=_tokenizer()), class_probability=0.05).double()
    loss, _ = one._loss(batch)
    loss.backward()
    for parameter in one.parameters():
        if world > 1 and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(world)
    gradients = {name: p.grad for name, p in one.named_parameters() if p.grad is not None}
    assert len(gradients) == len([*one.parameters()])
    return {"loss": loss.detach(), **gradients}


def _tokenizer() -> str:
    encoder = GruSentences(2, 2)
    encoder.take_words(["a b c d e"])
    return encoder.tokenizer.to_str()


def documents(numbers: list[int]) -> dict[str, Tensor]:
    """Documents of 2, 3, ... sentences."""
    counts = torch.tensor([2 + n for n in numbers])
    position = torch.cat([torch.arange(int(count)) for count in counts])
    document = torch.tensor(numbers).repeat_interleave(counts)
    tokens = torch.stack([2 + document % 5, 2 + position % 5, 2 + (document * position) % 5], dim=1)
    rows = torch.arange(len(document))
    return {
        "tokens": tokens,
        "lengths": 1 + position % 3,
        "row": rows,
        "document": document,
        "position": position,
    }


def steps_of_two_processes(rank: int, folder: Path) -> None:
    """Called in each of two processes by tests/models/test_two_processes.py."""
    torch.save(step(documents([[0, 1], [2]][rank]), world=2), folder / f"sentences{rank}.pt")


def assert_steps_are_those_of_one_process(folder: Path) -> None:
    expected = step(documents([0, 1, 2]))
    for rank in range(2):
        found = torch.load(folder / f"sentences{rank}.pt", weights_only=True)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14, msg=name)
