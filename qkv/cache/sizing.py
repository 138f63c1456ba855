"""How many blocks the pool gets, with the arithmetic spelled out.

Does not know about: tensors' contents, requests.
"""

import logging
from dataclasses import dataclass

import torch

from qkv.cache.store import raw_slot_bytes
from qkv.config import CacheConfig
from qkv.errors import ConfigError
from qkv.layout import HeadFormat, LayerShape
from qkv.validate import parse_bytes

log = logging.getLogger("qkv")

DEFAULT_UTILIZATION = {"cpu": 0.1, "cuda": 0.9}


@dataclass(frozen=True)
class PoolSize:
    """num_blocks includes the null block."""

    num_blocks: int
    block_bytes: int
    host_blocks: int
    arithmetic: str


@dataclass(frozen=True)
class RawRows:
    """What the formats keep raw besides the pool: whether there are tails, and the most tail blocks and sink tokens of any."""

    tails: bool
    tail_blocks: int
    sink_tokens: int
    slot_bytes: int  # of one tail and one sink slot, over all layers

    @classmethod
    def of(cls, layers: list[LayerShape], formats: list[list[HeadFormat]], block_size: int, dtype: torch.dtype) -> "RawRows":
        """Raises ConfigError for sinks that do not fit the first block, with which sequences share them."""
        kinds = [fmt for ranges in formats for r in ranges for fmt in (r.k, r.v)]
        sinks = max(fmt.sink_tokens for fmt in kinds)
        if sinks > block_size:
            raise ConfigError(
                f"quantizer: {sinks} sink tokens do not fit the first block of {block_size} tokens; use at most {block_size}, or "
                "a larger allocator.block_size"
            )
        tails, most = any(fmt.unit == "block" for fmt in kinds), max(fmt.tail_blocks for fmt in kinds)
        return cls(tails, most, sinks, raw_slot_bytes(layers, formats, block_size, dtype))


def size_pool(
    cache: CacheConfig,
    block_bytes: int,
    block_size: int,
    wanted_blocks: int,
    device: torch.device,
    free_bytes: int | None = None,
    raw_bytes: int = 0,
) -> PoolSize:
    """Blocks from cache.num_blocks, memory_bytes or memory_utilization; by default `wanted_blocks` (what max_num_seqs
    requests of max_model_len would fill), within the default share of the device's memory. free_bytes: what is free there,
    where the device is not this machine's (a simulation). A budget in bytes also pays for raw_bytes of tails and sinks.

    Raises ConfigError when the budget does not hold two blocks (one is the null block).
    """
    budget = parse_bytes(cache.memory_bytes, "cache.memory_bytes")
    less = f" - {raw_bytes:,} of raw tails and sinks" if raw_bytes else ""
    if cache.num_blocks is not None:
        blocks, how = cache.num_blocks, f"num_blocks={cache.num_blocks}"
    elif budget is not None:
        blocks = max(0, budget - raw_bytes) // block_bytes
        how = f"memory_bytes={budget:,}{less} // {block_bytes:,} bytes per block"
    else:
        share = cache.memory_utilization or (0.9 if free_bytes is not None else DEFAULT_UTILIZATION.get(device.type, 0.5))
        free = free_bytes if free_bytes is not None else _free(device)
        budget = int(share * free)
        blocks = max(0, budget - raw_bytes) // block_bytes
        how = f"{share:.0%} of {free:,} free bytes{less} // {block_bytes:,} bytes per block"
        if cache.memory_utilization is None and wanted_blocks < blocks:
            blocks, how = wanted_blocks, f"max_num_seqs x max_model_len fill {wanted_blocks - 1:,} blocks, + 1 null block"
    if blocks < 2:
        raise ConfigError(
            f"the pool would have {blocks} blocks ({how}); it needs at least 2, one of them the null block. Raise "
            f"cache.memory_bytes to {2 * block_bytes + raw_bytes:,} bytes or more, or lower allocator.block_size"
            + (" or scheduler.max_num_seqs" if raw_bytes else "")
        )
    host_bytes = parse_bytes(cache.host_memory_bytes, "cache.host_memory_bytes") or 0
    text = (
        f"KV pool: {blocks:,} blocks ({how}) x {block_bytes:,} bytes = {blocks * block_bytes / 2**20:,.1f} MiB; "
        f"{(blocks - 1) * block_size:,} tokens; host pool {host_bytes // block_bytes:,} blocks"
    )
    log.info(text)
    return PoolSize(blocks, block_bytes, host_bytes // block_bytes, text)


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil  # not needed on a GPU

    return int(psutil.virtual_memory().available)
