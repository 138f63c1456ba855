"""Drops a victim's blocks and prefills its tokens again later. It needs no host memory; published blocks may still be hit."""

from dataclasses import dataclass

from qkv.policies.preemptor.base import PREEMPTORS, CostModel, Mode, Preemptor
from qkv.types import RequestView


@PREEMPTORS.register("recompute")
@dataclass
class Recompute(Preemptor):
    """Source: what vLLM v1 always does."""

    def mode(self, victim: RequestView, host_free: int, costs: CostModel) -> Mode:
        return "recompute"
