"""One line for people: who gives way when the pool is full of running requests, and how it comes back."""

from collections.abc import Sequence
from dataclasses import dataclass

from qkv.policies.preemptor.base import PREEMPTORS, CostModel, Mode, Preemptor
from qkv.types import RequestView
from qkv.validate import require


@PREEMPTORS.register("template")
@dataclass
class Template(Preemptor):
    """Starting point: the largest requests give way, so that few do; long ones are swapped, short ones recomputed.

    Source: where the idea comes from; Differs: what this does otherwise. The fields are the policy's settings.
    """

    swap_from_blocks: int = 32

    def __post_init__(self) -> None:
        require(self.swap_from_blocks >= 0, "swap_from_blocks", self.swap_from_blocks, "at least 0")

    def victims(self, running: Sequence[RequestView], need: int) -> list[int]:
        """Request ids in order, until `need` blocks are free. Leave this method out to keep the default: the last in line."""
        chosen: list[int] = []
        freed = 0
        for view in sorted(running, key=lambda v: v.num_private_blocks, reverse=True):
            if freed >= need:
                break
            chosen.append(view.id)
            freed += view.num_private_blocks
        return chosen

    def mode(self, victim: RequestView, host_free: int, costs: CostModel) -> Mode:
        """How the victim comes back. costs.recompute_s(tokens) and costs.swap_s(blocks) are seconds, None until measured."""
        fits = victim.num_blocks <= host_free
        return "swap" if fits and victim.num_blocks >= self.swap_from_blocks else "recompute"
