"""The scheduler with a pretend model: every decode gets token 1, nothing is computed."""

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.cache.block_manager import BlockManager
from qkv.cache.host_pool import HostPool
from qkv.cache.prefix import PrefixHasher
from qkv.config import SchedulerConfig
from qkv.errors import ConfigError
from qkv.metrics.recorder import Recorder
from qkv.policies.allocator.base import ALLOCATORS
from qkv.policies.evictor.base import EVICTORS
from qkv.policies.preemptor.base import PREEMPTORS, CostModel, Preemptor
from qkv.scheduler import Scheduler
from qkv.types import Request, RequestView, SamplingParams, Status, StepPlan

B = 8


def make(
    num_blocks: int = 64,
    host: int = 32,
    preemptor: str | Preemptor = "recompute",
    prefix: bool = False,
    allocator: str = "paged",
    watermark: float = 0.0,
    **config: int,
) -> Scheduler:
    pool = ALLOCATORS.build({"name": allocator, "block_size": B})
    pool.bind(num_blocks, EVICTORS.build("lru"), 8)
    hasher = PrefixHasher("xxh3_128", B, []) if prefix else None
    manager = BlockManager(pool, hasher, HostPool(host), Recorder(), watermark, block_bytes=100)
    return Scheduler(manager, PREEMPTORS.build(preemptor), SchedulerConfig(**config), CostModel(B, 100))


def request(i: int, prompt: int, output: int = 10, priority: int = 0, **kw: int) -> Request:
    return Request(i, prompt, [100 * i + t for t in range(prompt)], SamplingParams(priority=priority), output, **kw)  # type: ignore[arg-type]


def run_step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan()
    for r in scheduler.complete(plan):
        r.token_ids.append(1)
        if len(r.token_ids) - r.prompt_len == r.max_tokens:
            scheduler.finish(r, "length")
    for chunk in plan.prefills:
        if chunk.completes and chunk.request.score_from is not None:
            scheduler.finish(chunk.request, "length")
    scheduler.manager.check(scheduler.requests())
    return plan


def ids(plan: StepPlan) -> tuple[list[int], list[tuple[int, int, int]]]:
    return [r.id for r in plan.decodes], [(c.request.id, c.start, c.end) for c in plan.prefills]


def test_chunked_prefill_is_mixed_with_decodes_in_order() -> None:
    s = make(max_num_batched_tokens=20, max_num_seqs=4)
    s.add(request(0, 5))
    s.add(request(1, 33))
    assert ids(run_step(s)) == ([], [(0, 0, 5), (1, 0, 15)])
    assert ids(run_step(s)) == ([0], [(1, 15, 33)])
    s.add(request(2, 30))
    assert ids(run_step(s)) == ([0, 1], [(2, 0, 18)])
    assert ids(run_step(s)) == ([0, 1], [(2, 18, 30)])
    assert ids(run_step(s)) == ([0, 1, 2], [])


def test_max_num_seqs_is_kept_and_the_queue_is_first_come_first_served() -> None:
    s = make(max_num_seqs=2, max_num_batched_tokens=64)
    for i in range(5):
        s.add(request(i, 4, output=3))
    order: list[int] = []
    while not s.idle:
        plan = run_step(s)
        assert len(plan.decodes) + len(plan.prefills) <= 2
        order += [c.request.id for c in plan.prefills]
    assert order == [0, 1, 2, 3, 4]


def test_a_lower_priority_value_is_served_first() -> None:
    s = make(max_num_seqs=1, max_num_batched_tokens=64)
    for i, priority in enumerate((1, 1, 0)):
        s.add(request(i, 4, output=2, priority=priority))
    order = []
    while not s.idle:
        order += [c.request.id for c in run_step(s).prefills]
    assert order == [2, 0, 1]


@pytest.mark.parametrize("preemptor", PREEMPTORS.names())
def test_a_preempted_request_returns_to_its_place(preemptor: str) -> None:
    """It was ahead of the queue, so it is admitted before all requests that came later, and finishes."""
    s = make(num_blocks=1 + 12, preemptor=preemptor, max_num_batched_tokens=64, max_num_seqs=8)
    for i in range(4):
        s.add(request(i, 30, output=30))
    finished: list[int] = []
    preempted: set[int] = set()
    for _ in range(500):
        if s.idle:
            break
        before = {r.id for r in s.requests()}
        plan = run_step(s)
        preempted |= {r.id for r in plan.preempted}
        finished += sorted(before - {r.id for r in s.requests()})
    assert finished == [0, 1, 2, 3]
    assert preempted, "the pool was not small enough"
    assert s.manager.allocator.num_referenced == 0


def test_victims_are_the_latest_and_never_the_first() -> None:
    s = make(num_blocks=1 + 9, max_num_batched_tokens=64)
    for i in range(3):
        s.add(request(i, 22, output=60))
    seen = []
    for _ in range(12):
        seen += [r.id for r in run_step(s).preempted]
    assert seen[0] == 2
    assert 0 not in seen


@dataclass
class _Stubborn(Preemptor):
    """A preemptor that names only the first request, which must not be preempted, and an id that is not running."""

    def victims(self, running: list[RequestView], need: int) -> list[int]:  # type: ignore[override]
        return [running[0].id, 999]

    def mode(self, victim: RequestView, host_free: int, costs: CostModel) -> str:  # type: ignore[override]
        return "swap"  # even when the host pool is full


def test_a_bad_preemptor_cannot_stop_progress_or_overrun_the_host_pool() -> None:
    s = make(num_blocks=1 + 9, host=2, preemptor=_Stubborn(), max_num_batched_tokens=64)
    for i in range(3):
        s.add(request(i, 22, output=40))
    preempted = []
    for _ in range(400):
        if s.idle:
            break
        preempted += [r.id for r in run_step(s).preempted]
    assert s.idle
    assert preempted, "the pool was not small enough"
    assert 0 not in preempted


def test_throughput_recovers_after_pressure_ends() -> None:
    """After preemptions, requests that fit again run together again."""
    s = make(num_blocks=1 + 12, max_num_batched_tokens=64)
    for i in range(3):
        s.add(request(i, 28, output=24))
    while s.recorder.preemptions == 0:
        run_step(s)
    while not s.idle:
        run_step(s)
    for i in range(3, 6):
        s.add(request(i, 8, output=6))
    run_step(s)
    assert len(run_step(s).decodes) == 3


def test_no_admission_in_a_step_that_preempts() -> None:
    """Otherwise the victim's blocks would go to a new request, and there would be no room when the victim comes back."""
    s = make(num_blocks=1 + 9, max_num_batched_tokens=64)
    for i in range(5):
        s.add(request(i, 20, output=30))
    preempting = 0
    for _ in range(300):
        if s.idle:
            break
        plan = run_step(s)
        if plan.preempted:
            preempting += 1
            assert not any(c.start == 0 and c.request not in plan.preempted and c.request.admissions == 1 for c in plan.prefills)
            assert not plan.swap_in
    assert s.idle
    assert preempting > 1, "the pool was not small enough"


def test_a_step_that_preempts_admits_nobody_however_urgent() -> None:
    """The newcomer is served before the victim, in the next step: in this one the victim's blocks are not free yet."""
    s = make(num_blocks=1 + 8, max_num_batched_tokens=64)
    s.add(request(0, 30, output=60))
    s.add(request(1, 30, output=60, priority=1))
    run_step(s)
    s.add(request(2, 10))
    for _ in range(10):
        plan = run_step(s)
        if plan.preempted:
            break
        assert not plan.prefills
    assert [r.id for r in plan.preempted] == [1]
    assert ids(plan) == ([0], [])
    assert ids(run_step(s)) == ([0], [(2, 0, 10)])


def test_a_prompt_that_is_being_prefilled_is_shared_chunk_by_chunk() -> None:
    s = make(prefix=True, max_num_batched_tokens=24, max_num_seqs=4)
    first, second = request(0, 33), request(1, 33)
    second.token_ids = list(first.token_ids)
    s.add(first)
    assert ids(run_step(s)) == ([], [(0, 0, 24)])
    s.add(second)
    assert ids(run_step(s)) == ([], [(0, 24, 33), (1, 24, 33)])


def test_a_step_that_fails_forgets_what_it_swapped_out() -> None:
    """The copies may not have happened, so the victim is prefilled again."""
    s = make(num_blocks=1 + 9, preemptor="swap", max_num_batched_tokens=64)
    requests = [request(i, 22, output=20) for i in range(3)]
    for r in requests:
        s.add(r)
    while not (plan := s.plan()).swap_out:
        for r in s.complete(plan):
            r.token_ids.append(1)
    assert {r.id for r in s.roll_back()} == {0, 1, 2}
    assert all(r.status is Status.WAITING and not (r.blocks or r.host_blocks or r.num_computed) for r in requests)
    s.manager.check(s.requests())
    while not s.idle:
        run_step(s)
    assert [len(r.token_ids) for r in requests] == [42] * 3


def test_quiet_steps_end_where_the_pool_does() -> None:
    """Each request needs another block every B steps, and not only the first time."""
    fast, slow = (make(num_blocks=1 + 12, max_num_batched_tokens=64) for _ in range(2))
    for s in (fast, slow):
        for i in range(2):
            s.add(request(i, 5 + 3 * i, output=200))
        run_step(s)
    steps = 0
    while not run_step(slow).preempted:
        steps += 1
    assert fast.quiet_steps(1000) == steps > 3 * B
    assert fast.quiet_steps(7) == 7


def test_a_scoring_requests_chunks_stay_within_the_logits_budget() -> None:
    s = make(max_num_batched_tokens=64, max_num_scored_tokens=10)
    s.add(request(0, 45, score_from=20))
    sizes = []
    while not s.idle:
        (chunk,) = run_step(s).prefills
        wanted = sum(p + 1 >= 20 for p in range(chunk.start, chunk.end))
        sizes.append(wanted)
    assert max(sizes) == 10
    assert sum(sizes) == 25  # tokens 20..44


def test_abort_works_in_every_state() -> None:
    s = make(num_blocks=1 + 12, preemptor="swap", max_num_batched_tokens=64, max_num_seqs=8)
    for i in range(24):
        s.add(request(i, 30, output=30))
    states = set()
    for step in range(200):
        if s.idle:
            break
        run_step(s)
        for r in list(s.requests()):
            if (r.id + step) % 5 == 0 and r.status not in states:
                states.add(r.status)
                s.finish(r, "abort")
                s.finish(r, "abort")  # twice is harmless
                s.manager.check(s.requests())
                break
    assert states == {Status.WAITING, Status.RUNNING, Status.SWAPPED}
    for r in list(s.requests()):
        s.finish(r, "abort")
    assert s.idle
    assert s.manager.allocator.num_referenced == 0
    assert s.manager.host.num_free == s.manager.host.num_blocks


def test_planning_touches_only_requests_that_are_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is visited once per block, however long its context is; other decodes cost nothing."""
    s = make(num_blocks=600, max_num_batched_tokens=4096)
    for i in range(32):
        s.add(request(i, 96, output=64))
    run_step(s)
    grown: list[int] = []
    grow = s.manager.grow

    def counted(r: Request) -> bool:
        grown.append(r.id)
        return grow(r)

    monkeypatch.setattr(s.manager, "grow", counted)
    for _ in range(4 * B):
        run_step(s)
    assert len(grown) == 32 * 4


def test_contiguous_requests_never_grow() -> None:
    s = make(num_blocks=1 + 32, allocator="contiguous", max_num_batched_tokens=64)
    for i in range(6):
        s.add(request(i, 10, output=40))
    while not s.idle:
        plan = run_step(s)
        assert not plan.preempted
        assert s.num_running <= 4


@given(
    prompts=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=10),
    blocks=st.integers(12, 40),
    chunk=st.integers(8, 64),
    host=st.integers(0, 20),
    preemptor=st.sampled_from(PREEMPTORS.names()),
    watermark=st.sampled_from([0.0, 0.2]),
    prefix=st.booleans(),
)
def test_everything_finishes_whatever_the_pressure(
    prompts: list[tuple[int, int]], blocks: int, chunk: int, host: int, preemptor: str, watermark: float, prefix: bool
) -> None:
    s = make(blocks, host, preemptor, prefix, watermark=watermark, max_num_batched_tokens=chunk, max_num_seqs=8)
    requests = [request(i, p, o) for i, (p, o) in enumerate(prompts)]
    for r in requests:
        s.add(r)
    for _ in range(3000):
        if s.idle:
            break
        plan = run_step(s)
        assert plan.num_tokens <= chunk
    assert all(r.status is Status.FINISHED for r in requests)
    assert [len(r.token_ids) for r in requests] == [p + o for p, o in prompts]
    allocator = s.manager.allocator
    assert allocator.num_referenced == 0
    assert allocator.num_free + allocator.num_cached == blocks - 1


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens=4 is not allowed; it must be at least max_num_seqs"):
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=4)
    with pytest.raises(ConfigError, match="watermark"):
        SchedulerConfig(watermark=math.nan)
