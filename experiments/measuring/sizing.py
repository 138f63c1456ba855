"""The arithmetic of memory: bytes of a block, blocks of a pool, requests that fit, and what would make the others fit.

Takes: a model's dimensions, a memory size, a demand. Gives: one row. Needs no weights. Does not know about: time, tables.
"""

from dataclasses import dataclass
from typing import Any

import torch

from experiments.measuring.scales import stand_in
from qkv.cache.store import block_bytes
from qkv.config import EngineConfig
from qkv.errors import ConfigError
from qkv.models import Dimensions
from qkv.policies.allocator.base import ALLOCATORS
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.validate import parse_bytes, require

GIB = 2**30
REST = 0.1  # where no reserve is given, this share of the memory is assumed to go to activations and the runtime


@dataclass(frozen=True)
class Demand:
    """What is to be served: `concurrency` requests of `context` tokens on `device_memory` bytes. reserve: sizes that the cache
    cannot have. tokens_per_request: how long requests really are, where that is shorter than `context`."""

    concurrency: int = 32
    context: int = 2048
    device_memory: int | str | None = None
    reserve: list[int | str] | None = None
    tokens_per_request: int | None = None

    def __post_init__(self) -> None:
        require(self.concurrency >= 1, "concurrency", self.concurrency, "at least 1")
        require(self.context >= 1, "context", self.context, "at least 1")
        n = self.tokens_per_request
        require(n is None or n >= 1, "tokens_per_request", n, "at least 1, or null")
        parse_bytes(self.device_memory, "device_memory")
        for i, size in enumerate(self.reserve or []):
            parse_bytes(size, f"reserve[{i}]")


@dataclass(frozen=True)
class Pool:
    """A cache of `budget` bytes in whole blocks. No count includes the null block, which every pool has in addition."""

    budget: int
    block_bytes: int
    block_size: int

    @property
    def blocks(self) -> int:
        return max(0, self.budget // self.block_bytes)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def requests(self, tokens: int) -> int:
        """How many requests of so many tokens fit, each in whole blocks."""
        return self.blocks // self.blocks_for(tokens)

    def context(self, concurrency: int) -> int:
        """How many tokens each of so many requests can have."""
        return self.blocks // concurrency * self.block_size


def block_size_of(config: EngineConfig) -> int:
    return int(ALLOCATORS.build(config.allocator).block_size)


def bytes_per_block(dims: Dimensions, dtype: str, quantizer: Any, block_size: int, kv_heads: int | None = None) -> int:
    """Bytes of a block over all layers. quantizer: a name or a mapping. kv_heads: how many, if not as many as the model has."""
    bound, layers = QUANTIZERS.build(quantizer), dims.layer_shapes(kv_heads)
    bound.bind(layers, stand_in(bound, layers), getattr(torch, dtype), torch.device("cpu"))
    return block_bytes(layers, [bound.formats(i) for i in range(len(layers))], block_size)


def plan_row(config: EngineConfig, dims: Dimensions, demand: Demand) -> dict[str, Any]:
    """The row, with its parts `policy` and `plan`. Raises ConfigError when the reserve takes the whole memory."""
    size, dtype = block_size_of(config), config.model.dtype
    block = bytes_per_block(dims, dtype, config.quantizer, size)
    memory = parse_bytes(demand.device_memory, "plan.device_memory") or config.device.memory_bytes
    weights = dims.parameters and dims.parameters * getattr(torch, dtype).itemsize
    if demand.reserve is not None:
        reserve = sum(parse_bytes(r, "plan.reserve") or 0 for r in demand.reserve)
    else:
        reserve = (weights or 0) + int(REST * memory)
    if reserve >= memory:
        raise ConfigError(
            f"plan.reserve: {reserve / GIB:.1f} GiB of {memory / GIB:.1f} GiB are not for the cache, so nothing is left for it; "
            "use a larger device, a smaller model or model.dtype, or give plan.reserve"
        )
    pool = Pool(memory - reserve, block, size)
    tokens = demand.tokens_per_request or demand.context
    plan: dict[str, Any] = {
        "device_memory": memory,
        "reserve_bytes": reserve,
        "weight_bytes": weights,
        "kv_bytes_per_token": block // size if block % size == 0 else block / size,
        "block_bytes": block,
        "null_block_bytes": block,
        "kv_budget_bytes": pool.budget,
        "concurrency": demand.concurrency,
        "context": demand.context,
        "kv_bytes": demand.concurrency * pool.blocks_for(demand.context) * block,
        "blocks": pool.blocks,
        "tokens": pool.blocks * size,
        "tokens_per_request": tokens,
        "requests": pool.requests(tokens),
        "requests_upper": pool.blocks * size // tokens,
        "fits": demand.concurrency <= pool.requests(demand.context),
        "options": _options(config, dims, demand, pool),
    }
    policy = {"quantizer": config.quantizer["name"], "allocator": config.allocator["name"], "block_size": size}
    return {"label": dims.name, "policy": policy, "plan": {k: v for k, v in plan.items() if v is not None}}


def _options(config: EngineConfig, dims: Dimensions, demand: Demand, pool: Pool) -> list[dict[str, Any]]:
    """What would change with each quantizer, a shorter context, fewer requests or a model with fewer KV heads."""
    options = []

    def add(change: str, block: int, concurrency: int, context: int) -> bool:
        there = Pool(pool.budget, block, pool.block_size)
        fits = context >= 1 and concurrency <= there.requests(context) and concurrency >= 1
        options.append(
            {
                "change": change,
                "kv_bytes_per_token": block / pool.block_size,
                "kv_bytes": concurrency * there.blocks_for(context) * block,
                "max_concurrency": there.requests(max(context, 1)),
                "max_context": min(there.context(max(concurrency, 1)), dims.max_positions or there.blocks * there.block_size),
                "fits": fits,
            }
        )
        return fits

    for name in QUANTIZERS.names():
        block = bytes_per_block(dims, config.model.dtype, name, pool.block_size)
        add(f"quantizer={name}", block, demand.concurrency, demand.context)
    if demand.concurrency > pool.requests(demand.context):
        if context := pool.context(demand.concurrency):
            add(f"plan.context={context}", pool.block_bytes, demand.concurrency, context)
        if fewer := pool.requests(demand.context):
            add(f"plan.concurrency={fewer}", pool.block_bytes, fewer, demand.context)
        for kv_heads in (h for h in range(dims.kv_heads - 1, 0, -1) if dims.query_heads % h == 0):
            block = bytes_per_block(dims, config.model.dtype, config.quantizer, pool.block_size, kv_heads)
            if demand.concurrency <= Pool(pool.budget, block, pool.block_size).requests(demand.context):
                add(f"a model with {kv_heads} KV heads", block, demand.concurrency, demand.context)
                break
    return options
