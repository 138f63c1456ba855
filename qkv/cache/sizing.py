"""Decides how many blocks the pool gets, and spells the arithmetic out.

Takes: the cache's settings and the bytes of a block. Gives: a PoolSize. Does not know about: tensors' contents, requests.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

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
    """What the pool and the host pool hold. num_blocks includes the null block; arithmetic says in words how it was found."""

    num_blocks: int
    block_bytes: int
    host_blocks: int
    arithmetic: str


@dataclass(frozen=True)
class RawRows:
    """What the formats keep raw beside the pool. tails: whether any format keeps raw tails; tail_blocks, sink_tokens: the most
    that any of them keeps."""

    tails: bool
    tail_blocks: int
    sink_tokens: int
    slot_bytes: int  # of one tail slot and one sink slot together, over all layers

    @classmethod
    def of(cls, layers: list[LayerShape], formats: list[list[HeadFormat]], block_size: int, dtype: torch.dtype) -> "RawRows":
        """formats: per layer. Raises ConfigError where the sink tokens are more than a block: sequences share them together
        with their first block."""
        kinds = [fmt for ranges in formats for r in ranges for fmt in (r.k, r.v)]
        sink_tokens = max(fmt.sink_tokens for fmt in kinds)
        if sink_tokens > block_size:
            raise ConfigError(
                f"quantizer: {sink_tokens} sink tokens do not fit the first block of {block_size} tokens; use at most "
                f"{block_size}, or a larger allocator.block_size"
            )
        tails, most = any(fmt.unit == "block" for fmt in kinds), max(fmt.tail_blocks for fmt in kinds)
        return cls(tails, most, sink_tokens, raw_slot_bytes(layers, formats, block_size, dtype))


def size_pool(
    cache: CacheConfig,
    block_bytes: int,
    block_size: int,
    wanted_blocks: int,
    device: torch.device,
    free_bytes: int | None = None,
    raw_bytes: int = 0,
) -> PoolSize:
    """The pool that cache.num_blocks, memory_bytes or memory_utilization asks for. Without these: `wanted_blocks`, the blocks
    that max_num_seqs requests of max_model_len fill, or fewer where the default share of the device's free memory holds fewer.

    free_bytes: free memory of the device in a simulation, where it is not this machine's; otherwise it is measured.
    raw_bytes: bytes of raw tails and sink tokens, which a budget in bytes pays for too.

    Raises ConfigError when the budget does not hold two blocks (one is the null block) or is larger than the free memory.
    """
    budget = parse_bytes(cache.memory_bytes, "cache.memory_bytes")
    less = f" - {raw_bytes:,} for raw tails and sink tokens" if raw_bytes else ""
    if cache.num_blocks is not None:
        blocks, how = cache.num_blocks, f"num_blocks={cache.num_blocks}"
    elif budget is not None:
        blocks = max(0, budget - raw_bytes) // block_bytes
        how = f"memory_bytes={budget:,}{less} // {block_bytes:,} bytes per block"
    else:
        share = cache.memory_utilization or (0.9 if free_bytes is not None else DEFAULT_UTILIZATION.get(device.type, 0.5))
        free = free_bytes if free_bytes is not None else free_memory(device)
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
    if free_bytes is None and blocks * block_bytes > (available := free_memory(device)):
        raise ConfigError(
            f"the pool would take {blocks * block_bytes / 2**30:,.1f} GiB ({how}), and {available / 2**30:,.1f} GiB are free; "
            "lower cache.memory_bytes, cache.num_blocks or cache.memory_utilization"
        )
    host_bytes = parse_bytes(cache.host_memory_bytes, "cache.host_memory_bytes") or 0
    text = (
        f"KV pool: {blocks:,} blocks ({how}) x {block_bytes:,} bytes = {blocks * block_bytes / 2**20:,.1f} MiB; "
        f"{(blocks - 1) * block_size:,} tokens; host pool {host_bytes // block_bytes:,} blocks"
    )
    log.info(text)
    return PoolSize(blocks, block_bytes, host_bytes // block_bytes, text)


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on `device` now: memory of the GPU, or main memory within the container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil  # here: the check of a GPU (experiments.gpu_check) runs on machines without it

    free = int(psutil.virtual_memory().available)
    try:  # by hand, for psutil knows no cgroups (v2): a container may have less than the machine
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return free if limit == "max" else min(free, int(limit) - used)
    except OSError:
        return free
