"""The laws of qkv/LAWS.md, end to end on a tiny model. A test's number is the law's."""

import itertools
from typing import Any, Literal

import pytest
import torch

from qkv.layout import SIDES, HeadFormat, KVFormat
from qkv.metrics.reads import CountReads
from qkv.metrics.recorder import Recorder
from qkv.policies.evictor.base import EVICTORS
from qkv.policies.preemptor.base import PREEMPTORS
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.types import Request, SamplingParams, Status
from tests.engine.support import block_unit, keep_stored, make, scales, stored, tokens

FUSABLE = [q for q in QUANTIZERS.names() if QUANTIZERS.get(q).encode_rule != "custom"]
TOKEN_UNIT = [q for q in FUSABLE if not block_unit(q)]
PREFIX = tokens(1, 72)
PROMPTS = [PREFIX + tokens(10 + i, n) for i, n in enumerate((61, 9, 40, 25, 88))]
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=3)

Outcome = tuple[list[list[int]], list[Any], list[bytes]]


def run(
    quantizer: str,
    block_size: int,
    chunk: int,
    prefix: str,
    preemptor: str,
    evictor: str,
    roomy: bool = False,
    backend: str = "auto",
) -> tuple[Outcome, Any]:
    """Generate for all prompts under one schedule. Returns (tokens, log-probabilities, stored bytes) per request, metrics."""
    pool_tokens = 2000 if roomy else 400  # the longest request takes 200, all of them 783
    with make(
        quantizer,
        block_size,
        deterministic=True,
        backend=backend,
        num_blocks=1 + pool_tokens // block_size,
        max_num_batched_tokens=chunk,
        enable_prefix_caching=prefix != "off",
        preemptor=preemptor,
        evictor=evictor,
    ) as engine:
        if prefix == "warm":
            engine.generate(PROMPTS, PARAMS)
        bytes_of = keep_stored(engine)
        outs = engine.generate(PROMPTS, PARAMS)
        engine.check()
        outcome = ([o.token_ids for o in outs], [o.logprobs for o in outs], [bytes_of[o.id] for o in outs])
        return outcome, engine.metrics()["cache"]


def combinations() -> list[tuple[int, int, str, str, str]]:
    return list(itertools.product((8, 16, 32), (64, 512), ("off", "cold", "warm"), PREEMPTORS.names(), EVICTORS.names()))


def covering() -> list[tuple[int, int, str, str, str]]:
    """A small set of combinations in which every pair of values of any two dimensions occurs."""
    left = {pair for c in combinations() for pair in itertools.combinations(enumerate(c), 2)}
    chosen = []
    while left:
        best = max(combinations(), key=lambda c: len(left & set(itertools.combinations(enumerate(c), 2))))
        left -= set(itertools.combinations(enumerate(best), 2))
        chosen.append(best)
    return chosen


def check_schedules(quantizer: str, schedules: list[tuple[int, int, str, str, str]], backend: str = "auto") -> None:
    """Every schedule gives, to the bit, what a run without pressure gives (of the same block size, for block-unit formats)."""
    expected: dict[int, Outcome] = {}
    for block_size in (8, 16, 32) if block_unit(quantizer) else (16,):
        expected[block_size], calm = run(quantizer, block_size, 512, "off", "recompute", "lru", roomy=True, backend=backend)
        assert calm["preemptions"] == 0
    preempted: set[str] = set()
    evicted: set[str] = set()
    for schedule in schedules:
        got, cache = run(quantizer, *schedule, backend=backend)
        for what, a, b in zip(("tokens", "logits", "codes"), got, expected.get(schedule[0]) or expected[16], strict=True):
            assert a == b, f"{what} differ under block_size, chunk, prefix, preemptor, evictor = {schedule}"
        assert cache["preemptions"] > 0, f"the pool was not small enough to preempt under {schedule}"
        preempted.add(schedule[3])
        if schedule[2] != "off" and cache["evictions"]:
            evicted.add(schedule[4])
        if schedule[2] == "warm":
            assert cache["prefix_hits_tokens"] > 0
    assert evicted == set(EVICTORS.names()), "the pool was not small enough to evict under every policy"
    assert preempted == set(PREEMPTORS.names())


@pytest.mark.parametrize("quantizer", FUSABLE)
def test_law3_schedule_invariance_to_the_bit(quantizer: str) -> None:
    check_schedules(quantizer, covering())


@pytest.mark.slow
@pytest.mark.parametrize("quantizer", FUSABLE)
def test_law3_on_the_reference_backend(quantizer: str) -> None:
    check_schedules(quantizer, covering(), "reference")


@pytest.mark.slow
@pytest.mark.parametrize("quantizer", FUSABLE)
def test_law3_every_combination(quantizer: str) -> None:
    check_schedules(quantizer, combinations())


@pytest.mark.parametrize("quantizer", FUSABLE)
def test_law3_scores_do_not_depend_on_chunks_batch_or_prefix(quantizer: str) -> None:
    """All logits are compared, to the bit."""

    def logits(first: int, **kw: Any) -> dict[tuple[int, int], torch.Tensor]:
        rows: dict[tuple[int, int], torch.Tensor] = {}

        def keep(index: int, start: int, chunk: torch.Tensor) -> None:
            for i, row in enumerate(chunk):
                assert (index, start + i) not in rows, "a position was scored twice"
                rows[index, start + i] = row.clone()

        with make(quantizer, deterministic=True, **kw) as engine:
            engine.score(PROMPTS[:3], first=first, on_logits=keep)
            assert set(rows) == {(i, t) for i, p in enumerate(PROMPTS[:3]) for t in range(first, len(p))}
            if kw.get("enable_prefix_caching", True) and first > 16:
                rows.clear()
                engine.score(PROMPTS[:3], first=first, on_logits=keep)
                assert engine.metrics()["cache"]["prefix_hits_tokens"] > 0
        return rows

    base = logits(1, max_num_batched_tokens=512, enable_prefix_caching=False)
    for first, kw in (
        (1, {"max_num_batched_tokens": 64}),
        (1, {"max_num_scored_tokens": 7, "max_num_seqs": 1}),
        (70, {"max_num_batched_tokens": 40}),
        (1, {"num_blocks": 14}),
    ):
        for key, row in logits(first, **kw).items():
            assert torch.equal(row, base[key]), f"row {key} differs with first={first}, {kw}"


@pytest.mark.parametrize("quantizer", TOKEN_UNIT)
def test_law3_without_the_deterministic_mode_in_float64(quantizer: str) -> None:
    """A float64 model makes last-bit differences too small to flip a code or a greedy token."""
    results = []
    for block_size, chunk in ((16, 512), (8, 64)):
        with make(
            quantizer, block_size, dtype_=torch.float64, num_blocks=400, max_num_batched_tokens=chunk, poison=False
        ) as engine:
            results.append([o.token_ids for o in engine.generate(PROMPTS, PARAMS)])
    assert results[0] == results[1]


@pytest.mark.parametrize("quantizer", FUSABLE)
def test_law3_otherwise_the_divergence_between_schedules_stays_below_the_quantizers_own(quantizer: str) -> None:
    def logprobs(q: str, **kw: Any) -> torch.Tensor:
        rows: list[torch.Tensor] = []
        with make(q, num_blocks=400, **kw) as engine:
            engine.score([PROMPTS[0]], on_logits=lambda _i, _s, x: rows.append(x.double().log_softmax(-1)))
        return torch.cat(rows)

    a, b = logprobs(quantizer, max_num_batched_tokens=512), logprobs(quantizer, max_num_batched_tokens=9, max_num_seqs=4)
    none = logprobs("none", max_num_batched_tokens=512)
    between = torch.nn.functional.kl_div(b, a, log_target=True, reduction="batchmean")
    own = torch.nn.functional.kl_div(a, none, log_target=True, reduction="batchmean")
    assert between <= (1e-9 if quantizer == "none" else own)


@pytest.mark.parametrize("quantizer", FUSABLE)
def test_law1_codes_of_a_committed_token_never_change(quantizer: str) -> None:
    """Where whole blocks are encoded, the codes of a full block never change either."""
    with make(quantizer, 8, num_blocks=50, preemptor="swap", max_num_batched_tokens=64, deterministic=True) as engine:
        for prompt in PROMPTS:
            engine.add_request(prompt, PARAMS)
        before: dict[int, dict[int, bytes]] = {}
        compared = 0
        while engine.has_work:
            engine.step()
            for r in engine.scheduler.requests():
                if r.status is Status.RUNNING:
                    now, old = final_pieces(engine, r), before.setdefault(r.id, {})
                    for at, piece in now.items():
                        assert old.setdefault(at, piece) == piece, f"request {r.id}: stored bytes changed"
                        compared += 1
        assert engine.metrics()["cache"]["preemptions"] > 0
        assert compared > 10_000


def final_pieces(engine: Any, request: Request) -> dict[Any, bytes]:
    """Stored bytes of layer 1 by place: (plane, token), or (plane, block) of full blocks."""
    B, n = engine.scheduler.manager.block_size, request.num_computed
    out = {}
    for i, hp in enumerate(engine._parts.store.planes(1)):
        for side in SIDES:
            fmt = hp.of(side).fmt
            for kind in ("codes", "scale", "zero"):
                plane = getattr(hp.of(side), kind)
                if plane is None:
                    continue
                for t in range(n // B if fmt.unit == "block" else n):
                    piece = plane[request.blocks[t]] if fmt.unit == "block" else plane[request.blocks[t // B], :, t % B]
                    out[i, side, kind, t] = piece.contiguous().view(torch.uint8).numpy().tobytes()
    return out


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("quantizer", [q for q in FUSABLE if block_unit(q)])
def test_law2_block_unit_formats_see_what_token_by_token_decoding_sees(quantizer: str, backend: str) -> None:
    """Full logits of one prefill equal those of one token at a time, to the bit; and they are not the unquantized ones."""

    def logits(q: str, **kw: Any) -> torch.Tensor:
        rows: list[torch.Tensor] = []
        with make(q, 8, deterministic=True, backend=backend, **kw) as engine:
            engine.score([PROMPTS[0]], on_logits=lambda _i, _s, x: rows.append(x.clone()))
        return torch.cat(rows)

    prefill = logits(quantizer)
    assert torch.equal(prefill, logits(quantizer, max_num_batched_tokens=1, max_num_seqs=1))
    none = logits("none")
    torch.testing.assert_close(prefill[:8], none[:8], rtol=1e-4, atol=1e-4)  # the first block sees itself raw
    assert (prefill[8:] - none[8:]).abs().max() > 1e-3


def test_law2_reads_come_from_the_pool_in_prefill_too() -> None:
    """A prompt scored in one prefill sees the quantizer's error, and exactly the error that decoding token by token sees."""

    def total(quantizer: str, **kw: Any) -> float:
        with make(quantizer, deterministic=True, **kw) as engine:
            (score,) = engine.score([PROMPTS[0]])
            assert engine.metrics()["fraction_read_from_cache"] == (
                1.0 if kw.get("reads") != "raw" else pytest.approx(0, abs=0.9)
            )
            return float(score.logprobs.sum())

    one_prefill = total("fp8")
    token_by_token = total("fp8", max_num_batched_tokens=1, max_num_seqs=1)
    assert one_prefill == token_by_token
    assert one_prefill != total("none")
    raw = total("fp8", reads="raw")
    assert raw == pytest.approx(total("none"), abs=1e-3), "one prefill with reads=raw never meets the quantizer"


def test_law2_the_fraction_read_from_the_cache_is_reported() -> None:
    with make("fp8", reads="raw", max_num_batched_tokens=40) as engine:
        engine.score([PROMPTS[0]])
        fraction = engine.metrics()["fraction_read_from_cache"]
        assert 0 < fraction < 1
        assert engine.metrics()["attention"]["reads"] == "raw"


@pytest.mark.parametrize("reads", ["cache", "raw"])
@pytest.mark.parametrize("chunk", [1, 7, 40])
@pytest.mark.parametrize(("tail_blocks", "sinks"), [(None, 0), (None, 4), (0, 0), (0, 4), (2, 3)])
def test_law2_raw_tails_and_sinks_do_not_count_as_read_from_the_cache(
    tail_blocks: int | None, sinks: int, chunk: int, reads: Any
) -> None:
    """The expected count is made pair by pair, for a layer whose K keeps raw rows and whose V keeps none."""
    B, T, recorder = 8, 61, Recorder()
    unit: Literal["token", "block"] = "token" if tail_blocks is None else "block"
    k = KVFormat(4, torch.uint8, "token", zero="float", unit=unit, tail_blocks=tail_blocks or 0, sink_tokens=sinks)
    v = KVFormat(8, torch.int8, "token")
    count = CountReads(recorder, [[HeadFormat(range(2), k, v)]], B, reads)
    stored = dict.fromkeys("kv", 0)
    for start in range(0, T, chunk):
        end = min(T, start + chunk)
        count(start, end)
        for query in range(start, end):
            for key in range(query + 1):
                fresh = reads == "raw" and key >= start
                in_tail = tail_blocks is not None and key // B >= query // B - tail_blocks
                stored["v"] += not fresh
                stored["k"] += not (fresh or in_tail or key < sinks)
    assert recorder.pairs_attended == T * (T + 1) // 2
    assert recorder.pairs_from_cache == sum(stored.values()) / 2


@pytest.mark.parametrize("quantizer", ["int8_token", "kivi", "protected"])
def test_law3_swap_is_byte_exact(quantizer: str) -> None:
    with make(quantizer, 8, num_blocks=60, preemptor="swap") as engine:
        ids = [engine.add_request(p, PARAMS) for p in PROMPTS[:3]]
        for _ in range(3):
            engine.step()
        victim = next(r for r in engine.scheduler.requests() if r.id == ids[2])
        bytes_before, computed = stored(engine, victim), victim.num_computed
        plan = engine.scheduler.plan()
        engine.scheduler._preempt(victim, plan)
        assert victim.status is Status.SWAPPED
        store, out = engine._parts.store, plan.swap_out[0]
        store.copy_out(out.device, out.host)
        store.poison_blocks(out.device)
        if out.raw_host:
            store.copy_raw_out(out.tail_slot, out.sink_slot, out.raw_host)
            for plane, slot in store._raw(out.tail_slot, out.sink_slot):
                plane[slot] = torch.nan
        copy = engine.scheduler.manager.swap_in(victim, alone=True)
        assert copy is not None
        store.copy_in(copy.device, copy.host)
        if copy.raw_host:
            store.copy_raw_in(copy.tail_slot, copy.sink_slot, copy.raw_host)
        assert victim.num_computed == computed
        assert stored(engine, victim) == bytes_before


def test_law4_abort_at_every_point_returns_every_block() -> None:
    with make("int8_token", 8, num_blocks=52, preemptor="auto", max_num_batched_tokens=32) as engine:
        for after in range(0, 40, 3):
            ids = [engine.add_request(p, PARAMS) for p in PROMPTS]
            for _ in range(after):
                engine.step()
                engine.check()
            for request_id in ids:
                engine.abort(request_id)
                engine.step()
                engine.check()
            assert engine.scheduler.idle
            allocator = engine.scheduler.manager.allocator
            assert allocator.num_referenced == 0
            assert engine.scheduler.manager.host.num_free == engine.scheduler.manager.host.num_blocks


@pytest.mark.parametrize("quantizer", FUSABLE)
def test_law5_free_pages_may_hold_anything(quantizer: str) -> None:
    """Every free page is poisoned again before every step, so an output would show if a page were read before it is written."""
    with make(quantizer, 8, num_blocks=52, deterministic=True) as engine:
        for prompt in PROMPTS:
            engine.add_request(prompt, PARAMS)
        tokens_of = {}
        while engine.has_work:
            allocator = engine.scheduler.manager.allocator
            engine._parts.store.poison_blocks(list(allocator._free))  # type: ignore[attr-defined]
            for out in engine.step():
                assert all(lp.logprob == lp.logprob for lp in out.logprobs or []), "NaN reached the output"
                tokens_of[out.id] = out.token_ids
            engine.check()
        assert all(len(t) == PARAMS.max_tokens for t in tokens_of.values())


def test_law5_every_residue_of_the_length_modulo_the_block() -> None:
    with (
        make("int8_token", 8, deterministic=True, enable_prefix_caching=False) as small,
        make("int8_token", 32, deterministic=True) as big,
    ):
        prompts = [tokens(50 + n, n) for n in range(1, 34)]
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        assert [o.token_ids for o in small.generate(prompts, params)] == [o.token_ids for o in big.generate(prompts, params)]


def test_law7_prefix_hits_need_the_same_salt() -> None:
    with make() as engine:
        for salt in ("a", "a", "b"):
            engine.add_request(PREFIX, SamplingParams(max_tokens=1), salt=salt)
            while engine.has_work:
                engine.step()
        assert engine.recorder.prefix_hits_tokens == 64  # the second "a" only


def test_law9_allocated_bytes_are_the_formula() -> None:
    for quantizer in FUSABLE:
        with make(quantizer) as engine:
            store = engine._parts.store
            allocated = sum(
                t.numel() * t.element_size() for i in range(len(engine.layers)) for p in store.planes(i) for t in p.tensors
            )
            formula = sum(
                128 * (r.k.bytes_per_block(16, len(r.heads), la.Dk) + r.v.bytes_per_block(16, len(r.heads), la.Dv))
                for la, ranges in zip(engine.layers, store.formats, strict=True)
                for r in ranges
            )
            memory = engine.metrics()["memory"]
            rows = 16 if block_unit(quantizer) else 4 if quantizer == "protected" else 0  # open block, sinks; K and V, float32
            assert memory["tail_bytes"] == 8 * rows * sum(la.H * (la.Dk + la.Dv) for la in engine.layers) * 4
            assert memory["allocated_bytes"] == memory["pool_bytes"] + memory["static_bytes"] + memory["tail_bytes"]
            assert allocated == formula == memory["pool_bytes"] == 128 * store.block_bytes
            file = scales(quantizer)
            if file is not None:
                assert memory["static_bytes"] == sum(t.nbytes for t in file.tensors.values())


def test_law10_one_request_always_makes_progress() -> None:
    """A pool that holds one request at a time serves them all, one after another."""
    for preemptor in PREEMPTORS.names():
        with make("none", 8, num_blocks=1 + 208 // 8, preemptor=preemptor, host_memory_bytes=0) as engine:
            outs = engine.generate(PROMPTS, PARAMS)
            assert [len(o.token_ids) for o in outs] == [40] * 5
            engine.check()
