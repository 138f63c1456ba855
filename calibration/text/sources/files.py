"""Your own files. JSON lines, CSV and text are read line by line here, because one broken line must not end the reading;
Parquet and JSON documents are read by the library datasets, as a stream."""

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from calibration.text.data import DATA, DataSource
from calibration.text.rows import ROW_LIMIT, Bad, Repaired
from calibration.text.sources.hub import stream
from qkv.errors import ConfigError

_BYTES = 4 * ROW_LIMIT  # of one line, at most 4 per character
_TEXT_SUFFIXES = (".txt", ".md")


def _existing(path: str) -> Path:
    found = Path(path).expanduser()
    if not path or not found.exists():
        raise ConfigError(f"data.path: '{path}' does not exist; give a file that does: data.path=...")
    return found


@dataclass
class _File(DataSource):
    """path: one file. field: column (or columns, in order: prompt, answer) with the text or the chat messages; null: guess."""

    path: str
    field: str | list[str] | None = None

    def __post_init__(self) -> None:
        if _existing(self.path).is_dir():
            raise ConfigError(f"data.path: '{self.path}' is a folder; data={self.name} reads one file (data=text reads folders)")


@DATA.register("jsonl")
@dataclass
class JsonLines(_File):
    """One JSON object a line."""

    def rows(self) -> Iterator[Any]:
        with _existing(self.path).open("rb") as file:
            for line in _lines(file):
                if not isinstance(line, str):
                    yield line
                elif line.strip():
                    try:
                        row = json.loads(line)
                    except (ValueError, RecursionError):
                        row = Bad("not JSON")
                    yield row if isinstance(row, dict | str | Bad) else Bad("not a JSON object")
                else:
                    yield Bad("empty or null")


@DATA.register("csv")
@dataclass
class Csv(_File):
    """Columns with a header line; the separator is found out (comma, semicolon, tab or |)."""

    def rows(self) -> Iterator[Any]:
        csv.field_size_limit(_BYTES)
        with _existing(self.path).open("rb") as file:
            remarks: list[Bad | Repaired] = []
            lines = _only_text(_lines(file), remarks)
            header = next(lines, "")
            separator = max(",;\t|", key=header.count)
            names = next(csv.reader([header], delimiter=separator), [])
            reader = csv.reader(lines, delimiter=separator)
            while True:
                try:
                    cells = next(reader, None)
                except csv.Error:
                    yield Bad("not CSV")
                    continue
                yield from remarks
                remarks.clear()
                if cells is None:
                    return
                if len(cells) > len(names):
                    yield Bad("more cells than columns")
                else:
                    yield dict(zip(names, cells, strict=False)) if cells else Bad("empty or null")


@DATA.register("text")
@dataclass
class Text(DataSource):
    """Plain text. path: a file, or a folder whose .txt and .md files are the documents."""

    path: str

    def __post_init__(self) -> None:
        _existing(self.path)

    def rows(self) -> Iterator[Any]:
        path = _existing(self.path)
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() in _TEXT_SUFFIXES) if path.is_dir() else [path]
        if not files:
            raise ConfigError(f"data.path: '{self.path}' has no {' or '.join(_TEXT_SUFFIXES)} files")
        for file in files:
            try:
                if file.stat().st_size > _BYTES:
                    yield Bad(f"longer than {_BYTES >> 20} MiB")
                else:
                    yield from _decoded(file.read_bytes())
            except OSError:
                yield Bad("unreadable file")


@DATA.register("json")
@dataclass
class Json(_File):
    """A JSON document: a list of objects."""

    def rows(self) -> Iterator[Any]:
        yield from stream("json", data_files=str(_existing(self.path)), split="train")


@DATA.register("parquet")
@dataclass
class Parquet(_File):
    """A Parquet file."""

    def rows(self) -> Iterator[Any]:
        yield from stream("parquet", data_files=str(_existing(self.path)), split="train")


def _only_text(lines: Iterable[str | Bad | Repaired], remarks: list[Bad | Repaired]) -> Iterator[str]:
    """The lines that are text, without NULs, which csv refuses; the others go to `remarks`."""
    for line in lines:
        if isinstance(line, str):
            yield line.replace("\0", "")
        else:
            remarks.append(line)


def _lines(file: BinaryIO) -> Iterator[str | Bad | Repaired]:
    """Lines as text; a line beyond the limit is Bad and never held whole."""
    while line := file.readline(_BYTES + 1):
        if len(line) > _BYTES:
            while line and not line.endswith(b"\n"):
                line = file.readline(_BYTES)
            yield Bad(f"longer than {_BYTES >> 20} MiB")
        else:
            yield from _decoded(line)


def _decoded(data: bytes) -> Iterator[str | Repaired]:
    """UTF-8, else Windows-1252, which is what such files usually are."""
    try:
        yield data.decode("utf-8-sig")
    except UnicodeDecodeError:
        yield Repaired("read as Windows-1252, not being UTF-8")
        yield data.decode("cp1252", "replace")
