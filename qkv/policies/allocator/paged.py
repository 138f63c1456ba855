"""Requests get blocks as they grow and share those of equal content: the pool is a free list and a prefix cache."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from qkv.policies.allocator.base import ALLOCATORS, BlockAllocator, NoFreeBlocks
from qkv.policies.evictor.base import BlockMeta, Evictor
from qkv.types import NULL_BLOCK, BlockHash, BlockId
from qkv.validate import require


@dataclass(slots=True)
class _Published:
    """A block that prefix matches can find. Always: its parent is published too, and is cached or referenced."""

    meta: BlockMeta
    hash: BlockHash
    tokens: tuple[int, ...]
    parent: BlockId  # NULL_BLOCK at the root
    children: int = 0  # published blocks whose parent is this one


@ALLOCATORS.register("paged")
@dataclass
class Paged(BlockAllocator):
    """block_size tokens per block. Source: PagedAttention (Kwon et al., 2023).

    Leaves are evicted first, whatever the evictor prefers: it is offered only blocks without published children, so no cached
    block ever becomes unreachable. A match compares the tokens too, so a hash collision costs a miss and never a wrong answer.
    """

    block_size: int = 16
    _free: list[BlockId] = field(default_factory=list, init=False, repr=False)
    _index: dict[BlockHash, BlockId] = field(default_factory=dict, init=False, repr=False)
    _published: dict[BlockId, _Published] = field(default_factory=dict, init=False, repr=False)
    _cached: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        power_of_two = self.block_size & (self.block_size - 1) == 0
        require(4 <= self.block_size <= 256 and power_of_two, "block_size", self.block_size, "4, 8, 16, 32, 64, 128 or 256")

    def bind(self, num_blocks: int, evictor: Evictor, max_blocks_per_request: int) -> None:
        super().bind(num_blocks, evictor, max_blocks_per_request)
        self._evictor = evictor
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def max_tokens(self) -> int:
        return (self.num_blocks - self.num_reserved) * self.block_size

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._cached

    @property
    def num_reserved(self) -> int:
        return 1

    def allocate(self, n: int) -> list[BlockId]:
        if n > self.num_available:
            raise NoFreeBlocks(f"{n} blocks were asked for, and {self.num_available} are available")
        while len(self._free) < n:
            self._evict()
        blocks = [self._free.pop() for _ in range(n)]
        for block in blocks:
            self.refs[block] = 1
        return blocks

    def acquire(self, blocks: Sequence[BlockId]) -> None:
        for block in blocks:
            entry = self._published[block]
            entry.meta.hits += 1
            entry.meta.last_step = self.step
            self._evictor.hit(entry.meta)
            if self.refs[block] == 0:
                self._cached -= 1
                if not entry.children:
                    self._evictor.remove(block)
            self.refs[block] += 1

    def release(self, blocks: Sequence[BlockId]) -> None:
        for block in blocks:
            self.refs[block] -= 1
            assert self.refs[block] >= 0, f"block {block} released more often than referenced"
            if self.refs[block]:
                continue
            entry = self._published.get(block)
            if entry is None:
                self._free.append(block)
                continue
            self._cached += 1
            entry.meta.last_step = self.step
            if not entry.children:
                self._evictor.add(entry.meta)

    def publish(self, block: BlockId, block_hash: BlockHash, parent: BlockId, tokens: tuple[int, ...], depth: int) -> bool:
        if block_hash in self._index or (depth and parent not in self._published):
            return False
        meta = BlockMeta(block, depth, born_step=self.step, last_step=self.step)
        self._published[block] = _Published(meta, block_hash, tokens, parent)
        self._index[block_hash] = block
        if depth:
            self._published[parent].children += 1
        return True

    def match(self, chain: Sequence[BlockHash], tokens: Sequence[int]) -> list[BlockId]:
        blocks: list[BlockId] = []
        for i, block_hash in enumerate(chain):
            block = self._index.get(block_hash)
            if block is None:
                break
            entry = self._published[block]
            parent = blocks[-1] if blocks else NULL_BLOCK
            if entry.parent != parent or entry.tokens != tuple(tokens[i * self.block_size : (i + 1) * self.block_size]):
                break
            blocks.append(block)
        return blocks

    def reset_cache(self) -> None:
        before = self.evictions
        while self._cached:
            self._evict()
        self.evictions = before  # evictions count blocks that went because others needed the room

    def _evict(self) -> None:
        """Free the block that the evictor names; its parent may become evictable."""
        (block,) = self._evictor.pop(1)
        entry = self._published.pop(block)
        del self._index[entry.hash]
        self._cached -= 1
        self._free.append(block)
        self.evictions += 1
        parent = self._published.get(entry.parent)
        if parent is not None:
            parent.children -= 1
            if not parent.children and not self.refs[entry.parent]:
                self._evictor.add(parent.meta)

    def check(self, tables: "Sequence[Sequence[BlockId]]") -> None:  # type: ignore[override]
        super().check(tables)
        assert len(set(self._free)) == len(self._free), "a block is in the free list twice"
        assert all(not self.refs[b] and b not in self._published for b in self._free), "a free block has references or content"
        assert len(self._index) == len(self._published), "the hash index and the published blocks disagree"
        children: dict[BlockId, int] = {}
        evictable = 0
        for block, entry in self._published.items():
            assert self._index[entry.hash] == block, f"block {block}: its hash points to block {self._index[entry.hash]}"
            if entry.parent:
                assert entry.parent in self._published, f"block {block}: cached, but its parent {entry.parent} is gone"
                children[entry.parent] = children.get(entry.parent, 0) + 1
            evictable += not self.refs[block] and not entry.children
        for block, entry in self._published.items():
            assert entry.children == children.get(block, 0), f"block {block}: wrong count of cached children"
        assert len(self._evictor) == evictable, f"the evictor holds {len(self._evictor)} blocks, {evictable} are evictable"
        assert self._cached == sum(not self.refs[b] for b in self._published), "wrong count of cached blocks"
