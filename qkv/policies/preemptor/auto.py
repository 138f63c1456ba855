"""Swaps or recomputes, whichever is cheaper for this victim by what was measured on this machine."""

from dataclasses import dataclass

from qkv.policies.preemptor.base import PREEMPTORS, CostModel, Mode, Preemptor
from qkv.types import RequestView
from qkv.validate import require


@PREEMPTORS.register("auto")
@dataclass
class Auto(Preemptor):
    """Compares 2 x bytes / copy bandwidth with tokens / prefill rate. Quantized blocks are cheaper to swap, so the length from
    which swapping pays depends on the quantizer. Until both rates are measured, it swaps from `swap_from_tokens` tokens on."""

    swap_from_tokens: int = 512

    def __post_init__(self) -> None:
        require(self.swap_from_tokens >= 0, "swap_from_tokens", self.swap_from_tokens, "at least 0")

    def mode(self, victim: RequestView, host_free: int, costs: CostModel) -> Mode:
        if host_free < victim.num_blocks:
            return "recompute"
        recompute, swap = costs.recompute_s(victim.num_computed), costs.swap_s(victim.num_blocks)
        if recompute is None or swap is None:
            return "swap" if victim.num_computed >= self.swap_from_tokens else "recompute"
        return "swap" if swap < recompute else "recompute"
