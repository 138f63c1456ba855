"""The best table of n entries for values that are distributed as N(0, 1). Does not know about: formats, quantizers."""

import math
from functools import lru_cache
from itertools import pairwise


@lru_cache
def lloyd_max(entries: int) -> tuple[float, ...]:
    """Ascending entries of the quantizer of N(0, 1) with the least squared error, an even number (Lloyd 1982, Max 1960).

    An entry is the mean of what is nearer to it than to any other, found by iteration to the last digits of a float.
    """
    half = [(2 * i + 1) * 3 / entries for i in range(entries // 2)]  # the positive ones
    while True:
        edges = [0.0, *((a + b) / 2 for a, b in pairwise(half)), math.inf]
        means = [(_density(a) - _density(b)) / (_below(b) - _below(a)) for a, b in pairwise(edges)]
        change, half = max(abs(a - b) for a, b in zip(means, half, strict=True)), means
        if change < 1e-13:
            return (*(-c for c in reversed(half)), *half)


def _density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _below(x: float) -> float:
    return (1 + math.erf(x / math.sqrt(2))) / 2
