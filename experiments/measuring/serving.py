"""Sends an engine the requests of a workload, in an open or a closed loop, on the engine's clock, which is real or simulated.

Takes: an engine and a Traffic. Gives: a Served, which says how much was served and how fast. Does not know about: policies,
records.
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

from experiments.harness.workload import Arrival, Slo, Traffic
from qkv.engine import Engine
from qkv.errors import ConfigError, RequestError
from qkv.metrics.summary import Latencies
from qkv.outputs import request_metrics
from qkv.simulation import SimulatedClock
from qkv.types import Request, SamplingParams


@dataclass
class Served:
    """Totals over the requests that ended.

    latencies: those of all requests but the first turns with which a closed loop fills its places. They arrive at the same
    moment and wait for each other, as no later request does. good: requests that met the service level. refused: requests
    that the engine did not take; reason: why it did not take the first of them.
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
        """The `speed` part of a row."""
        rates = {
            "output_tokens_per_s": self.output_tokens,
            "total_tokens_per_s": self.output_tokens + self.prompt_tokens,
            "requests_per_s": self.requests,
            "goodput_requests_per_s": self.good,
        }
        out: dict[str, Any] = {name: n / self.seconds for name, n in rates.items()} if self.seconds else {}
        return out | self.latencies.distributions()


class _Driver:
    """Knows which request is sent next, and when. coming: requests whose time is known, the earliest first. live: requests
    that the engine works on, by id. In a closed loop a conversation takes a place when it begins and frees it when it ends."""

    def __init__(self, engine: Engine, traffic: Traffic) -> None:
        self.engine, self.traffic = engine, traffic
        self.start = engine.clock()
        self.coming: list[tuple[float, int, Arrival]] = []
        self.order = itertools.count()
        self.first: Iterator[Arrival] = iter(traffic)
        self.live: dict[int, Arrival] = {}
        self.closed = traffic.workload.arrivals == "closed"
        self.burst: set[int] = set()  # the conversations with which a closed loop fills its places at the start
        self.open = 0  # places taken in a closed loop: conversations that began and have not ended
        self.fill()
        if self.closed:
            self.burst = {arrival.index for _, _, arrival in self.coming}

    def fill(self) -> None:
        """Take the next first turn from the workload into `coming`; in a closed loop, one for every free place."""
        work = self.traffic.workload
        if self.closed:
            while self.open < work.concurrency and (arrival := next(self.first, None)) is not None:
                self.open += 1
                self.push(arrival, self.engine.clock())
        elif not any(p.turn == 0 for _, _, p in self.coming) and (arrival := next(self.first, None)) is not None:
            self.push(arrival, self.start + (arrival.at or 0.0))

    def push(self, arrival: Arrival, at: float) -> None:
        heapq.heappush(self.coming, (at, next(self.order), arrival))

    @property
    def next_time(self) -> float:
        """When the next request is to be sent; infinity if none is known."""
        return self.coming[0][0] if self.coming else math.inf

    def ended(self, arrival: Arrival, request: Request | None, now: float) -> None:
        """The request ended, or was refused (None): its conversation goes on with its next turn or frees its place."""
        following = self.traffic.next_turn(arrival, list(request.token_ids), now) if request is not None else None
        if following is not None:
            self.push(following, following.at or now)
        elif self.closed:
            self.open -= 1
            self.fill()


def serve(
    engine: Engine, traffic: Traffic, slo: Slo | None = None, progress: bool = False, tick: Callable[[], None] | None = None
) -> Served:
    """Send every request of the workload and step until all have ended. tick: called after every step.

    Raises ConfigError where requests arrive at set times but the clock counts this process's CPU seconds only.
    """
    if engine.config.runner.clock == "cpu" and traffic.workload.arrivals not in ("together", "closed"):
        raise ConfigError("runner.clock=cpu stands still while nothing runs: use workload.arrivals=closed or together")
    driver, served, slo = _Driver(engine, traffic), Served(), slo or Slo()
    clock, work = engine.clock, traffic.workload
    with tqdm(total=len(traffic), disable=not progress, unit="request", leave=False, mininterval=0.5) as bar:
        while driver.coming or driver.live:
            while driver.next_time <= clock():
                at, _, arrival = heapq.heappop(driver.coming)
                _send(engine, driver, served, arrival, at, work.ignore_eos)
                driver.fill()
            if isinstance(clock, SimulatedClock):
                clock.deadline = driver.next_time
            if not engine.has_work:
                _wait(clock, driver.next_time)
                continue
            for request in engine.advance():
                if request.finish_reason is not None and request.id in driver.live:
                    arrival = driver.live.pop(request.id)
                    _count(served, request, slo, arrival.index in driver.burst and arrival.turn == 0)
                    driver.ended(arrival, request, clock())
                    bar.update()
            if tick is not None:
                tick()
    served.seconds = clock() - driver.start
    return served


@cache
def _params(max_tokens: int, ignore_eos: bool) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)


def _send(engine: Engine, driver: _Driver, served: Served, arrival: Arrival, at: float, ignore_eos: bool) -> None:
    try:
        driver.live[engine.add_request(arrival.prompt, _params(arrival.output_tokens, ignore_eos), arrival=at)] = arrival
    except RequestError as error:
        served.refused += 1
        served.reason = served.reason or str(error)
        driver.ended(arrival, None, at)


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
