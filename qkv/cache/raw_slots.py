"""Which slot holds the raw rows of whom: tails belong to running requests, sinks to the first block of a sequence.

The bytes are in cache/store.py. Does not know about: requests, tensors.
"""

from collections.abc import Iterable

from qkv.types import BlockId


class TailSlots:
    """Slots 0..n-1. Every running request owns one, so n = max_num_seqs always suffices."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._free = list(range(n - 1, -1, -1))

    def take(self) -> int:
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def check(self, owned: Iterable[int]) -> None:
        """Raise AssertionError if free and owned slots do not add up."""
        assert sorted([*owned, *self._free]) == list(range(self.n)), "tail slots leaked or are owned twice"


class SinkSlots:
    """Slots 0..n-1, keyed by the first block of a sequence. Requests that share the block share the slot.

    A slot outlives its last user, so that a later prefix match finds the raw rows, until another sequence needs it: the one
    unused for longest goes first. A cached first block without its slot is no match. n must be at least the number of
    requests that run at once.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._free = list(range(n - 1, -1, -1))
        self._slot: dict[BlockId, int] = {}  # least recently taken first
        self._users: dict[BlockId, int] = {}

    def holds(self, block: BlockId) -> bool:
        return block in self._slot

    def take(self, block: BlockId, fresh: bool) -> int:
        """The slot of the sequence that starts with this block. fresh: the block is new, what its slot held is void."""
        slot = self._slot.pop(block, None)
        if fresh and slot is not None:
            self._free.append(slot)
            slot = None
        if slot is None:
            if not self._free:
                unused = next(b for b in self._slot if not self._users[b])
                self._free.append(self._slot.pop(unused))
                del self._users[unused]
            slot, self._users[block] = self._free.pop(), 0
        self._slot[block] = slot
        self._users[block] += 1
        return slot

    def give_back(self, block: BlockId) -> None:
        self._users[block] -= 1

    def check(self, first_blocks: Iterable[BlockId]) -> None:
        """Raise AssertionError if slots or their users do not add up. first_blocks: of all that run."""
        users: dict[BlockId, int] = dict.fromkeys(self._slot, 0)
        for block in first_blocks:
            users[block] += 1
        assert users == self._users, f"sink slots are used by {users}, counted {self._users}"
        assert sorted([*self._slot.values(), *self._free]) == list(range(self.n)), "sink slots leaked"
