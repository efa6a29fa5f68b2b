"""Names of findings, in any source, as one name: the table ``findings.yaml`` of `medclip_dcl.common`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml

from data_prep.sources.source_tables import OWN_FILE, and_others
from medclip_dcl.common.command_line import nearest
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.findings import finding_names


def plain_finding(name: str) -> str:
    """The same for names of a finding that differ in case, blanks, dashes and underscores."""
    return re.sub(r"[\s_/-]+", " ", name).strip().lower()


class Alias(NamedTuple):
    """Common name of a set's finding; `is_choice` if the two names need not mean the same."""

    finding: str
    is_choice: bool


def aliases() -> dict[str, Alias]:
    """Plain name of a finding in any set -> its common name, from ``findings.yaml``."""
    table = finding_names()
    found = {plain_finding(finding): Alias(finding, False) for finding in table}
    for finding, other in table.items():
        for kind in ("same", "choice"):
            found |= {plain_finding(name): Alias(finding, kind == "choice") for name in other.get(kind, ())}
    return found


def same_finding(name: str) -> str:
    """Common name of a finding of this name, if both mean the same; else the name itself."""
    alias = aliases().get(plain_finding(name))
    return name if alias is None or alias.is_choice else alias.finding


def with_parents(names: Iterable[str]) -> dict[str, list[str]]:
    """Name of a finding of PadChest -> itself and all that are above it in the set's tree, from ``findings.yaml``."""
    above: dict[str, list[str]] = {}
    for finding, other in finding_names().items():
        for child in other.get("children", ()):
            above.setdefault(plain_finding(child), []).append(finding)

    def climb(name: str) -> list[str]:
        return [name, *(higher for parent in above.get(plain_finding(name), ()) for higher in climb(parent))]

    return {name: climb(name) for name in names}


def names_of(release: str) -> list[str]:
    """All names of findings of a release, from ``vocabularies.yaml``."""
    table = (files("data_prep.sources") / "vocabularies.yaml").read_text(encoding="utf-8")
    return list(yaml.safe_load(table)[release])


def is_list_of_names(value: Any) -> bool:
    """True for a list of texts."""
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def known_names(findings: pd.Series, known: Sequence[str], where: str) -> pd.Series:
    """The known name of each finding in lists of them, one a row, by the place of its list; others are refused.

    Case and dashes do not matter, and a name that means the same by ``findings.yaml`` is that finding.
    """
    named = findings.reset_index(drop=True).explode().dropna().map(lambda name: " ".join(name.split()))
    plain = {plain_finding(name): name for name in known}
    same = {same_finding(name): name for name in known}
    found = named.map(
        {name: plain.get(plain_finding(name), same.get(same_finding(name))) for name in named.unique()}
    )
    if (unknown := named[found.isna()].value_counts()).empty:
        return found
    first, *others = [
        f"{str(name)[:60]!r} ({count:,} of {len(findings):,} rows)" for name, count in unknown.items()
    ]
    raise UserError(
        f"{where}: expected findings of the release, found {first}{and_others(others)}"
        f"{nearest(str(unknown.index[0]), filter(None, known))}; {OWN_FILE}"
    )


def common_names(names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """A set's names of findings -> common names (its own where the table has none), and the choices among them."""
    known, found, choices = aliases(), {}, []
    for name in dict.fromkeys(names):
        alias = known.get(plain_finding(name), Alias(name, False))
        found[name] = alias.finding
        if alias.is_choice:
            choices.append(f"{name!r} counts as {alias.finding}")
    return found, [f"findings: {'; '.join(choices)} (choices)"] if choices else []


def in_common(names: pd.Series) -> pd.Series:
    """The common name of each."""
    return names.map(common_names(names)[0])


def renamed(labels: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Labels under common names, of several columns of one name the largest value; and the choices among the names."""
    names, choices = common_names(labels.columns)
    labels = labels.rename(columns=names)
    return labels if labels.columns.is_unique else labels.T.groupby(level=0, sort=False).max().T, choices


def listed(
    named: pd.Series, length: int, columns: Sequence[str] = (), others: Collection[str] = ("",)
) -> tuple[pd.DataFrame, list[str]]:
    """As `renamed`, from names by the row that lists them: 1 if listed, else 0; `columns` first; without `others`."""
    named = named[~named.isin(list(others))]
    names, choices = common_names([*columns, *sorted(set(named))])
    columns = [*dict.fromkeys(names.values())]
    labels = np.zeros((length, len(columns)))
    labels[named.index, named.map(names).map(columns.index).astype("int64")] = 1
    return pd.DataFrame(labels, columns=columns), choices
