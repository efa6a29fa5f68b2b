"""Findings and their prompts: CheXpert's label columns, CheX5's pairs of prompts, and user-defined prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from medclip_dcl.common.command_line import nearest
from medclip_dcl.common.errors import UserError, quoted

CHEXPERT: tuple[str, ...] = (
    "Atelectasis",
    "Cardiomegaly",
    "Consolidation",
    "Edema",
    "Enlarged Cardiomediastinum",
    "Fracture",
    "Lung Lesion",
    "Lung Opacity",
    "No Finding",
    "Pleural Effusion",
    "Pleural Other",
    "Pneumonia",
    "Pneumothorax",
    "Support Devices",
)
"""Label columns of ``mimic-cxr-2.0.0-chexpert.csv.gz``, in the release's order."""


class Prompts(NamedTuple):
    """A pair of sentences, one of which is true of an image (zero-shot classification)."""

    negative: str
    positive: str


CHEX5: dict[str, Prompts] = {
    "Cardiomegaly": Prompts("Heart size normal", "Cardiomegaly"),
    "Edema": Prompts("No pulmonary edema", "Pulmonary edema"),
    "Pleural Effusion": Prompts("No pleural effusions", "Pleural effusions"),
    "Pneumonia": Prompts("No signs of pneumonia", "Findings suggesting pneumonia"),
    "Pneumothorax": Prompts("No pneumothorax", "Pneumothorax"),
}
"""Prompts of Wang et al., MLHC 2023, table 2, keyed by CheXpert column, in the order of their table 3."""

MIN_PATIENTS = 20
"""Patients, of either class, that the interval of one finding or category needs: of 5 it covers 83% (choice)."""
PLATT_PATIENTS = 20
"""Patients with a positive, and with a negative case, that a fit of two parameters needs: ten for each (choice)."""

Texts: TypeAlias = "str | Sequence[str]"
PromptSource: TypeAlias = "Mapping[str, Sequence[Texts]] | str | Path"
"""Finding -> (negative, positive), each one prompt or several; a YAML file of such pairs; or a packaged one by name."""

Ensemble: TypeAlias = Literal["scores", "embeddings"]
"""Of several prompts a side: the mean of their scores, or the score of the mean of their normalised embeddings."""

PromptEnsembles: TypeAlias = "dict[str, tuple[tuple[str, ...], tuple[str, ...]]]"
"""Finding -> negative and positive prompts."""


def read_prompts(prompts: PromptSource, owner: str = "prompts") -> PromptEnsembles:
    """Prompt ensembles from pairs, from a YAML file of pairs or from a packaged one by its name, such as chexpert14.

    `owner` names the pairs in an error; a file names itself. The use of a packaged one is said on standard error.
    """
    if isinstance(prompts, (str, Path)):
        from medclip_dcl.common.files import parse_yaml, read_text
        from medclip_dcl.common.packaged import find_configuration

        file = find_configuration(prompts, "prompts", owner).say_origin()
        owner = f"{owner}, {prompts}"
        prompts = parse_yaml(read_text(file), owner)
    if not isinstance(prompts, Mapping) or not prompts:
        raise UserError(
            f"{owner}: prompts name no finding: expected finding: [negative, positive], found {quoted(prompts)}"
        )
    if len({*map(str, prompts)}) < len(prompts):
        raise UserError(f"{owner}: two findings have one name, such as 1 and '1'; keep one")
    return {str(finding): _pair(pair, f"{owner}: {finding}") for finding, pair in prompts.items()}


def prompt_texts(prompts: PromptEnsembles) -> dict[str, list[str | list[str]]]:
    """The prompts as in a YAML file: a side of one prompt is that prompt."""
    return {
        finding: [texts[0] if len(texts) == 1 else [*texts] for texts in pair]
        for finding, pair in prompts.items()
    }


def ensemble_used(prompts: PromptEnsembles, ensemble: Ensemble) -> Ensemble | None:
    """None where each side is one prompt, so that both ways are the same."""
    return ensemble if any(len(texts) > 1 for pair in prompts.values() for texts in pair) else None


def _pair(pair: Any, owner: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Negative and positive prompts, each one or several."""
    listed = isinstance(pair, Sequence) and not isinstance(pair, str)
    both = [(texts,) if isinstance(texts, str) else texts for texts in pair] if listed else []
    are_texts = (
        isinstance(texts, Sequence)
        and texts
        and all(isinstance(text, str) and text.strip() for text in texts)
        for texts in both
    )
    if len(both) != 2 or not all(are_texts):
        raise UserError(f"{owner} needs a negative and a positive prompt: found {quoted(pair)}")
    for texts in both:
        if len(set(texts)) < len(texts):
            raise UserError(f"{owner} has a duplicate prompt: {quoted(list(texts))}")
    return tuple(both[0]), tuple(both[1])


def in_order(findings: Iterable[str]) -> list[str]:
    """CheX5's findings first, in their order; then the others in the given order."""
    listed = list(findings)
    return [*(name for name in CHEX5 if name in listed), *(name for name in listed if name not in CHEX5)]


def require_labelled(asked: Iterable[str], labelled: Sequence[str], owner: str) -> None:
    """Refuse a finding that a data set does not label."""
    for finding in asked:
        if finding not in labelled:
            raise UserError(
                f"{owner}: the data set does not label {finding!r}{nearest(finding, labelled)}; it labels "
                f"{', '.join(labelled) or 'no finding at all: prepare it from a source with labels'}"
            )
