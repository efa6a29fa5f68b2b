"""Speed and memory of the objectives and of the LSE+NL similarity, against the usual implementations.

    python tests/benchmarks/bench_objectives.py [--rounds 11] [--step_batch 8]

Run by hand, never in CI. Random data and weights. The rounds of all methods are interleaved and medians are compared,
so that a noisy machine is fair to each; two processes that fight for a core are not fair to methods that use threads:
set OMP_NUM_THREADS to the cores that are free. Prints the tables and replaces the section of this file in RESULTS.md.

- Cost of debiasing: the loss of dcl_lm (eta from log p, then the corrected loss) less that of infonce, and less torch's
  cross_entropy, as a share of a training step.
- A loop of open_clip: the loss of docs/own_loop.md against open_clip's `ClipLoss`.
- LSE+NL: against a loop over images that does what the definition says, and against the floor: the matrix products
  of two cosine maps and of their gradients, and nothing else.
"""

from __future__ import annotations

import argparse
import math
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from results_file import command, medians, process_memory, write_section
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy, normalize

from medclip_dcl.common.devices import device_name
from medclip_dcl.networks.similarity import LSENonLocal
from medclip_dcl.objectives import LanguageModelClassProbability, contrastive_loss

HERE = Path(__file__).resolve()
TITLE = "Objectives and similarity"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GAMMA2 = 14.0
DIM = 128
SENTENCES, IMAGES, REGIONS = 512, 64, 225
LOOP_DIM = 512
TOKENS = 24  # of a sentence; the mean of Open-i is about half: a short step makes the share larger, a long one smaller


def losses_of(batch: int) -> dict[str, Callable[[], Any]]:
    """Forward and backward of each loss on (batch, batch) logits."""
    logits = (GAMMA2 * (2 * torch.rand(batch, batch, device=DEVICE) - 1)).requires_grad_()
    columns = torch.arange(batch, device=DEVICE)
    log_p = -40 * torch.rand(batch, device=DEVICE)
    eta_of = LanguageModelClassProbability()

    def debiased() -> None:
        eta = eta_of(log_p=log_p)
        contrastive_loss(logits, columns, class_probability=eta, floor=-GAMMA2).backward()

    return {
        "dcl_lm": debiased,
        "infonce": lambda: contrastive_loss(logits, columns, class_probability=0.0, floor=-GAMMA2).backward(),
        "cross_entropy": lambda: cross_entropy(logits, columns).backward(),
    }


def training_step(batch: int) -> Callable[[], None]:
    """ResNet-18 at 480 px, BERT-base, LSE+NL, InfoNCE and AdamW."""
    # Imported here: torchvision and transformers would weigh on every measurement of memory.
    from transformers import BertConfig, BertModel

    from medclip_dcl.networks.image_encoder import ResNetRegions

    encoder = ResNetRegions(18).to(DEVICE)
    bert = BertModel(BertConfig(), add_pooling_layer=False).to(DEVICE)
    projection, similarity = torch.nn.Linear(768, DIM).to(DEVICE), LSENonLocal(DIM).to(DEVICE)
    modules = torch.nn.ModuleList([encoder, bert, projection, similarity]).train()
    optimiser = torch.optim.AdamW(modules.parameters(), lr=1e-5)
    images = torch.rand(batch, 3, 480, 480, device=DEVICE)
    tokens = torch.randint(1000, 30000, (batch, TOKENS), device=DEVICE)

    def run() -> None:
        regions = encoder(images).flatten(2).transpose(1, 2)
        sentences = projection(bert(input_ids=tokens).last_hidden_state[:, 0])
        loss = contrastive_loss(similarity(regions, sentences), torch.arange(batch, device=DEVICE))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    return run


def cost_of_debiasing(step_batch: int, loss_rounds: int, rounds: int) -> list[str]:
    """Share of a training step that eta and the correction take."""
    step = medians({"step": training_step(step_batch)}, rounds)["step"]
    lines = [
        f"Cost of debiasing. A training step (ResNet-18 at 480 px, BERT-base with {TOKENS} word pieces a sentence, "
        f"LSE+NL, AdamW) at batch {step_batch}: {step:.2f} s, median of {rounds}. Losses: forward and backward, "
        f"medians of {loss_rounds} interleaved rounds. A loss at batch 64 over a step at batch {step_batch} overstates "
        "the share, as a step at 64 takes longer.",
        "",
        "| loss at batch | dcl_lm, ms | infonce, ms | cross_entropy, ms | dcl_lm - infonce, share of the step | "
        "dcl_lm - cross_entropy, share of the step |",
        "|---|---|---|---|---|---|",
    ]
    for batch in sorted({step_batch, 64}):
        median = medians(losses_of(batch), loss_rounds)
        shares = [(median["dcl_lm"] - median[name]) / step for name in ("infonce", "cross_entropy")]
        times = " | ".join(f"{1e3 * median[name]:.3f}" for name in ("dcl_lm", "infonce", "cross_entropy"))
        lines.append(f"| {batch} | {times} | {shares[0]:.4%} | {shares[1]:.4%} |")
    return lines


def own_loop_lines(rounds: int) -> list[str]:
    """Time of the loss that docs/own_loop.md puts in the place of open_clip's, without and with eta."""
    from open_clip.loss import ClipLoss

    page = (HERE.parents[2] / "docs/own_loop.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0], names)
    clip_loss, own_loss, eta_of = ClipLoss(), names["debiased_clip_loss"], names["eta_of"]
    lines = [
        f"A loop of open_clip: the loss of docs/own_loop.md against ClipLoss, {LOOP_DIM} dimensions; forward and "
        "backward.",
        "",
        "| batch | ClipLoss, ms | ours with a = 0, ms | ratio | with eta, ms | largest difference of the gradient |",
        "|---|---|---|---|---|---|",
    ]
    for batch in (64, 256, 1024):
        torch.manual_seed(0)
        pair, scale = normalize(torch.randn(2, batch, LOOP_DIM, device=DEVICE), dim=2), torch.tensor(GAMMA2)
        log_p = -40 * torch.rand(batch, device=DEVICE)

        def run(loss: Callable[..., Tensor], *more: Tensor, a: float = 0.0) -> Tensor:
            leaf, eta_of.a = pair.clone().requires_grad_(), a  # noqa: B023
            loss(leaf[0], leaf[1], scale.to(DEVICE), *more).backward()  # noqa: B023
            return leaf.grad  # type: ignore[return-value]

        methods = {
            "clip": lambda: run(clip_loss),
            "plain": lambda: run(own_loss, log_p),  # noqa: B023
            "eta": lambda: run(own_loss, log_p, a=0.2),  # noqa: B023
        }
        error = (methods["clip"]() - methods["plain"]()).abs().max().item()
        clip, plain, eta = (1e3 * x for x in medians(methods, max(rounds, 20_000 // batch)).values())
        lines.append(f"| {batch} | {clip:.2f} | {plain:.2f} | {plain / clip:.2f} | {eta:.2f} | {error:.0e} |")
    return lines


def loop_over_images(similarity: LSENonLocal, regions: Tensor, sentences: Tensor) -> Tensor:
    """LSE+NL by its definition, one image after the other."""
    columns = []
    unit = normalize(sentences, dim=1)
    for v in regions.unbind():
        cosines = unit @ normalize(v, dim=1).T
        r = similarity.sharpness
        lse = (torch.logsumexp(r * cosines, 1) - math.log(len(v))) / r
        queries = similarity.q(v)
        alpha = (queries[cosines.argmax(1)] @ queries.T / math.sqrt(v.shape[1])).softmax(1)
        columns.append((lse + cosine_similarity(alpha @ v, sentences, dim=1)) / 2)
    return similarity.gamma2 * torch.stack(columns, 1)


def similarity_methods(images: int = IMAGES) -> dict[str, Callable[[], Any]]:
    """Forward and backward of LSE+NL, of the loop, and of the matrix products of two maps."""
    torch.manual_seed(0)
    similarity = LSENonLocal(DIM).to(DEVICE)
    regions = torch.randn(images, REGIONS, DIM, device=DEVICE)
    sentences = torch.randn(SENTENCES, DIM, device=DEVICE)
    gradient = torch.randn(SENTENCES, images, device=DEVICE)

    def run(forward: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        v, t = regions.clone().requires_grad_(), sentences.clone().requires_grad_()
        logits = forward(v, t)
        logits.backward(gradient)
        return logits.detach(), v.grad  # type: ignore[return-value]

    def products() -> None:
        rows = regions.view(-1, DIM)
        for _ in range(2):
            of_map = sentences @ rows.T
            of_map.T @ sentences
            of_map @ rows

    return {
        "LSE+NL": lambda: run(similarity),
        "loop over images": lambda: run(lambda v, t: loop_over_images(similarity, v, t)),
        "products of two maps": products,
    }


def similarity_lines(rounds: int) -> list[str]:
    """Time of LSE+NL and how its peak memory grows."""
    methods = similarity_methods()
    (logits, gradient), (expected, expected_gradient) = methods["LSE+NL"](), methods["loop over images"]()
    error = ((gradient - expected_gradient).norm() / expected_gradient.norm()).item()
    median = medians(methods, rounds)
    nothing = peak_of("nothing")
    few, many = (peak_of(name) - nothing for name in ("LSE+NL", "LSE+NL of 8 x the images"))
    one = SENTENCES * IMAGES * REGIONS * 4 / 2**20
    return [
        f"LSE+NL, {SENTENCES} sentences x {IMAGES} images x {REGIONS} regions x {DIM} dimensions; forward and "
        "backward.",
        "",
        "| method | seconds |",
        "|---|---|",
        *(f"| {name} | {seconds:.3f} |" for name, seconds in median.items()),
        "",
        f"{median['loop over images'] / median['LSE+NL']:.2f} x faster than the loop; "
        f"{median['LSE+NL'] / median['products of two maps']:.2f} x the time of the bare products. Largest difference "
        f"of the logits from the loop's {(logits - expected).abs().max().item():.1e}, relative difference of the "
        f"regions' gradient {error:.1e}. Peak memory without imports: {few:,.0f} MiB, at {8 * IMAGES} images "
        f"{many:,.0f} MiB, inputs and (image x region) tensors included; one tensor of sentences x images x regions "
        f"would be {one:.0f} and {8 * one:.0f} MiB.",
    ]


def peak_memory(name: str) -> float:
    """Peak memory in MiB of a method; called in a process of its own."""
    if name.startswith("LSE+NL"):
        similarity_methods(IMAGES if name == "LSE+NL" else 8 * IMAGES)["LSE+NL"]()
    if DEVICE.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return process_memory()["VmHWM"] / 2**20


def peak_of(name: str) -> float:
    """`peak_memory` in a fresh process."""
    words = [sys.executable, str(HERE), "--peak_memory", name]
    return float(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[-1])


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Benchmark of the objectives and of LSE+NL.")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--step_rounds", type=int, default=3)
    parser.add_argument("--loss_rounds", type=int, default=500)
    parser.add_argument("--step_batch", type=int, default=8)
    parser.add_argument("--peak_memory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak_memory is not None:
        print(peak_memory(options.peak_memory))
        return
    torch.manual_seed(0)
    lines = [
        f"{device_name(DEVICE)}, {platform.machine()}; torch {torch.__version__}; float32, random data and weights; "
        f"medians of {options.rounds} interleaved rounds. `{command()}`",
        "",
        *cost_of_debiasing(options.step_batch, options.loss_rounds, options.step_rounds),
        "",
        *own_loop_lines(options.rounds),
        "",
        *similarity_lines(options.rounds),
    ]
    write_section(TITLE, lines)


if __name__ == "__main__":
    main()
