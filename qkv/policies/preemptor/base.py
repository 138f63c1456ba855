"""Who gives up blocks when a running request needs one, and how it comes back. Plans, never applies.

Takes: views of the running requests. Gives: victims in order, and per victim "recompute" or "swap".
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
    """What moving and recomputing cost here: means over everything measured so far, None before the first measurement."""

    block_size: int
    block_bytes: int
    prefill_tokens_per_s: float | None = None
    copy_bytes_per_s: float | None = None
    _prefilled: tuple[float, float] = (0.0, 0.0)  # tokens, seconds
    _copied: tuple[float, float] = (0.0, 0.0)  # bytes, seconds

    def count_prefill(self, tokens: int, seconds: float) -> None:
        """A step that only prefilled. Means over time: a short last chunk weighs what it took, not what it held."""
        self._prefilled = (self._prefilled[0] + tokens, self._prefilled[1] + seconds)
        if self._prefilled[1] > 0:
            self.prefill_tokens_per_s = self._prefilled[0] / self._prefilled[1]

    def count_copy(self, size: int, seconds: float) -> None:
        """Bytes copied to or from host memory."""
        self._copied = (self._copied[0] + size, self._copied[1] + seconds)
        if self._copied[0] and self._copied[1] > 0:
            self.copy_bytes_per_s = self._copied[0] / self._copied[1]

    def recompute_s(self, tokens: int) -> float | None:
        return None if not self.prefill_tokens_per_s else tokens / self.prefill_tokens_per_s

    def swap_s(self, blocks: int) -> float | None:
        """Seconds to copy out and back in."""
        return None if not self.copy_bytes_per_s else 2 * blocks * self.block_bytes / self.copy_bytes_per_s


@dataclass
class Preemptor(ABC):
    """Laws: deterministic, inputs unchanged, victims are distinct running requests."""

    name: ClassVar[str]

    def victims(self, running: Sequence[RequestView], need: int) -> list[int]:
        """Request ids to preempt, in order, until `need` blocks are free (or all that would help).

        The default gives up what is served last anyway: the lowest urgency, then the latest arrival. `running` comes in
        serving order. The scheduler never preempts the first of them, so one request always advances.
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
        """How the victim comes back. "swap" is allowed only if host_free >= victim.num_blocks."""


PREEMPTORS: Registry[Preemptor] = Registry("preemptor", Preemptor, "qkv.policies.preemptor")
