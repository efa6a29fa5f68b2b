"""Options of a phantom."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from data_prep.phantom.people import SEXES
from data_prep.phantom.rates import RARE_FINDINGS
from medclip_dcl.common.command_line import number, option, whole_number, worker_count

# Three splits by patient need some; the identifiers have room for so many.
MIN_STUDIES, MAX_STUDIES = 20, 2_000_000


@dataclass(frozen=True)
class Options:
    """Options that determine the contents of a phantom.

    Images of test patients of `degraded_sex` (F or M) are dim and grainy: a gap between groups that an evaluation must
    find. `false_negatives` and `rare_findings` are explained in `dial`.
    """

    studies: int = option(
        "number of studies (about 1.2 images each)", type=whole_number(MIN_STUDIES, MAX_STUDIES), metavar="N"
    )
    seed: int = option("another seed gives other studies", type=whole_number(0), metavar="N")
    size: int = option(
        "longer side of the images in pixels, give or take 6%% (512)",
        512,
        type=whole_number(64, 4096),
        metavar="N",
    )
    degraded_sex: str | None = option(
        "degrade the test images of this sex: a gap that tables by group must find (none)",
        None,
        choices=SEXES,
    )
    false_negatives: float | None = option(
        "mean share of training images of which a training report's sentence is true (rho), by fewer or more normal "
        "sentences and rarer findings: about 0.03 to 0.7 (no change, which gives 0.43)",
        None,
        metavar="SHARE",
    )
    rare_findings: float | None = option(
        f"make each of {', '.join(RARE_FINDINGS)} so rare outside the test studies: at most 0.01 of the studies (no "
        "change)",
        None,
        type=number(0.01),
        metavar="SHARE",
    )

    singletons: float | None = option(
        "share of the training reports' sentences, each once a report, that stand in no other training report, by "
        "asides with day and time that change no class (no change: 0.01 with 2,600 studies)",
        None,
        type=number(0.95),
        metavar="SHARE",
    )

    def named(self) -> dict[str, object]:
        """Options that are asked for, by name."""
        # Of `Options` alone: a subclass has options that change nothing in the files.
        values = {field.name: getattr(self, field.name) for field in fields(Options)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Phantom(Options):
    """Write a digital phantom: stylised chest radiographs with reports, labels, boxes and the truth about them.

    RAW gets the raw layout of MIMIC-CXR-JPG 2.0.0 and MS-CXR v1.0.0. No patients are in it. The same options give the
    same files; a finished folder is left alone, an unfinished one is completed.
    """

    output: Path = option("folder to write", metavar="RAW")
    workers: int = worker_count()
