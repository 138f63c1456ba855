"""Replace this by one line for readers: which block goes first, and why that should help."""

from dataclasses import dataclass

from qkv.policies.evictor.base import EVICTORS, BlockMeta, PriorityEvictor
from qkv.validate import require


@EVICTORS.register("template")
@dataclass
class Template(PriorityEvictor):
    """A starting point: least recently used, where every hit makes a block count as `hit_steps` steps younger.

    Source: where the idea comes from; Differs: what this policy does otherwise. The dataclass fields are the policy's settings.
    """

    hit_steps: float = 10.0

    def __post_init__(self) -> None:
        require(self.hit_steps >= 0, "hit_steps", self.hit_steps, "at least 0")

    def priority(self, meta: BlockMeta) -> float:
        """The block of the smallest priority is evicted first. It follows from `meta` alone, without a clock or other state;
        `meta` has block, depth, born_step, last_step and hits."""
        return meta.last_step + self.hit_steps * meta.hits
