"""From a named source of rows to documents, and to windows of token ids of equal length.

Takes: a source by name (conf/data; the sources themselves are in sources/). Gives: documents as text, or windows of token ids.
Does not know about: models, quantizers, what the tokens are for.
"""

import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from calibration.text.rows import Reader, Report
from qkv.errors import ConfigError
from qkv.registry import Registry

log = logging.getLogger(__name__)


@dataclass
class DataSource(ABC):
    """A named source of rows. Registered dataclass = settings = YAML schema.

    A source of columns has a setting `field`: the name or names of those that hold the text, None to guess.
    """

    name: ClassVar[str]

    @abstractmethod
    def rows(self) -> Iterator[Any]:
        """Rows one by one, in a fixed order: a text, a mapping of columns, Bad for what cannot be read, or Repaired as a remark.

        Raises ConfigError when the source is missing.
        """

    def documents(self, tokenizer: Any = None, report: Report | None = None) -> list[str]:
        """Every usable text, in a fixed order; what was skipped or guessed goes into `report`, without one to the log.

        tokenizer: for its chat template.

        Raises ConfigError when the source is missing, a named column is not there, or nothing is left.
        """
        reader = Reader(getattr(self, "field", None), tokenizer, report if report is not None else Report())
        texts = list(reader.texts(self.rows()))
        if report is None and (reader.report.notes or reader.report.skipped):
            log.warning("data.%s: %s", self.name, reader.report.line())
        if not texts:
            raise ConfigError(f"data.{self.name}: no usable text is left; {reader.report.line()}")
        return texts


DATA: Registry[DataSource] = Registry("data source", DataSource, "calibration.text.sources")


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids without special tokens. A model without a tokenizer (random weights) reads the text's bytes."""
    if tokenizer is None:
        return list(text.encode("utf-8"))
    return list(tokenizer.encode(text, add_special_tokens=False))


def opening(tokenizer: Any) -> list[int]:
    """What the tokenizer starts every text with: [bos] or nothing."""
    start = [] if tokenizer is None else list(tokenizer.encode("", add_special_tokens=True))[:1]
    return start if start and start[0] == tokenizer.bos_token_id else []


def encode_body(tokenizer: Any, text: str) -> list[int]:
    """Token ids without the token that the tokenizer starts every text with, which some chat templates write themselves."""
    first, tokens = opening(tokenizer), encode(tokenizer, text)
    return tokens[len(first) :] if first and tokens[: len(first)] == first else tokens


def windows(
    source: DataSource,
    tokenizer: Any,
    count: int,
    length: int,
    seed: int = 0,
    skip: int = 0,
    cycle: bool = False,
    report: Report | None = None,
) -> list[list[int]]:
    """`count` token lists of exactly `length` ids, after skipping the first `skip` of them: windows never overlap.

    Documents are shuffled by `seed`, joined by a blank line and cut, so short documents share a window; where the
    tokenizer starts every text with a special token (bos), so does each window. Too little text raises ConfigError, or
    with `cycle` is repeated.
    """
    documents = source.documents(tokenizer, report)
    random.Random(seed).shuffle(documents)
    first = opening(tokenizer)
    body = length - len(first)
    if body < 1:
        raise ConfigError(f"data.{source.name}: windows of {length} tokens hold no text beside the tokenizer's opening token")
    need = (skip + count) * body
    stream: list[int] = []
    for text in documents:
        if len(stream) >= need:
            break
        stream += encode_body(tokenizer, text.strip() + "\n\n")
    if len(stream) < need and not (cycle and stream):
        raise ConfigError(
            f"data.{source.name}: {skip + count} windows of {length} tokens need {need:,} tokens, it has {len(stream):,}. "
            "Ask for fewer or shorter ones, or use larger data"
        )
    stream *= -(-need // len(stream))
    return [first + stream[i * body : (i + 1) * body] for i in range(skip, skip + count)]
