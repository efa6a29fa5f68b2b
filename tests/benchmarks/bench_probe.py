"""Probes of a set's findings on features that are computed once, against one pass of features a finding.

    python tests/benchmarks/bench_probe.py --set data/nih --model runs/demo

The fits are the same in both, so that the ratio is (findings * pass + fits) / (pass + fits); pass and fits are timed in
interleaved rounds, one C each, in the process alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from results_file import command, medians, write_section

from medclip_dcl.data.labelled import LabelPolicy
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.encoding.encode import batches_of
from medclip_dcl.metrics.linear_probe import finding_aucs, logistic_probes, standardisation
from medclip_dcl.networks.classifier import FindingNetwork
from medclip_dcl.pictures.geometry import View
from medclip_dcl.use.model import load

STRENGTHS = 5


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--images", type=int, default=300, help="train images that are drawn for the fits")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    prepared, source = PreparedSet(options.set), load(options.model).network
    targets = LabelPolicy("ignore", "zeros").of_studies(prepared.rows("labels"))[prepared.findings]
    images = prepared.rows("images", use=["train"]).merge(targets, on="study_id")
    images = images.sample(options.images, random_state=0)
    labels = images[prepared.findings].to_numpy()
    labels = labels[:, np.isfinite(finding_aucs(labels, labels, 5))]
    n = labels.shape[1]
    network = FindingNetwork(source.image_encoder, prepared.findings, **source.image_config()).eval()
    size = network.image_size

    def features() -> np.ndarray:
        batches = batches_of(prepared.stored_images(images["path"].tolist()), View(size, size), 16, 0)
        return torch.cat([network.features(*network.inputs_of(batch)) for batch in batches]).numpy()

    mean, deviation = standardisation(torch.from_numpy(found := features()))
    scaled = ((torch.from_numpy(found) - mean) / deviation).double().numpy()
    seconds = medians(
        {"pass": features, "fits": lambda: logistic_probes(scaled, labels, 0.01)}, options.rounds
    )
    once, fits = seconds["pass"], STRENGTHS * seconds["fits"]
    lines = [
        f"CPU, {torch.get_num_threads()} threads, on a shared machine; {len(images)} train images of "
        f"{prepared.info['source']}, "
        f"{size} px, {found.shape[1]} features, {n} findings, {STRENGTHS} values of C; medians of {options.rounds} "
        f"interleaved rounds. `{command()}`",
        "",
        "| | s | x one pass a finding |",
        "|---|---|---|",
        f"| features once, fits | {once:.2f} + {fits:.2f} | {(n * once + fits) / (once + fits):.1f} |",
        f"| features for each finding, fits | {n * once:.2f} + {fits:.2f} | 1.0 |",
    ]
    write_section("Probes of a benchmark", lines)


if __name__ == "__main__":
    main()
