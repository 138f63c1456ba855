"""How much of what attention reads is read as it was stored, and how much as it was before encoding.

Takes: the chunk of every forward. Gives: the recorder's counts of (query, key) pairs. Does not know about: tensors.
A key that is read from a raw tail, from raw sink rows, or with attention.reads=raw carries no quantization error. So a score that
mostly met such keys says little about the quantizer.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from qkv.layout import SIDES, HeadFormat, KVFormat
from qkv.metrics.recorder import Recorder


class _Kind(NamedTuple):
    """tail_blocks: raw blocks before a query's own, raw too; None for token-unit formats. sink_tokens: raw first tokens."""

    tail_blocks: int | None
    sink_tokens: int


class CountReads:
    """Called with the token range of every chunk of a forward; decodes are chunks of one."""

    def __init__(
        self, recorder: Recorder, formats: Sequence[Sequence[HeadFormat]], block_size: int, reads: Literal["cache", "raw"]
    ) -> None:
        """formats: per layer. A pair counts in K and in V, and in every kv head of every layer alike."""
        self._recorder, self._block_size, self._raw = recorder, block_size, reads == "raw"
        heads: Counter[_Kind] = Counter()
        for r in (r for layer in formats for r in layer):
            for side in SIDES:
                heads[_kind(r.of(side))] += len(r.heads)
        self._shares = [(kind, count / heads.total()) for kind, count in heads.items()]

    def __call__(self, start: int, end: int) -> None:
        """Queries start..end-1 of one sequence attended to all keys up to their own."""
        self._recorder.pairs_attended += _sum(start + 1, end)
        for kind, share in self._shares:
            self._recorder.pairs_from_cache += share * self._stored(kind, start, end)

    def _stored(self, kind: _Kind, start: int, end: int) -> int:
        """Pairs whose key was read as stored."""
        (tail, sink_tokens), B = kind, self._block_size
        if tail is None:
            return (
                (end - start) * max(0, start - sink_tokens)
                if self._raw
                else _sum(max(start - sink_tokens, 0) + 1, end - sink_tokens)
            )
        total = 0
        for block in range(start // B, -(-end // B)):
            queries = min(end, (block + 1) * B) - max(start, block * B)
            encoded = (block - tail) * B
            total += queries * max(0, (min(encoded, start) if self._raw else encoded) - sink_tokens)
        return total


def _kind(fmt: KVFormat) -> _Kind:
    return _Kind(fmt.tail_blocks if fmt.unit == "block" else None, fmt.sink_tokens)


def _sum(first: int, last: int) -> int:
    """first + ... + last; 0 if there are none."""
    return max(0, last - first + 1) * (first + last) // 2
