"""Which cached block goes when the pool is full.

Takes: blocks that became evictable (reference count 0, content valid, no cached child). Gives: victims, worst first.
Does not know about: reference counts, hashes, requests, clocks (time is the engine's step counter).
"""

import heapq
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from qkv.registry import Registry
from qkv.types import BlockId


class NotEnough(Exception):
    """Fewer victims than asked for; nothing was changed."""


@dataclass(slots=True)
class BlockMeta:
    """What is known of one cached block. `hits` counts prefix matches, in all and not only since the last release."""

    block: BlockId
    depth: int  # place in its prefix chain, 0 at the root
    born_step: int  # step at which it was published
    last_step: int  # step of its last use: publication, hit or release
    hits: int = 0


@dataclass
class Evictor(ABC):
    """Holds evictable blocks. The allocator offers leaves only, so no policy can orphan a cached child."""

    name: ClassVar[str]

    @abstractmethod
    def add(self, meta: BlockMeta) -> None:
        """The block became evictable."""

    @abstractmethod
    def hit(self, meta: BlockMeta) -> None:
        """A prefix match used the block, held here or not; meta.hits and meta.last_step are already updated."""

    @abstractmethod
    def remove(self, block: BlockId) -> None:
        """The block is no longer evictable. KeyError if it is not held."""

    @abstractmethod
    def pop(self, n: int) -> list[BlockId]:
        """Remove and return n victims, worst first. Raises NotEnough, with nothing changed, if fewer are held."""

    @abstractmethod
    def __len__(self) -> int: ...


@dataclass
class PriorityEvictor(Evictor):
    """The easy road: write one pure function, `priority`. The heap lives here, once.

    Ties go to the deeper block, then to the older block id.
    """

    _heap: list[tuple[Any, int, BlockId, int]] = field(default_factory=list, init=False, repr=False)
    _live: dict[BlockId, int] = field(default_factory=dict, init=False, repr=False)  # block -> version of its valid entry
    _version: int = field(default=0, init=False, repr=False)

    @abstractmethod
    def priority(self, meta: BlockMeta) -> Any:
        """Sortable; the smallest is evicted first. Pure."""

    def add(self, meta: BlockMeta) -> None:
        self._version += 1
        self._live[meta.block] = self._version
        heapq.heappush(self._heap, (self.priority(meta), -meta.depth, meta.block, self._version))
        if len(self._heap) > 64 + 4 * len(self._live):
            self._heap = [entry for entry in self._heap if self._live.get(entry[2]) == entry[3]]
            heapq.heapify(self._heap)

    def hit(self, meta: BlockMeta) -> None:
        if meta.block in self._live:
            self.add(meta)

    def remove(self, block: BlockId) -> None:
        del self._live[block]

    def pop(self, n: int) -> list[BlockId]:
        if n > len(self._live):
            raise NotEnough(f"{n} victims asked for, {len(self._live)} blocks held")
        victims: list[BlockId] = []
        while len(victims) < n:
            _, _, block, version = heapq.heappop(self._heap)
            if self._live.get(block) == version:
                del self._live[block]
                victims.append(block)
        return victims

    def __len__(self) -> int:
        return len(self._live)


EVICTORS: Registry[Evictor] = Registry("evictor", Evictor, "qkv.policies.evictor")
