"""Which documents of a source calibrate, and which are held back to check the result: seeded, spread over all lengths.

Takes: a source, a tokenizer. Gives: token lists, with words on how they were made. Does not know about: models, statistics.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from calibration.text.data import DataSource, encode_body, opening, windows
from calibration.text.rows import Report
from qkv.errors import ConfigError
from qkv.validate import require

_CHARACTERS = 24  # per token, at most, that are looked at: bounds what a huge document costs
_STRATA = 8


@dataclass(frozen=True)
class Sampling:
    """How documents are drawn.

    documents: that calibrate. tokens: of one document at most; the rest is cut off. held_back: further documents, on which
    the result is checked. packing: join documents and cut windows of exactly `tokens`, instead of one document a sample.
    """

    documents: int = 256
    tokens: int = 512
    held_back: int = 16
    packing: bool = False

    def __post_init__(self) -> None:
        require(self.documents >= 1, "documents", self.documents, "at least 1")
        require(self.tokens >= 16, "tokens", self.tokens, "at least 16")
        require(self.held_back >= 0, "held_back", self.held_back, "at least 0 (0: no check)")


@dataclass(frozen=True)
class Sample:
    """calibration, held_back: token lists. how: one line that says how they were made. cut: documents that were longer than
    a sample, so that their later positions were not seen. report: how the rows were read."""

    calibration: list[list[int]]
    held_back: list[list[int]]
    how: str
    cut: int
    report: Report


def draw(source: DataSource, tokenizer: Any, sampling: Sampling, seed: int) -> Sample:
    """Raises ConfigError when the source is missing or nothing usable is left."""
    want, report = sampling.documents + sampling.held_back, Report()
    if sampling.packing:
        lists, cut = windows(source, tokenizer, want, sampling.tokens, seed, report=report), 0
        how = f"documents joined, cut into windows of {sampling.tokens} tokens"
    else:
        texts = source.documents(tokenizer, report)
        lists, how, cut = _documents(texts, tokenizer, want, sampling.tokens, seed)
    # Spread the held-back ones over the lengths, which the lists are sorted by.
    held = round(len(lists) * sampling.held_back / want) if len(lists) > 1 else 0
    held = min(len(lists) - 1, max(held, min(1, sampling.held_back)))
    chosen = {int((i + 0.5) * len(lists) / held) for i in range(held)} if held > 0 else set()
    rest = [tokens for i, tokens in enumerate(lists) if i not in chosen]
    random.Random(seed).shuffle(rest)
    return Sample(rest, [lists[i] for i in sorted(chosen)], how, cut, report)


def _documents(texts: Sequence[str], tokenizer: Any, want: int, length: int, seed: int) -> tuple[list[list[int]], str, int]:
    """Up to `want` token lists, shortest first, how they were made, and how many documents were longer than a sample."""
    first = opening(tokenizer)
    body = length - len(first)
    if len(texts) >= want:
        picked = _stratified(texts, want, seed)
        pieces = [encode_body(tokenizer, text[: _CHARACTERS * body])[: body + 1] for text in picked]
        long = sum(len(p) > body for p in pieces)
        how = f"{want} of {len(texts):,} documents, drawn evenly from {_STRATA} classes of length"
    else:
        pieces, long = [], 0
        for text in sorted(texts, key=len):
            tokens = encode_body(tokenizer, text[: _CHARACTERS * body * want])
            long += len(tokens) > body
            pieces += [tokens[i : i + body] for i in range(0, len(tokens), body)]
        random.Random(seed).shuffle(pieces)
        pieces = pieces[:want]
        how = f"all {len(texts):,} documents ({want} were asked for), in {len(pieces)} pieces"
    cut = sum(len(p) > body for p in pieces)
    lists = sorted((first + p[:body] for p in pieces if p), key=len)
    if not lists:
        raise ConfigError("data: the documents have no tokens")
    return lists, f"{how}; at most {length} tokens each ({cut} were cut off), no packing", long


def _stratified(texts: Sequence[str], want: int, seed: int) -> list[str]:
    """`want` texts, as evenly as possible from classes of length with equally many texts each."""
    generator = random.Random(seed)
    ordered = sorted(texts, key=lambda t: (len(t), t))
    borders = [round(i * len(ordered) / _STRATA) for i in range(_STRATA + 1)]
    classes = [ordered[a:b] for a, b in pairwise(borders)]
    for one in classes:
        generator.shuffle(one)
    picked: list[str] = []
    while len(picked) < want:
        for one in classes:
            if one and len(picked) < want:
                picked.append(one.pop())
    return picked
