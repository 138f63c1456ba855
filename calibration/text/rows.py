"""From dirty rows to clean texts, everything counted. shapes.py decides what a row means, chat.py renders conversations.

Takes: rows as sources give them. Gives: texts, and a Report of what was read, skipped and guessed.
Does not know about: files, tokens, models.
"""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple

import xxhash

from calibration.text.chat import Chat
from calibration.text.messages import is_conversation
from calibration.text.names import ABOUT, ANSWER, CONVERSATION, HISTORY, OPTIONS, PROMPT, SYSTEM, TEXT, TOOLS, plain_name
from calibration.text.shapes import Read, all_text, chosen, shape
from calibration.text.threads import are_posts, threads
from calibration.text.values import is_empty, is_reference, why_not_text
from qkv.errors import ConfigError

ROW_LIMIT = 8 * 2**20  # characters; a longer row is a dump, not a document
READ_LIMIT = 2**28  # characters kept in memory at most; reading stops there and says so
_GUESS_ROWS = 50
_EXAMPLES = 3  # rows that a report shows as they were read
_SPOKEN = {*PROMPT, *ANSWER, *CONVERSATION, *SYSTEM, *ABOUT, *OPTIONS, *TOOLS, *HISTORY}  # an answer may well be a number
_KNOWN = {*_SPOKEN, *TEXT}


class Bad(NamedTuple):
    """A row that could not be read, and why, in two or three words."""

    reason: str


class Repaired(NamedTuple):
    """Said of the row that follows: what was done to read it."""

    what: str


@dataclass
class Report:
    """What reading a source came to. All counters are by reason or kind.

    skipped: rows. repaired: rows that were read after all. dropped: parts of rows that were used. shapes: rows by the columns
    their text was taken from. examples: the texts of the first rows, as read. notes: decisions worth a line.
    """

    rows: int = 0
    kept: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    repaired: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    shapes: Counter[str] = field(default_factory=Counter)
    conversations: int = 0
    scripts: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def line(self) -> str:
        """One line for people."""
        parts = [f"{self.kept:,} of {self.rows:,} rows used"]
        for name in ("skipped", "repaired", "dropped"):
            counted = [(why, n) for why, n in getattr(self, name).most_common() if n]
            parts += [f"{name}: {', '.join(f'{n:,} {why}' for why, n in counted)}"] if counted else []
        if len(self.scripts) > 1:
            total = sum(self.scripts.values())
            parts.append("scripts: " + ", ".join(f"{name} {100 * n / total:.0f} %" for name, n in self.scripts.most_common(4)))
        return "; ".join(parts + self.notes)

    def as_dict(self) -> dict[str, Any]:
        """For records: everything but the examples, which are the user's text."""
        counters = {name: dict(+getattr(self, name)) for name in ("skipped", "repaired", "dropped", "shapes", "scripts")}
        return {"rows": self.rows, "kept": self.kept, "conversations": self.conversations, **counters, "notes": self.notes}

    def shown(self, characters: int) -> list[str]:
        """The examples for people, each at most about so many characters: how it begins and how it ends."""
        half = characters // 2
        return [t if len(t) <= characters else f"{t[:half]} [...] {t[-half:]}" for t in self.examples]


class Reader:
    """Turns rows into texts, one pass, streaming. columns: those that hold the text; None: by the names that data sets use."""

    def __init__(self, columns: str | list[str] | None, tokenizer: Any, report: Report) -> None:
        self.columns = [columns] if isinstance(columns, str) else columns
        self.report, self._chat = report, Chat(tokenizer, report.repaired, report.dropped)
        self._hashes: set[bytes] = set()
        self._unfit: dict[str, str] = {}  # columns that hold no text, and why
        self._longest: str | None = None  # the column to take where no name is known
        self._unused: dict[str, None] = {}
        self._no_text = False  # of none of the first rows' columns

    def texts(self, rows: Iterable[Any]) -> Iterator[str]:
        """Raises ConfigError only when a column that was asked for is in none of the first rows."""
        source = iter(rows)
        head = list(islice(source, _GUESS_ROWS))
        self._choose([r for r in head if isinstance(r, Mapping)])
        everything: Iterator[Any] = chain(head, source)
        if self.columns is None and are_posts(head):
            everything = threads(everything, self.report.dropped)
        kept = 0
        for row in everything:
            if isinstance(row, Repaired):
                self.report.repaired[row.what] += 1
                continue
            self.report.rows += 1
            text = self._text(row)
            if isinstance(text, Bad):
                self.report.skipped[text.reason] += 1
                continue
            self.report.kept += 1
            self.report.scripts[_script(text)] += 1
            if len(self.report.examples) < _EXAMPLES:
                self.report.examples.append(text)
            kept += len(text)
            yield text
            if kept > READ_LIMIT:
                self.report.notes.append(f"reading stopped after {READ_LIMIT >> 20} Mi characters")
                break
        self._note_columns()

    def _text(self, row: Any) -> str | Bad:
        if isinstance(row, Bad):
            return row
        if isinstance(row, list) and is_conversation(row):
            row = {"messages": row}
        if isinstance(row, Mapping):
            row = self._of_columns(row)
        if not isinstance(row, str):
            return row if isinstance(row, Bad) else Bad("empty or null") if row is None else Bad("not text")
        text = row.strip()
        if not text:
            return Bad("empty or null")
        if len(text) > ROW_LIMIT:
            return Bad(f"longer than {ROW_LIMIT >> 20} Mi characters")
        sample = text[:2000]
        broken = sum(c == "\ufffd" or (unicodedata.category(c) == "Cc" and c not in "\t\n\r\f") for c in sample)
        if broken > len(sample) / 20:
            return Bad("not text (binary, or a wrong encoding)")
        digest = xxhash.xxh3_128_digest(text.encode("utf-8", "surrogatepass"))
        if digest in self._hashes:
            return Bad("duplicate")
        self._hashes.add(digest)
        return text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates cannot be tokenized

    def _of_columns(self, row: Mapping[Any, Any]) -> str | Bad | None:
        """What a row of columns says, conversations through the chat template."""
        if self.columns is not None:
            read = chosen(row, self.columns, self.report.dropped)
        else:
            row = {key: value for key, value in row.items() if key not in self._unfit}
            read = shape(row, self.report.dropped)
            said = all_text(row.get(self._longest))
            if read is None and is_reference(said):
                return Bad("only an id, a URL, a number or a date")
            if read is None and said.strip():
                read = Read((str(self._longest),), said, [])
        if read is None:
            return self._why_nothing(row)
        self._unused |= dict.fromkeys(str(key) for key in row if str(key) not in read.columns)
        self.report.shapes[", ".join(read.columns)] += 1
        if isinstance(read.content, str):
            return read.content
        if not read.content:
            return None
        self.report.conversations += 1
        return self._chat.text(read.content, read.tools)

    def _why_nothing(self, row: Mapping[Any, Any]) -> Bad | None:
        """None: what could hold text is empty."""
        if self.columns is not None:
            cells = [row.get(c) for c in self.columns]
        else:
            cells = [v for k, v in row.items() if plain_name(k) in _KNOWN or k == self._longest]
            if self._no_text:
                return Bad("with nothing but ids, URLs, numbers, dates or labels")
        return Bad("not text") if any(isinstance(v, int | float) and not is_empty(v) for v in cells) else None

    def _choose(self, rows: list[Mapping[str, Any]]) -> None:
        if not rows:
            return
        have = list(dict.fromkeys(key for row in rows for key in row))
        if self.columns is not None:
            missing = [c for c in self.columns if c not in have and c.split(".")[0] not in have]
            if missing:
                raise ConfigError(f"data.field: '{missing[0]}' is not in the data; its columns are: {', '.join(map(str, have))}")
            return
        cells = {c: [row.get(c) for row in rows] for c in have}
        reasons = {c: why_not_text(values) for c, values in cells.items()}
        strings = {c for c, why in reasons.items() if why not in (None, "no strings", "single words")}
        self._unfit = {c: str(reasons[c]) for c in strings if plain_name(c) not in _SPOKEN}
        self._no_text = len(self._unfit) == len(have)
        free = [c for c, why in reasons.items() if why is None]
        free = free or [
            c for c in have if plain_name(c) not in _SPOKEN and why_not_text([all_text(v) for v in cells[c]]) is None
        ]  # a text in each of several languages
        self._longest = max(free, key=lambda c: sum(len(all_text(v)) for v in cells[c]), default=None)
        if self._longest is None and len(have) == 1 and reasons[have[0]] == "single words":
            self._longest = have[0]

    def _note_columns(self) -> None:
        if not self.report.shapes or (self.columns is not None and len(self._unused) == 0):
            return
        used = list(dict.fromkeys(name for shape in self.report.shapes for name in shape.split(", ")))
        others = [c for c in dict.fromkeys([*self._unused, *map(str, self._unfit)]) if c not in used]
        if others and self.columns is None:
            kinds = ", ".join(f"{c} ({self._unfit[c]})" if c in self._unfit else c for c in others)
            self.report.notes.append(f"text taken from: {', '.join(used)} (also there: {kinds}; choose with data.field=...)")


def _script(text: str) -> str:
    """The most frequent script of the first letters: LATIN, CJK, CYRILLIC, ..."""
    names = Counter(unicodedata.name(c, "OTHER").split(" ")[0] for c in islice((c for c in text if c.isalpha()), 60))
    return names.most_common(1)[0][0] if names else "OTHER"
