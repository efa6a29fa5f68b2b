"""Spellings of one name: of a patient, a study or an image, in tables and on disk."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import pandas as pd

from data_prep.sources.prepared_images import listed_files
from medclip_dcl.common.files import file_states
from medclip_dcl.pictures.image_file import ENDINGS

# Characters without ink that Unicode does not count as format characters.
_UNSEEN = {*map(chr, (0x34F, 0x115F, 0x1160, 0x2800, *range(0xFE00, 0xFE10)))}
_ONE_SIGN = str.maketrans("\u2212\u2043\u2018\u2019\u02bc\u00b4", "--''''")
_WRAPPING = " =\"'`\u201c\u201d\u201e\u201a\u00ab\u00bb"
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")


def plain_name(name: str) -> str:
    """The same for all spellings of a name.

    By NFKC, without characters that are not seen, ="..." or quotes around it, doubled blanks, and commas between groups
    of three digits, and with one sign for all dashes. Case and leading zeros stay, see `plain_number`.
    """
    if not (name.isascii() and name.isprintable()):
        name = unicodedata.normalize("NFKC", name.translate(_ONE_SIGN)).translate(_ONE_SIGN)
        name = "".join(map(_plain_character, name))
    name = " ".join(name.split()).strip(_WRAPPING)
    return _THOUSANDS.sub(lambda match: match[0].replace(",", ""), name) if "," in name else name


def _plain_character(character: str) -> str:
    if character.isspace():
        return " "
    category = unicodedata.category(character)
    if category in ("Cc", "Cf") or character in _UNSEEN:
        return ""
    if category == "Nd":
        return str(unicodedata.decimal(character))
    return "-" if category == "Pd" else character


def plain_number(name: str) -> str:
    """`plain_name` without case and, of a number, without leading zeros and decimals: "007" and "7,0" are "7"."""
    return re.sub(r"^0*([0-9]+)(?:[.,]0+)?$", r"\1", plain_name(name).casefold())


def plain_image(name: str) -> str:
    """`plain_name` of an image without case and without its ending."""
    return ENDINGS.sub("", plain_name(name)).casefold()


def as_spelled(names: Iterable[str], known: Collection[str]) -> list[str]:
    """The names of images as `known` spells them, where one alone of it has another spelling, case or ending."""
    known = {*known}
    spelled = _only_ones(known, plain_image)
    return [name if name in known else spelled.get(plain_image(name), name) for name in names]


def code_points(name: str) -> str:
    """The characters of a name that may look like others: " (U+2010)"; "" for none."""
    points = [f"U+{ord(c):04X}" for c in dict.fromkeys(name) if not (c.isascii() and c.isprintable())]
    return f" ({', '.join(points[:5])}{', ...' * (len(points) > 5)})" if points else ""


def find_files(images: pd.Series, root: Path, others_of: Collection[str] = ()) -> pd.Series:
    """Paths of images named relative to `root`; `others_of` are names of images that are not wanted.

    A file that is not there is looked for under another spelling or case of its name, then under another ending. It is
    taken where one file alone has it, which no other image names, and said.
    """
    named = {name: root / name for name in images.unique()}
    states = file_states([*map(str, named.values())])
    # Also of a file in a closed folder.
    if missing := [name for name, (size, _) in zip(named, states, strict=True) if name and size < 0]:
        files = [file for file in listed_files(root) if ENDINGS.search(file.name) or not file.suffix]
        taken = {*named, *others_of}
        others = [name for file in files if (name := file.relative_to(root).as_posix()) not in taken]
        ways: dict[str, Callable[[str], str]] = {
            "by another spelling": lambda name: plain_name(name).casefold(),
            "by another ending": plain_image,
        }
        for way, key in ways.items():
            wanted, there = _only_ones(missing, key), _only_ones(others, key)
            found = {wanted[plain]: there[plain] for plain in wanted if plain in there}
            if found:
                first, file = next(iter(found.items()))
                print(f"{root}: images found {way}: {len(found):,} (first: {first!r} is {file!r})")
            named |= {name: root / file for name, file in found.items()}
            missing = [name for name in missing if name not in found]
            others = sorted({*others} - {*found.values()})
    return images.map({name: str(file) for name, file in named.items()})


def _only_ones(names: Iterable[str], key: Callable[[str], str]) -> dict[str, str]:
    """Key -> name, of the names that share their key with no other."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(key(name), []).append(name)
    return {plain: alike[0] for plain, alike in found.items() if len(alike) == 1}
