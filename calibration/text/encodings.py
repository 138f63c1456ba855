"""Which encoding a file is in, told from its bytes or refused. charset-normalizer judges candidates, letters decide between them.

Takes: bytes. Gives: a name that Python knows, or None where two readings are about as good. Does not know about: files, rows.
"""

import codecs
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import BinaryIO

from charset_normalizer import from_bytes
from charset_normalizer.constant import FREQUENCIES

_BOMS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_SINGLE = (
    "cp1252",
    "cp1250",
    "iso8859_2",
    "cp1254",
    "cp1257",
    "cp1251",
    "koi8_r",
    "cp866",
    "cp1253",
    "cp1255",
    "cp1256",
    "cp874",
)
_MULTIPLE = ("gb18030", "cp950", "cp949", "cp932", "euc_jp")
_WIDE = ("utf_16_le", "utf_16_be", "utf_32_le", "utf_32_be")
_NAMES = {"gb18030": "GB18030", "cp950": "Big5", "cp949": "EUC-KR", "cp932": "Shift_JIS", "euc_jp": "EUC-JP", "cp874": "TIS-620"}
_SAMPLE = 2**16  # bytes of lines that are not ASCII, looked at
_SCANNED = 2**26  # bytes searched for such lines
_JUDGED = 4000  # characters of a candidate's reading that are judged
_GOOD = 0.85  # a reading below this score is no guess
_APART = 0.08  # how much better than the next different reading it must be
_FREQUENCY = 0.3  # weight of the letters' frequency
_WESTERN = 0.09  # in favour of Windows-1252, where other Latin encodings read as well: by far the most common
_UTF8_SHARE = 0.5  # of the lines that are not ASCII: from here on the others are mistakes in a UTF-8 file
_MARKS = "–—‘’‚“”„•…‰‹›€™«»§°·£©®±²³½¼¾¿¡´\xa0№、。，！？：；（）「」『』《》【】〈〉～・ー％－"  # signs that texts have
# What each language writes beside a to z: text in the right encoding has the letters of one language, in a wrong one of none.
_LETTERS = (
    "àâæçéèêëîïôœùûüÿ", "äöüß", "áéíóúüñªº", "áâãàçéêíóôõúü", "àèéìíîòóùú", "åäöéü", "æøåéäö", "éëïóöüáíúè", "áðéíóúýþæö",
    "ąćęłńóśźż", "áčďéěíňóřšťúůýž", "áäčďéíĺľňóôŕšťúýž", "áéíóöőúüű", "ăâîșțşţ", "čćđšž", "çğıİöşüâî", "äöõüšž",
    "āčēģīķļņšūž", "ąčęėįšųūž", "çëäö",
)  # fmt: skip
_FREQUENT = [
    set(letters if len(letters) > 60 or language == "Korean" else letters[:12]) for language, letters in FREQUENCIES.items()
]
_VOWELS = set("аеёиоуыэюяіїєαεηιουωάέήίόύώ")


def known(name: str) -> bool:
    """Whether Python has this encoding for text."""
    try:
        "a".encode(name)
    except (LookupError, UnicodeError, ValueError, TypeError):
        return False
    return True


def title(encoding: str) -> str:
    """An encoding's name as people know it."""
    name = codecs.lookup(encoding).name
    return re.sub(r"^CP125", "Windows-125", _NAMES.get(encoding, name.upper().replace("ISO8859", "ISO-8859")))


def of_file(file: BinaryIO) -> str | None:
    """The encoding of a file, read from its beginning; "utf-8" also where a few lines are not. None: it could not be told."""
    start = file.read(4096)
    for bom, name in _BOMS.items():
        if start.startswith(bom):
            return name
    if b"\0" in start:
        return guess(start)
    if b"\x1b$" in start and not any(byte > 127 for byte in start):
        return "iso2022_jp"
    lines, size, scanned = [], 0, 0
    for line in _pieces(start, file):
        scanned += len(line)
        if not line.isascii():
            lines.append(line)
            size += len(line)
        if size > _SAMPLE or scanned > _SCANNED:
            break
    good = sum(_decodes(line, "utf-8") for line in lines)
    if good >= _UTF8_SHARE * len(lines):
        return "utf-8"
    return guess(b"".join(lines))


def guess(data: bytes) -> str | None:
    """The one encoding, other than UTF-8, in which these bytes read as text; None if none or several do."""
    data = _whole(data[: 2 * _SAMPLE])
    best: dict[str, tuple[float, str]] = {}  # by what they read
    zeros = b"\0" in data
    for name in _WIDE if zeros else (*_SINGLE, *_MULTIPLE, *_WIDE[:2]):
        if (name in _WIDE and len(data) % (4 if "32" in name else 2)) or not _decodes(data, name):
            continue
        text = data.decode(name)
        found = from_bytes(data, cp_isolation=[name]).best() if name not in _WIDE else None
        if found is None and name not in _WIDE:
            continue
        score = plausible(text) + _FREQUENCY * frequent(text) - (found.chaos if found is not None else 0.0)
        score += _WESTERN if name == "cp1252" else 0.0
        if text not in best:
            best[text] = (score, name)
    ranked = sorted(best.values(), key=lambda pair: -pair[0])
    if not ranked or ranked[0][0] < _GOOD or (len(ranked) > 1 and ranked[0][0] - ranked[1][0] < _APART):
        return None
    return ranked[0][1]


def plausible(text: str) -> float:
    """0 to 1: how much of what is not ASCII looks as people write it. 1 for ASCII."""
    if any(unicodedata.category(c) in ("Cc", "Co", "Cn") and c not in "\t\n\r\f\x85" for c in text[: 4 * _JUDGED]):
        return 0.0
    foreign = [c for c in text if not c.isascii()][:_JUDGED]
    if not foreign:
        return 1.0
    letters = [c for c in foreign if c.isalpha() or unicodedata.category(c) in ("Mn", "Mc")]
    marks = [c for c in foreign if c in _MARKS]
    rest = len(foreign) - len(letters) - len(marks)
    if not letters:
        return len(marks) / len(foreign) * 0.9
    by_script = Counter(_script(c) for c in letters)
    script, size = by_script.most_common(1)[0]
    if script in ("CJK", "HIRAGANA", "KATAKANA"):
        good = sum(_usual_han(c) if _script(c) == "CJK" else 1 for c in letters if _script(c) in ("CJK", "HIRAGANA", "KATAKANA"))
    elif script == "HANGUL":
        good = sum(_encodes(c, "euc_kr") for c in letters if _script(c) == "HANGUL")
    elif script == "LATIN":
        lower = Counter(c.lower() for c in letters if _script(c) == "LATIN")
        good = max(sum(n for c, n in lower.items() if c in alphabet) for alphabet in _LETTERS)
    else:
        good = size
    return max(0.0, good - 2 * _odd(text, script) - rest / 2) / (len(letters) + rest / 2)


def frequent(text: str) -> float:
    """0 to 1: the share of letters, other than Latin ones, that are among the most frequent of one language."""
    letters = Counter(c.lower() for c in text[: 8 * _JUDGED] if c.isalpha() and _script(c) != "LATIN")
    total = sum(letters.values())
    return max(sum(letters[c] for c in usual) for usual in _FREQUENT) / total if total else 0.0


def _odd(text: str, script: str) -> int:
    """Letters that break what words look like: two alphabets in one, capitals after small ones, a final form inside, no vowel."""
    if script in ("CJK", "HIRAGANA", "KATAKANA"):  # written without spaces
        return len(re.findall(r"(?<=[\u3040-\u9fff]) (?=[\u3040-\u9fff])", text[: 8 * _JUDGED]))
    if script == "THAI":  # spaces between phrases only
        return sum(len(word) for word in text[: 8 * _JUDGED].split() if len(word) < 6)
    if script == "HANGUL":
        return 0
    odd = capitals = small = 0
    for word in re.findall(r"[^\W\d_]+", text[: 8 * _JUDGED]):
        if word.isascii():
            continue
        scripts = {_script(c) for c in word}
        foreign = [c for c in word if not c.isascii()]
        odd += len(foreign) if len(scripts) > 1 else sum(a.islower() and b.isupper() for a, b in pairwise(word))
        odd += sum(c == "ς" for c in word[:-1])
        odd += len(word) * (script in ("CYRILLIC", "GREEK") and len(word) > 3 and not _VOWELS & set(word.lower()))
        capitals, small = capitals + sum(c.isupper() for c in foreign), small + sum(c.islower() for c in foreign)
    return odd + (capitals // 4 if capitals > small else 0)


def _script(c: str) -> str:
    return unicodedata.name(c, "OTHER").split(" ")[0].split("-")[0]


def _usual_han(c: str) -> bool:
    """One of the characters that a national standard puts on its first level."""
    for name, low, high in (("gb2312", 0xB0, 0xD7), ("big5", 0xA4, 0xC6), ("euc_jp", 0xB0, 0xCF)):
        if _encodes(c, name) and low <= c.encode(name)[0] <= high:
            return True
    return False


def _encodes(c: str, name: str) -> bool:
    try:
        c.encode(name)
    except UnicodeEncodeError:
        return False
    return True


def _decodes(data: bytes, name: str) -> bool:
    try:
        data.decode(name)
    except UnicodeDecodeError:
        return False
    return True


def _pieces(start: bytes, file: BinaryIO) -> Iterator[bytes]:
    """Lines, the first of them from what was read already; a long one in pieces of whole characters."""
    rest = start + file.readline(_SAMPLE)
    yield from _lines(rest)
    while line := file.readline(_SAMPLE):
        yield _whole(line)


def _lines(data: bytes) -> Iterable[bytes]:
    return data.splitlines(keepends=True)


def _whole(data: bytes) -> bytes:
    """Without what may be half a character at the end of a piece."""
    if len(data) < _SAMPLE:
        return data
    cut = max(data.rfind(b" "), data.rfind(b"\n"))
    if cut > 0:
        return data[:cut]
    return next((data[: len(data) - i] for i in range(4) if _decodes(data[: len(data) - i], "utf-8")), data)
