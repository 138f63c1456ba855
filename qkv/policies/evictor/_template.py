"""One line for people: which block goes first, and why that should help."""

from dataclasses import dataclass

from qkv.policies.evictor.base import EVICTORS, BlockMeta, PriorityEvictor
from qkv.validate import require


@EVICTORS.register("template")
@dataclass
class Template(PriorityEvictor):
    """Starting point: least recently used, where every hit counts as `hit_steps` steps of youth.

    Source: where the idea comes from; Differs: what this does otherwise. The fields are the policy's settings.
    """

    hit_steps: float = 10.0

    def __post_init__(self) -> None:
        require(self.hit_steps >= 0, "hit_steps", self.hit_steps, "at least 0")

    def priority(self, meta: BlockMeta) -> float:
        """The smallest is evicted first. `meta` has block, depth, born_step, last_step and hits. Pure: no clock, no state."""
        return meta.last_step + self.hit_steps * meta.hits
