"""Marks that an export leaves in report text: escapes of Excel, HTML and HL7, RTF, and invisible characters.

Only known ones are taken off: "~3 cm", "<5 mm", "R&D", "^" and "|" stay. Heads of Markdown become heads before a colon,
and words that a line's end divides are joined.
"""

from __future__ import annotations

import re
import unicodedata
from html import unescape
from html.entities import html5

PLACEHOLDER = (
    r"-?nan|\(?null\)?|nil|none|n/?a|n\.a|<na>|nat|\\n|#n/?[av]|#[a-z/]+0?[!?]|undefined|missing|unk(?:nown)?|unbekannt"
    r"|anonym(?:ous|i[sz]ed)"
)
"""Words of exports and spreadsheets that alone in a cell stand for a missing value."""

_BLOCK = r"p|div|tr|li|[uod]l|d[dt]|h[1-6r]|table|t(?:head|body|foot)|pre|center|head|html|body|paragraph|list|item"
_INLINE = r"[biusa]|em|strong|font|span|su[bp]|small|big|strike|del|ins|img|meta|link|style|script|title"
_TAG = re.compile(
    rf"<(?:/?(?:(?P<line>br)|(?P<block>{_BLOCK})|(?P<cell>t[dh])|{_INLINE}|[a-z]\w*:\w+)"
    r"""(?:\s+(?:nowrap|[\w:-]+\s*=\s*(?:"[^"]*"|'[^']*'|[^\s"'<>]+)))*\s*/?|!doctype[^<>]*)>|<!\[CDATA\[|\]\]>""",
    re.IGNORECASE,
)
_INSTEAD = {"line": "<br>", "block": "<p>", "cell": " "}
# No text of the report stands between these.
_UNSEEN = re.compile("(?i)<!--|<(?:style|script|title)(?: [^<>]*)?>")
_UNSEEN_END = re.compile("(?i)-->|</(?:style|script|title)>")
_ENTITY = re.compile(r"&(?:#\d{1,7};?|#[xX][0-9a-fA-F]{1,6};?|(?P<name>[A-Za-z][A-Za-z0-9]{1,31};))")
_EXCEL = re.compile(r"_x(?!D[89A-F])([0-9A-F]{4}|000[ad])_")
_HL7 = re.compile(r"\\(?:([FSTREHN])|X((?:[0-9A-Fa-f]{2})+)|\.(?i:(br|sp|ce|sk)|in|ti|fi|nf)[+-]?\d*)\\")
_HL7_SIGNS = {"F": "|", "S": "^", "T": "&", "R": "~", "E": "\\"}

# A group without groups in it, and the beginning of one that is no text.
_RTF_GROUP = re.compile(r"(?<!\\)\{((?:[^{}\\]|\\.)*+)\}", re.DOTALL)
_RTF_UNSEEN = re.compile(
    r"[\s\0]*\\(?:\*|(?:fonttbl|colortbl|stylesheet|info|pict|object|header|footer|fldinst)\b)"
)
_RTF = re.compile(
    r"(?s)\\'([\da-fA-F]{2})|\\u(-?\d{1,5}) ?(?:\?|\\'\w\w)?|\\([a-zA-Z]+)(?:-?\d+)? ?|\\(.)|[{}]"
)
_RTF_CHARACTERS = {
    **dict.fromkeys(("par", "line", "sect", "page", "row"), "\n"),
    **dict.fromkeys(("tab", "cell", "~"), " "),
    **{"\\": "\\", "{": "{", "}": "}", "_": "-", "emdash": "—", "endash": "–", "bullet": "•"},
    **{"lquote": "'", "rquote": "'", "ldblquote": '"', "rdblquote": '"'},
}
# In a text that is not a whole document. Bytes stand beside words only: "l\'absence" is French.
_RTF_WORD = re.compile(
    r"\\(?:(par|line)|pard|plain|tab|[bi]0?|ul(?:none)?|q[lcrj]|(?:fs?|cf|lang|s[abl]|[fl]i|uc|highlight)-?\d+)"
    r"(?![A-Za-z0-9])"
)
_RTF_BYTE = re.compile(r"\\'([0-9a-fA-F]{2})")
_CHARACTERS = {
    "": re.compile("[\x00-\x08\x0e-\x1b\x7f\xad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]"),
    "\n": re.compile("[\x0b\x0c\x85\u2028]"),
    " ": re.compile("[\x1c-\x1f\xa0\u2000-\u200a\u202f\u3000]"),
}
# Ligatures, and letters and digits of full width.
_WIDE = re.compile("[\ufb00-\ufb06\uff10-\uff19\uff21-\uff3a\uff41-\uff5a]")
_MARKDOWN_HEAD = re.compile(
    r"^[ \t]*#{1,6}[ \t]+([^\W\d_][^\n:.#]{0,60}?)[ \t]*:?[ \t]*#*[ \t]*$", re.MULTILINE
)
# "pneumo-" / "thorax"; the hyphen stays in "left-" / "sided" and "Ober-" / "und".
_DIVIDED = re.compile(
    "\xad[ \t]*\r?\n[ \t]*"
    r"|(?P<before>[^\W_]{1,40})[-\u2010][ \t]*\r?\n[ \t]*(?=(?P<behind>[^\W_]{1,40}))"
    r"(?!(?i:und|oder|bzw|or|and|et|y|e|to|no|not|new|the|there|is|are|with|likely|which|unchanged|stable)\b)"
)
_STAYS = re.compile(
    r"\b(?:left|right|upper|lower|middle|broad|cross|well|ill|mid|non|semi|post|pre|follow|x|air|self|low|high|small|large|two|three|one|single|half|so|soft"
    r"|long|short|full|fluid|free|day|year|week|month|old|poorly|thin|thick|ground|tree|end|check|work|wide)$"
    r"|^(?:sided|up|rays?|year|old|day|like|type|shaped|sized|based|related|defined|filled|appearing|glass|tube|line|spectrum)\b",
    re.IGNORECASE,
)


def plain_text(text: str) -> str:
    """The text without marks of an export; the letters and line breaks that they stand for take their place."""
    text = _EXCEL.sub(lambda match: chr(int(match[1], 16)), text)
    if "\\" in text:
        before, *document = re.split(r"\{\\rtf\d* ?", _HL7.sub(_of_hl7, text), maxsplit=1)
        text = before + "".join(map(_of_rtf, document))
        text, n_words = _RTF_WORD.subn(lambda match: "\n" if match[1] else " ", text)
        text = _RTF_BYTE.sub(lambda match: _of_byte(match[1]), text) if n_words else text
        text = re.sub(r"\\(?=['\"])", "", text)
    for _ in range(2):  # "&amp;lt;"
        text = _ENTITY.sub(lambda m: m[0] if m["name"] and m["name"] not in html5 else unescape(m[0]), text)
    first, *others = _UNSEEN.split(text)
    text = first + "".join(_UNSEEN_END.split(other, maxsplit=1)[-1] for other in others)
    text = _TAG.sub(lambda match: _INSTEAD.get(match.lastgroup or "", ""), text)
    text = _MARKDOWN_HEAD.sub(r"\1:", _DIVIDED.sub(_joined, text))
    text = _WIDE.sub(lambda match: unicodedata.normalize("NFKC", match[0]), text)
    for instead, character in _CHARACTERS.items():
        text = character.sub(instead, text)
    return unicodedata.normalize("NFC", text)


def _joined(match: re.Match[str]) -> str:
    """The words that a hyphen at a line's end divides, with the hyphen if it belongs to them."""
    before, behind = match["before"] or "", match["behind"] or ""
    if behind[:1].isupper() and not (before + behind).isupper():
        return match[0]
    stays = _STAYS.search(before) or _STAYS.match(behind)
    # "piperacillin-" / "tazobactam" and "gastro-" / "duodenoscopy", "T8-" / "T9", "AP-" / "portable"
    is_long = len(before + behind) > 20 and not before.endswith("o")
    is_code = not (before + behind).isalpha() or before[-1:].isupper() != behind[:1].isupper()
    return f"{before}-" if stays or is_long or is_code else before


def _of_hl7(match: re.Match[str]) -> str:
    sign, code, line = match.groups()
    if code:
        return bytes.fromhex(code).decode("utf-8", "replace")
    return "\\.br\\" if line else _HL7_SIGNS.get(sign, "")


def _of_byte(code: str, page: str = "1252") -> str:
    try:
        return bytes.fromhex(code).decode(f"cp{page}", "replace")
    except LookupError:
        return _of_byte(code)


def _of_rtf(document: str) -> str:
    """Text of an RTF document, from behind its first word."""
    document = re.sub(r"[\r\n]+", "\0", document)
    page = re.search(r"\\ansicpg(\d{1,5})", document)
    for _ in range(20):  # groups in groups; "\0" ends a word
        document = _RTF_GROUP.sub(lambda m: "" if _RTF_UNSEEN.match(m[1]) else f"\0{m[1]}\0", document)

    def meant(match: re.Match[str]) -> str:
        byte, code, word, sign = match.groups()
        if byte:
            return _of_byte(byte, page[1] if page else "1252")
        return chr(int(code) % 0x10000) if code else _RTF_CHARACTERS.get(word or sign, "")

    return _RTF.sub(meant, document).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
