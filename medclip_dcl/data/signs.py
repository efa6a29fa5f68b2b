"""What a sentence says of findings: present, absent, or neither; by their names and a few rules of English reports."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int8

from medclip_dcl.common.finding_names import table

# Rules go on behind these as in a new sentence.
_BREAK = re.compile(r"[.;:?!]|\b(?:but|however|although|though|while|whereas|except)\b")
# "has not changed", "without significant interval change": said of a finding, and no negation.
_UNCHANGED = re.compile(
    r"\b(?:no|not|without)(?: (?:any|much|definite|acute|interval|\w+ant(?:ly)?))* chang\w+"
)
_NEGATION = re.compile(
    r"\b(?:no|without|neither|nor|denies|(?:negative|free|clear|absence|lack) (?:of|for)|not(?! exclu| rule))\b"
)
# Until the next comma behind a finding; doubt also anywhere in front of it.
_DENIED = re.compile(
    r"\b(?:absent|resolved|(?:not|no longer) (?:seen|vis[iu]|present|identif|evident|appa|appre|demonst|noted|found))"
)
_DOUBT = re.compile(
    r"\b(?:may|might|could|can ?not|can't|possib\w+|probab\w+|(?:un)?likely|question\w*|suspect\w*|suspicio\w*|if"
    r"|suggest\w*|concern\w*|versus|vs|equivocal|consider\w*|exclu\w+|rule[sd]? out|r/o|evaluat\w+|history|resol\w+"
    r"|favou?r\w*|differential|correlat\w+|no (?:new|increas\w+|worsening|further|additional|other))\b"
)
_OR, _JOINED = re.compile(r"\bn?or\b"), re.compile(r"\b(?:and|with)\b")


def signs(texts: Sequence[str], findings: Sequence[str]) -> Int8[np.ndarray, "text finding"]:
    """1: the text says that the finding is present, -1: absent; 0: neither, with doubt, or both.

    Findings are read by their names in ``findings.yaml``, and "No Finding" not at all. A negation goes on to the end of
    the sentence, over a comma only where "or" follows; behind "and" or "with" a finding then has no sign (choices).
    """
    names, found = _names(findings), np.zeros((len(texts), len(findings)), dtype=np.int8)
    for row, text in enumerate(texts):
        parts = _BREAK.split(" ".join(text.lower().split()))
        matches = [match for part in parts for match in names.finditer(_UNCHANGED.sub("", part))]
        said = {
            (int(str(x.lastgroup)[1:]), _sign(x.string[: x.start()], x.string[x.end() :])) for x in matches
        }
        for column, sign in said:
            found[row, column] = 0 if (column, -sign) in said or (column, 0) in said else sign
    return found


def _sign(before: str, behind: str) -> int:
    """Sign of a name between these parts of its sentence."""
    clause, negations = behind.partition(",")[0], list(_NEGATION.finditer(before))
    if _DOUBT.search(clause) or (not negations and _DOUBT.search(before)):
        return 0
    if not negations:
        return -1 if _DENIED.search(clause) else 1
    scope = before[negations[-1].start() :]
    is_other = _JOINED.search(_OR.split(scope)[-1]) or ("," in scope and not _OR.search(scope + behind))
    return 0 if is_other or _DOUBT.match(scope) else -1


def _names(findings: Sequence[str]) -> re.Pattern[str]:
    """Finds names of findings; the group f0, f1, ... says of which."""
    groups = []
    for column, finding in enumerate(findings):
        other = table().get(finding, {})
        names = [finding, *(name for kind in ("same", "choice", "words") for name in other.get(kind, ()))]
        forms = [re.sub("[xy]$", "(?:x|ces|y|ies)", re.escape(name.lower())) for name in names]
        groups += [f"(?P<f{column}>(?:{'|'.join(forms)})(?:e?s)?)"] if finding != "No Finding" else []
    return re.compile(rf"(?<!pericardial )(?<!soft tissue )\b(?:{'|'.join(groups) or '(?!)'})\b")
