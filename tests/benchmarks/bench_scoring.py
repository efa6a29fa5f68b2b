"""Speed, exactness and memory of sentence scoring, against the naive loop, minicons and the arithmetic floor.

    python tests/benchmarks/bench_scoring.py [--model base | small | both] [--sentences 128] [--rounds 3] [--families]

Run by hand, never in CI. Real Open-i sentences (MEDCLIP_DCL_REAL_DATA), CXR-BERT's real tokenizer, random weights of
BERT's sizes. The rounds of all methods are interleaved and medians are compared, so that a noisy machine is fair to
each. Prints the tables and replaces the section of this file in RESULTS.md. minicons is timed if it is installed
(`pip install minicons==0.3.39 --no-deps`, and what it imports).

- naive: the L masked copies of one sentence as a batch, logits of all positions, log-softmax of the masked ones.
- naive, all: the same with log-softmax of all logits, as where the model is given labels and returns the loss.
- minicons: its MaskedLMScorer with batches of 10 sentences in the order of a prepared set, which is the alphabet's.
- floor: the matrix products that the algorithm needs, of the same sizes, and nothing else.

With --families, other families than BERT against minicons and the naive loop: their sizes of vocabulary, CXR-BERT's
tokenizer for all, so that the sentences are the same.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import operator
import os
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

# oneDNN compiles a kernel for each shape and keeps 1,024. minicons has a shape for every batch: without more room each
# round would time the compiler.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")
# As in the commands: beside a neighbour threads that spin slow the naive loop more than the engine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import pandas as pd
import torch
import transformers
from results_file import REAL, command, cpu, medians, process_memory, timed, write_section
from transformers import BertConfig, BertForMaskedLM, BertTokenizer, PreTrainedModel

from data_prep.text.sentences import passages, split_sentences
from medclip_dcl.common.devices import device_name
from medclip_dcl.networks.bert_folder import word_pieces
from medclip_dcl.networks.language_model import load_masked_tokenizer
from medclip_dcl.scoring import ScoringPlan, default_token_budget, pseudo_log_likelihood, score_batches

HERE = Path(__file__).resolve()
SIZES: dict[str, dict[str, int]] = {
    "base": {},
    "small": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
    },
}
NAMES = {"base": "BERT-base (12 x 768)", "small": "4 layers x 256"}
STRATA = 8
SAMPLED = 200
FAMILIES: dict[str, dict[str, Any]] = {
    "DistilBertForMaskedLM": {},
    "RobertaForMaskedLM": {"vocab_size": 50265, "pad_token_id": 0},
    "ElectraForMaskedLM": {"embedding_size": 128},
    "DebertaV2ForMaskedLM": {
        "vocab_size": 128100,
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 256,
        "share_att_key": True,
        "position_biased_input": False,
    },
    "ModernBertForMaskedLM": {"vocab_size": 50368, "pad_token_id": 0},
}
"""Settings in which a family differs from BERT at the same size; BERT-base sizes are 12 x 768."""


@functools.cache
def openi_sentences() -> list[str]:
    """Every sentence of Open-i, repeats included."""
    reports = pd.read_csv(REAL / "openi" / "openi_reports.csv")
    texts = pd.concat([reports["findings"], reports["impression"]]).dropna()
    return [sentence for text in texts for part in passages(text) for sentence in split_sentences(part)]


def chosen_sentences(tokenizer: BertTokenizer, per_stratum: int) -> list[str]:
    """Distinct sentences, as many from each eighth of the length distribution, in the order of the alphabet."""
    distinct = sorted(set(openi_sentences()))
    lengths = np.array([len(ids) for ids in word_pieces(tokenizer, distinct)])
    order = np.argsort(lengths, kind="stable")
    generator = np.random.default_rng(0)
    parts = [
        generator.choice(stratum, per_stratum, replace=False) for stratum in np.array_split(order, STRATA)
    ]
    return [distinct[i] for i in sorted(np.concatenate(parts))]


def random_family(family: str, size: str) -> PreTrainedModel:
    """A model of another family of that size with random weights."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    }
    options = {"vocab_size": 30522, **sizes, **SIZES[size], **FAMILIES[family]}
    if family.startswith("DistilBert"):
        options["hidden_dim"] = options.pop("intermediate_size")
    kind = getattr(transformers, family)
    model: PreTrainedModel = kind(kind.config_class(**options)).eval()
    return model


def ours(model: PreTrainedModel, tokenizer: BertTokenizer, sentences: list[str]) -> list[float]:
    """The engine."""
    found: list[float] = pseudo_log_likelihood(model, tokenizer, sentences)["log_p"].tolist()
    return found


def compare_families(sizes: list[str], per_stratum: int, rounds: int) -> list[str]:
    """Rows of the table of families, float32."""
    tokenizer = load_masked_tokenizer(REAL / "cxr_bert_tokenizer")
    lines = []
    for size in sizes:
        for family in FAMILIES if size == "small" else ["RobertaForMaskedLM"]:
            sentences = chosen_sentences(tokenizer, per_stratum if size == "small" else per_stratum // 4)
            model = random_family(family, size)
            scorer = minicons_scorer(model, tokenizer)
            methods: dict[str, Callable[[], Any]] = {
                "naive": functools.partial(naive, model, tokenizer, sentences),
                "ours": functools.partial(ours, model, tokenizer, sentences),
            }
            if scorer is not None:
                methods["minicons"] = functools.partial(scorer, sentences)
            error = np.abs(np.array(methods["ours"]()) / np.array(methods["naive"]()) - 1).max()
            median = medians(methods, rounds)
            to_minicons = f"{median['minicons'] / median['ours']:.2f}" if scorer is not None else "-"
            parts = [
                family.removesuffix("ForMaskedLM"),
                NAMES[size].replace("BERT-base (12 x 768)", "12 x 768"),
            ]
            seconds = [f"{median.get(name, math.nan):.2f}" for name in ("ours", "naive", "minicons")]
            ratio = f"{median['naive'] / median['ours']:.2f}"
            lines.append(f"| {' | '.join([*parts, *seconds, ratio, to_minicons])} | {error:.1e} |")
            print(lines[-1], flush=True)
    return lines


def random_model(size: str) -> BertForMaskedLM:
    """BERT of that size with CXR-BERT's vocabulary and random weights."""
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(vocab_size=30522, **SIZES[size])).eval()


@torch.inference_mode()
def naive(model: PreTrainedModel, tokenizer: BertTokenizer, sentences: list[str]) -> list[float]:
    """The definition, sentence by sentence."""
    found = []
    for ids in word_pieces(tokenizer, sentences):
        batch, copies, pieces = masked_copies(model, tokenizer, ids)
        logits = model(input_ids=batch).logits[copies, copies + 1].float().cpu()
        found.append(logits.log_softmax(-1)[copies, pieces].double().sum().item())
    return found


@torch.inference_mode()
def naive_all(model: BertForMaskedLM, tokenizer: BertTokenizer, sentences: list[str]) -> list[float]:
    """The definition by the model's own loss: log-softmax of all positions, of which the masked ones count."""
    found = []
    for ids in word_pieces(tokenizer, sentences):
        batch, copies, pieces = masked_copies(model, tokenizer, ids)
        labels = torch.full_like(batch, -100)
        labels[copies, copies + 1] = pieces.to(batch.device)
        found.append(-len(ids) * model(input_ids=batch, labels=labels).loss.double().item())
    return found


def masked_copies(
    model: PreTrainedModel, tokenizer: BertTokenizer, ids: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A sentence's copies with one piece masked each, their numbers, and the pieces that were masked."""
    row = torch.tensor([tokenizer.cls_token_id, *ids, tokenizer.sep_token_id], device=model.device)
    copies = torch.arange(len(ids))
    batch = row.repeat(len(ids), 1)
    batch[copies, copies + 1] = tokenizer.mask_token_id
    return batch, copies, torch.tensor(ids)


def minicons_scorer(model: PreTrainedModel, tokenizer: BertTokenizer) -> Callable[[list[str]], Any] | None:
    """minicons' scorer around the same model; None where it is not installed."""
    try:
        from minicons.scorer import MaskedLMScorer  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        print(f"minicons is left out: {error}", file=sys.stderr)
        return None
    # 0.3.39 calls what transformers 5 removed.
    if not hasattr(BertTokenizer, "batch_encode_plus"):
        setattr(BertTokenizer, "batch_encode_plus", BertTokenizer.__call__)  # noqa: B010
    scorer = MaskedLMScorer(model, device=str(model.device), tokenizer=tokenizer)

    def score(sentences: list[str]) -> list[float]:
        found: list[float] = []
        for start in range(0, len(sentences), 10):
            some = sentences[start : start + 10]
            found += scorer.sequence_score(some, reduction=lambda x: x.sum().item())
        return found

    return score


def floor(model: BertForMaskedLM, plan: ScoringPlan, dtype: torch.dtype) -> Callable[[], None]:
    """The matrix products of the algorithm: all layers but the last in full, one row of the last and of the head for
    each copy. The first layer's projections, shared between copies, and attention itself are left out.

    All threads share each product, where ours give every thread products of its own: a measure, not a strict bound."""
    config = model.config
    width, wide, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    options = {"dtype": dtype, "device": model.device}

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(columns, rows, **options).t()  # as nn.Linear keeps it

    projection, output = matrix(width, 3 * width), matrix(width, width)
    up, down, head = matrix(width, wide), matrix(wide, width), matrix(width, vocabulary)
    batches = [(batch.stop - batch.start, batch.length + 2) for batch in plan.batches]
    rows = {
        count: torch.randn(count, width, **options)
        for pair in batches
        for count in (pair[0], pair[0] * pair[1])
    }
    widest = {count: torch.randn(count, wide, **options) for count in rows}

    def run() -> None:
        with torch.inference_mode():
            for copies, length in batches:
                some, all_rows = rows[copies], rows[copies * length]
                for layer in range(config.num_hidden_layers - 1):
                    if layer:
                        all_rows @ projection
                    all_rows @ output
                    all_rows @ up
                    widest[copies * length] @ down
                for product in (output, output, output, output, up):
                    some @ product
                widest[copies] @ down
                some @ output
                some @ head

    return run


def compare(size: str, per_stratum: int, rounds: int, low: torch.dtype) -> list[str]:
    """Rows of the table for one model size."""
    tokenizer = load_masked_tokenizer(REAL / "cxr_bert_tokenizer")
    sentences = chosen_sentences(tokenizer, per_stratum)
    model = random_model(size)
    # The floor's products are as large as what goes through the layers at a time.
    plan = ScoringPlan(tokenizer, sentences, positions=512, token_budget=4096)

    methods: dict[str, Callable[[], Any]] = {
        "naive float32": lambda: naive(model, tokenizer, sentences),
        "naive, all float32": lambda: naive_all(model, tokenizer, sentences),
        "ours float32": functools.partial(ours, model, tokenizer, sentences),
        "floor float32": floor(model, plan, torch.float32),
        f"ours {_short(low)}": functools.partial(ours, copy.deepcopy(model).to(low), tokenizer, sentences),
        f"floor {_short(low)}": floor(model, plan, low),
    }
    scorer = minicons_scorer(model, tokenizer)
    if scorer is not None:
        methods["minicons float32"] = lambda: scorer(sentences)
    for run in methods.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    scores: dict[str, Any] = {}
    for _ in range(rounds):
        for name, run in methods.items():
            taken, scores[name] = timed(run)
            seconds[name].append(taken)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    expected = np.array(scores["naive float32"])
    lines: list[str] = []
    for name in methods:
        if name.startswith("floor"):
            continue
        floor_name = f"floor {name.split()[-1]}"
        to_minicons = f"{median['minicons float32'] / median[name]:.2f}" if scorer is not None else "-"
        error = np.abs(np.array(scores[name]) / expected - 1).max()
        lines.append(
            f"| {NAMES[size]} | {name} | {median[name]:.2f} | {median['naive float32'] / median[name]:.2f} | "
            f"{median['naive, all float32'] / median[name]:.2f} | {to_minicons} | "
            f"{median[floor_name] / median[name]:.2f} | {error:.1e} |"
        )
    return lines


def operations(config: BertConfig, plan: ScoringPlan) -> int:
    """Floating-point operations of the algorithm's matrix products, a multiplication and an addition each."""
    width, wide, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    total = 0
    for batch in plan.batches:
        copies, length = batch.stop - batch.start, batch.length + 2
        rest = width * width + 2 * width * wide
        token = rest + 2 * length * width
        all_layers = (
            copies
            * length
            * ((config.num_hidden_layers - 1) * token + (config.num_hidden_layers - 2) * 3 * width**2)
        )
        last = copies * (3 * width**2 + 2 * length * width * config.num_attention_heads + rest)
        total += 2 * (all_layers + last + copies * (width**2 + width * vocabulary))
    return total


class WithRepeats(ScoringPlan):
    """A plan that scores every sentence, also one that was there before."""

    words = np.empty(0, dtype=np.int32)

    def _tokenise(self, longest: int) -> None:
        rows = list(word_pieces(self.tokenizer, self.sentences))
        self.row = np.arange(len(rows))
        self.pieces = np.concatenate([np.array(row, dtype=np.int32) for row in rows])
        self.starts = np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)])


def deduplication(rounds: int, low: torch.dtype) -> str:
    """All of Open-i with its repeats against its distinct word-piece sequences, for this engine and the naive loop."""
    tokenizer = load_masked_tokenizer(REAL / "cxr_bert_tokenizer")
    sentences = openi_sentences()
    model = random_model("small").to(low)
    budget = default_token_budget(model)
    plans = [
        kind(tokenizer, sentences, positions=512, token_budget=budget) for kind in (WithRepeats, ScoringPlan)
    ]
    seconds: list[list[float]] = [[], []]
    for _ in range(rounds + 1):
        for taken, plan in zip(seconds, plans, strict=True):
            numbers = range(len(plan.batches))
            taken.append(timed(functools.partial(list, score_batches(model, plan, numbers)))[0])
    # The first round compiles kernels.
    repeated, distinct = (statistics.median(taken[1:]) for taken in seconds)
    ratios = {}
    for size in SIZES:
        config = random_model(size).config
        ratios[size] = operations(config, plans[0]) / operations(config, plans[1])
    naive_ratios = {size: operator.truediv(*naive_seconds(size, plans[1], rounds)) for size in SIZES}
    return (
        f"All of Open-i: {len(sentences):,} sentences, {plans[1].n_distinct:,} distinct word-piece sequences. "
        f"{NAMES['small']}, {_short(low)}, all scored: {repeated:.1f} s, each once: {distinct:.1f} s, "
        f"**{repeated / distinct:.2f} x** faster (medians of {rounds} interleaved rounds; by the number of operations "
        f"{ratios['small']:.2f} x, for BERT-base {ratios['base']:.2f} x). The naive loop (float32, all logits) takes "
        f"{naive_ratios['base']:.2f} (BERT-base) and {naive_ratios['small']:.2f} times as long with the repeats: by so "
        f"much more the engine leads it on all of Open-i (from {SAMPLED} sentences, spread evenly over their lengths)."
    )


def naive_seconds(size: str, plan: ScoringPlan, rounds: int) -> list[float]:
    """Seconds that the naive loop takes for all sentences and for the distinct ones, from evenly spread samples."""
    model = random_model(size)
    lengths = np.diff(plan.starts)
    first = np.unique(plan.row, return_index=True)[1]
    texts = []
    for places in (np.arange(len(plan.row)), first):
        by_length = places[np.argsort(lengths[plan.row[places]], kind="stable")]
        sampled = by_length[((np.arange(SAMPLED) + 0.5) * len(by_length) / SAMPLED).astype(int)]
        # The naive loop takes sentences as they come, long after short.
        np.random.default_rng(0).shuffle(sampled)
        texts.append([plan.sentences[place] for place in sampled])
    taken = np.zeros((rounds + 1, 2))
    for number in range(rounds + 1):
        for pair in zip(*texts, strict=True):
            for which, text in enumerate(pair):
                taken[number, which] += timed(functools.partial(naive_all, model, plan.tokenizer, [text]))[0]
    # The first round warms up.
    seconds = np.median(taken[1:], axis=0) / SAMPLED * (len(plan.row), len(first))
    return seconds.tolist()


def peak_memory(count: int) -> int:
    """Peak resident memory in bytes of scoring so many distinct sentences; called in a process of its own."""
    tokenizer = load_masked_tokenizer(REAL / "cxr_bert_tokenizer")
    config = BertConfig(
        vocab_size=30522, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    generator = np.random.default_rng(0)
    words = sorted({word for text in openi_sentences()[:2000] for word in text.split()})
    lengths = generator.integers(3, 6, size=count)
    sentences = [" ".join(generator.choice(words, size=n)) for n in lengths]
    pseudo_log_likelihood(BertForMaskedLM(config), tokenizer, sentences)
    return process_memory()["VmHWM"]


def memory() -> str:
    """Peak memory at 20,000 and at 200,000 sentences."""
    peaks = []
    for count in (20_000, 200_000):
        words = [sys.executable, str(HERE), "--peak_memory", str(count)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout.split()[-1]))
    few, many = (peak / 2**20 for peak in peaks)
    return (
        f"Peak resident memory: {few:,.0f} MiB at 20,000 sentences, {many:,.0f} MiB at 200,000 "
        f"({many / few - 1:+.1%}); a tiny model, so that sentences weigh as much as they can."
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Benchmark of sentence scoring.")
    parser.add_argument("--model", choices=("base", "small", "both"), default="both")
    parser.add_argument(
        "--sentences", type=int, default=128, help="for each of 8 strata of length; base has a fourth"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--families", action="store_true", help="other families than BERT, and nothing else")
    parser.add_argument("--peak_memory", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.peak_memory is not None:
        print(peak_memory(options.peak_memory))
        return
    sizes = ["base", "small"] if options.model == "both" else [options.model]
    device, (name, units) = torch.device("cpu"), cpu()
    amx = "with AMX" if "amx_tile" in units else "without AMX"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    if options.families:
        lines = [
            f"{device_name(device)}, {name}; {versions}; minicons 0.3.39; float32; distinct Open-i sentences from "
            f"{STRATA} strata of length, {options.sentences} each (12 x 768: a fourth), CXR-BERT's tokenizer, each "
            f"family's own size of vocabulary, random weights; medians of {options.rounds} interleaved rounds; the "
            f"largest relative error against the naive loop. `{command()}`",
            "",
            "| family | size | ours, s | naive, s | minicons, s | x naive | x minicons | relative error |",
            "|---|---|---|---|---|---|---|---|",
            *compare_families(sizes[::-1], options.sentences, options.rounds),
        ]
        write_section("Sentence scoring by family", lines)
        return
    lines = [
        f"{device_name(device)}, {name} {amx}; {versions}; distinct Open-i sentences from {STRATA} strata of "
        f"length, {options.sentences} each (BERT-base: a fourth), random weights; medians of {options.rounds} "
        f"interleaved rounds; the largest relative error. `{command()}`",
        "",
        "| model | method | seconds | x naive | x naive, all | x minicons | share of the floor | relative error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for size in sizes:
        count = options.sentences if size == "small" else max(1, options.sentences // 4)
        lines += compare(size, count, options.rounds, getattr(torch, options.dtype))
    lines += ["", deduplication(options.rounds, getattr(torch, options.dtype)), "", memory()]
    write_section(f"Sentence scoring, CPU {amx}", lines)


if __name__ == "__main__":
    main()
