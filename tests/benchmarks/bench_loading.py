"""Images a core-second of a loader process, and decoders of prepared images.

    python tests/benchmarks/bench_loading.py [--images 2074] [--rounds 5] [--batch 64]

Run by hand, never in CI. The real chest X-rays of MEDCLIP_DCL_REAL_DATA, fitted to 512 x 512 and saved as preparation
saves them (JPEG of quality 95). Rounds of all methods are interleaved, and medians of CPU seconds are compared. Prints
the tables and replaces the section of this file in RESULTS.md.

- grey: what the datamodules do. Workers send uint8 crops with brightness, contrast and mean of each.
- floats: workers send three equal float32 channels, augmented.
- decoders: simplejpeg is measured where it is installed; the project does not need it.
"""

from __future__ import annotations

import argparse
import io
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
import torchvision
from PIL import Image
from results_file import REAL, command, cpu, write_section
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.io import ImageReadMode, decode_jpeg

from data_prep.sources.prepared_images import QUALITY
from medclip_dcl.pictures.transforms import GreyCrop, augment, batch_of, load_grey, to_input

TITLE = "Images a core-second of a loader"
SIZE, CROP, VARIATION = 512, 480, 0.2


def prepared(count: int) -> list[bytes]:
    """Real chest X-rays as preparation writes them; spread over all of them."""
    files = [
        file for name in ("real_cxr/files", "nih/images") for file in sorted((REAL / name).rglob("*.jpg"))
    ]
    if not files:
        sys.exit(f"no real chest X-rays under {REAL} (set MEDCLIP_DCL_REAL_DATA)")
    encoded = []
    for place in np.linspace(0, len(files) - 1, min(count, len(files))).round().astype(int):
        with Image.open(files[place]) as image:
            fitted = image.convert("L").resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        stream = io.BytesIO()
        fitted.save(stream, format="JPEG", quality=QUALITY)
        encoded.append(stream.getvalue())
    return encoded


def grey(encoded: bytes, generator: np.random.Generator) -> GreyCrop:
    return augment(load_grey(encoded, SIZE), CROP, VARIATION, VARIATION, generator)


def floats(encoded: bytes, generator: np.random.Generator) -> Tensor:
    """The same, in three float32 channels."""
    image = load_grey(encoded, SIZE)
    top, left = (int(generator.integers(SIZE - CROP + 1)) for _ in range(2))
    crop = image[top : top + CROP, left : left + CROP].astype(np.float32) / 255
    crop = crop * np.float32(generator.uniform(1 - VARIATION, 1 + VARIATION))
    factor = np.float32(generator.uniform(1 - VARIATION, 1 + VARIATION))
    crop = np.clip(factor * crop + (1 - factor) * crop.mean(), 0, 1)
    return torch.from_numpy(crop).expand(3, -1, -1)


def stacked(images: Sequence[Tensor]) -> dict[str, Tensor]:
    return {"images": torch.stack(list(images))}


class Examples:
    """Augmented images by position."""

    def __init__(self, encoded: list[bytes], load: Callable[[bytes, np.random.Generator], Any]) -> None:
        self.encoded, self.load = encoded, load

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, index: int) -> Any:
        return self.load(self.encoded[index], np.random.default_rng([0, 0, index]))


METHODS: dict[str, tuple[Callable[..., Any], Callable[..., dict[str, Tensor]]]] = {
    "floats": (floats, stacked),
    "grey": (grey, batch_of),
}


def cpu_seconds(process: int) -> float:
    """CPU seconds of all threads of a process."""
    threads = Path(f"/proc/{process}/task").glob("*/schedstat")
    return sum(int(file.read_text(encoding="utf-8").split()[0]) for file in threads) / 1e9


def loaders(encoded: list[bytes], batch: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Images a CPU second of one worker process, of each round after the first, and MB of a batch."""
    rates: dict[str, list[float]] = {name: [] for name in METHODS}
    sizes: dict[str, float] = {}
    process: dict[str, Any] = {}
    each: dict[str, Any] = {}
    for name, (load, collate) in METHODS.items():
        examples: Any = Examples(encoded, load)
        each[name] = DataLoader(examples, batch, num_workers=1, collate_fn=collate, persistent_workers=True)
    for number in range(rounds + 1):
        for name, loader in each.items():
            workers = {child.pid for child in active_children()}
            batches = iter(loader)
            if not number:
                (process[name],) = {child.pid for child in active_children()} - workers
            before = cpu_seconds(process[name])
            for found in batches:
                if len(found["images"]) == batch:
                    sizes[name] = sum(values.nbytes for values in found.values()) / 1e6
            if number:
                rates[name].append(len(encoded) / (cpu_seconds(process[name]) - before))
    return rates, sizes


def of_tensor(encoded: bytes) -> np.ndarray:
    """By torchvision."""
    with warnings.catch_warnings():
        return decode_jpeg(torch.frombuffer(bytearray(encoded), dtype=torch.uint8), ImageReadMode.GRAY)[
            0
        ].numpy()


def decoders() -> dict[str, Callable[[bytes], np.ndarray]]:
    found: dict[str, Callable[[bytes], np.ndarray]] = {
        f"Pillow {PIL.__version__} (load_grey)": lambda encoded: load_grey(encoded, SIZE),
        f"torchvision {torchvision.__version__}": of_tensor,
    }
    try:
        import simplejpeg  # type: ignore[import-not-found]
    except ImportError:
        return found
    name = f"simplejpeg {simplejpeg.__version__}"
    return {**found, name: lambda encoded: simplejpeg.decode_jpeg(encoded, "GRAY")[:, :, 0]}


def decoding(encoded: list[bytes], rounds: int) -> dict[str, tuple[float, int]]:
    """Median images a CPU second of each decoder, and how many images it decodes as `load_grey` does."""
    seconds: dict[str, list[float]] = {name: [] for name in decoders()}
    for _ in range(rounds):
        for name, decode in decoders().items():
            start = time.process_time()
            for each in encoded:
                decode(each)
            seconds[name].append(time.process_time() - start)
    return {
        name: (
            len(encoded) / statistics.median(seconds[name]),
            sum(np.array_equal(decode(each), load_grey(each, SIZE)) for each in encoded),
        )
        for name, decode in decoders().items()
    }


def equal(encoded: list[bytes]) -> int:
    """Number of images of which both methods show the encoder the same bits."""
    pairs = zip(Examples(encoded, grey), Examples(encoded, floats), strict=True)  # type: ignore[call-overload]
    return sum(torch.equal(to_input(**batched(crop))[0], image) for crop, image in pairs)


def batched(crop: GreyCrop) -> dict[str, Tensor]:
    return batch_of([crop])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=2074)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    encoded = prepared(options.images)
    rates, sizes = loaders(encoded, options.batch, options.rounds)
    lines = [
        f"One loader process with 1 thread, {cpu()[0]}, {platform.system()}; torch {torch.__version__}, numpy "
        f"{np.__version__}. {len(encoded):,} real chest X-rays as JPEG of {SIZE} px (mean "
        f"{statistics.mean(map(len, encoded)) / 1e3:.0f} kB), crops of {CROP} px, batches of {options.batch}; medians "
        f"(and range) of {options.rounds} interleaved rounds, in CPU seconds of the worker. `{command()}`",
        "",
        "| workers send | images a core-second | MB a batch |",
        "|---|---|---|",
        *(
            f"| {name} | {statistics.median(each):,.0f} ({min(each):,.0f} to {max(each):,.0f}) | {sizes[name]:.1f} |"
            for name, each in rates.items()
        ),
        "",
        f"Of {equal(encoded):,} of {len(encoded):,} images the encoder sees the same bits either way.",
        "",
        "| decoder | images a core-second | same pixels |",
        "|---|---|---|",
        *(
            f"| {name} | {rate:,.0f} | {same:,} of {len(encoded):,} |"
            for name, (rate, same) in decoding(encoded, options.rounds).items()
        ),
    ]
    write_section(TITLE, lines)


if __name__ == "__main__":
    main()
