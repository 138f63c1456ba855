"""Keeps track of which slot holds which raw rows: those of a request's tail, or those of a sequence's sink tokens.

Takes: requests that start and end, as calls of take and give_back. Gives: slot numbers. A tail slot belongs to one running
request, a sink slot to the first block of a sequence. Does not know about: requests, the rows themselves (cache/store.py).
"""

from collections.abc import Iterable

from qkv.types import BlockId


class TailSlots:
    """Slots 0..n-1 for raw tails. Every running request owns exactly one, so n = max_num_seqs always suffices."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._free = list(range(n - 1, -1, -1))

    def take(self) -> int:
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def check(self, owned: Iterable[int]) -> None:
        """Raise AssertionError unless every slot is free or is exactly once in `owned`, the running requests' slots."""
        assert sorted([*owned, *self._free]) == list(range(self.n)), "a tail slot leaked or is owned twice"


class SinkSlots:
    """Slots 0..n-1 for the raw rows of sink tokens, keyed by the first block of the sequence. Requests that share this block
    share its slot.

    A slot keeps its rows when its last user ends, so that a later prefix match finds them. When another sequence needs a slot
    and none is free, it takes the unused slot that was taken longest ago; the block that loses its slot can no longer be
    matched. n must be at least the number of requests that run at once.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._free = list(range(n - 1, -1, -1))
        self._slot: dict[BlockId, int] = {}  # least recently taken first
        self._users: dict[BlockId, int] = {}

    def holds(self, block: BlockId) -> bool:
        """Whether the raw rows of the sequence that starts with this block are still in a slot."""
        return block in self._slot

    def take(self, block: BlockId) -> int:
        """The slot of the sequence that starts with this block, for one more user. A slot that the block's id still has from
        another sequence serves as well as any: a new sequence writes its first rows before it reads them."""
        slot = self._slot.pop(block, None)
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
        """Raise AssertionError if a slot is lost or its users are miscounted. first_blocks: one for every running request."""
        users: dict[BlockId, int] = dict.fromkeys(self._slot, 0)
        for block in first_blocks:
            users[block] += 1
        assert users == self._users, f"users of sink slots by first block: counted {self._users}, but there are {users}"
        assert sorted([*self._slot.values(), *self._free]) == list(range(self.n)), "a sink slot leaked or is owned twice"
