"""Percentiles of many values in bounded memory.

Takes: values of at least 0. Gives: mean, p50, p95, p99. Does not know about: what they measure.
"""

import math
from collections import Counter
from collections.abc import Iterable

import numpy as np

EXACT = 20_000  # values kept as they are; beyond, only their bucket is
GAMMA = 1.01  # ratio of neighbouring buckets: percentiles are within 0.5 %
_SMALLEST = 1e-9


class Sketch:
    """Exact up to 20,000 values, then logarithmic buckets. The mean stays exact. Order does not matter.

    Source: DDSketch (Masson et al., 2019), without its collapsing: a few thousand buckets cover 1e-9 to 1e9.
    """

    def __init__(self) -> None:
        self.count, self.total = 0, 0.0
        self._values: list[float] = []
        self._buckets: Counter[int] = Counter()

    def add(self, values: Iterable[float]) -> None:
        self._values.extend(values)
        if len(self._values) > EXACT:
            self._flush()

    def _flush(self) -> None:
        values = np.asarray(self._values)
        keys, counts = np.unique(np.ceil(np.log(np.maximum(values, _SMALLEST)) / math.log(GAMMA)).astype(int), return_counts=True)
        for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
            self._buckets[key] += count
        self.count, self.total = self.count + len(values), self.total + float(values.sum())
        self._values.clear()

    def distribution(self) -> dict[str, float] | None:
        """mean, p50, p95, p99 (linear interpolation while exact), or None without values."""
        if not self._buckets:
            if not self._values:
                return None
            p50, p95, p99 = np.percentile(self._values, (50, 95, 99))
            return {"mean": float(np.mean(self._values)), "p50": float(p50), "p95": float(p95), "p99": float(p99)}
        if self._values:
            self._flush()
        keys = np.array(sorted(self._buckets))
        upto = np.cumsum([self._buckets[key] for key in keys.tolist()])
        where = np.searchsorted(upto, np.array((0.5, 0.95, 0.99)) * self.count)
        p50, p95, p99 = (2 * GAMMA ** float(keys[i]) / (1 + GAMMA) for i in where)
        return {"mean": self.total / self.count, "p50": p50, "p95": p95, "p99": p99}
