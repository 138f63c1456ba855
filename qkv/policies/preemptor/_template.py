"""Replace this by one line for readers: who gives way when running requests fill the pool, and how it comes back."""

from collections.abc import Sequence
from dataclasses import dataclass

from qkv.policies.preemptor.base import PREEMPTORS, CostModel, Mode, Preemptor
from qkv.types import RequestView
from qkv.validate import require


@PREEMPTORS.register("template")
@dataclass
class Template(Preemptor):
    """A starting point: the largest requests give way, so that few have to; long ones are swapped, short ones recomputed.

    Source: where the idea comes from; Differs: what this policy does otherwise. The dataclass fields are the policy's settings.
    """

    swap_from_blocks: int = 32

    def __post_init__(self) -> None:
        require(self.swap_from_blocks >= 0, "swap_from_blocks", self.swap_from_blocks, "at least 0")

    def victims(self, running: Sequence[RequestView], need: int) -> list[int]:
        """Ids of the requests to preempt, in order, until `need` blocks are free. Without this method the default holds: those
        served last give way first."""
        chosen: list[int] = []
        freed = 0
        for view in sorted(running, key=lambda v: v.num_private_blocks, reverse=True):
            if freed >= need:
                break
            chosen.append(view.id)
            freed += view.num_private_blocks
        return chosen

    def mode(self, victim: RequestView, host_free: int, costs: CostModel) -> Mode:
        """How the victim comes back. costs.recompute_s(tokens) and costs.swap_s(blocks) give seconds, or None until something
        was measured."""
        fits = victim.num_blocks <= host_free
        return "swap" if fits and victim.num_blocks >= self.swap_from_blocks else "recompute"
