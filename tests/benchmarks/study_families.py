"""Every family of encoders through the whole suite, and the speed of its test.

    PYTHONPATH=. python tests/benchmarks/study_families.py --set data/nih --folder runs/families

Run by hand, never in CI: fifteen minutes of one core. For each family a library saves a small random model. Ours is
built from that folder and compared with the library's own output; then, by the commands: one epoch on 24 images, test,
export, load, ONNX files (which the export compares with torch). In the loaded model a bright square must change its own
region most. For the speed, a model of about the size of a ViT-S tests images of SET (a prepared set with CheX5 labels):
reading, scaling, encoder and zero-shot scores, against the library's forward alone on the same images; one thread,
medians of interleaved rounds. Finished families are not repeated. Prints the table of docs/image_encoders.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import transformers
from results_file import medians

from medclip_dcl import load
from medclip_dcl.command import cli
from medclip_dcl.data.image_text import ImageTextDataModule
from medclip_dcl.evaluation import ZeroShotClassification
from medclip_dcl.networks import (
    BertSentences,
    GlobalCosine,
    ImageTextNetwork,
    TimmRegions,
    TransformersRegions,
)
from medclip_dcl.networks.image_text import pad_tokens
from medclip_dcl.networks.text_encoder import TransformersSentences
from tests.command.small_runs import small
from tests.networks import test_pretrained_regions as of_transformers
from tests.networks import test_text_encoder as of_texts
from tests.networks.test_timm_regions import SMALL, own_map
from tests.program import shell
from tests.small import SENTENCES, write_small_bert, write_small_set
from tests.text_models import FAMILIES, write_text_model

export = shell("export")

TIMM = [
    "vit_tiny_patch16_224",
    "swin_tiny_patch4_window7_224",
    "convnext_atto",
    "resnet18",
    "efficientnet_b0",
]
ANY_SIZE = {"vit": {"dynamic_img_size": True}, "swin": {"strict_img_size": False}}
TOKENS: dict[str, Any] = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}
TOKENS |= {"num_hidden_layers": 6, "patch_size": 16}
STAGES = {"hidden_sizes": [96, 192, 384, 768], "depths": [2, 2, 4, 2]}
WINDOWS = {"embed_dim": 96, "depths": [2, 2, 4, 2], "num_heads": [3, 6, 12, 24], "window_size": 7}
LARGE_TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"embed_dim": 384, "depth": 6, "num_heads": 6},
    "convnext_atto": {"depths": (2, 2, 4, 2), "dims": (96, 192, 384, 768)},
}
STEPS = ("trains", "tests", "exports", "ONNX")
HEAD = ("family", "largest difference", *STEPS, "square found", "speed")
Row = dict[str, Any]


def saved_by_timm(name: str, folder: Path) -> Any:
    """A model as timm initialises it, saved with a classifier; the same, for any image size."""
    torch.manual_seed(0)
    arguments = {"num_classes": 3, **SMALL[name]}
    model = timm.create_model(name, **arguments)
    timm.models.save_for_hf(model, folder, safe_serialization=True)
    again = timm.create_model(name, **arguments, **ANY_SIZE.get(name.split("_")[0], {})).eval()
    again.load_state_dict(model.state_dict())
    return again


@torch.no_grad()
def image_difference(name: str, model: Any, encoder: Any) -> float:
    """Largest difference of the features at two image sizes."""
    found = []
    for rows, columns in ((4, 4), (3, 5)):
        images = torch.rand(2, 3, rows * encoder.stride, columns * encoder.stride)
        if isinstance(encoder, TimmRegions):
            expected = own_map(name, model, images, rows)
        else:
            tokens = of_transformers.patch_tokens(name, model, images, rows * columns)
            expected = tokens.transpose(1, 2).unflatten(2, (rows, columns))
        found.append((encoder.features(images) - expected).abs().max().item())
    return max(found)


@torch.no_grad()
def text_difference(name: str, folder: Path) -> float:
    """Largest difference of the pooled states of texts."""
    encoder = TransformersSentences(str(folder), final_period=False).eval()
    expected = of_texts.by_the_library(name, folder)(of_texts.TEXTS)[encoder.pooling]
    return (encoder.states(*pad_tokens(encoder.tokenize(of_texts.TEXTS))) - expected).abs().max().item()


@torch.no_grad()
def square_found(network: ImageTextNetwork, stride: int) -> str:
    """Share of the regions of a 5 x 7 image in which a bright square changes that region most."""
    images, found = 0.2 * torch.rand(1, 3, 5 * stride, 7 * stride), 0
    for place in range(35):
        row, column = (x * stride for x in divmod(place, 7))
        bright = images.clone()
        bright[..., row : row + stride, column : column + stride] += 0.8
        change = (network.feature_map(bright) - network.feature_map(images)).norm(dim=1)
        found += int(change.argmax()) == place
    return f"{found / 35:.0%}"


def whole_way(work: Path, part: str, kind: type, stride: int = 16) -> Row:
    """One small run by the commands, and its export; a command that fails ends it, with its reason."""
    run, exported, option = work / "run", work / "exported", f"--model.init_args.{part}"
    side = stride * (4 if stride > 12 else 8)
    words = small(
        run, work.parent / "set", work.parent / "bert", objective="infonce", resnet=part == "image_encoder"
    )
    words += [
        option,
        f"medclip_dcl.networks.{kind.__name__}",
        f"{option}.init_args.pretrained",
        str(work / "small"),
    ]
    tokens = "40" if work.name.endswith("siglip") else "38"  # all positions, of RoBERTa and MPNet two fewer
    words += ["--model.init_args.text_encoder.init_args.max_tokens", tokens, "--trainer.max_epochs", "1"]
    words += ["--data.init_args.image_size", str(side), "--data.init_args.crop_size", str(side - stride)]

    def export_and_load() -> None:
        export([str(run), "--output", str(exported)])
        own, again = load(run), load(exported)
        image = np.random.default_rng(1).integers(0, 255, (side, side), dtype=np.uint8)
        assert np.array_equal(own.embed_images(image), again.embed_images(image)), "images differ"
        assert np.array_equal(own.embed_texts(SENTENCES), again.embed_texts(SENTENCES)), "texts differ"

    commands: tuple[Callable[[], Any], ...] = (
        lambda: cli.main(["fit", *words]),
        lambda: cli.main(["test", "--config", str(run / "config.yaml"), "--untrained", "false"]),
        export_and_load,
        lambda: export([str(exported), "--output", str(exported), "--onnx"]),
    )
    row: Row = dict.fromkeys(STEPS, "no")
    for name, command in zip(STEPS, commands, strict=True):
        try:
            with (work / "log.txt").open("a") as log, redirect_stdout(log), redirect_stderr(log):
                command()
        except (Exception, SystemExit) as error:
            print(f"{work.name}: {name}: {type(error).__name__}: {error} (see {work / 'log.txt'})")
            break
        row[name] = "yes"
    return row


def speed(saved: Callable[..., Any], name: str, kind: Any, work: Path, prepared: str, rounds: int) -> float:
    """Time of the library's forward over that of a test of the same images."""
    (work / "large").mkdir(exist_ok=True)
    model, encoder = saved(name, work / "large"), kind(str(work / "large"))
    text = BertSentences(str(work.parent / "bert"))
    network = ImageTextNetwork(encoder, text, GlobalCosine(), image_size=224).eval()
    data = ImageTextDataModule(prepared, image_size=224, batch_size=8, num_workers=0, predict_use="validate")
    zero_shot = ZeroShotClassification()
    zero_shot.prepare(data.evaluation("validate"), "validate")
    loader = data.predict_dataloader()
    shown = [network.normalised(*network.inputs_of(batch)) for batch in islice(loader, 2)]

    def test() -> None:
        for batch in islice(loader, len(shown)):
            zero_shot.measure(network, network.encode(*network.inputs_of(batch)), batch["dicom_id"])

    def bare() -> None:
        for images in shown:
            model(pixel_values=images) if kind is TransformersRegions else model.forward_features(images)

    with torch.inference_mode():
        found = medians({"bare": bare, "test": test}, rounds)
    return found["bare"] / found["test"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", required=True, help="prepared set, of which 16 validate images are tested")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    SMALL["efficientnet_b0"] = {}
    if not (options.folder / "bert").is_dir():
        write_small_set(options.folder / "set")
        write_small_bert(options.folder / "bert")
    file = options.folder / "rows.json"
    rows: dict[str, Row] = json.loads(file.read_text()) if file.is_file() else {}

    def keep(work: Path, found: Row) -> None:
        rows[work.name] = rows.get(work.name, {}) | found
        file.write_text(json.dumps(rows, indent=1))
        print(work.name, found, flush=True)

    images: list[tuple[Callable[..., Any], str, Any]] = [
        *((of_transformers.saved, name, TransformersRegions) for name in of_transformers.ARCHITECTURES),
        *((saved_by_timm, name, TimmRegions) for name in TIMM),
    ]
    works = [options.folder / f"{kind.__name__} {name}" for _, name, kind in images]
    for work, (saved, name, kind) in zip(works, images, strict=True):
        if work.name not in rows:
            (work / "small").mkdir(parents=True, exist_ok=True)
            model, encoder = saved(name, work / "small"), kind(str(work / "small")).eval()
            found = {"largest difference": f"{image_difference(name, model, encoder):.1g}"}
            found |= whole_way(work, "image_encoder", kind, encoder.stride)
            if found["exports"] == "yes":
                found["square found"] = square_found(load(work / "exported").image_text, encoder.stride)
            keep(work, found)
    for name in FAMILIES:
        work = options.folder / f"TransformersSentences {name}"
        if work.name not in rows:
            difference = text_difference(name, write_text_model(name, work / "small"))
            found = whole_way(work, "text_encoder", TransformersSentences)
            keep(work, {"largest difference": f"{difference:.1g}", **found})
    for name, own in of_transformers.ARCHITECTURES.items():
        own |= {"image_size": 224}
        own |= STAGES if "convnext" in name else WINDOWS if "swin" in name else TOKENS
    SMALL.update({name: {} for name in TIMM} | LARGE_TIMM)
    for work, arguments in zip(works, images, strict=True):
        if "speed" not in rows[work.name]:
            keep(work, {"speed": f"{speed(*arguments, work, options.set, options.rounds):.2f}"})
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, timm {timm.__version__}"
    print(f"{platform.machine()}, {versions}", f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}", sep="\n")
    for name, row in rows.items():
        print(f"| {' | '.join([name, *(row.get(x, '') for x in HEAD[1:])])} |")


if __name__ == "__main__":
    main()
