"""False negatives among the reports of Open-i, and log p against the share of reports of which a sentence is true.

    python tests/benchmarks/study_open_i.py SET

Run by hand, never in CI. SET is made by `prepare openi --labels negbio_gold_14_labels.csv --text_only` and scored. Key
words say which labelled findings a sentence states or denies; they go to SET/sentences_of_findings.csv, which has
report texts. `medclip-dcl eta SET --sentences` does all else; its numbers are copied to
docs/results/open_i_false_negatives.csv, its figure to docs/figures.
"""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

import pandas as pd

from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.encoding.eta_report import false_negatives, scored_sentences, with_labels, write_report
from medclip_dcl.encoding.options import Eta

DOCS = Path(__file__).resolve().parents[2] / "docs"
WORDS = {
    "Atelectasis": r"atelecta\w*",
    "Cardiomegaly": r"cardiomegaly|heart(?! failure)|cardiac|cardiomediastin\w*",
    "Consolidation": r"consolidat\w*|airspace|infiltrat\w*",
    "Edema": r"o?edema|(?:vascular|venous) congestion|heart failure",
    "Pleural Effusion": r"(?<!pericardial )effusions?|pleural fluid",
    "Pneumonia": r"pneumonia|infecti\w*",
    "Pneumothorax": r"pneumothora\w*",
}
# Sentences that deny several findings without their names.
DENIED = {
    r"\blungs?\b.*\bclear\b|\bclear\b.*\blungs?\b": ["Consolidation", "Edema", "Pneumonia"],
    r"\bno\b.*\b(?:acute|active)\b.*\b(?:disease|process\w*|abnormalit\w*|findings?|cardiopulmonary|pulmonary)\b": [
        "Consolidation",
        "Edema",
        "Pleural Effusion",
        "Pneumonia",
        "Pneumothorax",
    ],
    r"\bnormal\b.*\b(?:chest|radiograph|exam\w*|x-?ray)\b|\bnegative\b.*\bchest\b": [*WORDS],
}
UNCHANGED = r"\b(?:no|not|without)(?: \w+)? changed?\b"
ABSENT = r"\b(?:no|not|without|free of|negative for|absence of|clear of|normal|unremarkable|resolved|nor)\b"


def rows_of(text: str) -> list[tuple[str, str, str]]:
    """Rows of --sentences (sentence, finding, sign): good enough for a share of many sentences, not for a diagnosis."""
    named = [finding for finding, words in WORDS.items() if re.search(rf"\b(?:{words})\b", text, re.I)]
    if named:
        is_absent = re.search(ABSENT, re.sub(UNCHANGED, "", text, flags=re.I), re.I)
        return [(text, finding, "-" if is_absent else "+") for finding in named]
    denied = [finding for words, some in DENIED.items() if re.search(words, text, re.I) for finding in some]
    return [(text, finding, "-") for finding in dict.fromkeys(denied)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, metavar="SET")
    data = parser.parse_args().data
    prepared, file = PreparedSet(data), data / "sentences_of_findings.csv"
    rows = [row for text in prepared.table("sentences")["text"] for row in rows_of(text)]
    pd.DataFrame(rows, columns=["sentence", "finding", "sign"]).to_csv(file, index=False)
    write_report(Eta(data=data, sentences=file))
    shutil.copyfile(data / "eta/eta.png", DOCS / "figures/open_i_false_negatives.png")
    name = prepared.file_of_model("log_p", None).stem
    sentences = with_labels(prepared, scored_sentences(prepared, name, 0.2, 0.35)[0], file)
    table = false_negatives(sentences).rename(columns="batch_{}".format, index=str)
    table = table.rename(columns={"batch_anchors": "anchors"})
    table.to_csv(DOCS / "results/open_i_false_negatives.csv", index_label="counted", float_format="%.4f")


if __name__ == "__main__":
    main()
