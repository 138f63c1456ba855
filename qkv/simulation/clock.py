"""A clock that moves only when it is told to. Does not know about: how long anything takes."""

import math
from dataclasses import dataclass


@dataclass
class SimulatedClock:
    """now: in seconds. deadline: when the next request arrives, set by who sends requests. The loop that takes many steps at
    once stops after the first step that ends at or after the deadline, since stepping one by one would see the request then."""

    now: float = 0.0
    deadline: float = math.inf

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """So much time passes."""
        self.now += seconds

    def wait_until(self, time: float) -> None:
        """Time passes until `time`, if that is not yet over."""
        self.now = max(self.now, time)
