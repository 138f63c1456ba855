"""Copies a victim's blocks to host memory and back, byte for byte. When the host pool is full, it recomputes instead."""

from dataclasses import dataclass

from qkv.policies.preemptor.base import PREEMPTORS, CostModel, Mode, Preemptor
from qkv.types import RequestView


@PREEMPTORS.register("swap")
@dataclass
class Swap(Preemptor):
    """Source: vLLM v0's swap mode. Differs: every victim can be swapped, not only sequence groups."""

    def mode(self, victim: RequestView, host_free: int, costs: CostModel) -> Mode:
        return "swap" if host_free >= victim.num_blocks else "recompute"
