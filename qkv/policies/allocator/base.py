"""Who owns which block: free, cached or referenced; and the index of cached blocks by content.

Takes: requests for blocks, releases, publications of full blocks. Gives: block ids.
Does not know about: requests, tensors. Touched by the stepping thread only.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from qkv.policies.evictor.base import Evictor
from qkv.registry import Registry
from qkv.types import NULL_BLOCK, BlockHash, BlockId


class NoFreeBlocks(Exception):
    """The pool cannot give that many blocks; nothing was changed."""


@dataclass
class BlockAllocator(ABC):
    """Reference counts live here, once. Block 0 is the null block: reserved, never handed out.

    Laws: allocate is all-or-nothing; free + cached + referenced + reserved = num_blocks, always.
    """

    name: ClassVar[str]
    grows: ClassVar[bool] = True  # False: a request gets all its blocks at admission
    block_size: int
    num_blocks: int = field(default=0, init=False, repr=False)
    refs: list[int] = field(default_factory=list, init=False, repr=False)
    step: int = field(default=0, init=False, repr=False)  # the engine's step counter: the only time eviction knows
    evictions: int = field(default=0, init=False, repr=False)

    def bind(self, num_blocks: int, evictor: Evictor, max_blocks_per_request: int) -> None:
        """Called once, before use. Raises ConfigError when the pool cannot hold a single request."""
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks

    @abstractmethod
    def blocks_for(self, num_tokens: int) -> int:
        """Blocks a request holds that has num_tokens tokens in the cache."""

    @abstractmethod
    def max_tokens(self) -> int:
        """Tokens of the largest single request that fits an otherwise empty pool."""

    @property
    @abstractmethod
    def num_free(self) -> int:
        """Blocks without content worth keeping."""

    @property
    @abstractmethod
    def num_cached(self) -> int:
        """Blocks with reference count 0 whose content can still be hit."""

    @property
    @abstractmethod
    def num_reserved(self) -> int:
        """Blocks that are never handed out: the null block, and what the policy cannot use."""

    @property
    def num_available(self) -> int:
        return self.num_free + self.num_cached

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - self.num_reserved - self.num_available

    @abstractmethod
    def allocate(self, n: int) -> list[BlockId]:
        """n blocks with reference count 1, evicting if needed. All, or NoFreeBlocks with nothing changed."""

    @abstractmethod
    def acquire(self, blocks: Sequence[BlockId]) -> None:
        """One more reference to each (cached blocks become referenced). A prefix match: counts as a hit."""

    @abstractmethod
    def release(self, blocks: Sequence[BlockId]) -> None:
        """One reference less to each, a request's last block first. At 0, published blocks stay cached, others are free."""

    @abstractmethod
    def publish(self, block: BlockId, block_hash: BlockHash, parent: BlockId, tokens: tuple[int, ...], depth: int) -> bool:
        """The block is full and its content can be shared; parent is the block before it in the request's table (the
        null block at depth 0). False if equal (or colliding) content is published already, or the parent is not: then
        the block stays private."""

    @abstractmethod
    def match(self, chain: Sequence[BlockHash], tokens: Sequence[int]) -> list[BlockId]:
        """Blocks of the longest cached prefix of the chain; token equality verified block by block. No side effect."""

    @abstractmethod
    def reset_cache(self) -> None:
        """Forget all cached content that nobody references."""

    def check(self, tables: Iterable[Sequence[BlockId]]) -> None:
        """Raise AssertionError naming the block if reference counts and the given block tables disagree."""
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
