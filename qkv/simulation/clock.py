"""Time that passes only when somebody says so. Does not know about: what takes how long."""

import math
from dataclasses import dataclass


@dataclass
class SimulatedClock:
    """Seconds. deadline: when the next request arrives; whoever takes many steps at once stops at the first step that ends
    at or after it, as stepping one by one would."""

    now: float = 0.0
    deadline: float = math.inf

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def wait_until(self, time: float) -> None:
        self.now = max(self.now, time)
