"""Segmented LRU: blocks hit at least `protect_at` times go last; within each segment the least recently used goes first."""

from dataclasses import dataclass

from qkv.policies.evictor.base import EVICTORS, BlockMeta, PriorityEvictor
from qkv.validate import require


@EVICTORS.register("slru")
@dataclass
class SLRU(PriorityEvictor):
    """Source: Karedla et al., 1994, as in SGLang. Differs: the protected segment has no capacity of its own."""

    protect_at: int = 2

    def __post_init__(self) -> None:
        require(self.protect_at >= 1, "protect_at", self.protect_at, "at least 1 hit")

    def priority(self, meta: BlockMeta) -> tuple[bool, int]:
        return (meta.hits >= self.protect_at, meta.last_step)
