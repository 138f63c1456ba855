"""Counts how many keys attention reads as they are stored, and how many it reads raw, as they were before encoding.

Takes: the token range of every chunk of a forward. Gives: the recorder's counts of (query, key) pairs.
Does not know about: tensors. Keys in a raw tail, sink tokens that are kept raw, and the keys of the present call under
attention.reads=raw carry no error of the quantizer. A score in which most of the keys read were such says little about it.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from qkv.layout import SIDES, HeadFormat, KVFormat
from qkv.metrics.recorder import Recorder


class _RawRows(NamedTuple):
    """Which keys a format lets a query read raw. tail_blocks: so many blocks before the query's own, and its own; None in formats
    that encode single tokens, which have no tail. sink_tokens: so many first tokens of the sequence."""

    tail_blocks: int | None
    sink_tokens: int


class CountReads:
    """The runner calls it with the token range of every chunk of a forward; a decode is a chunk of one token."""

    def __init__(
        self, recorder: Recorder, formats: Sequence[Sequence[HeadFormat]], block_size: int, reads: Literal["cache", "raw"]
    ) -> None:
        """formats: per layer. A pair counts as a mean over K and V and the KV heads of all layers, each with equal weight."""
        self._recorder, self._block_size, self._raw = recorder, block_size, reads == "raw"
        heads: Counter[_RawRows] = Counter()
        for head_range in (head_range for layer in formats for head_range in layer):
            for side in SIDES:
                heads[_raw_rows(head_range.of(side))] += len(head_range.heads)
        self._shares = [(raw, count / heads.total()) for raw, count in heads.items()]

    def __call__(self, start: int, end: int) -> None:
        """Count that the queries start..end-1 of one sequence attended to all keys up to their own."""
        self._recorder.pairs_attended += _sum(start + 1, end)
        for raw, share in self._shares:
            self._recorder.pairs_from_cache += share * self._stored(raw, start, end)

    def _stored(self, raw: _RawRows, start: int, end: int) -> int:
        """How many pairs there are whose key was read as it is stored."""
        (tail, first), B = raw, self._block_size
        if tail is None:
            return (end - start) * max(0, start - first) if self._raw else _sum(max(start - first, 0) + 1, end - first)
        total = 0
        for block in range(start // B, -(-end // B)):
            queries = min(end, (block + 1) * B) - max(start, block * B)
            encoded = (block - tail) * B
            total += queries * max(0, (min(encoded, start) if self._raw else encoded) - first)
        return total


def _raw_rows(fmt: KVFormat) -> _RawRows:
    return _RawRows(fmt.tail_blocks if fmt.unit == "block" else None, fmt.sink_tokens)


def _sum(first: int, last: int) -> int:
    """first + ... + last; 0 if there are none."""
    return max(0, last - first + 1) * (first + last) // 2
