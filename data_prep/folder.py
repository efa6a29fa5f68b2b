"""Prepare a folder of images with a table, as a hospital exports them."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from data_prep.options import VIEWS, Folder
from data_prep.sources import preparation, source_tables
from data_prep.sources import rows as row_tables
from data_prep.sources.cells import with_texts
from data_prep.sources.finding_names import plain_finding, same_finding
from data_prep.sources.growth import digests_of_rows
from data_prep.sources.preparation import Source
from data_prep.sources.rows import NO_REPORT, PEOPLE, SPLIT_NAMES, TEXTS, TableCheck, label_columns
from data_prep.sources.source_tables import SPLITS, CsvFile
from data_prep.sources.spellings import find_files
from data_prep.text.languages import WORDS
from data_prep.text.sections import OWN_RULES_VERSION
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import encoding_of, kind_of_file
from medclip_dcl.common.findings import CHEXPERT
from medclip_dcl.data.prepared import TABLES
from medclip_dcl.pictures.image_file import IMAGE_ENDING

_ADVICE = "fix the table"
_READING_ADVICE = f"{_ADVICE}, or name its --encoding (as cp1252 or utf-16) and its --delimiter"
# Words around AP, PA or FRONTAL that leave a view the same.
_POSITIONS = re.compile(
    r"\b(?:(?:SEMI|HALF)? ?(?:ERECT|UPRIGHT|SITTING)|SUPINE|STANDING|PORTABLE|MOBILE|BEDSIDE|HORIZONTAL|DEBOUT|ASSIS"
    r"|(?:IM )?(?:STEHEN|SITZEN|LIEGEN)D?|CHEST|THORAX|TORAX|CXR|X ?RAY|RX|VIEW|PROJECTION)\b"
)
_AP = r"\bA ?P\b|\b[AÂ]NT[EÉ]RO?(?:IOR)? ?POST[EÉ]RI(?:ORE?|EUR)\b"
_PA = r"\bP ?A\b|\bP[OÓ]ST[EÉ]RO?(?:IOR)? ?ANT[EÉ]RI(?:ORE?|EUR)\b"
_OTHER_VIEWS = (
    r"(?:L|R|LEFT |RIGHT )? ?LAT[EÉ]?(?:RA\w+)?(?: LEFT| RIGHT)?|LATERO LATERALE|[LR]?L|P(?:RO|ER)FILO?|SEITLICH"
    r"|OBLIQUE|[LR][AP]O|[LR]LD"
)
_LABEL_WORDS = {
    **dict.fromkeys(("yes", "true", "pos", "ja", "si", "s\u00ed", "s\u00ec", "sim", "oui"), "1"),
    **dict.fromkeys(("no", "false", "neg", "nein", "nee", "n\u00e3o", "nao", "non"), "0"),
}
_WORDS_OF = {"de": "weiblich|frau|m(?:ä|ae)nnlich|mann|ja|nein", "nl": "vrouw|(?:vrouwe|manne)lijk|nee"}
"""Words of tables that no other language has."""
# A list as Python writes it, or two names with endings.
_SEVERAL_IMAGES = re.compile(rf"^[\[(]\s*['\"]|{IMAGE_ENDING}['\"\s]*[,;|]['\"\s]*\S+\.[A-Za-z]{{3}}")
_COLUMNS = ("image", *TEXTS, "patient", "study", "view", "split", *PEOPLE)
_RESERVED = {*_COLUMNS, "file", *(column for columns in TABLES.values() for column in columns)} - set(
    CHEXPERT
)
"""Names that a finding cannot have."""


def prepare(settings: Folder) -> None:
    """Prepare a set, finish a broken one, or say that it is finished."""
    check = TableCheck(settings.table, settings.drop_bad_rows)
    table, encoding = _table(settings, check)
    columns = check.columns = _columns(settings, table, check)
    if check.problems:
        _read(settings, table, columns, check)
    made_from = preparation.made_from(
        settings,
        "folder of images with a table" if "image" in columns else "table of reports",
        False,
        [settings.table],
        {
            "columns": columns,
            "split": settings.split_options("split" in columns),
            "views": list(settings.views) if "view" in columns else None,
            "text_rules": OWN_RULES_VERSION,
            "delimiter": table.delimiter,
            "encoding": encoding,
            **preparation.given(settings, "drop_bad_rows", "label_values", "language", "sex_values"),
        },
    )
    preparation.prepare_set(settings, made_from, lambda: _read(settings, table, columns, check))


def _table(settings: Folder, check: TableCheck) -> tuple[CsvFile, str]:
    """The table, read as its byte order mark and its header say where no option does, and its encoding."""
    content = source_tables.unpacked(settings.table, _READING_ADVICE)
    if settings.encoding is None and (kind := kind_of_file(content)):
        raise UserError(f"{settings.table} is {kind}; save it as a CSV file in UTF-8")
    encoding = settings.encoding or encoding_of(content)
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        wanted = "UTF-8" if settings.encoding is None else encoding
        check.problems.append(
            f"line {line} is not {wanted}; name the --encoding, as cp1252 (western Windows)"
        )
        text = content.decode("latin-1")  # the other problems can be listed all the same
    said, header = source_tables.SEPARATOR_LINE.match(text), re.split(r"[\r\n]", text, maxsplit=1)[0]
    found = said[1] if said else max(",;\t|", key=header.count)
    return CsvFile(settings.table, text, _READING_ADVICE, settings.delimiter or found), encoding


def _columns(settings: Folder, table: CsvFile, check: TableCheck) -> dict[str, str]:
    """Content -> name of its column in the table."""
    header = table.header()
    named = {name: getattr(settings, f"{name}_column") for name in _COLUMNS}
    has_text = any(named[name] for name in TEXTS)
    if settings.text_only and (
        named["image"] or named["sex"] or named["age"] or settings.images or settings.views != VIEWS
    ):
        raise UserError(
            "--text_only has no images: leave out --image_column, --sex_column, --age_column, --images and --views"
        )
    # If an option names one kind of text, the other is not looked up by its default name.
    skipped = {"image", "view", *PEOPLE} if settings.text_only else set()
    if has_text:
        skipped |= {name for name in TEXTS if named[name] is None and (name == "text" or named["text"])}
    columns = {name: named[name] or name for name in _COLUMNS if named[name] or name not in skipped}
    columns = {name: column for name, column in columns.items() if column in header}
    labels = _label_columns(settings, header, check)
    needed = {
        "patient": "without it nothing keeps training and evaluation apart; name it by --patient_column"
    }
    if not settings.text_only:
        needed["image"] = "name it by --image_column, or pass --text_only"
    if not (has_text or {*TEXTS} & {*columns} or (labels and not settings.text_only)):
        needed["text"] = "name it by --text_column, or by --findings_column and --impression_column"
    if settings.views != VIEWS:
        needed["view"] = "--views chooses by it: name it by --view_column, or leave out --views"
    needed |= {name: f"--{name}_column names one that is there" for name in _COLUMNS if named[name]}
    for name in _COLUMNS:
        if name in needed and name not in columns:
            _lacks(check, named[name] or name, header, needed[name])
    if "text" in columns and ("findings" in columns or "impression" in columns):
        check.problems.append(
            "it has a column text beside findings or impression; say which to take by --text_column, or by "
            "--findings_column and --impression_column"
        )
    return columns | labels


def _label_columns(settings: Folder, header: Sequence[str], check: TableCheck) -> dict[str, str]:
    """Findings -> their columns: CheXpert's by name ("pleural_effusion" is "Pleural Effusion"), others as named."""
    found: dict[str, str] = {}
    common = {name: same_finding(name) for name in settings.label_columns}
    for finding in dict.fromkeys((*CHEXPERT, *common.values())):
        named = [name for name in settings.label_columns if common[name] == finding]
        alike = [name for name in header if plain_finding(name) == plain_finding(finding) or name in named]
        if len(alike) > 1:
            check.problems.append(f"expected one column of {finding}, found {' and '.join(alike)}; {_ADVICE}")
        if alike and (finding in CHEXPERT or {*alike} & {*named}):
            found[finding] = alike[0]
    for name, finding in common.items():
        if name not in found.values():
            _lacks(check, name, header, "--label_columns names columns that are there")
        elif name != finding:
            print(f"{settings.table}: the column {name} counts as the finding {finding}")
        if name in _RESERVED:
            check.problems.append(
                f"the column {name} of --label_columns has another meaning in a prepared set; rename it in the table"
            )
    return found


def _lacks(check: TableCheck, column: str, header: Sequence[str], advice: str) -> None:
    is_first = not any(" lacks the column " in problem for problem in check.problems)
    found = f"; found {source_tables.listed(header)[:300] or 'an empty file'}" if is_first else ""
    check.problems.append(f"it lacks the column {column}{found}; {advice}")


def _read(settings: Folder, table: CsvFile, columns: dict[str, str], check: TableCheck) -> Source:
    if unused := [name for name in table.header() if name not in columns.values()]:
        print(
            f"{table.file}: columns that are not used: {source_tables.listed(unused)} (--label_columns takes labels of "
            "findings)"
        )
    if not {*TEXTS} & {*columns}:
        print(
            f"{table.file}: no column of reports: a set of images and labels (--text_column names a report)"
        )
    root = settings.images if settings.images is not None else table.file.parent
    if not settings.text_only and not root.is_dir():
        raise UserError(f"--images {root} is not a folder")
    rows, placeholders = _cells(settings, table, columns, check)
    rows = _with_known_people(settings, rows)
    n_images = int((rows["image"] != "").sum())
    labels, unread = _labels(settings, rows[[name for name in columns if name not in _COLUMNS]], check)
    rows = rows.assign(**labels)
    if "split" in rows:
        splits = rows["split"].str.lower().map(SPLIT_NAMES)
        rows = check.require(rows, "split", splits.notna(), " | ".join(SPLITS)).assign(split=splits)
    if "patient" not in rows:
        check.finish()
    rows = check.require(rows, "patient", rows["patient"] != "", "a name in every row", refuse=False)
    digests = digests_of_rows(rows)
    if "study" not in rows:
        rows = rows.assign(study=[str(row - 1) for row in rows.index])
    named = {*rows["image"]}
    if "view" in rows:
        rows = _of_wanted_views(rows, settings, check)
    is_one = ~rows["image"].str.contains(_SEVERAL_IMAGES)
    rows = check.require(rows, "image", is_one, "one image in each row (write a row for each)")
    rows = row_tables.with_image_paths(rows, root, check)
    rows = rows.assign(**{name: "" for name in ("view", "split") if name not in rows})
    rows["file"] = find_files(rows["image"], root, named)
    others = n_images - int((rows["image"] != "").sum()) - [kind for kind, *_ in check.rejects].count("image")
    counts = {"images_in_release": n_images, "images_not_frontal": others, "placeholders": placeholders}
    counts |= {"labels_not_read": unread} if unread else {}
    source = row_tables.rows_source(rows, settings, check, counts)
    return replace(source, language=settings.language, rows=digests)


def _cells(
    settings: Folder, table: CsvFile, columns: dict[str, str], check: TableCheck
) -> tuple[pd.DataFrame, dict[str, int]]:
    """The rows of the table, in which placeholders are "", and the number of placeholders by content."""
    table.require_rows([columns[name] for name in ("patient", "image") if name in columns])
    cells, wrong = table.read(dict.fromkeys(columns.values()))
    # Two purposes may share a column: a table whose rows are studies of patients that it does not name.
    rows = pd.DataFrame({name: cells[column] for name, column in columns.items()})
    rows = _without_headers(rows, check)
    check.rejects += [("report", line.partition(":")[0], line) for line in wrong]
    if wrong and not settings.drop_bad_rows:
        check.problems.append(source_tables.unequal_lines(wrong))
    is_missing = rows.apply(source_tables.is_placeholder)
    for name in [name for name in _COLUMNS if name in rows]:  # "+" and "-" may be labels
        is_missing[name] |= ~rows[name].str.contains(r"[^\W_]") & (rows[name] != "")
    for name in [name for name in columns if name not in _COLUMNS]:
        is_missing[name] &= ~rows[name].str.casefold().isin([*(settings.label_values or ())])
    numbers = {str(name): int(number) for name, number in is_missing.sum().items() if number}
    if numbers:
        found = ", ".join(f"{columns[name]} {number:,}" for name, number in numbers.items())
        print(f"{table.file}: NaN, NULL, N/A and the like count as empty: {found}")
    rows = rows.mask(is_missing, "").assign(**{} if "image" in rows else {"image": ""})
    if (is_copy := rows.duplicated() & (rows["image"] != "")).any():
        print(f"{table.file}: rows that repeat an earlier one and are left out: {is_copy.sum():,}")
    rows = rows[~is_copy]
    for name in [name for name in TEXTS if name in rows]:
        rows = with_texts(rows, name, check)
    return rows, numbers


def _without_headers(rows: pd.DataFrame, check: TableCheck) -> pd.DataFrame:
    """The rows without those that repeat the header, as tables that were joined have them; these are said."""
    header = [check.columns[name].casefold() for name in map(str, rows)]
    plain = rows.apply(lambda column: column.str.casefold())
    is_header = plain.isin(header).all(axis=1) & (plain.nunique(axis=1) == len({*header}))
    if not is_header.any():
        return rows
    places = ", ".join(map(str, rows.index[is_header][: source_tables.SHOWN]))
    if (plain[is_header] == header).all(axis=None):
        check.warn(f"rows that repeat the header and are left out: {is_header.sum():,} (row {places})")
    else:
        check.problems.append(
            f"row {places} is a header of another order of columns: the rows below it are shifted"
        )
    return rows[~is_header]


def _labels(
    settings: Folder, cells: pd.DataFrame, check: TableCheck
) -> tuple[dict[str, pd.Series], dict[str, int]]:
    """Labels as numbers by finding, and the number of cells by finding that are not read: these are no labels.

    Cells that are not read are a problem of the table, unless bad rows are dropped and no class loses its cells: none
    of the values is in more than five cells and 1% of its column, and both a 1 and a 0 remain.
    """
    given = settings.label_values or {}
    labels, counts, found, is_lost, seen = {}, {}, [], False, {""}
    unread: Counter[str] = Counter()
    for finding in map(str, cells):
        words = (
            cells[finding].str.normalize("NFKC").str.replace("\u2212", "-").str.strip("='\" ").str.casefold()
        )
        seen |= {*words}
        numbers = source_tables.label_numbers(words.map({**_LABEL_WORDS, **given}).fillna(words))
        labels[finding] = numbers.replace(math.inf, math.nan)
        wrong = Counter(words[numbers == math.inf]).most_common()
        unread.update(dict(wrong))
        if not wrong:
            continue
        shown = [f"{value[: source_tables.SHORT]!r} {number:,}" for value, number in wrong]
        n_cells, counts[finding] = int((words != "").sum()), sum(number for _, number in wrong)
        found.append(
            f"column {check.columns[finding]}: expected {source_tables.LABELS}, found {shown[0]}"
            f"{source_tables.and_others(shown[1:])} ({counts[finding]:,} of {n_cells:,} cells)"
        )
        is_lost |= wrong[0][1] > max(5, 0.01 * n_cells) or not {0.0, 1.0} <= {*numbers}
    if unused := sorted(given.keys() - seen):
        check.warn(f"--label_values: no label column has {', '.join(unused)}")
    if found and settings.drop_bad_rows and not is_lost:
        check.warn(f"{'; '.join(found)}; these are no labels, their rows stay")
    elif found:
        named = [word for word, _ in unread.most_common(10)]
        unknown = {word: "?" for word in named if "," not in word and len(word) <= source_tables.SHORT}
        pairs = shlex.quote(",".join(f"{word}={label}" for word, label in {**unknown, **given}.items()))
        remedy = f", or give --label_values={pairs} with 1, 0, -1 or nothing (no label) for each ?"
        check.problems.append(f"{'; '.join(found)}; write labels in their place{remedy if unknown else ''}")
    return labels, counts


def _with_known_people(settings: Folder, rows: pd.DataFrame) -> pd.DataFrame:
    """Sexes by `Folder.sex_values`; V is a woman in a Dutch table, and "45 J." years in a Dutch or German one.

    A word in a column tells the language, or the section heads of most texts.
    """
    others = [rows[name] for name in rows if name not in ("image", "patient", "study", "age")]

    def tells(language: str, words: str) -> bool:
        heads = rf"(?im)^\W*(?:{'|'.join(WORDS[language].heads.values()).replace(', ', '|')})\W*:"
        cells = [column[column != ""].str for column in others]
        return any(c.fullmatch(words, case=False).any() or c.contains(heads).mean() > 0.5 for c in cells)

    languages = {settings.language} & {*_WORDS_OF} or {x for x, words in _WORDS_OF.items() if tells(x, words)}
    if "sex" in rows:
        sexes = {**({"v": "F"} if "nl" in languages else {}), **(settings.sex_values or {})}
        rows = rows.assign(sex=[sexes.get(word.strip(" .").casefold(), word) for word in rows["sex"]])
    if "age" in rows and languages:
        rows = rows.assign(age=rows["age"].str.replace(r"(?<=\d) ?J\.?$", "", case=False, regex=True))
    return rows


def standard_views(views: pd.Series) -> pd.Series:
    """AP, PA or FRONTAL for spellings such as "a.p.", "P/A" and "ap supine", OTHER for lateral and oblique views.

    "" for anything else: words that are not known, and names of several views.
    """
    plain = views.str.upper().str.replace(r"[\W_]+", " ", regex=True).str.replace(_POSITIONS, " ", regex=True)
    plain = plain.str.replace(_AP, "AP", regex=True).str.replace(_PA, "PA", regex=True)
    plain = plain.str.replace(r"\b(?:DE )?FACE\b", "FRONTAL", regex=True)
    plain = (
        plain.str.split()
        .str.join(" ")
        .str.replace(r"^FRONTAL (?=AP$|PA$)|(?<=^AP|^PA) FRONTAL$", "", regex=True)
    )
    return plain.where(plain.isin(VIEWS), plain.str.fullmatch(_OTHER_VIEWS).map({True: "OTHER", False: ""}))


def _of_wanted_views(rows: pd.DataFrame, settings: Folder, check: TableCheck) -> pd.DataFrame:
    """The rows of the views that `Folder.views` names, and those without an image; unknown views are rejects."""
    wanted = {view.upper() for view in settings.views}
    views = standard_views(rows["view"])
    views = views.mask(rows["view"].str.upper().isin(wanted), rows["view"])
    is_wanted = views.str.upper().isin(wanted) | (rows["image"] == "")
    expected = f"one of the views {', '.join(settings.views)} (option --views), or a known other one"
    if not is_wanted.any():
        check.problems.append(source_tables.wrong_values(rows["view"], ~is_wanted, expected))
        return rows
    rows = _shared_by_study(rows.assign(view=views.where(views != "", rows["view"])), is_wanted)
    rows = check.require(rows, "view", is_wanted | (views != ""), expected, refuse=False)
    return rows[is_wanted[rows.index]]


def _shared_by_study(rows: pd.DataFrame, is_frontal: pd.Series) -> pd.DataFrame:
    """Texts, labels, sex and age in all rows of their study: only the row of the lateral image may have the report."""
    rows = rows.copy()
    # Values of a frontal row take precedence.
    order = (~is_frontal).sort_values(kind="stable").index
    study = [rows.loc[order, "patient"], rows.loc[order, "study"]]
    columns = [name for name in (*TEXTS, *label_columns(rows)) if name in rows]
    cells, own = rows[columns].replace("", None), [rows["patient"], rows["study"]]
    wanted = cells.where(is_frontal, axis=0).groupby(own).transform("first")
    is_other = ((cells != wanted) & cells.notna() & wanted.notna()).any(axis=1) & ~is_frontal
    if n := len(rows.loc[is_other, ["patient", "study"]].drop_duplicates()):
        print(f"studies with other texts or labels in rows of other views, which do not count: {n:,}")
    for column in (*TEXTS, NO_REPORT, *PEOPLE, *label_columns(rows)):
        if column in rows:
            said = rows[column].replace("", None)
            shared = said.loc[order].groupby(study).transform("first").reindex(rows.index)
            rows[column] = rows[column].where(said.notna(), shared)
            if column in (*TEXTS, NO_REPORT, *PEOPLE):
                rows[column] = rows[column].fillna("")
    return rows
