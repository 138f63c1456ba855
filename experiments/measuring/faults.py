"""Breaks an engine's parts at random while it serves: what can go wrong in a step, by kind, with a count of how often it did.

Takes: an engine and a random generator. Gives: the same engine, whose policies, copies, forward and sampling raise now and then.
Does not know about: requests, what should come of it.
"""

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from qkv.engine import Engine

MARK = "put there by the soak"  # in the message of every fault, so that an error of another origin is noticed
POOL_METHODS = ("allocate", "acquire", "release", "publish", "match")


class Faults:
    """rate: probability that a call of a broken method raises. injected: how often each kind did. pool_operations: calls of the
    allocator, which is watched for that. Everything here is called by the thread that steps."""

    def __init__(self, engine: Engine, rng: random.Random, rate: float) -> None:
        self._rng, self._rate = rng, rate
        self.injected: Counter[str] = Counter()
        self.pool_operations = 0
        parts, loop = engine._parts, engine._loop
        self._manager = engine.scheduler.manager
        start_over = self._manager.start_over

        def start_over_and_watch(requests: Any) -> None:
            start_over(requests)
            self._watch_pool()  # it is a new one

        self._manager.start_over = start_over_and_watch  # type: ignore[method-assign]
        self._watch_pool()
        self._break("preemptor", engine.scheduler.preemptor, "victims", lambda: KeyError(MARK), 10)
        self._break("preemptor", engine.scheduler.preemptor, "mode", lambda: TypeError(MARK), 10)
        self._break("host memory", parts.store, "reserve_host", lambda: MemoryError(MARK), 8)
        self._break("swap copy", parts.store, "copy_in", lambda: OSError(MARK), 30)
        self._break("out of memory", parts.adapter, "forward", lambda: torch.OutOfMemoryError(f"out of memory, {MARK}"), 0.3)
        self._break("forward", parts.backend, "attend", lambda: ValueError(MARK), 0.2)
        self._break("sampling", loop._sampler, "_draw", lambda: ArithmeticError(MARK), 0.2)
        self._break("output", loop._outputs, "append", lambda: UnicodeError(MARK), 0.2)

    def _watch_pool(self) -> None:
        allocator = self._manager.allocator
        for name in POOL_METHODS:
            self._break("allocator", allocator, name, lambda: RuntimeError(MARK), 0.05, self._count)
        evictor = getattr(allocator, "_evictor", None)
        for name in ("add", "hit", "pop") if evictor is not None else ():
            self._break("evictor", evictor, name, lambda: ZeroDivisionError(MARK), 0.5)

    def _count(self) -> None:
        self.pool_operations += 1

    def _break(
        self,
        kind: str,
        owner: Any,
        method: str,
        error: Callable[[], Exception],
        share: float = 1.0,
        seen: Callable[[], None] = lambda: None,
    ) -> None:
        """share: of the rate: less for what is called often, more for what is rare. seen: told of every call."""
        original = getattr(owner, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen()
            if self._rng.random() < self._rate * share:
                self.injected[kind] += 1
                raise error()
            return original(*args, **kwargs)

        setattr(owner, method, call)


class JumpingClock:
    """Seconds, with jumps of up to an hour in both directions. jumps: how many there were."""

    def __init__(self, rng: random.Random, rate: float) -> None:
        self._rng, self._rate, self._offset, self.jumps = rng, rate, 0.0, 0

    def __call__(self) -> float:
        if self._rng.random() < self._rate:
            self._offset += self._rng.uniform(-3600, 3600)
            self.jumps += 1
        return time.perf_counter() + self._offset
