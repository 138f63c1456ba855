"""A runner that computes nothing and moves the clock by the time that the step would take; and a store that holds no bytes.

Takes: a StepPlan. Gives: made-up tokens. Does not know about: queues, policies.
"""

from collections.abc import Sequence
from typing import Any

import torch

from qkv.attention.base import Observer
from qkv.cache.store import KVStore
from qkv.errors import ConfigError
from qkv.metrics.recorder import Recorder
from qkv.runner import StepResult
from qkv.simulation.clock import SimulatedClock
from qkv.simulation.cost import StepCost
from qkv.simulation.tokens import SimulatedTokens
from qkv.types import BlockId, Request, StepPlan


class SimulatedRunner:
    """Stands in for the runner and for the attention backend. observer is never called, since there are no keys and values."""

    name = "simulated"  # the record shows it where an attention backend's name would be

    def __init__(self, cost: StepCost, clock: SimulatedClock, tokens: SimulatedTokens, recorder: Recorder) -> None:
        self.cost, self.clock, self.tokens, self.recorder = cost, clock, tokens, recorder
        self.observer: Observer | None = None

    def model_changed(self) -> bool:
        return False

    def run(self, plan: StepPlan) -> StepResult:
        """Let the step's time pass and return its made-up tokens. Raises ConfigError for scoring requests: they need logits."""
        if any(c.request.score_from is not None for c in plan.prefills):
            raise ConfigError("a simulation has no logits to score with; use runner=default")
        keys = sum(r.num_computed + 1 for r in plan.decodes)
        ready = [*plan.decodes, *(c.request for c in plan.prefills if c.completes)]
        chunks = [(c.start, c.end) for c in plan.prefills]
        if plan.num_tokens:
            self.clock.advance(self.cost.seconds(len(plan.decodes), keys, chunks, len(ready)))
        pairs = keys + sum((b - a) * a + (b - a) * (b - a + 1) // 2 for a, b in chunks)
        self.recorder.pairs_attended += pairs
        self.recorder.pairs_from_cache += pairs
        return StepResult(None, [], [self.tokens.at(r.id, len(r.token_ids)) for r in ready])

    def forget(self, request: Request) -> None:
        pass


class SimulatedStore(KVStore):
    """Computes sizes as the real store does, but its planes have no memory. A copy only moves the clock."""

    def __init__(self, *args: Any, cost: StepCost, clock: SimulatedClock, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | {"poison": False}))
        self._cost, self._clock = cost, clock

    def copy_out(self, device_ids: list[BlockId], host_ids: list[BlockId]) -> None:
        self._clock.advance(self._cost.copy_seconds(len(device_ids) * self.block_bytes))

    def copy_in(self, device_ids: list[BlockId], host_ids: list[BlockId]) -> None:
        self._clock.advance(self._cost.copy_seconds(len(device_ids) * self.block_bytes))

    def copy_raw_out(self, tail_slot: int, sink_slot: int, host_ids: Sequence[BlockId]) -> None:
        self._clock.advance(self._cost.copy_seconds(len(host_ids) * self.block_bytes))

    copy_raw_in = copy_raw_out

    def reserve_host(self) -> None:
        """There is nothing to reserve."""

    def free(self) -> None:
        """There is nothing to free."""

    def check_null(self) -> None:
        """There are no bytes to check."""


META = torch.device("meta")
