"""Percentiles of many values in bounded memory.

Takes: values of at least 0. Gives: mean, p50, p95, p99, count. Does not know about: what the values measure.
"""

import math
from collections import Counter
from collections.abc import Iterable

import numpy as np

EXACT = 20_000  # so many values are kept as they are; when there are more, only the buckets they fall into are counted
GAMMA = 1.01  # ratio of the bounds of neighbouring buckets, which keeps percentiles within 0.5 %
_SMALLEST = 1e-9


class Sketch:
    """Exact up to 20,000 values; beyond, values are counted in logarithmic buckets. The mean stays exact, and the order of the
    values does not matter.

    Source: DDSketch (Masson et al., 2019). Differs: buckets are never merged, since a few thousand cover 1e-9 to 1e9.
    """

    def __init__(self) -> None:
        self.count, self.total = 0, 0.0
        self._values: list[float] = []
        self._buckets: Counter[int] = Counter()

    def __len__(self) -> int:
        return self.count + len(self._values)

    def add(self, values: Iterable[float]) -> None:
        self._values.extend(values)
        if len(self._values) > EXACT:
            full, self._values = self._values, []
            self._buckets += _bucketed(full)
            self.count, self.total = self.count + len(full), self.total + math.fsum(full)

    def distribution(self) -> dict[str, float] | None:
        """mean, p50, p95, p99 (interpolated linearly while values are exact), or None without values. Changes nothing, so that
        another thread may call it while values come in."""
        values = list(self._values)
        if not self._buckets:
            if not values:
                return None
            p50, p95, p99 = np.percentile(values, (50, 95, 99))
            return {"mean": float(np.mean(values)), "p50": float(p50), "p95": float(p95), "p99": float(p99)}
        buckets, count = self._buckets + _bucketed(values), self.count + len(values)
        keys = sorted(buckets)
        upto = np.cumsum([buckets[key] for key in keys])
        where = np.searchsorted(upto, np.array((0.5, 0.95, 0.99)) * count)
        p50, p95, p99 = (2 * GAMMA ** float(keys[i]) / (1 + GAMMA) for i in where)
        return {"mean": (self.total + math.fsum(values)) / count, "p50": p50, "p95": p95, "p99": p99}


def _bucketed(values: list[float]) -> Counter[int]:
    """How many of the values fall into each bucket; bucket k holds those above GAMMA**(k - 1) and up to GAMMA**k."""
    if not values:
        return Counter()
    powers = np.ceil(np.log(np.maximum(np.asarray(values), _SMALLEST)) / math.log(GAMMA)).astype(int)
    keys, counts = np.unique(powers, return_counts=True)
    return Counter(dict(zip(keys.tolist(), counts.tolist(), strict=True)))
