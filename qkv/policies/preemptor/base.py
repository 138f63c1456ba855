"""Chooses who gives up blocks when a running request needs one, and how the victim comes back. The scheduler carries it out.

Takes: views of the running requests. Gives: victims in order, and for each victim "recompute" or "swap".
Does not know about: the pool, tensors, the scheduler's queues.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from qkv.registry import Registry
from qkv.types import RequestView

Mode = Literal["recompute", "swap"]


@dataclass(slots=True)
class CostModel:
    """What copying blocks and prefilling tokens cost on this machine: means over all that was measured so far, and None before
    the first measurement. The loop counts after every step; preemptors ask."""

    block_size: int
    block_bytes: int
    prefill_tokens_per_s: float | None = None
    copy_bytes_per_s: float | None = None
    _prefilled: tuple[float, float] = (0.0, 0.0)  # tokens, seconds
    _copied: tuple[float, float] = (0.0, 0.0)  # bytes, seconds

    def count_prefill(self, tokens: int, seconds: float) -> None:
        """A step that did nothing but prefill so many tokens took so long. The mean is all tokens over all seconds, so a short
        last chunk weighs as much as the time it took."""
        self._prefilled = (self._prefilled[0] + tokens, self._prefilled[1] + seconds)
        if self._prefilled[1] > 0:
            self.prefill_tokens_per_s = self._prefilled[0] / self._prefilled[1]

    def count_copy(self, size: int, seconds: float) -> None:
        """Copying `size` bytes to or from host memory took so long."""
        self._copied = (self._copied[0] + size, self._copied[1] + seconds)
        if self._copied[0] and self._copied[1] > 0:
            self.copy_bytes_per_s = self._copied[0] / self._copied[1]

    def recompute_s(self, tokens: int) -> float | None:
        """Seconds to prefill so many tokens again."""
        return None if not self.prefill_tokens_per_s else tokens / self.prefill_tokens_per_s

    def swap_s(self, blocks: int) -> float | None:
        """Seconds to copy so many blocks out and back in."""
        return None if not self.copy_bytes_per_s else 2 * blocks * self.block_bytes / self.copy_bytes_per_s


@dataclass
class Preemptor(ABC):
    """Only the scheduler calls it, while it plans a step. Equal inputs give equal answers, inputs stay unchanged, and victims
    are distinct running requests."""

    name: ClassVar[str]

    def victims(self, running: Sequence[RequestView], need: int) -> list[int]:
        """Ids of the requests to preempt, in order, until `need` blocks are free, or of all where that is not enough.

        Called when a running request needs a block and the pool has none. running: all running requests in serving order, the
        needy one among them. The scheduler never preempts the first of them, so one request always advances. By default the
        requests that are served last give way first: those of the highest priority number, and among them the latest.
        """
        chosen: list[int] = []
        freed = 0
        for view in reversed(running):
            if freed >= need:
                break
            chosen.append(view.id)
            freed += view.num_private_blocks
        return chosen

    @abstractmethod
    def mode(self, victim: RequestView, host_free: int, costs: CostModel) -> Mode:
        """How the victim comes back. Called for each victim when its turn comes. host_free: free host blocks, less those that
        its raw rows take. "swap" is allowed only if host_free >= victim.num_blocks. costs: what was measured so far."""


PREEMPTORS: Registry[Preemptor] = Registry("preemptor", Preemptor, "qkv.policies.preemptor")
