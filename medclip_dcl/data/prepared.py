"""The format of a prepared data set: one folder that ``medclip-dcl prepare`` writes and everything later reads.

`TABLES` lists the tables; dataset.json has the format version, the source, the options, counts, and the digests and the
fingerprint of the content (`medclip_dcl.data.identity`).
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import digest, digest_of_file, parse_json, write_parquet
from medclip_dcl.common.findings import CHEXPERT, in_order
from medclip_dcl.common.formats import PREPARED_SET
from medclip_dcl.data.identity import IMAGE_DIGESTS, IMAGE_FILES, Content, current_content
from medclip_dcl.data.ranking import PARTS, Ranking
from medclip_dcl.data.shards import StoredImages, stored_images
from medclip_dcl.data.table_checks import REFERENCES, contradictions, damage, score_problem, some
from medclip_dcl.data.vectors import read_vectors, write_vectors

FORMAT_VERSION = PREPARED_SET.version
IDENTIFIERS = "identifiers.csv"
"""In a prepared set: the source's names of patients and studies that are not whole numbers, with their numbers."""

TABLES: dict[str, dict[str, str]] = {
    "images": {
        "dicom_id": "str",
        **dict.fromkeys(("subject_id", "study_id"), "int64"),
        **dict.fromkeys(("view", "official_split", "use", "path"), "str"),
        **dict.fromkeys(("height", "width"), "int64"),
    },
    "studies": {"study_id": "int64", "subject_id": "int64", "official_split": "str", "use": "str"},
    "sentences": {"sentence_id": "int64", "text": "str", "n_reports": "int64"},
    "reports": {"study_id": "int64", "section": "str", "position": "int64", "sentence_id": "int64"},
    "labels": {"study_id": "int64", **dict.fromkeys(CHEXPERT, "float64")},
    "cases": {"dicom_id": "str", "finding": "str", "label": "int64", "use": "str"},
    "boxes": {**dict.fromkeys(("dicom_id", "category", "phrase"), "str"), **dict.fromkeys("xywh", "float64")},
    "masks": {
        **dict.fromkeys(("dicom_id", "category", "phrase", "reader"), "str"),
        **dict.fromkeys(("height", "width"), "int64"),
        "counts": "str",
    },
    "classes": {"sentence_id": "int64", "class_id": "int64", "rho": "float64", "sentence_share": "float64"},
    "image_classes": {"dicom_id": "str", "class_id": "int64"},
    "log_p": {"sentence_id": "int64", "n_tokens": "int64", "log_p": "float64"},
    IMAGE_FILES: {"path": "str", "bytes": "int64", "digest": "str", "original_bytes": "int64"},
}
"""Table name -> column -> type ("str" columns hold no missing values).

"labels" may have further float64 columns, of findings beyond CheXpert's. Only sets of reports alone have "studies"; a
set without reports has neither "sentences" nor "reports". A box or mask without a phrase has the phrase ""; counts are
COCO run lengths, separated by blanks, of a mask of height x width pixels.
"""
_ALWAYS = ("images", "image_files", "sentences", "reports", "labels", "cases")

OPTIONAL: dict[str, dict[str, str]] = {"images": {"sex": "str", "age": "float64"}, "boxes": {"reader": "str"}}
"""Columns that follow those of `TABLES` where the source has them: sex, a value of `SEXES`; age at the study in years,
NaN where it is unknown; the reader who drew a box."""

SEXES = ("F", "M", "unknown")

_MADE_BY = {
    "boxes": "medclip-dcl prepare mimic-cxr with --ms_cxr FILE, or medclip-dcl prepare public",
    "masks": "medclip-dcl prepare public",
    "classes": "medclip-dcl prepare mimic-cxr on a phantom release (only there the truth is known)",
    "image_classes": "medclip-dcl prepare mimic-cxr on a phantom release (only there the truth is known)",
    "studies": "medclip-dcl prepare folder (or openi) with --text_only",
    "log_p": "medclip-dcl score SET --model FOLDER",
    "text_embedding": "medclip-dcl embed SET --model FOLDER",
    "ranking": "medclip-dcl rank SET",
    "posterior": "medclip-dcl rank SET --posterior",
}
# Folder with one file for each model -> what the files hold.
_BY_MODEL = {
    "log_p": "sentence scores",
    "text_embedding": "sentence embeddings",
    "ranking": "report rankings",
    "posterior": "report posteriors",
}
# Rows written at a time: 200 MB of BERT-base's embeddings.
_EMBEDDING_ROWS = 65_536
_SEAL = "medclip_dcl_seal"
_LABELS = "medclip_dcl_labels"
_INFO: dict[str, Any] = {"source": "", "options": {}, "counts": {}, "source_files": {}, "digests": {}}
"""Entries of dataset.json where it has none."""


class PreparedDataError(UserError):
    """A prepared data set is missing, broken, or not what the caller needs; the message says what to do."""


def columns_of(table: str, frame: Iterable[Any]) -> dict[str, str]:
    """Expected columns and types: with the optional ones among those of the frame, and findings of "labels"."""
    expected = TABLES[table]
    if table == "labels":
        return expected | {str(name): "float64" for name in frame if name not in expected}
    return expected | {name: kind for name, kind in OPTIONAL.get(table, {}).items() if name in frame}


def check_table(frame: pd.DataFrame, table: str) -> None:
    expected = columns_of(table, frame)
    if list(frame.columns) != list(expected):
        raise PreparedDataError(
            f"table {table}: expected the columns {list(expected)}, found {list(frame.columns)}"
        )
    for column, kind in expected.items():
        found = frame[column].dtype
        is_text = kind == "str" and all(isinstance(value, str) for value in frame[column])
        if not is_text and str(found) != kind:
            raise PreparedDataError(f"table {table}, column {column}: expected {kind}, found {found}")


def labelled_findings(labels: pd.DataFrame) -> list[str]:
    """Findings with a label in the table "labels", uncertain ones included; CheX5's first."""
    return in_order(labels.columns[1:][labels.iloc[:, 1:].notna().any()])


def case_table(images: pd.DataFrame, labels: pd.DataFrame, cases: str = "all") -> pd.DataFrame:
    """The table "cases": labels that are exactly 1 or 0, of test and validate images (SSD, section 3.2, for CheX5).

    Images of the official test split have use "test" even where they also serve grounding.

    Args:
        images: the table "images", or one with its columns.
        labels: the table "labels".
        cases: "all"; "balanced" leaves out, of each use and finding, the surplus of the commoner label (choice: those
            whose hashed dicom_id comes last, so that the draw depends on nothing else).
    """
    is_test = (images["official_split"] == "test") & images["use"].isin(["test", "grounding"])
    use = np.where(is_test, "test", "validate")
    evaluated = images[["dicom_id", "study_id"]].assign(use=use)[is_test | (images["use"] == "validate")]
    findings = labelled_findings(labels)
    long = evaluated.merge(labels, on="study_id").melt(
        id_vars=["dicom_id", "use"], value_vars=findings, var_name="finding", value_name="label"
    )
    long = long[long["label"].isin([0.0, 1.0])]
    if cases == "balanced":
        long = _balanced(long)
    order = {finding: place for place, finding in enumerate(findings)}
    long = long.sort_values(
        ["finding", "dicom_id"], key=lambda column: column.map(order) if column.name == "finding" else column
    )
    types = _pandas_types("cases")
    return long[list(types)].astype(types).reset_index(drop=True)


def _pandas_types(table: str) -> dict[str, str]:
    """Column -> type in pandas."""
    return {name: "object" if kind == "str" else kind for name, kind in TABLES[table].items()}


def _balanced(cases: pd.DataFrame) -> pd.DataFrame:
    """As many cases of label 1 as of label 0 for each use and finding."""
    draw = cases["dicom_id"].map(lambda name: hashlib.sha256(str(name).encode()).hexdigest())
    groups = [cases["use"], cases["finding"]]
    place = draw.groupby([*groups, cases["label"]]).rank(method="first")
    positive = (cases["label"] == 1).groupby(groups).transform("sum")
    negative = (cases["label"] == 0).groupby(groups).transform("sum")
    return cases[place <= np.minimum(positive, negative)]


def _read_table(file: Path, table: str, is_as_written: bool = False, **part: Any) -> pd.DataFrame:
    """A table, or the `part` of it that pandas is asked for; the format of another than was written is checked."""
    try:
        frame = pd.read_parquet(file, **part)
        if not is_as_written:
            check_table(frame, table)
    except (pa.ArrowException, OSError, PreparedDataError) as error:
        raise PreparedDataError(f"{file}: {error}; make it again: {_command_for(table)}") from error
    return frame


def _has_format(schema: pa.Schema, table: str) -> bool:
    expected = columns_of(table, schema.names)
    kinds = {pa.int64(): "int64", pa.float64(): "float64", pa.string(): "str", pa.large_string(): "str"}
    return dict(zip(schema.names, map(kinds.get, schema.types), strict=True)) == expected


def _command_for(table: str) -> str:
    return _MADE_BY.get(table, "medclip-dcl prepare mimic-cxr (or folder, openi, public: what made the set)")


def write_table(frame: pd.DataFrame, file: Path, table: str) -> None:
    """Check a table of the prepared set and write it as Parquet, atomically."""
    check_table(frame, table)
    write_parquet(frame, file)


def seal(scores: pd.DataFrame, sentences: pd.DataFrame) -> dict[str, str]:
    """Attribute of sentence scores by which later changes of them, or of the sentences' texts, are noticed."""
    columns = (scores[name].to_numpy().tobytes() for name in TABLES["log_p"])
    return {_SEAL: digest(*columns, _texts(sentences))}


def seal_of_texts(sentences: pd.DataFrame) -> dict[str, str]:
    """Attribute of sentence embeddings by which later changes of the sentences' texts are noticed."""
    return {_SEAL: digest(_texts(sentences))}


def _texts(sentences: pd.DataFrame) -> bytes:
    return "\n".join(sentences.sort_values("sentence_id")["text"]).encode()


class TextEmbedding(NamedTuple):
    """Embeddings (sentence, dim), not normalised, of all sentences by one text encoder; sentence_id ascends."""

    sentence_id: np.ndarray
    embedding: np.ndarray


def report_embedding(sentences: TextEmbedding, reports: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """study_id, ascending, of a table "reports", and the mean (study, dim) over each report's distinct sentences."""
    from scipy.sparse import csr_matrix

    said = reports[["study_id", "sentence_id"]].drop_duplicates()
    studies, study = np.unique(said["study_id"].to_numpy(), return_inverse=True)
    column = np.searchsorted(sentences.sentence_id, said["sentence_id"].to_numpy())
    share = (1 / np.bincount(study, minlength=len(studies)))[study].astype(np.float32)
    mean = csr_matrix((share, (study, column)), shape=(len(studies), len(sentences.sentence_id)))
    return studies, mean @ sentences.embedding


def write_text_embedding(embedding: TextEmbedding, file: Path, metadata: Mapping[str, str]) -> None:
    """Write sentence embeddings as Parquet, atomically: sentence_id, and embedding as fixed-size lists of float32."""
    ids, values = embedding.sentence_id, np.ascontiguousarray(embedding.embedding, dtype=np.float32)
    parts = (slice(row, row + _EMBEDDING_ROWS) for row in range(0, max(1, len(ids)), _EMBEDDING_ROWS))
    write_vectors(({"sentence_id": ids[part], "embedding": values[part]} for part in parts), file, metadata)


def _broken(file: Path, kind: str, problem: object) -> PreparedDataError:
    return PreparedDataError(
        f"{file}: {problem}; correct the file, or delete it and make it again with: {_MADE_BY[kind]}"
    )


class PreparedSet:
    """A prepared data set, opened for reading; `info` is its dataset.json."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        file = self.folder / "dataset.json"
        if not file.is_file():
            unfinished = "holds no dataset.json (not a prepared set, or unfinished)"
            state = unfinished if self.folder.is_dir() else "does not exist"
            raise PreparedDataError(
                f"prepared data set {self.folder} {state}; make it with: "
                f"medclip-dcl prepare mimic-cxr --source RAW --output {self.folder} (or folder, openi, public)"
            )
        try:
            info = parse_json(file.read_text(encoding="utf-8"))
            PREPARED_SET.check(info, "format")
        except ValueError as error:  # a UserError is one
            raise PreparedDataError(f"{file}: {error}; prepare the set again into a new folder") from error
        self.info: dict[str, Any] = {**_INFO, **info}
        self._tables: dict[str, pd.DataFrame] = {}
        self._sound: set[str] = set()

    @cached_property
    def changed_tables(self) -> dict[str, str]:
        """Digests ("": missing) of the tables that are not as they were written."""
        now = {name: digest_of_file(self.folder / f"{name}.parquet") for name in TABLES}
        return {name: found for name, found in now.items() if found != self.info["digests"].get(name, "")}

    @cached_property
    def content(self) -> Content:
        return current_content(self.folder, self.info, self.changed_tables)

    def take_content(self, content: Content) -> None:
        """Take the content that another process of this machine has found, in place of looking again."""
        self.content, self.changed_tables = content, content.tables

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the tables, the order of their rows and the pixels as they are now."""
        return self.content.fingerprint

    @property
    def changes(self) -> str:
        """A warning about changes since the set was written; "" for none."""
        changed = [*(f"{name}.parquet" for name in self.content.tables), *self.content.images]
        if not (changed and self.info["digests"]):
            return ""
        return (
            f"{some(f'{self.folder} was changed after it was prepared', changed)[0]}: it counts as another set, of "
            f"fingerprint {self.fingerprint}; medclip-dcl check {self.folder} looks for damage"
        )

    def image_digests(self) -> pd.DataFrame:
        """Rows of `IMAGE_DIGESTS` for each image; none without the table "image_files"."""
        if not self.has(IMAGE_FILES):
            return pd.DataFrame(columns=IMAGE_DIGESTS)
        images = self.table("images").merge(self.table(IMAGE_FILES), on="path")
        changed = images["path"].map(self.content.images)
        now = images["digest"].mask(changed.notna(), changed)
        height, width, size = (images[name].astype(str) for name in ("height", "width", "original_bytes"))
        images = images.assign(digest=now, original=height + " x " + width + ", " + size, family=self.family)
        names = self.patient_names(images["subject_id"])
        of_name = {name: digest(name.encode()) if self.names_patients else None for name in names.unique()}
        return images.assign(patient=names.map(of_name))[IMAGE_DIGESTS]

    def patient_names(self, subject_id: pd.Series) -> pd.Series:
        """Names of patients in the source: by `IDENTIFIERS`, which must be as it was written, else the numbers."""
        file, names = self.folder / IDENTIFIERS, subject_id.astype(str)
        is_changed = self.info.get("identifiers") not in (None, digest_of_file(file))
        if file.is_file() and not is_changed:
            table = pd.read_csv(file, dtype=str, keep_default_na=False).query("kind == 'patient'")
            names = names.map(dict(zip(table["number"], table["name"], strict=True))) if len(table) else names
        if is_changed or names.isna().any():
            raise PreparedDataError(
                f"{file}: expected the names of all patients as they were written, by which patients are compared with "
                "those of other sets; prepare the set again into a new folder"
            )
        return names

    @property
    def family(self) -> str:
        """Source whose names of patients hold in every set of it, such as "PadChest" in PadChest-GR.

        "" for a table of one's own, whose names may be another hospital's as well, and for a phantom.
        """
        source, options = self.info["source"], self.info["options"]
        if "names_patients" in options:  # a public set
            return [source, *options.get("images_of", [])][-1]
        return "mimic-cxr" if source.startswith("mimic-cxr") and not self.is_phantom else ""

    @property
    def is_phantom(self) -> bool:
        """True if the set comes from the digital phantom: no patient data, the truth is known."""
        return self.info.get("phantom") is True

    @property
    def names_patients(self) -> bool:
        """False if the source names no patients, so that each image counts as one."""
        return self.info.get("options", {}).get("names_patients", True)

    def has(self, table: str) -> bool:
        return (self.folder / f"{table}.parquet").is_file()

    def table(self, table: str) -> pd.DataFrame:
        """One table of `TABLES`, checked and read once; do not change it in place."""
        self.check(table)
        return self.unchecked_table(table)

    def rows(self, table: str, columns: list[str] | None = None, **values: Iterable[Any]) -> pd.DataFrame:
        """The rows of a table whose columns have one of these values, checked as `table` checks, and not kept."""
        some = {name: list(given) for name, given in values.items()}
        if table in self._tables or not self._is_as_written(table) or not all(some.values()):
            frame = self.table(table)
            for name, given in some.items():
                frame = frame[frame[name].isin(given)]
            return frame.reset_index(drop=True) if columns is None else frame[columns].reset_index(drop=True)
        self.check(table)
        filters = [(name, "in", given) for name, given in some.items()] or None
        part = {"columns": columns, "filters": filters}
        return _read_table(self.folder / f"{table}.parquet", table, is_as_written=True, **part)

    def check(self, table: str) -> None:
        """Refuse a damaged table (`table_checks.damage`), unless it and those it refers to are as they were written."""
        if table in self._sound:
            return
        beside = [name for name in REFERENCES.get(table, ()) if name in TABLES and self.has(name)]
        if not all(map(self._is_as_written, [*beside, table])):
            problems = damage(table, {name: self.unchecked_table(name) for name in [*beside, table]})
            if problems:
                raise PreparedDataError(
                    f"{self.folder}: {'; '.join(problems)}; correct the table, or prepare the set again into a new "
                    f"folder (all problems: medclip-dcl check {self.folder})"
                )
        self._sound.add(table)

    def _is_as_written(self, table: str) -> bool:
        """True for a table with the digest of dataset.json and the columns of `TABLES`."""
        if table not in self.info["digests"] or table in self.changed_tables:
            return False
        return _has_format(pq.read_schema(self.folder / f"{table}.parquet"), table)

    def forget_tables(self) -> None:
        """Free the memory of the tables that were read."""
        self._tables.clear()
        pa.default_memory_pool().release_unused()

    def unchecked_table(self, table: str) -> pd.DataFrame:
        """As `table`, of the right format but with any damage in its rows."""
        if table not in self._tables:
            file = self.folder / f"{table}.parquet"
            made = self.info["digests"]  # none: it is not known which tables the set had
            if not file.is_file() and table in ("sentences", "reports") and made and table not in made:
                types = _pandas_types(table)
                self._tables[table] = pd.DataFrame({name: pd.Series(dtype=x) for name, x in types.items()})
                return self._tables[table]
            if not file.is_file():
                raise PreparedDataError(
                    f"{self.folder} has no table {table}.parquet; create it with: {_command_for(table)}"
                )
            self._tables[table] = _read_table(file, table, self._is_as_written(table))
        return self._tables[table]

    @cached_property
    def findings(self) -> list[str]:
        return labelled_findings(self.rows("labels"))

    def studies(self, use: str) -> pd.Series:
        """Numbers (study_id) of the studies of one use: of its images, or of its reports in a set of text alone."""
        if self.has("studies"):
            return self.rows("studies", ["study_id"], use=[use])["study_id"]
        return self.rows("images", ["study_id"], use=[use])["study_id"].drop_duplicates()

    def log_p(self, name: str | None = None) -> pd.DataFrame:
        """Sentence scores of one language model: columns sentence_id, n_tokens, log_p (natural logarithm).

        `name` is the stem of a file in ``log_p/``; None takes the only one there. A sentence without tokens has log_p
        NaN, which the caller refuses.
        """
        frame = _read_table(file := self.file_of_model("log_p", name), "log_p")
        problem = self._without_row(frame["sentence_id"]) or score_problem(frame)
        kept = frame.attrs.get(_SEAL)
        if not problem and kept is not None and kept != seal(frame, self.table("sentences"))[_SEAL]:
            problem = (
                "expected scores and texts as they were scored, found that one was changed since (a file of your own "
                f"needs no attribute {_SEAL})"
            )
        if problem:
            raise _broken(file, "log_p", problem)
        return frame

    def text_embedding(self, name: str | None = None) -> TextEmbedding:
        """Sentence embeddings by one frozen text encoder, of the named or the only file in ``text_embedding/``."""
        file = self.file_of_model("text_embedding", name)
        columns = {"sentence_id": "int64", "embedding": "float32"}
        seal = seal_of_texts(self.table("sentences"))
        return TextEmbedding(*self._vectors("text_embedding", file, columns, seal, may_lack_seal=True))

    def ranking(self, name: str | None = None, kind: str = "ranking") -> Ranking:
        """Ranking of reports for each sentence, or posterior, of the named or the only file in the folder `kind`."""
        (file, of_reports), seal = self.ranking_files(name, kind), self.seal_of_reports()
        part, size, number = PARTS[kind]
        columns = {"sentence_id": "int64", "vector": number, part: number}
        sentence_id, *parts = self._vectors(kind, file, columns, seal)
        columns = {"study_id": "int64", "vector": number}
        study_id, reports = self._vectors(kind, of_reports, columns, seal)
        if (sizes := [part.shape[1] for part in parts]) != [reports.shape[1], size]:
            problem = f"expected vectors of {reports.shape[1]} numbers, as of reports, and {size} of {part}"
            raise _broken(file, kind, f"{problem}, found {sizes}")
        labels = (pq.read_schema(file).metadata or {}).get(_LABELS.encode())
        if labels is not None and labels != self.seal_of_labels()[_LABELS].encode():
            raise _broken(file, kind, "labels.parquet is not what it was learned from")
        needed = self.table("reports")["study_id"]
        needed = needed[needed.isin(pd.concat([self.studies("train"), self.studies("validate")]))]
        if missing := needed[~needed.isin(study_id)].nunique():
            raise _broken(of_reports, kind, f"{missing} of {needed.nunique()} reports have no row")
        return Ranking(sentence_id, np.concatenate(parts, axis=1), study_id, reports)

    def _vectors(
        self,
        kind: str,
        file: Path,
        columns: Mapping[str, str],
        seal: Mapping[str, str],
        may_lack_seal: bool = False,
    ) -> list[np.ndarray]:
        """Keys and vectors of a file, of all sentences if these are the keys."""
        try:
            found = read_vectors(file, columns, may_lack_seal)
            kept = (pq.read_schema(file).metadata or {}).get(_SEAL.encode())
        except (pa.ArrowException, ValueError, OSError) as error:
            raise _broken(file, kind, error) from error
        problem = self._without_row(found[0]) if "sentence_id" in columns else ""
        if not problem and kept != seal[_SEAL].encode() and not (may_lack_seal and kept is None):
            problem = (
                f"expected {_BY_MODEL[kind]} of the set's texts, found others, or texts were changed since"
            )
        if problem:
            raise _broken(file, kind, problem)
        return found

    def ranking_files(self, name: str | None = None, kind: str = "ranking") -> tuple[Path, Path]:
        """Files of sentences and of reports."""
        file = self.file_of_model(kind, name)
        return file, self.folder / f"{kind}_reports" / file.name

    def seal_of_labels(self) -> dict[str, str]:
        """Attribute of posteriors: digest of the table "labels", which they depend on."""
        labels = self.table("labels")
        columns = (labels[name].to_numpy().tobytes() for name in labels)
        return {_LABELS: digest(str([*labels]).encode(), *columns)}

    def seal_of_reports(self) -> dict[str, str]:
        """Attribute of rankings: digest of the texts, the reports, and which of them are of training."""
        reports, train = self.table("reports"), np.sort(self.studies("train").to_numpy())
        rows = (reports[name].to_numpy().tobytes() for name in ("study_id", "sentence_id"))
        return {_SEAL: digest(_texts(self.table("sentences")), *rows, train.tobytes())}

    def readable_tables(self) -> tuple[dict[str, pd.DataFrame], list[str]]:
        """The readable tables of the right format, and the problems of the others."""
        tables, problems = {}, []
        for name in TABLES:
            if self.has(name) or name in _ALWAYS:
                try:
                    tables[name] = self.unchecked_table(name)
                except PreparedDataError as error:
                    problems.append(str(error))
        return tables, problems

    def table_problems(self, tables: Mapping[str, pd.DataFrame]) -> list[str]:
        """Problems of the tables of a set, all of them readable."""
        changed = ", ".join(self.content.tables)
        problems = [f"changed, added or removed after the set was made: {changed}"] if changed else []
        problems += [problem for name in tables for problem in damage(name, tables)]
        images, labels = (tables[name].drop_duplicates() for name in ("images", "labels"))
        try:
            self.patient_names(images["subject_id"])
        except PreparedDataError as error:
            problems.append(str(error))
        cases = case_table(images, labels, self.info["options"].get("cases", "all"))
        return problems + contradictions(tables, cases)

    def score_problems(self) -> list[str]:
        """Scores and embeddings that are not readable, or do not cover all sentences."""
        problems = []
        kinds = {"log_p": self.log_p, "text_embedding": self.text_embedding, "ranking": self.ranking}
        kinds["posterior"] = partial(self.ranking, kind="posterior")
        read: Callable[[str], object]
        for kind, read in kinds.items():
            for name in self.models(kind):
                try:
                    read(name)
                except PreparedDataError as error:
                    problems.append(str(error))
        return problems

    def models(self, kind: str) -> list[str]:
        """Names of the files in the folder of a kind, such as "log_p"."""
        files = (self.folder / kind).glob("*.parquet")
        return sorted(file.stem for file in files if not file.name.startswith("."))

    def file_of_model(self, kind: str, name: str | None = None) -> Path:
        """The named or the only file in the folder of a kind, such as "log_p"."""
        names = self.models(kind)
        chosen = [found for found in names if name in (None, found)]
        if len(chosen) == 1:
            return self.folder / kind / f"{chosen[0]}.parquet"
        what, named = _BY_MODEL[kind], f" named {name} in {kind}" if name else ""
        others = f" (there: {', '.join(names)}); name one (the option {kind}), or" if names else ";"
        raise PreparedDataError(
            f"{self.folder} has {'several' if chosen else 'no'} {what}{named}{others} create {what.split()[1]} with: "
            f"{_MADE_BY[kind]}"
        )

    def _without_row(self, ids: pd.Series | np.ndarray) -> str:
        """A problem with the sentences of the set that have no row in a file; "" for none."""
        missing = ~self.table("sentences")["sentence_id"].isin(ids)
        return f"{int(missing.sum())} of {len(missing)} sentences have no row" if missing.any() else ""

    @property
    def fitting(self) -> tuple[str, int | None]:
        """Geometry (`medclip_dcl.pictures.geometry.GEOMETRIES`) and size in pixels, if known, of the fitted images."""
        options = self.info["options"]
        return options.get("geometry", "stretch"), options.get("size")

    def stored_images(self, paths: Sequence[str]) -> StoredImages:
        """Images of these paths of the table "images", in this order, encoded as they are stored."""
        return stored_images(self.folder, paths)

    def read_image(self, path: str) -> bytes:
        """The JPEG file of an image, by its path in the table "images"."""
        return self.stored_images([path])[0]

    def open_image(self, path: str) -> Image.Image:
        """An image, by its path in the table "images"."""
        return Image.open(io.BytesIO(self.read_image(path)))

    @cached_property
    def patients_in_training_and_evaluation(self) -> list[int]:
        """Patients both in training and in evaluation; training refuses a set with any."""
        shared: set[int] = set()
        for table in ("images", "studies"):
            if table == "images" or self.has(table):
                of = self.rows(table, ["subject_id", "use"])
                held_out = of.loc[of["use"].isin(("validate", "test", "grounding")), "subject_id"]
                shared |= set(of.loc[of["use"] == "train", "subject_id"]) & set(held_out)
        return sorted(shared)

    def require_separate_patients(self) -> None:
        """Refuse to train on a set in which a patient is in training and in evaluation."""
        if both := self.patients_in_training_and_evaluation:
            raise PreparedDataError(
                f"{self.folder}: {len(both)} patients are both in training and in evaluation (first: {both[0]}); "
                "run the command that made the set again"
            )
