"""Whether the tables by group find a gap that is there, and none where there is none, on phantoms.

    python tests/benchmarks/study_subgroups.py --run runs/demo --folder runs/subgroups [--seeds 20]

Run by hand, never in CI: about ten minutes of one core. By the README's commands, for each seed: a phantom whose test
images of women are degraded (`--degraded_sex F`), and the same without; prepared, and tested by the checkpoint of the
run, which has seen neither. Of the other splits only a few studies are drawn, since a test uses none. A gap counts as
found where the table of the run marks one by sex, and as a false finding where it marks any without the degradation;
both by p adjusted for all gaps. Finished tests are not repeated. Prints the counts and replaces the section of this
file in RESULTS.md.
"""

from __future__ import annotations

import argparse
import platform
import shutil
from pathlib import Path
from unittest.mock import patch

import pandas as pd
import torch
from results_file import command, write_section

from data_prep.phantom import release
from data_prep.phantom.people import PATIENTS_FILE
from data_prep.phantom.studies import PlannedStudy, plan_studies
from medclip_dcl.command import cli
from medclip_dcl.report.contrasts import ALPHA
from medclip_dcl.report.subgroups import subgroup_table
from tests.program import verb

TITLE = "Gaps between groups that are found"


def tested_studies(studies: int, seed: int) -> list[PlannedStudy]:
    """The test studies of a phantom, with a few others, without which it cannot be written."""
    planned = plan_studies(studies, seed)
    others = [study for study in planned if study.split != "test"]
    return sorted([*others[:20], *(x for x in planned if x.split == "test")], key=lambda study: study.index)


def tested(run: Path, folder: Path, seed: int, studies: int, is_planted: bool) -> Path:
    """The run folder of a test on a phantom of its own."""
    output = folder / f"{'planted' if is_planted else 'none'}_{seed}"
    if (output / "results.json").is_file():
        return output
    raw, prepared = output / "raw", output / "set"
    planted = ["--degraded_sex", "F"] if is_planted else []
    with patch.object(release, "plan_studies", tested_studies):
        verb("phantom")(
            ["--output", str(raw), "--studies", str(studies), "--seed", str(seed), "--workers", "1", *planted]
        )
    verb("prepare mimic-cxr")(
        [
            *("--source", str(raw), "--output", str(prepared), "--workers", "1"),
            *("--ms_cxr", str(raw / "MS_CXR_Local_Alignment_v1.0.0.json")),
            *("--patients", str(raw / PATIENTS_FILE)),
        ]
    )
    cli.main(
        [
            *("test", "--config", str(run / "config.yaml"), "--run_folder", str(output)),
            *("--ckpt_path", str(run / "checkpoints/best.ckpt"), "--data.init_args.folder", str(prepared)),
            *("--data.init_args.num_workers", "0", "--trainer.enable_progress_bar", "false"),
        ]
    )
    shutil.rmtree(raw)
    shutil.rmtree(prepared)
    return output


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, required=True, help="trained run, e.g. of make demo")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--studies", type=int, default=500, help="of a phantom; 22%% are tested")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    n_found, n_false, gaps = 0, 0, []
    # Not 0, the seed of the demo's phantom.
    for seed in range(1, arguments.seeds + 1):
        for is_planted in (True, False):
            run = tested(arguments.run, arguments.folder, seed, arguments.studies, is_planted)
            table = subgroup_table(run)
            marked = table[table["p"] <= ALPHA]
            if is_planted:
                n_found += bool((marked["attribute"] == "sex").any())
                gaps.append(
                    table[(table["attribute"] == "sex") & (table["group"] == "F")].set_index("metric")["gap"]
                )
            else:
                n_false += bool(len(marked))
            print(f"seed {seed}, {'planted' if is_planted else 'none'}: {len(marked)} marked", flush=True)
    mean = pd.concat(gaps, axis=1).mean(axis=1)
    names = {"grounding/cnr_signed": "signed CNR", "retrieval/recall": "Recall"}
    planted = ", ".join(f"{name} {mean[path]:+.2f}" for path, name in names.items())
    lines = [
        f"Phantoms of {arguments.studies} studies, of which 22% are tested, seeds 1 to {arguments.seeds}; checkpoint of"
        f" `make demo`; CPU, 1 thread, {platform.machine()}; torch {torch.__version__}. `{command()}`",
        "",
        "| phantom | runs with a marked gap |",
        "|---|---|",
        f"| women's test images degraded (mean gap: {planted}) | {n_found} of {arguments.seeds}, by sex |",
        f"| none | {n_false} of {arguments.seeds}, by view, sex or age |",
    ]
    write_section(TITLE, lines)


if __name__ == "__main__":
    main()
