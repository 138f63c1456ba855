"""Keeps track of which host blocks are free. A host block has room for all planes of one device block.

Takes: how many blocks a swapped request needs. Gives: their ids. Does not know about: the bytes, which cache/store.py holds.
"""

from collections.abc import Sequence

from qkv.types import BlockId


class HostPool:
    """Host blocks have the ids 0..num_blocks-1. One that is not free belongs to exactly one swapped request."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> list[BlockId]:
        """Take n free blocks. The caller has checked that num_free is at least n."""
        assert n <= len(self._free), f"{n} host blocks were asked for, and {len(self._free)} are free"
        return [self._free.pop() for _ in range(n)]

    def release(self, blocks: Sequence[BlockId]) -> None:
        self._free.extend(blocks)

    def check(self, tables: Sequence[Sequence[BlockId]]) -> None:
        """Raise AssertionError unless every host block is free or in exactly one of `tables`, the swapped requests' blocks."""
        owned = [block for table in tables for block in table]
        assert sorted(owned + self._free) == list(range(self.num_blocks)), "a host block leaked or is owned twice"
