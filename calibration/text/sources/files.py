"""Your own files, folders of them or patterns, compressed or not. Text, JSON lines and CSV are read line by line, because one
broken line must not end the reading; JSON documents are read whole, tables a batch at a time."""

import bz2
import csv
import glob
import gzip
import json
import lzma
import os
import zlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

from calibration.text import encodings
from calibration.text.data import DATA, DataSource
from calibration.text.rows import ROW_LIMIT, Bad, Repaired
from calibration.text.sources.documents import rows_of
from qkv.errors import ConfigError
from qkv.validate import require

_BYTES = 4 * ROW_LIMIT  # of one line, at most 4 per character
_DOCUMENT_BYTES = 2**30  # of one JSON document, which is held in memory
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
_UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)  # what files that end too early or are damaged raise
_UNKNOWN = "in an encoding that cannot be told (set data.encoding, e.g. cp1252 or gb18030)"


def _suffix(path: Path) -> str:
    """.jsonl of a.jsonl and of a.jsonl.gz."""
    last = path.suffix.lower()
    return Path(path.stem).suffix.lower() if last in _COMPRESSED else last


@dataclass
class _Files(DataSource):
    """path: a file, a folder (searched to its depths for this kind of file) or a pattern like ~/mail/**/*.txt."""

    path: str
    kind: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        path = Path(os.path.expanduser(self.path))
        if not self.path or not (path.exists() or glob.glob(str(path), recursive=True)):
            raise ConfigError(
                f"data.path: '{self.path}' does not exist; give a file, a folder or a pattern that does: data.path=..."
            )
        if path.is_file() and (other := _other_kind(path, self.suffixes)):
            raise ConfigError(f"data.path: '{self.path}' is not {self.kind} by its name; read it with data={other}, or rename it")

    def rows(self) -> Iterator[Any]:
        path = Path(os.path.expanduser(self.path))
        if path.is_dir():
            there = [p for p in path.rglob("*") if p.is_file() and not any(n.startswith(".") for n in p.relative_to(path).parts)]
        elif path.exists():
            there = [path]
        else:
            there = [p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file()]
        wanted = [p for p in there if _suffix(p) in self.suffixes] if path.is_dir() else there
        if not wanted:
            raise ConfigError(f"data.path: '{self.path}' has no {self.kind} ({', '.join(self.suffixes)})")
        for file in sorted(wanted):
            try:
                yield from self.of_file(file)
            except _UNREADABLE:
                yield Bad("unreadable file, or the rest of one")
        for _ in range(len(there) - len(wanted)):
            yield Bad("file of another kind")

    @abstractmethod
    def of_file(self, path: Path) -> Iterator[Any]:
        """The rows of one file."""


@dataclass
class _Table(_Files):
    """field: column (or columns, the answer last) with the text or the messages; null: by the names that data sets use."""

    field: str | list[str] | None = None


@dataclass
class _Encoded:
    """Settings of files that are text. encoding: of the files; null: UTF-8, or told from their bytes."""

    encoding: str | None = None

    def check_encoding(self) -> None:
        if self.encoding is not None:
            require(
                encodings.known(self.encoding), "encoding", self.encoding, "a name that Python knows: utf-8, cp1252, gb18030, ..."
            )

    def lines(self, path: Path) -> Iterator[str | Bad | Repaired]:
        """Lines as text; a line beyond the limit is Bad and never held whole. The first item may be a remark on the file."""
        found = self.encoding
        if found is None:
            found = "utf-8"
            with suppress(*_UNREADABLE), closing(opened(path)) as file:  # a damaged file is noticed when it is read
                found = encodings.of_file(file)
            if found not in (None, "utf-8", "utf-8-sig"):
                yield Repaired(f"read as {encodings.title(str(found))}, not being UTF-8")
        with closing(opened(path)) as file:
            if found is None or found in ("utf-8", "utf-8-sig"):
                yield from _utf8_lines(file, told=found is not None)
            else:
                yield from _text_lines(file, found)

    def whole(self, path: Path, limit: int) -> Iterator[str | Bad | Repaired]:
        """The file as one text of at most `limit` characters, after remarks on it; lines that cannot be read are left out."""
        parts: list[str] = []
        size, bad = 0, None
        for line in self.lines(path):
            if isinstance(line, Repaired):
                yield line
            elif isinstance(line, Bad):
                bad = line
            else:
                parts.append(line)
                size += len(line)
            if size > limit:
                yield Bad(f"longer than {limit >> 20} Mi characters")
                return
        if bad is not None and not any(part.strip() for part in parts):
            yield bad
            return
        if bad is not None:
            yield Repaired("without its lines that cannot be decoded")
        yield "".join(parts)


@DATA.register("jsonl")
@dataclass
class JsonLines(_Encoded, _Table):
    """One JSON object a line."""

    kind = "JSON lines"
    suffixes = (".jsonl", ".ndjson", ".json")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_encoding()

    def of_file(self, path: Path) -> Iterator[Any]:
        if self.is_document(path):
            yield from _json_document(self, path)
            return
        for line in self.lines(path):
            if not isinstance(line, str):
                yield line
            elif line.strip():
                yield _json_row(line)
            else:
                yield Bad("empty or null")

    def is_document(self, path: Path) -> bool:
        """Whether the file is one document after all."""
        return _is_document(path)


@DATA.register("json")
@dataclass
class Json(JsonLines):
    """A JSON document: rows, columns, or an object with the rows in it."""

    kind = "JSON"
    suffixes = (".json", ".jsonl", ".ndjson")

    def is_document(self, path: Path) -> bool:
        return _is_document(path, or_one_object=True)


@DATA.register("csv")
@dataclass
class Csv(_Encoded, _Table):
    """Columns with a header line; the separator is found out (comma, semicolon, tab or |)."""

    kind = "CSV"
    suffixes = (".csv", ".tsv", ".tab", ".psv")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_encoding()

    def of_file(self, path: Path) -> Iterator[Any]:
        csv.field_size_limit(_BYTES)
        remarks: list[Bad | Repaired] = []
        lines = _only_text(self.lines(path), remarks)
        header = next((line for line in lines if line.strip()), "")
        separator = "\t" if _suffix(path) in (".tsv", ".tab") else max(",;\t|", key=header.count)
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
class Text(_Encoded, _Files):
    """Plain text: every file is one document."""

    kind = "plain text"
    suffixes = (".txt", ".md", ".text", ".markdown", ".rst")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_encoding()

    def of_file(self, path: Path) -> Iterator[Any]:
        yield from self.whole(path, ROW_LIMIT)


@DATA.register("parquet")
@dataclass
class Parquet(_Table):
    """Parquet or Arrow files."""

    kind = "Parquet"
    suffixes = (".parquet", ".pq", ".arrow", ".feather")

    def of_file(self, path: Path) -> Iterator[Any]:
        import pyarrow
        from pyarrow import ipc, parquet

        try:
            if _suffix(path) in (".arrow", ".feather"):
                with pyarrow.memory_map(str(path)) as file:
                    try:
                        batches: Iterable[Any] = ipc.open_stream(file)
                    except pyarrow.ArrowInvalid:
                        opened_file = ipc.open_file(file)
                        batches = (opened_file.get_batch(i) for i in range(opened_file.num_record_batches))
                    for batch in batches:
                        yield from batch.to_pylist()
            else:
                for batch in parquet.ParquetFile(path).iter_batches(batch_size=256):
                    yield from batch.to_pylist()
        except (pyarrow.ArrowException, ValueError) as error:
            if Path(os.path.expanduser(self.path)).is_file():
                raise ConfigError(f"data.path: cannot load '{self.path}': {str(error).splitlines()[0]}") from None
            yield Bad("unreadable file, or the rest of one")


def opened(path: Path) -> BinaryIO:
    """The bytes of a file, decompressed if it is compressed, by its first bytes."""
    with path.open("rb") as file:
        start = file.read(6)
    if start.startswith(b"\x1f\x8b"):
        return cast(BinaryIO, gzip.open(path, "rb"))
    if start.startswith(b"BZh"):
        return cast(BinaryIO, bz2.open(path, "rb"))
    if start.startswith(b"\xfd7zXZ\0"):
        return cast(BinaryIO, lzma.open(path, "rb"))
    if start.startswith(b"\x28\xb5\x2f\xfd"):
        import pyarrow

        return cast(BinaryIO, BufferedReader(pyarrow.input_stream(str(path), compression="zstd")))
    return path.open("rb")


def _is_document(path: Path, or_one_object: bool = False) -> bool:
    """Whether a file of JSON is one document rather than lines: its first line is no whole value, or a list and all there is."""
    with closing(opened(path)) as file:
        line = file.readline(_BYTES).removeprefix(b"\xef\xbb\xbf").strip()
        alone = not file.read(1)
    if line[:1] in (b"\xff", b"\xfe") or b"\0" in line:
        return or_one_object  # UTF-16 or UTF-32
    if line[:1] not in (b"[", b"{"):
        return or_one_object
    try:
        first = json.loads(line)
    except (ValueError, RecursionError):
        return or_one_object or line in (b"[", b"{") or line.startswith(b"[")
    return alone and (or_one_object or isinstance(first, list))


def _json_document(source: _Encoded, path: Path) -> Iterator[Any]:
    with closing(opened(path)) as file:
        size = sum(len(chunk) for chunk in iter(lambda: file.read(2**24), b""))
    if size > _DOCUMENT_BYTES:
        yield Bad(f"JSON document beyond {_DOCUMENT_BYTES >> 30} GiB (write one object a line)")
        return
    for text in source.whole(path, _DOCUMENT_BYTES):
        if not isinstance(text, str):
            yield text
            continue
        yield from rows_of(text)


def _json_row(line: str) -> Any:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return Bad("not JSON")
    if isinstance(row, list) and row and all(isinstance(m, dict) for m in row):
        return row  # a conversation
    return row if isinstance(row, dict | str) else Bad("not a JSON object")


def _other_kind(path: Path, suffixes: tuple[str, ...]) -> str | None:
    """The option that reads files of this name, if it is not the one with `suffixes`."""
    suffix = _suffix(path)
    kinds = {"jsonl": (".jsonl", ".ndjson"), "json": (".json",), "csv": Csv.suffixes, "parquet": Parquet.suffixes}
    return next((name for name, theirs in kinds.items() if suffix in theirs and suffix not in suffixes), None)


def _only_text(lines: Iterable[str | Bad | Repaired], remarks: list[Bad | Repaired]) -> Iterator[str]:
    """The lines that are text, without NULs, which csv refuses; the others go to `remarks`."""
    for line in lines:
        if isinstance(line, str):
            yield line.replace("\0", "")
        else:
            remarks.append(line)


def _utf8_lines(file: BinaryIO, told: bool) -> Iterator[str | Bad | Repaired]:
    """Lines of UTF-8. One that is not is read in the encoding told from it alone; told: whether that of the file could be."""
    while line := file.readline(_BYTES + 1):
        if len(line) > _BYTES:
            while line and not line.endswith(b"\n"):
                line = file.readline(_BYTES)
            yield Bad(f"longer than {_BYTES >> 20} MiB")
            continue
        try:
            yield line.decode("utf-8-sig")
        except UnicodeDecodeError:
            found = encodings.guess(line) if told else None
            if found is None:
                yield Bad("not text (binary, or a wrong encoding)" if b"\0" in line else _UNKNOWN)
            else:
                yield Repaired(f"read as {encodings.title(found)}, not being UTF-8")
                yield line.decode(found, "replace")


def _text_lines(file: BinaryIO, encoding: str) -> Iterator[str | Bad | Repaired]:
    """Lines of a file in another encoding; bytes that are not of it become U+FFFD, which is said."""
    text = TextIOWrapper(file, encoding=encoding, errors="replace", newline="")
    while line := text.readline(ROW_LIMIT + 1):
        if len(line) > ROW_LIMIT:
            while line and not line.endswith("\n"):
                line = text.readline(ROW_LIMIT)
            yield Bad(f"longer than {ROW_LIMIT >> 20} Mi characters")
            continue
        if "\ufffd" in line:
            yield Repaired(f"with bytes that are not {encodings.title(encoding)}")
        yield line.removeprefix("\ufeff")
