"""Single values of a row: what is empty, what is JSON in a string, what can be told not to be text.

Takes: cells. Gives: answers about them. Does not know about: rows, columns, conversations.
"""

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

_NUMBER = r"[-+]?[\d.,]+(?:e[-+]?\d+)?\s?%?"
_DATE = r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}(?:[T\s]\d{1,2}:\d{2}(?::\d{2})?(?:[.,]\d+)?\s?(?:Z|UTC|[AP]M|[-+]\d{2}:?\d{2})?)?"
_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]{0,6}\.?"
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2})?"
_DAY = rf"(?:[a-z]{{3}},? )?(?:{_MONTH} \d{{1,2}},?|\d{{1,2}} {_MONTH})(?: \d{{4}})?"
_WRITTEN_DATE = rf"{_DAY}(?: {_CLOCK})?(?: [-+]\d{{4}}| [a-z]{{3}})?(?: \d{{4}})?"
_URL = r"(?:[a-z][a-z0-9+.-]*://|www\.|mailto:)\S+|[\w.+-]+@[\w-]+\.[\w.]+"
_PATH = r"(?:[A-Za-z]:\\|/|\./|~/)\S+|\S+\.(?:jpe?g|png|gif|pdf|wav|mp[34]|html?|txt|json|csv)"
_ID = r"(?=\S*\d)[A-Za-z0-9]{1,16}(?:[-_:.#/][A-Za-z0-9]+)+|(?=[A-Za-z]*\d)[A-Za-z0-9]{8,}|[0-9a-f]{16,}"
_ID += r"|(?:sha\d+|md5):\S+|[A-Za-z]{1,4}\d+"
_REFERENCE = re.compile(rf"(?:{_NUMBER}|{_DATE}|{_WRITTEN_DATE}|{_CLOCK}|{_URL}|{_PATH}|{_ID})", re.IGNORECASE)
_LABELS = 10  # rows for each different value, from which on a column is one of labels


def is_empty(value: Any) -> bool:
    """Nothing to read: null, not a number, only white space, or a collection of such."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return True
    if isinstance(value, str):
        return not value.strip()
    return isinstance(value, Mapping | Sequence) and not isinstance(value, bytes) and len(value) == 0


def without_nulls(value: Any) -> Any:
    """The same without the null entries that columnar files give every mapping (each has the keys of all)."""
    if isinstance(value, Mapping):
        return {key: without_nulls(v) for key, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list | tuple) else value


def parsed(value: Any) -> Any:
    """A string that is a list or a mapping, in JSON or as Python prints it, as what it is; anything else as it came."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(re.sub(r"}\s+{", "}, {", value.strip()))  # numpy prints lists without commas
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value


def is_reference(text: str) -> bool:
    """An id, a hash, a URL, a path, a number or a date, and nothing else: it names or measures something, it says nothing."""
    return len(text) < 2000 and _REFERENCE.fullmatch(text.strip()) is not None


def why_not_text(values: Sequence[Any]) -> str | None:
    """Why a column of these cells holds no text, in words; None if it may."""
    texts = [v for v in values if isinstance(v, str) and v.strip()]
    if not texts:
        return "no strings"
    if 2 * sum(is_reference(t) for t in texts) > len(texts):
        return "ids, URLs, numbers or dates"
    if len(texts) >= _LABELS and len(set(texts)) * _LABELS <= len(texts):
        return "labels"
    if 2 * sum(_is_word(t) for t in texts) > len(texts):
        return "single words"
    return None


def _is_word(text: str) -> bool:
    """One word, of a script that puts spaces between words (those after Sinhala mostly do not)."""
    return len(text.split()) == 1 and all(c < "\u0e00" for c in text)
