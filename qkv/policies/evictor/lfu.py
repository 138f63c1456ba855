"""Least frequently used, with ageing: a popular block loses half of its weight every `age_steps` steps without use."""

import math
from dataclasses import dataclass

from qkv.policies.evictor.base import EVICTORS, BlockMeta, PriorityEvictor
from qkv.validate import require


@EVICTORS.register("lfu")
@dataclass
class LFU(PriorityEvictor):
    """priority = log2(1 + hits) + last_step / age_steps. At every moment `now` this orders blocks as
    (1 + hits) x 2^(-(now - last_step) / age_steps) does, so entries need no sorting again as time passes.

    Source: LRFU (Lee et al., 2001), at its end of decayed frequency. Differs: the count does not decay by itself; it is
    weighted by the time since the last use.
    """

    age_steps: float = 1000.0

    def __post_init__(self) -> None:
        require(self.age_steps > 0, "age_steps", self.age_steps, "above 0")

    def priority(self, meta: BlockMeta) -> float:
        return math.log2(1 + meta.hits) + meta.last_step / self.age_steps
