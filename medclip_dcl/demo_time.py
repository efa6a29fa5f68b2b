"""Say how long ``make demo`` will take on this machine, before it starts: ``python -m medclip_dcl.demo_time``.

A few of its training steps are timed, with random images and tokens. The other stages are counted in steps in float32,
by the time that both took on one idle machine (tests/benchmarks/RESULTS.md, "The demo, stage by stage"). The machine
may get busier, or less busy: each training says how much time it has left.
"""

from __future__ import annotations

import time

import torch
from torch import nn
from transformers import BertConfig, BertModel

from medclip_dcl.command_line import in_words
from medclip_dcl.distributed import best_precision
from medclip_dcl.encoders.image import ResNetRegions
from medclip_dcl.encoders.masked_language import last_hidden_states

FLOAT32 = "32-true"
STEPS = 1098
"""Of configs/demo.yaml: 9 epochs of 122 batches."""
OTHER_STAGES = 1090
"""All that is not forward and backward of these steps, in steps in float32."""
_TIMED = 6
_IMAGES, _SIDE, _SENTENCES, _TOKENS = 16, 112, 90, 25  # a batch of configs/demo.yaml


def step_seconds(precision: str) -> float:
    """Median seconds of forward and backward of both encoders on a batch of the demo's size.

    Args:
        precision: Lightning's name of it, mixed bfloat16 or float32.
    """
    image = ResNetRegions(depth=18, stride=16, width=32, centred=True)
    text = BertModel(
        BertConfig(
            vocab_size=2000,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=512,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        add_pooling_layer=False,
    )
    images, tokens = torch.rand(_IMAGES, 3, _SIDE, _SIDE), torch.randint(2000, (_SENTENCES, _TOKENS))
    lengths = torch.full((_SENTENCES,), _TOKENS)
    both = nn.ModuleList([image, text])
    times = []
    for _ in range(_TIMED + 1):  # the first also compiles kernels
        start = time.perf_counter()
        both.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision != FLOAT32):
            loss = image(images).square().mean() + last_hidden_states(text, tokens, lengths).square().mean()
        loss.backward()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[_TIMED // 2]


def main() -> None:
    """Print the estimate."""
    precision = best_precision("cpu")
    in_float32 = step_seconds(FLOAT32)
    seconds = in_float32 if precision == FLOAT32 else step_seconds(precision)
    print(
        f"make demo: about {in_words(STEPS * seconds + OTHER_STAGES * in_float32)} on this machine as busy as it is "
        f"now, without what is finished already ({seconds:.2f} s a training step on {torch.get_num_threads()} threads; "
        "less on a GPU)",
        flush=True,
    )


if __name__ == "__main__":
    main()
