"""From dirty rows to clean texts: columns by name or guessed, chat messages through the model's template, everything counted.

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

from qkv.errors import ConfigError

ROW_LIMIT = 8 * 2**20  # characters; a longer row is a dump, not a document
READ_LIMIT = 2**28  # characters kept in memory at most; reading stops there and says so
_GUESS_ROWS = 50
_TEXT = ("text", "content", "document", "body", "article", "page_content", "message", "description")
_MESSAGES = ("messages", "conversations", "conversation", "dialogue", "turns")
_PROMPT = ("prompt", "instruction", "question", "query", "input")
_ANSWER = ("response", "completion", "answer", "output", "chosen")
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}


class Bad(NamedTuple):
    """A row that could not be read, and why, in two or three words."""

    reason: str


class Repaired(NamedTuple):
    """Said of the row that follows: what was done to read it."""

    what: str


@dataclass
class Report:
    """What reading a source came to. notes: decisions worth a line, e.g. which column was guessed."""

    rows: int = 0
    kept: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    repaired: Counter[str] = field(default_factory=Counter)
    scripts: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def line(self) -> str:
        """One line for people."""
        parts = [f"{self.kept:,} of {self.rows:,} rows used"]
        parts += [f"skipped: {', '.join(f'{n:,} {why}' for why, n in self.skipped.most_common())}"] if self.skipped else []
        parts += [f"repaired: {', '.join(f'{n:,} {why}' for why, n in self.repaired.most_common())}"] if self.repaired else []
        if len(self.scripts) > 1:
            total = sum(self.scripts.values())
            parts.append("scripts: " + ", ".join(f"{name} {100 * n / total:.0f} %" for name, n in self.scripts.most_common(4)))
        return "; ".join(parts + self.notes)

    def as_dict(self) -> dict[str, Any]:
        counters = {name: dict(getattr(self, name)) for name in ("skipped", "repaired", "scripts")}
        return {"rows": self.rows, "kept": self.kept, **counters, "notes": self.notes}


class Reader:
    """Turns rows into texts, one pass, streaming. columns: names of what holds the text; None: guess from the first rows."""

    def __init__(self, columns: str | list[str] | None, tokenizer: Any, report: Report) -> None:
        self.columns = [columns] if isinstance(columns, str) else columns
        self.tokenizer, self.report = tokenizer, report
        self._hashes: set[bytes] = set()

    def texts(self, rows: Iterable[Any]) -> Iterator[str]:
        """Raises ConfigError only when a column that was asked for is in none of the first rows."""
        source = iter(rows)
        head = list(islice(source, _GUESS_ROWS))
        self._choose([r for r in head if isinstance(r, Mapping)])
        kept = 0
        for row in chain(head, source):
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
            kept += len(text)
            yield text
            if kept > READ_LIMIT:
                self.report.notes.append(f"reading stopped after {READ_LIMIT >> 20} Mi characters")
                return

    def _text(self, row: Any) -> str | Bad:
        if isinstance(row, Bad):
            return row
        if isinstance(row, Mapping):
            row = self._joined([row.get(c) for c in self.columns or []])
        if not isinstance(row, str):
            return Bad("empty or null") if row is None else Bad("not text")
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

    def _joined(self, values: list[Any]) -> Any:
        """Columns of one row: a text as it is, messages through the chat template, several fields as a conversation."""
        if len(values) == 1:
            return self._messages(values[0]) if isinstance(values[0], list) else values[0]
        turns = [v for v in values if isinstance(v, str) and v.strip()]
        if not turns:
            return None
        roles = ("user", "assistant")
        return self._messages([{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)])

    def _messages(self, messages: list[Any]) -> str | None:
        turns: list[dict[str, str]] = []
        for m in messages:
            if isinstance(m, str):
                m = {"role": ("user", "assistant")[len(turns) % 2], "content": m}
            if not isinstance(m, Mapping):
                return None
            content, role = m.get("content", m.get("value")), str(m.get("role", m.get("from", "user")))
            if isinstance(content, str) and content.strip():
                turns.append({"role": _ROLES.get(role, role), "content": content})
        if not turns:
            return None
        if getattr(self.tokenizer, "chat_template", None):
            try:
                return str(self.tokenizer.apply_chat_template(turns, tokenize=False))
            except Exception:  # templates raise their own kinds: unknown roles, turns that do not alternate
                self.report.repaired["messages joined without the chat template, which refused them"] += 1
        return "\n\n".join(turn["content"] for turn in turns)

    def _choose(self, rows: list[Mapping[str, Any]]) -> None:
        if not rows:
            return
        have = list(dict.fromkeys(key for row in rows for key in row))
        if self.columns is not None:
            missing = [c for c in self.columns if c not in have]
            if missing:
                raise ConfigError(f"data.field: '{missing[0]}' is not in the data; its columns are: {', '.join(map(str, have))}")
            return
        self.columns = _guess(rows, have)
        others = [str(c) for c in have if c not in self.columns]
        if others:
            names = ", ".join(self.columns)
            self.report.notes.append(f"text taken from: {names} (also there: {', '.join(others)}; choose with data.field=...)")


def _guess(rows: list[Mapping[str, Any]], have: list[str]) -> list[str]:
    """The column, or prompt and answer, most likely to hold the text: by name, else the one with the longest strings."""
    lower = {str(c).lower(): c for c in reversed(have)}
    for names in (_MESSAGES, _TEXT):
        found = [lower[n] for n in names if n in lower and any(isinstance(r.get(lower[n]), str | list) for r in rows)]
        if found:
            return found[:1]
    pair = [next((lower[n] for n in names if n in lower), None) for names in (_PROMPT, _ANSWER)]
    named = [c for c in pair if c is not None]
    if named:
        return named
    lengths = {c: sum(len(r[c]) for r in rows if isinstance(r.get(c), str)) for c in have}
    return [max(have, key=lambda c: lengths[c])]


def _script(text: str) -> str:
    """The most frequent script of the first letters: LATIN, CJK, CYRILLIC, ..."""
    names = Counter(unicodedata.name(c, "OTHER").split(" ")[0] for c in islice((c for c in text if c.isalpha()), 60))
    return names.most_common(1)[0][0] if names else "OTHER"
