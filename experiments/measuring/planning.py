"""Times how long it takes to plan a step, without a model: the scheduler, the block manager and the policies are the real ones.

Takes: numbers of running requests and context lengths. Gives: a row with milliseconds per step. Does not know about: tables.
"""

import random
import statistics
import time
from dataclasses import replace

from qkv.cache.block_manager import BlockManager
from qkv.cache.host_pool import HostPool
from qkv.cache.prefix import PrefixHasher
from qkv.config import EngineConfig
from qkv.errors import ConfigError
from qkv.metrics.recorder import Recorder
from qkv.metrics.summary import distribution
from qkv.policies.allocator.base import ALLOCATORS
from qkv.policies.evictor.base import EVICTORS
from qkv.policies.preemptor.base import PREEMPTORS, CostModel
from qkv.scheduler import Scheduler
from qkv.types import Request, SamplingParams, StepPlan


def planning_time(config: EngineConfig, batch: int, context: int, steps: int, shared_prefix: int) -> dict[str, object]:
    """One row: prefill `batch` requests of `context` tokens, of which the first `shared_prefix` are the same in all, then time
    `steps` decode steps."""
    scheduler = _scheduler(config, batch, context + steps + 1)
    for request in _requests(config.seed, batch, context, shared_prefix, steps + 1, scheduler.manager.block_size):
        scheduler.add(request)
    while not (plan := scheduler.plan()).decodes or len(plan.decodes) < batch:
        _advance(scheduler, plan)
    _advance(scheduler, plan)
    allocator, recorder = scheduler.manager.allocator, scheduler.recorder
    before, plan_ms, complete_ms = allocator.num_referenced, [], []
    for _ in range(steps):
        start = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        ready = scheduler.complete(plan)
        plan_ms.append(1e3 * (planned - start))
        complete_ms.append(1e3 * (time.perf_counter() - planned))
        _sample(ready, plan.step)
    return {
        "policy": {
            "allocator": config.allocator["name"],
            "block_size": allocator.block_size,
            "evictor": config.evictor["name"],
            "preemptor": config.preemptor["name"],
            "prefix_caching": config.cache.enable_prefix_caching,
        },
        "cache": {"hit_rate": recorder.hit_rate, "evictions": allocator.evictions, "preemptions": recorder.preemptions},
        "scheduler": {
            "running": batch,
            "context_tokens": context,
            "steps": steps,
            "plan_ms": distribution(plan_ms),
            "complete_ms": distribution(complete_ms),
            "step_ms_median": statistics.median(p + c for p, c in zip(plan_ms, complete_ms, strict=True)),
            "blocks_allocated_per_step": (allocator.num_referenced - before) / steps,
        },
    }


def _scheduler(config: EngineConfig, batch: int, tokens: int) -> Scheduler:
    """A scheduler whose pool is just large enough for `batch` requests of `tokens` tokens that share no blocks."""
    allocator, recorder = ALLOCATORS.build(config.allocator), Recorder()
    blocks = -(-tokens // allocator.block_size)
    allocator.bind(batch * (blocks + 1) + 1, EVICTORS.build(config.evictor), blocks)
    if allocator.max_tokens() < tokens:
        raise ConfigError(f"allocator {config.allocator}: one request of {tokens} tokens does not fit; raise allocator.max_len")
    caching = config.cache.enable_prefix_caching
    hasher = PrefixHasher(config.cache.prefix_hash, allocator.block_size, ["bench_scheduler"]) if caching else None
    manager = BlockManager(allocator, hasher, HostPool(0), recorder)
    limits = replace(config.scheduler, max_num_seqs=batch, max_num_batched_tokens=max(8192, batch))
    return Scheduler(manager, PREEMPTORS.build(config.preemptor), limits, CostModel(allocator.block_size, 0))


def _requests(seed: int, batch: int, context: int, shared: int, new: int, block_size: int) -> list[Request]:
    """Prompts of `context` tokens, less up to one block so that not all need their next block in the same step."""
    rng = random.Random(seed)
    prefix = [rng.randrange(50_000) for _ in range(shared)]
    params = SamplingParams(max_tokens=new)
    requests = []
    for i in range(batch):
        length = max(2, context - i % block_size)
        tokens = (prefix + [rng.randrange(50_000) for _ in range(length - len(prefix))])[:length]
        requests.append(Request(i, length, tokens, params, max_tokens=new))
    return requests


def _advance(scheduler: Scheduler, plan: StepPlan) -> None:
    _sample(scheduler.complete(plan), plan.step)


def _sample(ready: list[Request], step: int) -> None:
    """Give every request its next token, in place of a runner; the token is made up."""
    for request in ready:
        request.token_ids.append((step * 7919 + request.id) % 50_000)
