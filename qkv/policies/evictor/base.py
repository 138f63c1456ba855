"""Chooses which cached block is evicted when the pool is full.

Takes: blocks that became evictable (reference count 0, valid content, no published child). Gives: victims, in the order in
which to evict them. Does not know about: reference counts, hashes, requests, clocks (time is the engine's step counter).
"""

import heapq
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from qkv.registry import Registry
from qkv.types import BlockId


class NotEnough(Exception):
    """The evictor holds fewer blocks than victims were asked for; nothing was changed."""


@dataclass(slots=True)
class BlockMeta:
    """What an evictor may know of one published block. `hits` counts its prefix matches since it was published."""

    block: BlockId
    depth: int  # place in its prefix chain, 0 at the root
    born_step: int  # step at which it was published
    last_step: int  # step of its last use: publication, hit or release
    hits: int = 0


@dataclass
class Evictor(ABC):
    """Holds the evictable blocks. Only the allocator calls it, and adds only blocks without published children, so that no
    policy can cut a cached block off from the root of its chain."""

    name: ClassVar[str]

    @abstractmethod
    def add(self, meta: BlockMeta) -> None:
        """The block became evictable: its last reference was released, or its last published child was evicted."""

    @abstractmethod
    def hit(self, meta: BlockMeta) -> None:
        """A request was admitted with this block in its cached prefix. The block may be held here or not; meta.hits and
        meta.last_step are up to date. If it is held, remove follows."""

    @abstractmethod
    def remove(self, block: BlockId) -> None:
        """The block is no longer evictable: a request references it again. Raises KeyError if it is not held here."""

    @abstractmethod
    def pop(self, n: int) -> list[BlockId]:
        """Remove n blocks and return them, the one to evict first in front. Called when the free blocks do not suffice.
        Raises NotEnough, with nothing changed, if fewer than n are held."""

    @abstractmethod
    def __len__(self) -> int:
        """How many blocks are held. The allocator compares it with its own count in check."""


@dataclass
class PriorityEvictor(Evictor):
    """An evictor that only has to say how much a block is worth, in one pure function, `priority`. This class keeps the heap.

    Of blocks with equal priority the deeper one is evicted first, then the one with the smaller block id.
    """

    _heap: list[tuple[Any, int, BlockId, int]] = field(default_factory=list, init=False, repr=False)
    _live: dict[BlockId, int] = field(default_factory=dict, init=False, repr=False)  # block -> version of its valid entry
    _version: int = field(default=0, init=False, repr=False)

    @abstractmethod
    def priority(self, meta: BlockMeta) -> Any:
        """A sortable value; the block with the smallest is evicted first. Called by add, and by hit for blocks held here. It must
        follow from `meta` alone."""

    def add(self, meta: BlockMeta) -> None:
        priority = self.priority(meta)
        self._version += 1
        self._live[meta.block] = self._version
        heapq.heappush(self._heap, (priority, -meta.depth, meta.block, self._version))
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
            raise NotEnough(f"{n} victims were asked for, and {len(self._live)} blocks are held")
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
