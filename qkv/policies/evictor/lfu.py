"""Least frequently used, with ageing: a popular block loses half of its weight every `age_steps` steps without use."""

import math
from dataclasses import dataclass

from qkv.policies.evictor.base import EVICTORS, BlockMeta, PriorityEvictor
from qkv.validate import require


@EVICTORS.register("lfu")
@dataclass
class LFU(PriorityEvictor):
    """priority = log2(1 + hits) + last_step / age_steps, which orders blocks by hits x 2^(-(now - last_step) / age_steps)
    at any `now`, so entries never need re-sorting as time passes.

    Source: the decayed-frequency end of LRFU (Lee et al., 2001); the count itself does not decay, only its age weighs.
    """

    age_steps: float = 1000.0

    def __post_init__(self) -> None:
        require(self.age_steps > 0, "age_steps", self.age_steps, "above 0")

    def priority(self, meta: BlockMeta) -> float:
        return math.log2(1 + meta.hits) + meta.last_step / self.age_steps
