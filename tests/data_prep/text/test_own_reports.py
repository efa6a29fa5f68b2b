"""Reports of other sources than MIMIC-CXR."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from data_prep.text.languages import SECTIONS
from data_prep.text.reports import MAX_CHARACTERS, Report, read_passages, read_sentences
from data_prep.text.sections import (
    BOTH,
    ENDED,
    KEPT,
    LEFT_OUT,
    NO_HEADER,
    Section,
    own_sections,
    study_sections,
)
from medclip_dcl.common.errors import UserError
from tests.data_prep.text.test_sections import SHAPES

# One letter for the section of each passage that is found.
KINDS = {"findings": "F", "impression": "I", BOTH: "B", NO_HEADER: "N"}


def found(text: str, *wanted: str) -> str:
    passages = read_passages(Report(1, sections=(Section("text", text),)), wanted or SECTIONS).found
    return "|".join(f"{KINDS[name]} {passage}" for name, passage in passages)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Without a known header the whole text, but titles, other sections and who wrote it.
        (
            "CHEST PA\n\nLarge left effusion.\n\nNo pneumothorax.\n\nDictated by: J. Smith\nTranscribed by: X",
            "N Large left effusion.|N No pneumothorax.",
        ),
        ("CHEST PA\nTHERE IS AN EFFUSION.\nNO EDEMA.\nDR. SMITH, MD", "N THERE IS AN EFFUSION. NO EDEMA."),
        ("EXAM: CHEST PA\nINDICATION: Cough.\nLungs clear.\r\nNo effusion.", "N Lungs clear. No effusion."),
        ("Clinical history: Cough\nLungs clear.", "N Lungs clear."),
        (
            "INDICATION: 65-year-old woman with cough and fever for three days. Please\nevaluate for pneumonia.\n"
            "Lungs are clear.",
            "N Lungs are clear.",
        ),
        ("Dictated by: Dr. Smith\nAP CHEST, 3:15 P.M.:\nLungs clear.", "N Lungs clear."),
        ("INDICATION: cough<BR>Lungs clear.<BR>~3 cm nodule.", "N Lungs clear.|N ~3 cm nodule."),
        ("CHEST WALL: Normal.\nHEART: Large.", "N CHEST WALL: Normal. HEART: Large."),
        ("Dear Dr. Roy,\nLungs clear.\nI have personally reviewed the images.\nJ. Smith", "N Lungs clear."),
        ("FINDINGS:\nHISTORY: Cough\nLungs clear.", "N Lungs clear."),
        ("Signed out to ICU. Tube 3 cm above carina.", "N Signed out to ICU. Tube 3 cm above carina."),
        ("No effusion. Electronically signed by J. Smith on 1/2.", "N No effusion."),
        ("INDICATION: Cough.", ""),
        # An impression alone: the text above it is that of the findings.
        ("CHEST PA\n\nLungs clear.\n\nIMPRESSION: Normal.\nSigned: X\nReviewed.", "N Lungs clear.|I Normal."),
        (
            "Röntgen Thorax p.a.\n\nGroßer Erguss.\n\nBeurteilung: Erguss.\n\nMit freundlichen Grüßen\nDr. Muster",
            "N Großer Erguss.|I Erguss.",
        ),
        # Headers of other languages: in any case, without accents or colon, within a line.
        ("Befund\nKein Erguss.\n\nBEURTEILUNG\nNormal.\ngez. Dr. Muster, Radiologe", "F Kein Erguss.|I Normal."),
        ("Klinik: Husten. Befund: Kein Erguss. Beurteilung: Normal.", "F Kein Erguss.|I Normal."),
        ("ANAMNESE: HUSTEN BEFUND: KEIN ERGUSS BEURTEILUNG: NORMAL", "F KEIN ERGUSS|I NORMAL"),
        ("Befund und Beurteilung (Thorax): Normal.", "B Normal."),
        ("Kein\nBefund\nlinks. Guter Befund: normal.", "N Kein Befund links. Guter Befund: normal."),
        ("Motivo: tos\nHallazgos: Sin derrame.\nIMPRESION: Normal.\nFdo.: Dra. Gil", "F Sin derrame.|I Normal."),
        ("Motif : toux\nResultats : Clair.\nConclusion : Normal.\nCordialement,\nDr Roy", "F Clair.|I Normal."),
        ("<p>INDICATION: cough</p><p><b>FINDINGS:</b> Clear &lt;5 mm.</p>", "F Clear <5 mm."),
        ("INDICAÇÃO: tosse\nACHADOS: Sem derrame.\nIMPRESSÃO: Normal.", "F Sem derrame.|I Normal."),
        ("QUESITO: tosse\nREFERTO: Normale. CONCLUSIONI: Nella norma.", "F Normale.|I Nella norma."),
        ("VERSLAG: Geen infiltraat.\nCONCLUSIE: Normaal.", "F Geen infiltraat.|I Normaal."),
        ("检查所见：双肺清晰。诊断意见：正常。", "F 双肺清晰。|I 正常。"),
        ("Reading: Clear.\nIMP - Normal.\nComment: Rotated.", "F Clear.|I Normal.|I Rotated."),
        # Heads that no list knows: before the reading another section, within it text.
        ("LUNGS: Clear.\nHEART: Normal.\nIMPRESSION: Fine.", "N LUNGS: Clear. HEART: Normal.|I Fine."),
        ("Image quality: Poor.\nLungs: Clear.\nHeart: Large.", "N Lungs: Clear. Heart: Large."),
        ("Clinical Details: Cough\nImpression: Normal.", "I Normal."),
        ("Chest Comparison: Large mass. No effusion.", "N Chest Comparison: Large mass. No effusion."),
        ("Klinische Fragestellung: Pneumonie?\n\nLungen frei.\nBeurteilung: Normal.", "N Lungen frei.|I Normal."),
        ("Ward: 3\nINDICATION: Cough\nRight lung: Clear.\nQuality: Poor.", "N Right lung: Clear. Quality: Poor."),
        ("City Hospital\nReferrer: X\nLungs clear.\nQuality: Poor.", "N City Hospital|N Lungs clear.|N Quality: Poor."),
        ("主诉：咳嗽\n双肺清晰，无异常。", "N 双肺清晰，无异常。"),
        ("Observations: The lungs are clear.", "F The lungs are clear."),
        ("Remarks: The lungs are clear.", "N Remarks: The lungs are clear."),
        ("Remarks: The lungs are clear.\nIMPRESSION: Normal.", "I Normal."),
        ("Age: 5\nReferring doctor: X\nHeart large.\nIMPRESSION: Fine.", "N Heart large.|I Fine."),
        ("City Hospital\nAuthor: X\nLungs clear.\nIMPRESSION: Fine.", "N City Hospital|N Lungs clear.|I Fine."),
        ("Hila: big\nLungs: clear\nRatio: 6\nRibs: fine", "N Hila: big|N Lungs: clear|N Ratio: 6|N Ribs: fine"),
        ("IMPRESSION: Fine. Chest pain: no cause.", "I Fine. Chest pain: no cause."),
        ("IMPRESSION: Cardiomegaly Dictated by: Anna Muster", "I Cardiomegaly"),
        (f"Referring doctor: X. {'The lungs are clear. ' * 5}", f"N Referring doctor: X.{' The lungs are clear.' * 5}"),
        ("Comparison films: None.\nQuality: Good\nLungs clear.\nIMPRESSION: Fine.", "N Lungs clear.|I Fine."),
        ("IMPRESSION: Fine.  Left lung: Clear. Accession number: 3", "I Fine. Left lung: Clear."),
        ("FINDINGS:\nClear.\nQuality: Poor.\nHeart: Large.", "F Clear. Quality: Poor. Heart: Large."),
        # Placeholders alone in a section; "None." where there is other text.
        ("FINDINGS: nan IMPRESSION: Normal.", "I Normal."),
        ("FINDINGS: See impression.\nIMPRESSION: Clear.", "I Clear."),
        ("FINDINGS: Clear.\nIMPRESSION: As above.", "F Clear."),
        ("FINDINGS: XXXX XXXX.\nIMPRESSION: N/A", ""),
        ("Findings: None. Impression: Normal.", "I Normal."),
        ("FINDINGS: None.", "F None."),
        ("FINDINGS: NaN. XXXX.\nIMPRESSION: Please see the findings above.", ""),
        ("FINDINGS: As noted in the impression.\nIMPRESSION: As expected.", "I As expected."),
        ("FINDINGS: None seen. IMPRESSION: See impression of the CT.", "F None seen.|I See impression of the CT."),
        ("## Findings\nNo pneumo-\nthorax. A left-\nsided inﬁltrate.", "F No pneumothorax. A left-sided infiltrate."),
        ("FINDINGS: PNEUMO-\nTHORAX at T8-\nT9.", "F PNEUMOTHORAX at T8-T9."),
        ("FINDINGS: Piperacillin-\ntazobactam.", "F Piperacillin-tazobactam."),
    ],
)  # fmt: skip
def test_sections_of_own_reports(text: str, expected: str) -> None:
    assert found(text) == expected


@pytest.mark.parametrize("report", [report for report, expected in SHAPES if re.match("F|B|I 1", expected)])
def test_findings_under_mimics_headers_stay(report: str) -> None:
    views = re.match(" (?:CHEST, TWO|REPORT)", report)
    expected = [(NO_HEADER if views else name, text.split()) for name, text in study_sections(report)]
    assert [(name, text.split()) for name, text in own_sections([Section("text", report)])] == expected


UNKNOWN_HEADS = (
    "Klinische Fragestellung, Verdachtsdiagnose, Zuweiser, Vorgeschichte, Untersuchungsart, Auftragsnummer, "
    "Station, Untersucher, Aufnahmedatum, Grund der Untersuchung, Bildqualität, Geb.-Datum, Motif de l'examen, "
    "Contexte clinique, Question posée, Prescripteur, Qualité du cliché, Nom du patient, Dose délivrée, "
    "Información clínica, Procedencia, Diagnóstico de sospecha, Médico solicitante, Pregunta clínica, Suspeita "
    "diagnóstica, Convênio, Método, Notizie cliniche, Sospetto clinico, Medico richiedente, Reparto, Domanda "
    "clinica, Aanvrager, Reden van onderzoek, Afdeling, Klinische vraagstelling, Clinical Details, Presenting "
    "complaint, Ward, Accession number, Chest pain, Heart rate, PMH, Study quality, Tech notes, Patient location, "
    "Order, 检查方法"
)
BEHIND_THE_IMPRESSION = (
    "ACCESSION NUMBER, Accession #, Workstation ID, Attestation, ATTENDING STATEMENT, Dictated, Dictation date, "
    "Critical result, CRITICAL RESULTS, Communication, Report status, STATUS, Job ID, Exam number, MRN, Patient "
    "class, Printed, Signed, Finalized, Verified, Facility, Location, CPT code, ICD-10, Phone, Distribution, Copy "
    "to, cc, Technologist, Image link, Peer review, Auftragsnummer, Verteiler, Copie à, Número de acceso, Kopie "
    "aan, SUMMARY 2, END OF IMPRESSION"
)
OF_THE_IMPRESSION = (
    "Right lower lobe, LUNGS, HEART AND MEDIASTINUM, New, Stable, Unchanged, Note, PICC, ET tube, Hilum, Since "
    "3/4, Overall, Differential diagnosis, Pneumonia, Frontal view, Left knee, Support devices, Interval change, "
    "Herz, Pleuraerguss, Neu, Corazón, Poumons, Cuore, Coração, Chest X-ray, At 3:15, There are two nodules, "
    "Sarcoidosis, Lymphoma, Most likely, Etiology, Acute pathology, Final diagnosis, Spleen, "
    "Previously, Normal"
)


@pytest.mark.parametrize("head", UNKNOWN_HEADS.split(", "))
def test_unknown_heads_before_the_reading(head: str) -> None:
    for colon in (":", " :", "："):
        assert found(f"{head}{colon} Words.\nLungs clear.\nIMPRESSION: Fine.") == "N Lungs clear.|I Fine."


@pytest.mark.parametrize("head", BEHIND_THE_IMPRESSION.split(", "))
def test_unknown_heads_behind_the_impression(head: str) -> None:
    report = f" FINDINGS:\n Clear.\n IMPRESSION:\n Fine.\n {head}: Words.\n More words.\n"
    assert found(report) == "F Clear.|I Fine."
    if head not in ("Dictated", "Signed", "Finalized"):
        assert [section.text.strip() for section in study_sections(report)] == ["Clear.", "Fine."]


@pytest.mark.parametrize("head", OF_THE_IMPRESSION.split(", "))
def test_heads_of_the_reading_stay_behind_it(head: str) -> None:
    report = f" IMPRESSION:\n Fine.\n {head}: Words.\n"
    assert f"{head}: Words." in found(report)
    assert f"{head}: Words." in study_sections(report)[0].text


def test_a_head_at_which_the_impression_begins_stays() -> None:
    report = " IMPRESSION:\n Category: 2.\n 1. Severity: mild.\n Fine.\n MRN: 3\n Words.\n FINDINGS: Clear.\n"
    texts = [" ".join(section.text.split()) for section in study_sections(report)]
    assert texts == ["Category: 2. 1. Severity: mild. Fine.", "Clear."]


def test_a_wrapped_clause_is_no_head() -> None:
    line = "No acute cardiopulmonary abnormality is identified on this examination"
    for head, is_kept in (("Reader", True), ("ACCESSION NUMBER", False)):
        assert (
            f"{head}: Words" in found(f"FINDINGS: Clear.\nIMPRESSION:\n{line}\n{head}: Words.")
        ) == is_kept


def test_notices_of_chexpert_plus_are_left_out() -> None:
    agree = "I have personally reviewed the images for this examination and agree\nwith the report transcribed above."
    dates = (
        "This report has been anonymized. All dates are offset from the actual dates by a fixed interval associated "
        "with the patient."
    )
    report = f"FINDINGS: Clear. {dates}\nIMPRESSION:\nFine. {agree}\nStable lines.\n{dates.upper()}"
    assert found(report) == "F Clear.|I Fine. Stable lines."
    assert "agree" not in str(study_sections(report)) and "DATES" not in str(study_sections(report))


SIGNERS = """Final Report Signed by: Anna Muster, MD on 1/2/2020 3:04 PM
Report dictated by: Anna Muster, MD, signed by: Bert Muster, MD
Report verified by Dr Muster
This report was electronically signed by Anna Muster, MD
Authored by: Anna Muster MD
Signed (Electronic Signature): 1/2/2020 Anna Muster
Signed (Electronic Signature) Anna Muster
Finalized by Anna Muster
By: Anna Muster, MD on: 1/2/2001
CC: Dr Bert Muster
I, Anna Muster, have reviewed the images.
Images reviewed and interpreted by Dr. Muster
Interpreting Radiologist: Anna Muster
Médecin radiologue : Anne Muster
Informe firmado por: Dra. Ana Muster
Firmado electrónicamente por Ana Muster
Befundet von Anna Muster
Befund vidiert: Muster
Dieser Befund wurde elektronisch signiert von A. Muster
Compte rendu validé électroniquement par Anne Muster
Validé le 12/03/2020 par Anne Muster
Laudo assinado eletronicamente por Ana Muster
Referto firmato digitalmente da Anna Muster
Verslag ondertekend door Anna Muster
Verslag door: Anna Muster
Ref. by: Dr Muster
Informe realizado por: Dra. Ana Muster
Copy to: Dr Bert Muster
报告医生：王""".splitlines()
NAMES = """MD, DNB (Radiodiagnosis)
Dra. Ana Muster Col. 12345
Dott.ssa Anna Muster
Dr Anne Muster - Radiologue
MUSTER, ANNA on 1/2/2020 3:04 PM
Anna Muster MD 1/2/2020 3:04""".splitlines()


@pytest.mark.parametrize("line", SIGNERS)
def test_no_order_of_words_keeps_a_signer(line: str) -> None:
    assert found(f"FINDINGS:\nClear.\nIMPRESSION:\nFine.\n{line}\nDepartment") == "F Clear.|I Fine."
    assert found(f"Lungs clear. No effusion.\n{line}") == "N Lungs clear. No effusion."


@pytest.mark.parametrize("line", NAMES)
def test_lines_of_names_are_left_out(line: str) -> None:
    assert found(f"IMPRESSION:\nFine.\n{line}") == "I Fine."


@pytest.mark.parametrize(
    "line",
    [
        "Verified by CT.",
        "The report of the CT was reviewed.",
        "Estudio realizado por tos.",
        "By report: pneumonia.",
        "This exam was read as normal.",
        "Released from its clamp.",
        "Findings were reviewed by phone.",
        "Prepared by drainage, it is smaller.",
        "Estudio realizado por TC previa.",
        "EFFUSION, RIGHT ON 1/2/2020",
    ],
)
def test_sentences_with_words_of_signatures_stay(line: str) -> None:
    assert line in found(f"FINDINGS:\nClear.\n{line}\nHeart normal.")


def test_one_section_of_an_own_report() -> None:
    assert found("Lungs clear.\nIMPRESSION: Normal.", "findings") == "N Lungs clear."
    assert found("Lungs clear.\nIMPRESSION: Normal.", "impression") == "I Normal."
    assert found("Lungs clear.", "impression") == "N Lungs clear."


def test_columns_of_sections_lose_marks_and_signatures() -> None:
    sections = (Section("findings", "<b>Clear</b>_x000D_\nSigned by: X"), Section("impression", "&nbsp;"))
    report = read_passages(Report(1, sections=sections), SECTIONS)
    assert report.found == (("findings", "Clear"),)
    assert report.taken == ("findings (marks of an export taken off)", "1 of 4 words, on 1 line")


def test_what_was_done_with_heads_and_placeholders_is_counted() -> None:
    texts = ("Remarks: Clear lungs.", "Ward: 3\nLungs clear.\nQuality: Poor.\nIMPRESSION: Fine.\nJob ID: 3")
    reports = [read_passages(Report(1, sections=(Section("text", text),)), SECTIONS) for text in texts]
    assert reports[0].taken[0] == "no_header (under unknown heads)"
    assert reports[1].notes.heads == {"WARD": LEFT_OUT, "QUALITY": KEPT, "JOB ID": ENDED}
    text = " FINDINGS: As above.\n IMPRESSION:  Fine.\n"
    for report in (Report(1, sections=(Section("text", text),)), Report(1, content=text.encode())):
        passages = read_passages(report, SECTIONS)
        assert passages.found == (("impression", "Fine."),) and passages.notes.placeholders == 1


HEADS_OF_RESULTS = (
    "RESULT, Results, RESULT(S), DETAILS, Discussion, REVIEW, BODY, Ergebnis, Resultado, Risultato, Resultaat"
)


@pytest.mark.parametrize("head", HEADS_OF_RESULTS.split(", "))
def test_results_are_findings_without_another_head(head: str) -> None:
    for line_break in ("\n", " ", "<br>"):
        report = f"INDICATION: Cough.{line_break}{head}: Heart large.{line_break}IMPRESSION: Fine."
        assert found(report) == "F Heart large.|I Fine."
        assert dict(study_sections(report))["findings"].strip() == "Heart large."
    assert found(f"{head}\nHeart large.") == "F Heart large."
    inside = f"FINDINGS: Clear.\n{head}: Heart large.\nIMPRESSION: Fine."
    assert found(inside) == f"F Clear. {head}: Heart large.|I Fine."
    # Text above it that no header names is not lost.
    assert found(f"Lungs are clear. No edema.\n{head}: Heart large.").startswith("N Lungs are clear.")


@pytest.mark.parametrize(("head", "is_mimic"), [("Radiologist remarks", False), ("NARRATIVE", True)])
def test_a_head_of_most_text_is_named(head: str, is_mimic: bool) -> None:
    texts = [f"INDICATION: Cough {n}.\n{head}: The heart is large.\nIMPRESSION: Fine." for n in range(5)]
    texts[3:] = ["FINDINGS: Clear.", f"INDICATION: A cough of many weeks.\n{head}: Fine."]

    def read(heads: Sequence[str] | None = None) -> list[list[tuple[str, str]]]:
        reports = [
            Report(n, content=text.encode()) if is_mimic else Report(n, sections=(Section("text", text),))
            for n, text in enumerate(texts)
        ]
        return [*read_sentences(reports, 5, SECTIONS, None, "none", findings_heads=heads).of_study.values()]

    with pytest.raises(UserError, match=rf"^--findings_heads: 3 of 5 reports .* {head.upper()}"):
        read()
    assert read([head.lower()])[0] == [("findings", "The heart is large."), ("impression", "Fine.")]
    assert read(["FINDINGS"])[0] == [("impression", "Fine.")]
    texts[0] = texts[3]
    assert len(read()) > 2


def test_a_text_of_absurd_length_is_named() -> None:
    report = Report(1, sections=(Section("text", "Clear. " * MAX_CHARACTERS),))
    assert read_passages(report, SECTIONS).reason == "report has more than 262,144 characters"
