"""Sentence boundaries of report text."""

from __future__ import annotations

import csv
import itertools
import json
import re
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import pysbd
import pytest
from pysbd.lang.english import English

from data_prep.text import boundaries
from data_prep.text import sentences as sentences_module
from data_prep.text.boundaries import _NUMBERED_REFERENCE
from data_prep.text.sections import Section, own_sections, study_sections
from data_prep.text.sentences import has_letter, passages, split_sentences
from tests.data_prep.text.boundary_score import Spans, boundary_f1, locate


def sentences(text: str) -> list[str]:
    return [sentence for passage in passages(text) for sentence in split_sentences(passage)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Lines are wrapped anywhere, and blank lines end a sentence without a full stop.
        ("The lungs are\n clear.  Heart size is\n normal.\n", "The lungs are clear.|Heart size is normal."),
        ("No acute process\n \n Heart is normal", "No acute process|Heart is normal"),
        ("Lungs clear.\r\n No effusion.\r\n", "Lungs clear.|No effusion."),
        # Numbered impressions: with and without full stops, brackets, blanks, line breaks.
        ("1. No acute process. 2. Stable nodule.", "No acute process.|Stable nodule."),
        ("1. Low lung volumes 2. No edema", "Low lung volumes|No edema"),
        ("1.No edema 2.Stable", "No edema|Stable"),
        ("1) No edema.\n 2) Stable nodule\n in the apex.", "No edema.|Stable nodule in the apex."),
        ("As follows: 1. No edema. 2. no effusion.", "As follows:|No edema.|no effusion."),
        ("Fracture of rib 2. Stable.", "Fracture of rib 2.|Stable."),
        ("1. Fracture of rib 2. Stable.", "Fracture of rib 2.|Stable."),
        # List dashes, but not ranges and compound words.
        ("- No effusion.\n - Heart is\n large.\n -Clear lungs", "No effusion.|Heart is large.|Clear lungs"),
        ("Moderate right\n -sided effusion of 3\n - 5 cm.", "Moderate right -sided effusion of 3 - 5 cm."),
        # A blank is missing after the full stop.
        (
            "Lungs clear.No effusion.Heart (enlarged).No edema.",
            "Lungs clear.|No effusion.|Heart (enlarged).|No edema.",
        ),
        ("Seen on CT.No change at T5.Stable.", "Seen on CT.|No change at T5.|Stable."),
        # What looks like an end of sentence and is none.
        ("Seen by Dr. Smith and Dr.Jones vs. prior.", "Seen by Dr. Smith and Dr.Jones vs. prior."),
        ("Nodule of 1.5 cm at 3:45 p.m. on ___.", "Nodule of 1.5 cm at 3:45 p.m. on ___."),
        (
            "Compared to ___, no change. ___ tube is unchanged.",
            "Compared to ___, no change.|___ tube is unchanged.",
        ),
        # Abbreviations of PySBD that end sentences in radiology.
        ("No mass. No nodule of 5 mm. No change on PA.", "No mass.|No nodule of 5 mm.|No change on PA."),
        # Rules and line-break tags.
        (
            "Clear lungs.\n ______________________________\n No edema<BR>Normal",
            "Clear lungs.|No edema|Normal",
        ),
        # Case, digits and marks stay.
        ("NO ACUTE Process?  Likely 2/2 CHF!", "NO ACUTE Process?|Likely 2/2 CHF!"),
        ("", ""),
        (" \n \n", ""),
    ],
)
def test_sentences_of_report_text(text: str, expected: str) -> None:
    assert "|".join(sentences(text)) == expected


# Sentences that follow upon one another in a passage; "|" marks where one ends.
IN_PLACE = """
Compression of T12. | L1 is intact. | T11 and 12. | Mild scoliosis.
Known hepatitis C. | No cirrhosis. | Patient with hepatitis B. | no change.
Type B dissection. | Stage III. | Heart is normal. | Grade 2. | NYHA class II. | no edema.
Seen on 3.4.12. | No change. | Film of 11/12/2010. | The heart is large.
At 3 a.m. today. | At 5 p.m. | the tube was moved. | At 4:05 PM. | Tube in place.
Dr. John R. Smith was paged. | He agrees. | Seen by Dr. Smith. | He left.
Seen by Jane Doe, M.D. | No change. | Jane Doe, MD. | Clear.
Stable since Jan. 5. | Seen Feb. 2011. | Unchanged since Dec. | Heart is large.
Given b.i.d. with food. | Given t.i.d. | Edema improved. | Take p.r.n. for pain. | Now n.p.o. | The stomach is empty.
E. coli pneumonia. | S. aureus sepsis. | 7 F. catheter. | Temp. 37 C. | Heart is normal.
See Fig. 3 and fig. 4. | Compare with No. 5. | See p. 3 of the report.
Approx. 3 cm mass. | Pt. is rotated. | Exam neg. for edema. | CXR neg. | Hx of CA. | Stable.
Left lung: clear. | R. lung: opacity. | Effusion on the L. | No effusion on the R. | The heart is large.
The mass is 3 x 2 x 1. 5 cm. | It was 4. cm before. | Stable nodule of .5 cm. | Fracture of rib 5. | Stable.
The ETT is 3 cm. above the carina. | Retract 1 cm. | NG tube in the stomach. | The 5 mm. nodule is stable.
There is a nodule (2.5 cm. in size) at the apex. | Clear.
Heart is normal. | (Unchanged.) | Lungs are clear. | (See above) | No effusion.
The patient said "I cough. A lot." and left. | He said "no." | Clear.
Pneumonia? | No. | Early edema? or infiltrate. | Is there edema? | no. | Nodule ?granuloma. is seen. | None.
THE HEART IS NORMAL. | DR. SMITH WAS CALLED. | R. BASE CLEAR.
HEART: NORMAL | LUNGS: CLEAR
Lat. view is limited. | Atelectasis bilat. and effusion. | Old rib fx. | No new fx. | Opacity in the rt. Upper lobe.
5 yrs. ago. | Stable for 5 yrs. | The nodule is benign. | Increased by 20%. | 50 % loss. | Clear.
There is an. effusion. | The heart is. large.
Heart is normal. and the lungs are clear. | Heart is normal, No effusion. | Clear; No mass.
There is mild cardiomegaly | No effusion | The bones are intact | Heart size is normal | Lungs are clear.
Tube overlying The stomach. | The Left lung is clear.
Lungs are clear XXXX | Heart is normal. | Unchanged since ___ | The heart is large.
Seen by Dr. XXXX. | XXXX was told. | By Dr. ___ at ___. | ___ is stable.
Lungs are clear | RECOMMENDATION: CT | Soft tissues: Normal
The right Lung is clear and the left Lung is opaque. | The enlarged Heart is stable.
Left Lung is clear | Right Lung is opaque. | The visualized Bones: intact. | No acute Bones: normal.
Comparison with prior Chest: no change. | AP Chest: clear. | Further Recommendations: CT.
LEFT LUNG: CLEAR | RIGHT LUNG: OPAQUE | BONES AND SOFT TISSUES: NORMAL
Opacity overlying Heart is stable. | Over the anterior Ribs is a known Lung nodule.
Status post Heart transplant is stable. | No opacity | Great Vessels are normal.
Film of XXXX, XXXX PM. | Clear ___ | Heart: large. | On the ___ Chest tube is seen.
"""


@pytest.mark.parametrize("marked", IN_PLACE.strip().splitlines())
def test_places_where_sentences_end_and_do_not(marked: str) -> None:
    expected = marked.split(" | ")
    assert sentences(" ".join(expected)) == expected


HEADS = """
LUNGS AND PLEURA|HEART AND MEDIASTINUM|BONES AND SOFT TISSUES|LINES AND TUBES|RIGHT LUNG|UPPER ABDOMEN|LUNGS/PLEURA
Lungs and Pleura|Heart and Mediastinum|Bones and Soft Tissues|Bones & Soft Tissues|Soft tissues of the neck|Right Heart
Right Lung|Left Lung|Right lung|Left Costophrenic Angle|Thoracic Spine|Central Lines|Heart/Mediastinum
Heart, Mediastinum|Lines, Tubes|Lungs, Pleura, and Airways|Musculoskeletal and Chest Wall|Portable Chest
Support Devices|Heart|LUNGS|Heart and Great Vessels
"""


@pytest.mark.parametrize("head", HEADS.replace("\n", "|").strip("|").split("|"))
def test_heads_of_several_words_stay_whole(head: str) -> None:
    expected = [
        "Clear.",
        f"{head}: Clear.",
        f"{head}: An opacity",
        f"{head}: none",
        "Bones: INTACT",
        f"{head}: None.",
    ]
    assert sentences(" ".join(expected)) == expected
    expected = ["There is no opacity", f"{head} is normal.", f"No mass in the {head}."]
    assert sentences(" ".join(expected)) == expected or head.isupper()
    # Wrapped at every blank, in a text of long and of short lines.
    for at in (match.start() for match in re.finditer(" ", head)):
        wrapped = f"{head[:at]}\n{head[at + 1 :]}: Clear."
        for before in (
            "No focal opacity.",
            "There is no evidence of a focal opacity in any of the lung fields.",
        ):
            assert sentences(f"{before} {wrapped}") == [before, f"{head}: Clear."]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Blanks are forgotten, doubled or stand before the full stop.
        ("Heart is normal.no effusion.Clear.2 clips.", "Heart is normal.|no effusion.|Clear.|2 clips."),
        ("At ___.___ is new.XXXX seen.", "At ___.|___ is new.|XXXX seen."),
        ("No mass .Clear . Stable.", "No mass .|Clear .|Stable."),
        # Left-over marks are no part of a sentence: the same sentence should not come in two spellings.
        (".Heart is large.. No mass. . Clear.;", "Heart is large.|No mass.|Clear."),
        ("Clear lungs... Compare with old films.", "Clear lungs...|Compare with old films."),
        # Lists.
        ("1. Heart normal. 2. Clear. 4. No mass. 4. Old.", "Heart normal.|Clear.|No mass.|Old."),
        ("A. Heart normal. B. Lungs clear.", "Heart normal.|Lungs clear."),
        ("(a) heart normal (b) lungs clear", "heart normal|lungs clear"),
        ("i. Heart normal. ii. Lungs clear.", "Heart normal.|Lungs clear."),
        ("#1 Heart normal #2 Lungs clear", "Heart normal|Lungs clear"),
        ("1- Heart normal. 2- Lungs clear.", "Heart normal.|Lungs clear."),
        ("1 Heart normal\n2 Lungs clear", "Heart normal|Lungs clear"),
        ("1. Lungs: a. clear b. no mass 2. Heart: normal", "Lungs:|clear|no mass|Heart: normal"),
        ("1. 2.5 cm nodule. 2. 3 cm mass.", "2.5 cm nodule.|3 cm mass."),
        ("1. Fracture of ribs 4 and 2. Stable. 2. Clear.", "Fracture of ribs 4 and 2.|Stable.|Clear."),
        ("Hand 1. Fracture. Chest 1. Clear.", "Hand|Fracture.|Chest|Clear."),
        ("Two findings: (1) a nodule and (2) edema.", "Two findings: (1) a nodule and (2) edema."),
        ("Seen by A. Smith and B. Jones.", "Seen by A. Smith and B. Jones."),
        ("- Clear lungs - Normal heart", "Clear lungs|Normal heart"),
        ("Clear lungs. - No mass. • Stable", "Clear lungs.|No mass.|Stable"),
        # A line that ended before its width was used, with a capital behind it.
        ("Clear lungs\nHeart is normal\nNo mass", "Clear lungs|Heart is normal|No mass"),
        ("#0 Clear.", "#0 Clear."),
        ("Heart: normal\nLungs: clear", "Heart: normal|Lungs: clear"),
        # A label of two words that wraps between them.
        ("No nodule in the Imaging\nNotes: stable.", "No nodule in the Imaging Notes: stable."),
        ("Seen by Dr.\n Jones in the\n ED.", "Seen by Dr. Jones in the ED."),
        ("A right\n PICC ends in the\n SVC.", "A right PICC ends in the SVC."),
        (
            "Effusion on the right\nHeart: large\nLungs: clear",
            "Effusion on the right|Heart: large|Lungs: clear",
        ),
        (
            "No pneumothorax is seen.\nThere is a left\nPort-A-Cath.",
            "No pneumothorax is seen.|There is a left Port-A-Cath.",
        ),
        # A boundary further up is none at the end of the line.
        (
            "No effusion.No mass The heart is large. There is a left\nPort-A-Cath on it.",
            "No effusion.|No mass|The heart is large.|There is a left Port-A-Cath on it.",
        ),
        # Names of sections within text, and tags.
        ("FINDINGS: Clear. IMPRESSION: Normal.", "Clear.|Normal."),
        ("Heart is large IMPRESSION: No edema", "Heart is large|No edema"),
        ("Incidental Findings: Old scar.", "Incidental Findings: Old scar."),
        ("Clear.<br/>Stable</p>Normal\\.br\\Old", "Clear.|Stable|Normal|Old"),
        (
            "The previously<BR>described nodule of XXXX<br />cm\\.br\\is seen.",
            "The previously described nodule of XXXX cm is seen.",
        ),
        # Who writes no full stops ends sentences by tags.
        ("lungs are clear<br>heart is normal<br>no effusion", "lungs are clear|heart is normal|no effusion"),
        ("Right\\normal left lung", "Right\\normal left lung"),
        ("Clear.\\nNo edema.\\r\\nThe heart\\nis normal.", "Clear.|No edema.|The heart is normal."),
    ],
)
def test_layout_of_report_text(text: str, expected: str) -> None:
    assert "|".join(filter(has_letter, sentences(text))) == expected


SIGNS = "\uf0b7 \uf0a7 \uf0d8 o ■ □ ○ ◇ ➢ ► ‣ → ✓ — + > ・ § # = ~ -> ◆ ❖ ⁃"


@pytest.mark.parametrize("sign", SIGNS.split())
def test_one_sign_before_lines_marks_a_list(sign: str) -> None:
    text = f"\n {sign} Heart normal in size and\n position\n {sign}\tLungs clear\n {sign} No 5 mm nodule"
    assert sentences(text) == ["Heart normal in size and position", "Lungs clear", "No 5 mm nodule"]


# Lines are divided by "/", sentences by "|".
LISTS = [
    # A label and its value.
    ("Pleural effusion: No/Pneumothorax: No/Edema: Yes", "Pleural effusion: No|Pneumothorax: No|Edema: Yes"),
    ("effusion: small left/pneumothorax: none.", "effusion: small left|pneumothorax: none."),
    ("Épanchement : non/CTR: 0.55/Œdème : -/Côtes: RAS", "Épanchement : non|CTR: 0.55|Œdème : -|Côtes: RAS"),
    ("Devices: ETT,/NGT: in place", "Devices: ETT, NGT: in place"),
    ("Lungs: opacity on the right/lung: clear", "Lungs: opacity on the right lung: clear"),
    # Short lines, unless a text may have been wrapped so.
    ("NORMAL HEART/CLEAR LUNGS/NO EFFUSION", "NORMAL HEART|CLEAR LUNGS|NO EFFUSION"),
    ("Cuore normale/Polmoni chiari/Nessun versamento", "Cuore normale|Polmoni chiari|Nessun versamento"),
    ("herz normal/lungen frei/ohne/erguss", "herz normal lungen frei ohne erguss"),
    ("lungs clear,/heart normal/no effusion", "lungs clear, heart normal no effusion"),
    ("no effusion on the right side/opacity in both lower lobes/of the lungs", "no effusion on the right side "
     "opacity in both lower lobes of the lungs"),
    ("Comments:/heart normal/lungs clear/no edema", "Comments: heart normal|lungs clear|no edema"),
    # Levels of a list, and signs of none.
    ("■ Lungs/  □ clear/  □ no mass/■ Heart large", "Lungs|clear|no mass|Heart large"),
    ("• Lungs/o Clear/o No mass/• Heart large", "Lungs|Clear|No mass|Heart large"),
    ("• Sin masas/o derrame/• Corazón normal", "Sin masas o derrame|Corazón normal"),
    ("> 5 mm nodule/> 3 mm nodule", "> 5 mm nodule > 3 mm nodule"),
    ("_ clear/_ normal", "_ clear _ normal"),
    ("↑ markings/↑ heart", "↑ markings ↑ heart"),
    ("? Lungs clear/? Heart normal/  in size", "Lungs clear|Heart normal in size"),
    ("? edema/? effusion", "edema ? effusion"),
    # Boxes of a form.
    ("[x] Edema/[ ] Mass/[ ] Nodule", "[x] Edema"),
    ("☐ Edema/☒ Mass/   of the base/☐ Nodule/Heart large.", "☒ Mass of the base|Heart large."),
    ("■ Edema/□ Mass", "■ Edema"),
    ("✗ Edema/✓ Mass", "✓ Mass"),
    ("✖ Edema/✔ Mass/⬜ Nodule/🗹 Fracture/❌ Tube", "✔ Mass|🗹 Fracture"),
    ("- [ ] Edema/- [X] Mass", "[X] Mass"),
    ("[x] Mass, mild to/moderate/☐ Nodule, if so/where/Heart large.", "[x] Mass, mild to moderate|Heart large."),
    ("( ) Derrame/(x) Massa", "(x) Massa"),
    # Brackets and dots close.
    ("[Lungs clear.] [no mass.] <Heart large.> Edema", "[Lungs clear.]|[no mass.]|<Heart large.>|Edema"),
    ("Heart normal...lungs clear...no mass", "Heart normal...|lungs clear...|no mass"),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "expected"), LISTS)
def test_lists_forms_and_labels_end_lines(lines: str, expected: str) -> None:
    report = f"FINDINGS:\n{lines}\nIMPRESSION: Fine.".replace("/", "\n")
    ((_, findings), _) = study_sections(report)
    assert "|".join(filter(has_letter, sentences(findings))) == expected
    assert own_sections([Section("text", report)])[0].text.strip() == findings.strip()


def wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width))


@pytest.mark.parametrize(("step", "n_may_differ"), [(97, 0), pytest.param(1, 5, marks=pytest.mark.slow)])
def test_no_wrapped_real_report_is_a_list(real_data: Path, step: int, n_may_differ: int, monkeypatch) -> None:
    """Open-i wrapped at any width, and real notes, are cut as without the rules of lists, forms and labels.

    Three reports of all differ: 2415, a report in a report, has labels without stops; 3263 and 3966 in small letters at
    24 become two sentences: "chest: no finding." / "left knee: normal."
    """
    with (real_data / "openi" / "openi_reports.csv").open(encoding="utf-8", newline="") as stream:
        rows = [*csv.DictReader(stream)][::step]
    texts = [" ".join(row[column].split()) for row in rows for column in ("findings", "impression")]
    wanted = [
        (width, wrapped(text, width))
        for written in texts
        for text in (written, written.upper(), written.lower())
        for width in (24, 30, 38, 50, 79)
    ]
    notes = sorted((real_data / "real_cxr").rglob("s*.txt"))
    wanted += [(0, path.read_text(errors="replace")) for path in notes]
    cut = [passages(text) for _, text in wanted]
    assert len(cut) > 1200 and notes
    monkeypatch.setattr(sentences_module, "_listed_lines", lambda lines: ())
    for rule in ("_bullets", "_boxes"):
        monkeypatch.setattr(sentences_module, rule, lambda lines: {})
    monkeypatch.setattr(boundaries, "_ENTRY", re.compile("(?!)"))
    others = Counter(width for (width, text), new in zip(wanted, cut, strict=True) if passages(text) != new)
    assert max(others.values(), default=0) <= n_may_differ and not others[0]


# What may stand in no sentence: numbers and letters of items, names of sections, tags.
LEFT_OUT = re.compile(r"\d{1,2}|[A-Pa-pIVXivx]|II|III|(?i:findings?|impressions?|conclusions?)|(?i:br|p)")


@pytest.mark.slow
def test_every_real_word_stands_in_one_sentence(real_data: Path) -> None:
    with (real_data / "openi" / "openi_reports.csv").open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 3955
    n_left_out = n_words = 0
    for text in {row[column] for row in rows[::32] for column in ("findings", "impression", "indication")}:
        words = iter(re.findall(r"\w+", text))
        for wanted in re.findall(r"\w+", " ".join(sentences(text))):
            n_words += 1
            for word in words:
                if word == wanted:
                    break
                assert LEFT_OUT.fullmatch(word), "a word is lost"
                n_left_out += 1
            else:
                pytest.fail("a word is not in the report, or in another order")
        assert all(LEFT_OUT.fullmatch(word) for word in words), "the end is lost"
        for passage in passages(text):
            assert "".join(split_sentences(passage)).replace(" ", "") == passage.replace(" ", "")
    assert n_words > 3_500 and n_left_out < 0.02 * n_words


ENDLESS = [
    *(unit * 2000 for unit in ("1. No mass. 2. ", "a. ", "(", '"', ". ", "-", "Clear\n")),
    *("x\n" + " " * 50_000 + "x", "X" * 100_000, "ADDENDUM:\nFINDINGS: a\n" * 2_000),
]


@pytest.mark.parametrize(
    "text",
    [
        "Heart is large The " * 2000,
        *(pytest.param(text, marks=pytest.mark.slow) for text in ENDLESS),
    ],
)
def test_time_grows_with_the_length_of_a_report(text: str) -> None:
    begin = time.perf_counter()
    study_sections(text)
    sentences(text)
    assert time.perf_counter() - begin < 10


def test_runs_of_numbers_do_not_hang() -> None:
    """Expressions that cut digits in many ways take years, and hold the interpreter's lock meanwhile."""
    texts = [f"Seen by Dr. Smith..[{'617 555 0123 ' * 9}] No edema.", "1. " * 50 + "No edema."]
    code = (
        "from data_prep.text.sections import Section, own_sections; "
        "from data_prep.text.sentences import passages, split_sentences; "
        f"read = [one for text in {texts!r} for one in own_sections([Section('text', text)])]; "
        "[split_sentences(passage) for _, one in read for passage in passages(one)]"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True, cwd=Path(__file__).parents[3])


def test_numbered_references_are_those_of_pysbd() -> None:
    theirs = re.compile(English.NUMBERED_REFERENCE_REGEX)
    ours = re.compile(_NUMBERED_REFERENCE)
    for text in map("".join, itertools.product("1 ,-]", repeat=6)):
        text = f"x.[{text}] A"
        assert ours.sub(r"\2|\7", text) == theirs.sub(r"\2|\7", text)


PYSBD = """Seen by Dr. Lee at 5 p.m. |No effusion.
Opacity of 3.5 cm vs. prior. |Stable.
Opacities, e.g. in the right lung, i.e. the base.
1. No edema. |2. Cardiomegaly, unchanged.
a) Lines in place. |b) No pneumothorax.
- No edema. |- No effusion.
Is there a fracture? |None! |Old film absent.
(No old film. Limited.) |Heart normal.
He said "no pain." |No change.
No change... |Follow up.
Lungs clear.No effusion.
Size is approx. |4 cm. |Stable.
PA and lat. |views. |No acute disease.
The U.S. film of Jan. 5 is absent.
See fig. 2. |Findings etc. are new.
Compared to 2:30 a.m. the tube is at T4. |ET tube in place.
Nodule No. 3 is 4 mm. |Recommend CT.
J. Smith, M.D. reviewed. |Agreed.
COMPARISON: None. |FINDINGS: Clear.
R. lung is clear. |L. lung has an opacity at the 6th rib."""
"""Texts as PySBD 0.3.4 cuts them, faults included: prepared sets and scores are made from them."""


@pytest.mark.parametrize("cut", PYSBD.splitlines())
def test_pysbd_cuts_as_it_did(cut: str) -> None:
    spans = boundaries._segmenter().segment(cut.replace("|", ""))
    assert "|".join(span.sent for span in spans) == cut


# --- Boundaries labelled by hand, see sentence_boundaries/README.md ------------------------------------------------


def labelled(real_data: Path, held_out: bool) -> dict[str, list[tuple[str, Spans]]]:
    """Texts with their sentences: the halves of the real reports and of the traps."""
    folder = Path(__file__).parent / "sentence_boundaries"
    with (real_data / "openi" / "openi_reports.csv").open(encoding="utf-8", newline="") as stream:
        rows = {int(row["uid"]): row for row in csv.DictReader(stream)}
    records = {name: json.loads((folder / f"{name}.json").read_text("utf-8")) for name in ("openi", "traps")}
    chosen = {name: [r for r in of if r["held_out"] is held_out] for name, of in records.items()}
    return {
        "reports": [(rows[r["uid"]][r["column"]], r["sentences"]) for r in chosen["openi"]],
        "traps": [(r["text"], r["sentences"]) for r in chosen["traps"]],
    }


def plain_pysbd(text: str) -> list[str]:
    segmenter = pysbd.Segmenter(language="en", clean=False)
    return [sentence for sentence in segmenter.segment(text) if isinstance(sentence, str)]


@pytest.mark.parametrize(("held_out", "least"), [(False, (1.0, 0.99)), (True, (0.9923, 0.94))])
def test_boundaries_agree_with_the_labels(
    real_data: Path, held_out: bool, least: tuple[float, float]
) -> None:
    """Real reports at least as PySBD alone, invented traps far better than it."""
    for texts, f1 in zip(labelled(real_data, held_out).values(), least, strict=True):
        ours, alone = (
            boundary_f1((text, locate(text, split(text)), true) for text, true in texts)
            for split in (sentences, plain_pysbd)
        )
        assert ours >= max(f1, alone)
