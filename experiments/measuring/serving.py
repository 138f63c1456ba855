"""Drives an engine with a workload, open or closed loop, on its own clock, real or simulated.

Takes: an engine, Traffic. Gives: what was served and how fast. Does not know about: policies, records.
"""

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tqdm import tqdm

from experiments.harness.workload import Planned, Slo, Traffic
from qkv.engine import Engine
from qkv.errors import ConfigError, RequestError
from qkv.metrics.summary import Latencies
from qkv.outputs import request_metrics
from qkv.simulation import SimulatedClock
from qkv.types import Request, SamplingParams


@dataclass
class Served:
    """latencies leave out the requests that a closed loop starts with all at once: nobody waits like that later.

    good: requests within the service level. refused: those the engine would not take, with the first reason.
    """

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    good: int = 0
    refused: int = 0
    reason: str | None = None
    latencies: Latencies = field(default_factory=Latencies)

    def speed(self) -> dict[str, Any]:
        """The row's `speed`."""
        rates = {
            "output_tokens_per_s": self.output_tokens,
            "total_tokens_per_s": self.output_tokens + self.prompt_tokens,
            "requests_per_s": self.requests,
            "goodput_requests_per_s": self.good,
        }
        out: dict[str, Any] = {name: n / self.seconds for name, n in rates.items()} if self.seconds else {}
        return out | self.latencies.distributions()


class _Driver:
    """Arrivals that are known, by time; and, in a closed loop, those that wait for a place."""

    def __init__(self, engine: Engine, traffic: Traffic) -> None:
        self.engine, self.traffic = engine, traffic
        self.start = engine.clock()
        self.coming: list[tuple[float, int, Planned]] = []
        self.order = itertools.count()
        self.first: Iterator[Planned] = iter(traffic)
        self.live: dict[int, Planned] = {}
        self.closed = traffic.workload.arrivals == "closed"
        self.burst: set[int] = set()  # conversations that a closed loop starts with
        self.open = 0  # conversations begun and not ended, in a closed loop
        self.fill()
        if self.closed:
            self.burst = {planned.index for _, _, planned in self.coming}

    def fill(self) -> None:
        """Know the next arrival; in a closed loop, one per free place."""
        work = self.traffic.workload
        if self.closed:
            while self.open < work.concurrency and (planned := next(self.first, None)) is not None:
                self.open += 1
                self.push(planned, self.engine.clock())
        elif not any(p.turn == 0 for _, _, p in self.coming) and (planned := next(self.first, None)) is not None:
            self.push(planned, self.start + (planned.at or 0.0))

    def push(self, planned: Planned, at: float) -> None:
        heapq.heappush(self.coming, (at, next(self.order), planned))

    @property
    def next_arrival(self) -> float:
        return self.coming[0][0] if self.coming else math.inf

    def ended(self, planned: Planned, request: Request | None, now: float) -> None:
        following = self.traffic.next_turn(planned, list(request.token_ids), now) if request is not None else None
        if following is not None:
            self.push(following, following.at or now)
        elif self.closed:
            self.open -= 1
            self.fill()


def serve(
    engine: Engine, traffic: Traffic, slo: Slo | None = None, progress: bool = False, tick: Callable[[], None] | None = None
) -> Served:
    """Send every request of the workload and step until all have ended. tick: called after every step.

    Raises ConfigError for arrivals in time on a clock that only runs while this process does.
    """
    if engine.config.runner.clock == "cpu" and traffic.workload.arrivals not in ("together", "closed"):
        raise ConfigError("runner.clock=cpu stands still while nothing runs: use workload.arrivals=closed or together")
    driver, served, slo = _Driver(engine, traffic), Served(), slo or Slo()
    clock, work = engine.clock, traffic.workload
    with tqdm(total=len(traffic), disable=not progress, unit="request", leave=False, mininterval=0.5) as bar:
        while driver.coming or driver.live:
            while driver.next_arrival <= clock():
                at, _, planned = heapq.heappop(driver.coming)
                _send(engine, driver, served, planned, at, work.ignore_eos)
                driver.fill()
            if isinstance(clock, SimulatedClock):
                clock.deadline = driver.next_arrival
            if not engine.has_work:
                _wait(clock, driver.next_arrival)
                continue
            for request in engine.advance():
                if request.finish_reason is not None and request.id in driver.live:
                    planned = driver.live.pop(request.id)
                    _count(served, request, slo, planned.index in driver.burst and planned.turn == 0)
                    driver.ended(planned, request, clock())
                    bar.update()
            if tick is not None:
                tick()
    served.seconds = clock() - driver.start
    return served


@cache
def _params(max_tokens: int, ignore_eos: bool) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)


def _send(engine: Engine, driver: _Driver, served: Served, planned: Planned, at: float, ignore_eos: bool) -> None:
    try:
        driver.live[engine.add_request(planned.prompt, _params(planned.output_tokens, ignore_eos), arrival=at)] = planned
    except RequestError as error:
        served.refused += 1
        served.reason = served.reason or str(error)
        driver.ended(planned, None, at)


def _count(served: Served, request: Request, slo: Slo, burst: bool) -> None:
    metrics = request_metrics(request)
    served.requests += 1
    served.prompt_tokens += request.prompt_len
    served.output_tokens += len(request.token_ids) - request.prompt_len
    served.good += slo.met(metrics.ttft, metrics.tpot)
    if not burst:
        served.latencies.add(metrics)


def _wait(clock: Callable[[], float], until: float) -> None:
    if until == math.inf:
        return
    if isinstance(clock, SimulatedClock):
        clock.wait_until(until)
    else:
        time.sleep(max(0.0, until - clock()))
