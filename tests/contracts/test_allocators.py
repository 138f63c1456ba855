"""Every registered allocator gives all blocks or none, none of them twice, counts them right, and finds only true prefixes."""

import random
from dataclasses import dataclass

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from qkv.policies.allocator.base import ALLOCATORS, BlockAllocator, NoFreeBlocks
from qkv.policies.allocator.paged import Paged
from qkv.policies.evictor.base import EVICTORS, BlockMeta
from qkv.policies.evictor.lru import LRU
from qkv.types import NULL_BLOCK, BlockId

PER_REQUEST = 6  # blocks of the longest request
allocators = pytest.mark.parametrize("name", ALLOCATORS.names())


def make(name: str, num_blocks: int = 26) -> BlockAllocator:
    allocator = ALLOCATORS.build(name)
    allocator.bind(num_blocks, EVICTORS.build("lru"), PER_REQUEST)
    return allocator


def state(allocator: BlockAllocator) -> tuple[int, int, list[int]]:
    return allocator.num_free, allocator.num_cached, list(allocator.refs)


def chain_of(tokens: list[int], size: int) -> list[bytes]:
    """One hash per full block: of everything up to its end, and so short that different contents sometimes collide."""
    return [bytes([xxhash.xxh32_intdigest(bytes(tokens[:end])) % 53]) for end in range(size, len(tokens) + 1, size)]


@allocators
def test_an_empty_pool_serves_what_it_promises(name: str) -> None:
    allocator = make(name)
    assert allocator.num_cached == allocator.num_referenced == 0
    assert allocator.num_free + allocator.num_reserved == allocator.num_blocks
    blocks = allocator.allocate(allocator.blocks_for(min(allocator.max_tokens(), PER_REQUEST * allocator.block_size)))
    assert len(set(blocks)) == len(blocks)
    assert NULL_BLOCK not in blocks
    allocator.check([blocks])


@allocators
@given(tokens=st.integers(1, PER_REQUEST * 16))
def test_a_longer_request_never_needs_fewer_blocks(name: str, tokens: int) -> None:
    allocator = make(name)
    assert allocator.blocks_for(tokens) <= allocator.blocks_for(tokens + 1)
    assert allocator.blocks_for(tokens) * allocator.block_size >= tokens


@allocators
def test_allocation_is_all_or_nothing(name: str) -> None:
    allocator = make(name)
    tables = []
    per_request = allocator.blocks_for(PER_REQUEST * allocator.block_size)
    while allocator.num_available >= per_request:
        tables.append(allocator.allocate(per_request))
        allocator.check(tables)
    before = state(allocator)
    with pytest.raises(NoFreeBlocks):
        allocator.allocate(per_request)
    assert state(allocator) == before
    assert len({block for table in tables for block in table}) == sum(map(len, tables))


@dataclass
class Seen:
    """What happened in a trace: a law that never met its case was not tested."""

    published: int = 0
    hits: int = 0
    deep_hits: int = 0  # of blocks below a root
    collisions: int = 0  # publications refused because other content has the same hash
    evictions: int = 0


def play(name: str, seed: int) -> Seen:
    """Requests over two tokens, so that prefixes repeat, come and go; a hit must hold the very tokens asked for."""
    rng, seen = random.Random(seed), Seen()
    allocator = make(name)
    size = allocator.block_size
    tables: list[list[BlockId]] = []
    content: dict[BlockId, list[int]] = {}  # everything up to the end of the block, as published
    hash_of: dict[BlockId, bytes] = {}
    for _ in range(40):
        if tables and rng.random() < 0.4:
            allocator.release(tables.pop(rng.randrange(len(tables)))[::-1])
        else:
            tokens = [t for _ in range(rng.randint(1, PER_REQUEST)) for t in [rng.randrange(2)] * size]
            chain = chain_of(tokens, size)
            hit = allocator.match(chain[:-1], tokens)
            assert all(content[block] == tokens[: (i + 1) * size] for i, block in enumerate(hit))
            before = state(allocator)
            allocator.acquire(hit)
            try:
                table = hit + allocator.allocate(allocator.blocks_for(len(tokens)) - len(hit))
            except NoFreeBlocks:
                allocator.release(hit[::-1])
                assert state(allocator) == before
                continue
            tables.append(table)
            seen.hits += len(hit)
            seen.deep_hits += len(hit[1:])
            known = len(hit)
            for i in range(len(hit), len(chain)):
                end = (i + 1) * size
                parent = table[i - 1] if i else NULL_BLOCK
                if not allocator.publish(table[i], chain[i], parent, tuple(tokens[end - size : end]), i):
                    seen.collisions += any(hash_of[b] == chain[i] and content[b] != tokens[:end] for b in content)
                    break
                content[table[i]], hash_of[table[i]] = tokens[:end], chain[i]
                known += 1
            seen.published += known - len(hit)
            assert allocator.match(chain, tokens)[:known] == table[:known], "what was just published is not found"
        allocator.check(tables)
    for table in tables:
        allocator.release(table[::-1])
    allocator.check([])
    seen.evictions = allocator.evictions
    allocator.reset_cache()
    assert allocator.num_cached == 0
    assert allocator.num_free + allocator.num_reserved == allocator.num_blocks
    return seen


@allocators
@given(seed=st.integers(0, 2**32))
def test_the_books_balance_whatever_happens(name: str, seed: int) -> None:
    play(name, seed)


@allocators
def test_where_blocks_are_shared_the_traces_meet_hits_deep_blocks_collisions_and_evictions(name: str) -> None:
    seen = [play(name, seed) for seed in range(50)]
    if name == "contiguous":  # shares nothing
        assert seen == [Seen()] * len(seen)
    elif any(s.published for s in seen) or issubclass(ALLOCATORS.get(name), Paged):
        for what in ("published", "hits", "deep_hits", "collisions", "evictions"):
            assert sum(getattr(s, what) for s in seen) > 20, f"{what} hardly ever happened"


class _Listening(LRU):
    """Least recently used, and everything it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, BlockId, int, int]] = []

    def add(self, meta: BlockMeta) -> None:
        self.told.append(("add", meta.block, meta.hits, meta.last_step))
        super().add(meta)

    def hit(self, meta: BlockMeta) -> None:
        self.told.append(("hit", meta.block, meta.hits, meta.last_step))
        super().hit(meta)


@allocators
def test_the_evictor_hears_of_every_hit_and_of_the_step_of_every_use(name: str) -> None:
    allocator, evictor = ALLOCATORS.build(name), _Listening()
    allocator.bind(26, evictor, PER_REQUEST)
    tokens = list(range(3 * allocator.block_size))
    chain = chain_of(tokens, allocator.block_size)
    allocator.step = 5
    first, second, third = table = allocator.allocate(allocator.blocks_for(len(tokens)))[:3]
    for i, block in enumerate(table):
        at = slice(i * allocator.block_size, (i + 1) * allocator.block_size)
        if not allocator.publish(block, chain[i], table[i - 1] if i else NULL_BLOCK, tuple(tokens[at]), i):
            pytest.skip("shares nothing")
    allocator.step = 7
    allocator.release(table[::-1])
    assert evictor.told == [("add", third, 0, 7)]
    allocator.step = 9
    allocator.acquire(allocator.match(chain[:2], tokens))
    assert evictor.told[1:] == [("hit", first, 1, 9), ("hit", second, 1, 9)]


def test_forgetting_the_cache_is_no_eviction() -> None:
    allocator = make("paged")
    (block,) = allocator.allocate(1)
    assert allocator.publish(block, b"hash", NULL_BLOCK, tuple(range(allocator.block_size)), 0)
    allocator.release([block])
    allocator.reset_cache()
    assert (allocator.num_cached, allocator.evictions) == (0, 0)
