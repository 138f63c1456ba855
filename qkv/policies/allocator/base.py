"""Knows of every block whether it is free, cached or referenced, and finds cached blocks by their content.

Takes: calls for blocks, releases of blocks, publications of full blocks. Gives: block ids.
Does not know about: requests, tensors. Only the stepping thread calls it.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from qkv.policies.evictor.base import Evictor
from qkv.registry import Registry
from qkv.types import NULL_BLOCK, BlockHash, BlockId


class NoFreeBlocks(Exception):
    """The pool cannot give as many blocks as were asked for; nothing was changed."""


@dataclass
class BlockAllocator(ABC):
    """Holds the reference count of every block. Block 0 is the null block: it is reserved and never handed out.

    The block manager calls all methods, except where one says otherwise. allocate gives all blocks or none, and law 4 holds
    after every call: free + cached + referenced + reserved = num_blocks.
    """

    name: ClassVar[str]
    grows: ClassVar[bool] = True  # False: a request gets all its blocks at admission
    block_size: int
    num_blocks: int = field(default=0, init=False, repr=False)
    refs: list[int] = field(default_factory=list, init=False, repr=False)
    step: int = field(default=0, init=False, repr=False)  # set by the scheduler in every step: the only time eviction knows
    evictions: int = field(default=0, init=False, repr=False)

    def bind(self, num_blocks: int, evictor: Evictor, max_blocks_per_request: int) -> None:
        """The engine calls this once, when it is built, before all else. evictor: chooses which cached block is evicted.
        max_blocks_per_request: blocks of the longest request. Raises ConfigError when the pool cannot hold one request."""
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self._bound = evictor, max_blocks_per_request

    def renewed(self) -> "BlockAllocator":
        """The same policy with every block free and nothing cached, and an evictor that knows nothing: what the block manager
        goes on with after a policy failed half-way and left books that nobody can trust."""
        evictor, max_blocks_per_request = self._bound
        fresh = replace(self)
        fresh.bind(self.num_blocks, replace(evictor), max_blocks_per_request)
        fresh.step, fresh.evictions = self.step, self.evictions
        return fresh

    @abstractmethod
    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks a request holds that has num_tokens tokens in the cache. Asked before a table is made or grows."""

    @abstractmethod
    def max_tokens(self) -> int:
        """Tokens of the largest request that fits an otherwise empty pool. The engine asks once, to refuse longer ones."""

    @property
    @abstractmethod
    def num_free(self) -> int:
        """How many blocks have no content worth keeping."""

    @property
    @abstractmethod
    def num_cached(self) -> int:
        """How many blocks have reference count 0 and content that a prefix match can still find."""

    @property
    @abstractmethod
    def num_reserved(self) -> int:
        """How many blocks are never handed out: the null block, and those that the policy cannot use."""

    @property
    def num_available(self) -> int:
        return self.num_free + self.num_cached

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - self.num_reserved - self.num_available

    @abstractmethod
    def allocate(self, n: int) -> list[BlockId]:
        """Return n blocks with reference count 1; evict cached blocks for them if needed. Raises NoFreeBlocks, with nothing
        changed, if there are not n. Called when a request is admitted, grows, or is swapped in."""

    @abstractmethod
    def acquire(self, blocks: Sequence[BlockId]) -> None:
        """Add a reference to each of the blocks and count a hit; cached ones become referenced. Called when a request is
        admitted, with what match returned for it."""

    @abstractmethod
    def release(self, blocks: Sequence[BlockId]) -> None:
        """Take a reference from each of the blocks. At 0 a published block stays, as cached, and another becomes free. Called
        with a request's whole table, its last block first, when the request ends or is preempted."""

    @abstractmethod
    def publish(self, block: BlockId, block_hash: BlockHash, parent: BlockId, tokens: tuple[int, ...], depth: int) -> bool:
        """Let prefix matches find the block, which is full. Called once for each full block of a table, in order.

        parent: the block before it in the table, or the null block at depth 0. tokens: the block's. Returns False, and leaves
        the block private, if equal content (or a colliding hash) is published already or the parent is not published."""

    @abstractmethod
    def match(self, chain: Sequence[BlockHash], tokens: Sequence[int]) -> list[BlockId]:
        """The published blocks of the longest known prefix of the chain. Compares the tokens of every block and changes
        nothing. chain: hashes of the request's first blocks; tokens: its token ids. Called before each try to admit it."""

    @abstractmethod
    def reset_cache(self) -> None:
        """Free all cached blocks. Called by Engine.reset_prefix_cache."""

    def check(self, tables: Iterable[Sequence[BlockId]]) -> None:
        """Raise AssertionError, naming the block, if the reference counts and the block tables disagree. tables: those of all
        running requests. Called by Engine.check, between steps."""
        counts = Counter(block for table in tables for block in table)
        assert counts[NULL_BLOCK] == 0, "the null block is in a block table"
        for block, ref in enumerate(self.refs):
            assert ref == counts[block], f"block {block}: reference count {ref}, but {counts[block]} tables hold it"
        referenced = sum(ref > 0 for ref in self.refs)
        assert self.num_free + self.num_cached + referenced + self.num_reserved == self.num_blocks, (
            f"free {self.num_free} + cached {self.num_cached} + referenced {referenced} + reserved {self.num_reserved}"
            f" != {self.num_blocks} blocks"
        )


ALLOCATORS: Registry[BlockAllocator] = Registry("allocator", BlockAllocator, "qkv.policies.allocator")
