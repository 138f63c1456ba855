"""Least recently used: the block whose last use is longest ago goes first."""

from dataclasses import dataclass

from qkv.policies.evictor.base import EVICTORS, BlockMeta, PriorityEvictor


@EVICTORS.register("lru")
@dataclass
class LRU(PriorityEvictor):
    """Source: what vLLM's free queue and SGLang's default do."""

    def priority(self, meta: BlockMeta) -> int:
        return meta.last_step
