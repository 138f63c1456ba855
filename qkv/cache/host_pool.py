"""Which host block is free. The bytes are in cache/store.py; a host block holds all planes of one device block."""

from collections.abc import Sequence

from qkv.types import BlockId


class HostPool:
    """Ids 0..num_blocks-1. Owned blocks belong to exactly one swapped request."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> list[BlockId]:
        """n blocks. The caller has checked num_free."""
        assert n <= len(self._free), f"{n} host blocks asked for, {len(self._free)} free"
        return [self._free.pop() for _ in range(n)]

    def release(self, blocks: Sequence[BlockId]) -> None:
        self._free.extend(blocks)

    def check(self, tables: Sequence[Sequence[BlockId]]) -> None:
        """Raise AssertionError if free and owned host blocks do not add up."""
        owned = [block for table in tables for block in table]
        assert sorted(owned + self._free) == list(range(self.num_blocks)), "host blocks leaked or are owned twice"
