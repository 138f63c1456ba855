"""The pool under random operations: whatever happens, the books balance."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from qkv.cache.block_manager import BlockManager
from qkv.cache.host_pool import HostPool
from qkv.cache.prefix import PrefixHasher
from qkv.cache.raw_slots import SinkSlots, TailSlots
from qkv.metrics.recorder import Recorder
from qkv.policies.allocator.base import ALLOCATORS, NoFreeBlocks
from qkv.policies.evictor.base import EVICTORS
from qkv.types import Request, SamplingParams, Status

B, SINKS = 8, 3


def make_manager(
    num_blocks: int = 24,
    host: int = 16,
    evictor: str = "lru",
    watermark: float = 0.0,
    prefix: bool = True,
    algorithm: str = "xxh3_128",
    raw_slots: int = 0,
) -> BlockManager:
    allocator = ALLOCATORS.build({"name": "paged", "block_size": B})
    allocator.bind(num_blocks, EVICTORS.build(evictor), num_blocks)
    hasher = PrefixHasher(algorithm, B, ["model", "quantizer"]) if prefix else None
    raw = {"tails": TailSlots(raw_slots), "sinks": SinkSlots(raw_slots), "raw_host_blocks": 1} if raw_slots else {}
    return BlockManager(allocator, hasher, HostPool(host), Recorder(), watermark, block_bytes=100, **raw)  # type: ignore[arg-type]


def make_request(i: int, tokens: list[int], **kw: object) -> Request:
    return Request(i, len(tokens), list(tokens), SamplingParams(), 1000, **kw)  # type: ignore[arg-type]


def compute(manager: BlockManager, request: Request, upto: int | None = None) -> None:
    """Do what a step does: the keys and values of tokens before `upto` are now in the cache."""
    request.num_computed = request.num_inputs if upto is None else upto
    manager.seal(request)


class PoolMachine(RuleBasedStateMachine):
    """Requests have a tiny vocabulary, so that prefixes repeat, and the pool is small, so that blocks and slots are scarce."""

    operations = 0

    @initialize(
        evictor=st.sampled_from(EVICTORS.names()),
        blocks=st.integers(6, 30),
        host=st.integers(0, 12),
        watermark=st.sampled_from([0.0, 0.1]),
        raw=st.booleans(),
    )
    def start(self, evictor: str, blocks: int, host: int, watermark: float, raw: bool) -> None:
        self.limit = blocks // 3 if raw else blocks  # requests that run at once: with raw rows, slots are scarce
        self.manager = make_manager(blocks, host, evictor, watermark, raw_slots=self.limit if raw else 0)
        self.tails: dict[int, tuple[int, ...]] = {}  # slot -> the prefix whose recent, or first, tokens it holds
        self.sinks: dict[int, tuple[int, ...]] = {}
        self.host_raw: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.running: list[Request] = []
        self.swapped: list[Request] = []
        self.next_id = 0
        self.content: dict[int, tuple[int, ...]] = {}  # block -> the whole prefix its bytes stand for, as last written
        self.host_content: dict[int, tuple[int, ...]] = {}

    def _write(self, request: Request, start: int, end: int) -> None:
        """Stand in for the store: write tokens start..end through the block table."""
        refs = self.manager.allocator.refs
        for position in range(start, end):
            block = request.blocks[position // B]
            assert refs[block] == 1, "a block with more than one reference is being written"
            self.content[block] = tuple(request.token_ids[: position + 1])
            if position < SINKS:
                self.sinks[request.sink_slot] = tuple(request.token_ids[: position + 1])
        self.tails[request.tail_slot] = tuple(request.token_ids[:end])
        request.num_computed = end
        self.manager.seal(request)

    @rule(seed=st.integers(0, 7), length=st.integers(1, 60), chunk=st.integers(1, 64))
    def admit(self, seed: int, length: int, chunk: int) -> None:
        tokens = [random.Random(seed * 1000 + i // B).randrange(3) for i in range(length)]
        request = make_request(self.next_id, tokens)
        if len(self.running) < self.limit and self.manager.admit(request, alone=not self.running):
            self.next_id += 1
            request.status = Status.RUNNING
            self.running.append(request)
            assert request.num_computed < len(tokens)
            for position in range(request.num_computed):
                self._expect(request, position)
            self._write(request, request.num_computed, min(len(tokens), request.num_computed + chunk))
        else:
            assert not request.blocks

    def _expect(self, request: Request, position: int) -> None:
        """What is stored at the position must stand for exactly the request's own tokens."""
        stored = self.content[request.blocks[position // B]]
        assert stored[: position + 1] == tuple(request.token_ids[: position + 1])

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 99), token=st.integers(0, 2))
    def append(self, pick: int, token: int) -> None:
        request = self.running[pick % len(self.running)]
        if request.num_computed == len(request.token_ids):
            if not self.manager.grow(request):
                return
            request.token_ids.append(token)
        self._write(request, request.num_computed, request.num_computed + 1)

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 99))
    def finish_or_abort(self, pick: int) -> None:
        request = self.running.pop(pick % len(self.running))
        self.manager.release(request)
        assert not request.blocks

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 99))
    def preempt_by_recompute(self, pick: int) -> None:
        request = self.running.pop(pick % len(self.running))
        self.manager.drop(request)
        assert request.num_computed == 0

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 99))
    def swap_out(self, pick: int) -> None:
        request = self.running[pick % len(self.running)]
        view = self.manager.view(request)
        if view.num_blocks == 0 or self.manager.host_blocks(request) > self.manager.host.num_free:
            return
        self.running.remove(request)
        copy = self.manager.swap_out(request)
        assert len(copy.device) == len(copy.host) == view.num_blocks
        for device, host in zip(copy.device, copy.host, strict=True):
            self.host_content[host] = self.content[device]
        for host in copy.raw_host:
            self.host_raw[host] = self.tails[copy.tail_slot], self.sinks[copy.sink_slot]
        self.swapped.append(request)

    @precondition(lambda self: self.swapped)
    @rule(pick=st.integers(0, 99))
    def swap_in(self, pick: int) -> None:
        request = self.swapped[pick % len(self.swapped)]
        copy = self.manager.swap_in(request, alone=not self.running) if len(self.running) < self.limit else None
        if copy is None:
            assert not request.blocks
            return
        for device, host in zip(copy.device, copy.host, strict=True):
            self.content[device] = self.host_content[host]
        for host in copy.raw_host:
            self.tails[copy.tail_slot], self.sinks[copy.sink_slot] = self.host_raw[host]
        self.swapped.remove(request)
        self.running.append(request)
        for position in range(request.num_computed):
            self._expect(request, position)

    @rule(n=st.integers(1, 6))
    def evict(self, n: int) -> None:
        allocator = self.manager.allocator
        if n <= allocator.num_available:
            blocks = allocator.allocate(n)
            for block in blocks:
                self.content[block] = (-1,)
            allocator.release(blocks)

    @rule()
    def reset(self) -> None:
        self.manager.allocator.reset_cache()
        assert self.manager.allocator.num_cached == 0

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "manager"):
            PoolMachine.operations += 1
            self.manager.check([*self.running, *self.swapped])
            for request in self.running:
                if request.num_computed:
                    self._expect(request, request.num_computed - 1)
                if request.tail_slot >= 0:
                    own = tuple(request.token_ids[: request.num_computed])
                    assert self.tails[request.tail_slot] == own
                    assert self.sinks[request.sink_slot][: len(own)] == own[:SINKS]


def test_admission_is_all_or_nothing() -> None:
    manager = make_manager(num_blocks=5)
    assert not manager.admit(make_request(0, list(range(5 * B))), alone=True)
    manager.check([])
    assert manager.allocator.num_free == 4


def test_an_admission_that_the_allocator_refuses_after_a_hit_gives_the_hit_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator may have the blocks and not be able to give them together."""
    manager = make_manager()
    first, second = (make_request(i, list(range(3 * B))) for i in range(2))
    assert manager.admit(first, True)
    compute(manager, first)

    def refuse(n: int) -> list[int]:
        raise NoFreeBlocks

    monkeypatch.setattr(manager.allocator, "allocate", refuse)
    assert not manager.admit(second, False)
    assert not second.blocks
    manager.check([first])


def test_full_prompt_hit_leaves_a_token_to_compute() -> None:
    """A prompt of whole blocks that is cached in full must still yield logits."""
    manager = make_manager()
    first, second = (make_request(i, list(range(3 * B))) for i in range(2))
    assert manager.admit(first, True)
    compute(manager, first)
    assert manager.admit(second, False)
    assert second.num_computed == 2 * B
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] != first.blocks[2]


def test_scoring_never_takes_the_positions_it_needs_from_the_cache() -> None:
    manager = make_manager()
    first = make_request(0, list(range(6 * B)))
    assert manager.admit(first, True)
    compute(manager, first)
    for score_from, cached in ((1, 0), (B, 0), (B + 1, B), (3 * B + 5, 3 * B), (6 * B - 1, 5 * B)):
        request = make_request(1, list(range(6 * B)), score_from=score_from)
        assert manager.admit(request, False)
        assert request.num_computed == cached, score_from
        manager.release(request)


def test_equal_prompts_in_one_step_stay_private_and_then_are_hit() -> None:
    manager = make_manager()
    a, b, c = (make_request(i, list(range(2 * B + 3))) for i in range(3))
    assert manager.admit(a, True)
    assert manager.admit(b, False)
    compute(manager, a)
    compute(manager, b)
    assert not set(a.blocks) & set(b.blocks)
    assert manager.admit(c, False)
    assert c.blocks[:2] == a.blocks[:2]
    manager.check([a, b, c])


def test_eviction_is_leaf_first_for_every_evictor() -> None:
    for name in EVICTORS.names():
        manager = make_manager(num_blocks=9, evictor=name)
        request = make_request(0, list(range(6 * B + 1)))
        assert manager.admit(request, True)
        compute(manager, request)
        manager.release(request)
        cached = 6
        while manager.allocator.num_cached:
            manager.allocator.release(manager.allocator.allocate(manager.allocator.num_free + 1))
            cached -= 1
            again = make_request(1, list(range(6 * B + 1)))
            assert len(manager._match(again)) == cached, f"{name}: a cached block became unreachable"
            manager.check([])
        assert cached == 0, "the blocks were never cached"


def test_blocks_that_never_filled_go_before_anything_cached() -> None:
    """Blocks that were never full must not push useful ones out."""
    manager = make_manager(num_blocks=6)
    long, short = make_request(0, list(range(3 * B + 1))), make_request(1, [7])
    assert manager.admit(long, True)
    compute(manager, long)
    manager.release(long)
    assert manager.admit(short, True)
    manager.release(short)
    assert manager.allocator.num_cached == 3
    assert manager.allocator.num_free == 2


def test_a_hash_collision_costs_a_miss_and_never_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkv.cache.prefix._HASHES", {"xxh3_128": lambda data: b"always the same!"})
    manager = make_manager()
    a, b = make_request(0, [1] * (2 * B + 1)), make_request(1, [2] * (2 * B + 1))
    assert manager.admit(a, True)
    compute(manager, a)
    assert manager.admit(b, False)
    assert b.num_computed == 0
    compute(manager, b)
    manager.check([a, b])


@pytest.mark.parametrize("algorithm", ["xxh3_128", "sha256"])
def test_prefix_identity(algorithm: str) -> None:
    """Everything that changes what the bytes mean changes the hash; equal inputs give equal hashes in any process."""

    def chain(identity: list[str], tokens: list[int], salt: str = "", size: int = B) -> bytes:
        out: list[bytes] = []
        PrefixHasher(algorithm, size, identity).extend(out, tokens, 2, salt)
        return out[-1]

    tokens = list(range(32))
    base = chain(["model", "int8", "scales-1"], tokens)
    assert base == chain(["model", "int8", "scales-1"], tokens)
    variants = [
        chain(["other", "int8", "scales-1"], tokens),
        chain(["model", "fp8", "scales-1"], tokens),
        chain(["model", "int8", "scales-2"], tokens),
        chain(["model", "int8", "scales-1"], tokens, salt="tenant"),
        chain(["model", "int8", "scales-1"], tokens, size=16),
        chain(["model", "int8", "scales-1"], [9, *tokens[1:]]),
        chain(["model", "int8scales-1"], tokens),
    ]
    assert len({base, *variants}) == len(variants) + 1


def test_the_chain_is_extended_not_rehashed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bytes] = []

    def counted(data: bytes) -> bytes:
        calls.append(data)
        return bytes(16)

    monkeypatch.setattr("qkv.cache.prefix._HASHES", {"xxh3_128": counted})
    hasher = PrefixHasher("xxh3_128", B, ["m"])
    chain: list[bytes] = []
    for blocks in range(1, 20):
        hasher.extend(chain, list(range(200)), blocks)
    assert len(calls) == 19 + 1  # one per block and the root


def test_hits_plus_misses_are_the_queried_tokens_and_counted_once() -> None:
    manager = make_manager(num_blocks=7)
    a = make_request(0, list(range(3 * B)))
    assert manager.admit(a, True)
    compute(manager, a)
    big = make_request(1, list(range(100, 100 + 4 * B)))
    for _ in range(5):
        assert not manager.admit(big, False)  # failed admissions are not lookups
    assert manager.recorder.prefix_queries_tokens == 3 * B
    same = make_request(2, list(range(3 * B)))
    assert manager.admit(same, False)
    assert manager.recorder.prefix_queries_tokens == 6 * B
    assert manager.recorder.prefix_hits_tokens == 2 * B == same.cached_tokens


def test_a_request_that_resumes_is_not_counted_as_a_prefix_hit() -> None:
    manager = make_manager()
    a = make_request(0, list(range(3 * B)))
    assert manager.admit(a, True)
    compute(manager, a)
    manager.drop(a)
    assert manager.admit(a, True)
    assert a.num_computed == 2 * B  # its own old blocks
    assert manager.recorder.prefix_hits_tokens == 0
    assert manager.recorder.resumed_hits_tokens == 2 * B
    assert manager.recorder.recompute_tokens == B


def test_a_swapped_request_moves_its_bytes_twice_and_offers_its_blocks_again() -> None:
    manager = make_manager()
    first, second = (make_request(i, list(range(3 * B + 1))) for i in range(2))
    assert manager.admit(first, True)
    compute(manager, first)
    manager.swap_out(first)
    manager.allocator.reset_cache()
    assert manager.swap_in(first, True) is not None
    assert manager.recorder.swap_out_bytes == manager.recorder.swap_in_bytes == 4 * 100
    manager.seal(first)
    assert manager.admit(second, False)
    assert second.blocks[:3] == first.blocks[:3]


def test_blocks_that_others_hold_too_do_not_count_as_private() -> None:
    manager = make_manager()
    first, second = (make_request(i, [*range(3 * B), *([i] * B), 9]) for i in range(2))
    assert manager.admit(first, True)
    compute(manager, first)
    assert manager.view(first).num_private_blocks == 5
    assert manager.admit(second, False)
    assert [manager.view(r).num_private_blocks for r in (first, second)] == [2, 2]
    manager.release(first)
    assert manager.view(second).num_private_blocks == 5


def test_the_watermark_holds_back_newcomers_but_never_the_only_request() -> None:
    manager = make_manager(num_blocks=11, watermark=0.5)
    small, big = make_request(0, [1] * 4 * B), make_request(1, [2] * 3 * B)
    assert manager.admit(small, alone=True)
    assert not manager.admit(big, alone=False)
    assert manager.admit(big, alone=True)


def test_a_hit_counts_against_the_watermark_like_the_blocks_it_takes() -> None:
    """Cached blocks that nobody uses are available until a hit takes them."""
    manager = make_manager(num_blocks=11, watermark=0.5)
    first, fits, too_much = (make_request(i, list(range(n * B + 1))) for i, n in enumerate((4, 4, 5)))
    assert manager.admit(first, alone=True)
    compute(manager, first)
    manager.release(first)
    assert not manager.admit(too_much, alone=False)  # 4 hit and 2 new would leave 4 of 10
    assert manager.admit(fits, alone=False)
    assert fits.num_computed == 4 * B


def test_evicting_forgets_the_hash() -> None:
    """When a block is used for other tokens, the prefix that it held can no longer be hit."""
    manager = make_manager(num_blocks=4)
    a = make_request(0, [1] * (3 * B))
    assert manager.admit(a, True)
    compute(manager, a)
    manager.release(a)
    b = make_request(1, [2] * (3 * B))
    assert manager.admit(b, True)
    compute(manager, b)
    manager.release(b)
    assert manager.recorder.prefix_hits_tokens == 0
    again = make_request(2, [1] * (3 * B))
    assert manager.admit(again, True)
    assert again.num_computed == 0


def test_contiguous_reserves_the_longest_length_and_shares_nothing() -> None:
    allocator = ALLOCATORS.build({"name": "contiguous", "block_size": B, "max_len": 4 * B})
    allocator.bind(10, EVICTORS.build("lru"), 100)
    manager = BlockManager(allocator, PrefixHasher("xxh3_128", B, []), HostPool(0), Recorder())
    a, b, c = (make_request(i, [1, 2, 3]) for i in range(3))
    assert manager.admit(a, True)
    assert manager.admit(b, False)
    assert a.blocks == [1, 2, 3, 4]
    assert b.blocks == [5, 6, 7, 8]
    assert not manager.admit(c, False)
    manager.check([a, b])
    manager.release(a)
    assert manager.admit(c, False)
    assert c.blocks == [1, 2, 3, 4]
    manager.check([b, c])


def test_ten_thousand_random_operations() -> None:
    PoolMachine.operations = 0
    run_state_machine_as_test(
        PoolMachine,
        settings=settings(max_examples=300, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)),
    )
    assert PoolMachine.operations >= 10_000
