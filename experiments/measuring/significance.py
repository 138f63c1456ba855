"""Tests whether two quantizers' scores on the same samples differ by more than chance, and what difference would have shown.

Takes: scores of the same samples, in the same order; higher is better. Gives: the mean difference, its standard error, a
p-value, the smallest difference that so many samples would have shown, and a verdict in words.
Does not know about: tasks, models, tables. Two runs of one model agree on most samples, which a paired test makes use of. To
compare the two means by their own standard errors, as if the samples were not the same, needs several times as many samples.

Sources: McNemar, Psychometrika 12 (1947), exact form; Efron and Tibshirani, An Introduction to the Bootstrap (1993), 16.4, in
studentized form; Holm, Scand. J. Statist. 6 (1979).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

ALPHA = 0.05  # of all comparisons together
POWER = 0.8
RESAMPLES = 9_999
_AT_A_TIME = 2_000_000  # so many resampled scores are held in memory at once


@dataclass(frozen=True)
class Paired:
    """The differences other - base over `samples` samples. delta: their mean. stderr: the standard error of delta; nan for one
    sample. p_value: two-sided, for the hypothesis that the true difference is 0.

    mde: the smallest true difference that would have been found with a probability of 80 %; inf if no difference would have
    been. changed: how many samples have another score.
    """

    samples: int
    delta: float
    stderr: float
    p_value: float
    mde: float
    changed: int


def paired(base: Sequence[float], other: Sequence[float], *, binary: bool, seed: int, comparisons: int = 1) -> Paired:
    """Test two lists of scores of the same samples against each other. Higher must be better: give log-likelihoods, not losses.

    binary: the scores are 0 or 1 (wrong or right), and the test is McNemar's, exact. Otherwise it is a paired bootstrap of the
    studentized mean, drawn with `seed`; its p-value is never below that of a sign test, so five samples can prove nothing.
    comparisons: how many such tests share one error probability. It counts for `mde`; p_value is of this test alone (see `holm`).
    Raises ValueError for lists of different lengths or without samples, and for scores that are not finite or, where binary, not
    0 or 1.
    """
    a, b = np.asarray(base, dtype=np.float64), np.asarray(other, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise ValueError(f"scores of the same samples are needed, at least one: got {len(base)} and {len(other)}")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ValueError("scores must be finite numbers")
    if binary and not np.isin(np.concatenate([a, b]), (0.0, 1.0)).all():
        raise ValueError("scores of a binary task must be 0 or 1; use binary=False for graded scores")
    if comparisons < 1:
        raise ValueError(f"comparisons: must be at least 1, got {comparisons}")
    n, difference = len(a), b - a
    worse, better = int((difference < 0).sum()), int((difference > 0).sum())
    delta = float(difference.mean())
    stderr = float(difference.std(ddof=1) / math.sqrt(n)) if n > 1 else math.nan
    sign_test_floor = 2.0 ** (1 - n)  # all samples move the same way
    if binary:
        p_value, mde = mcnemar(worse, better), _flips_needed(n, (worse + better) / n, comparisons)
    else:
        p_value, mde = max(sign_test_floor, _bootstrap(difference, seed)), _quantiles(comparisons) * stderr
    if sign_test_floor > ALPHA / comparisons or (binary and mde > 1):
        mde = math.inf
    return Paired(n, delta, stderr, p_value, mde, worse + better)


def mcnemar(worse: int, better: int) -> float:
    """Exact two-sided p-value for the hypothesis that a sample that flips is as likely to get worse as to get better. Samples
    that did not flip do not matter."""
    flips = worse + better
    tail = sum(math.comb(flips, i) for i in range(min(worse, better) + 1))
    return min(1.0, 2 * tail / 2**flips)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values, in the given order, corrected for how many there are: with a probability of 95 % no true hypothesis is among
    those below 0.05."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, so_far = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        so_far = max(so_far, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = so_far
    return adjusted


def verdict(result: Paired, adjusted_p: float | None = None, unit: str = "points") -> str:
    """The result in words. adjusted_p: from `holm`; None where it was the only comparison. unit: of the scores; "points" are
    hundredths of an accuracy."""

    def amount(x: float) -> str:
        return f"{100 * x:.1f} points" if unit == "points" else f"{x:.3g} {unit}"

    if (result.p_value if adjusted_p is None else adjusted_p) < ALPHA:
        return f"{'loss' if result.delta < 0 else 'gain'} of {amount(abs(result.delta))}"
    if math.isinf(result.mde):
        return f"too few samples to tell ({result.samples})"
    seen = f"would have seen {amount(result.mde)}"
    if not result.changed:
        return "no sample changed" + (f" ({seen})" if result.mde else "")
    return f"no measurable loss at this sample size ({seen})"


def _quantiles(comparisons: int) -> float:
    """By how many standard errors a true difference must differ from 0 to be found with a probability of POWER."""
    normal = NormalDist()
    return normal.inv_cdf(1 - ALPHA / comparisons / 2) + normal.inv_cdf(POWER)


def _flips_needed(n: int, flipping: float, comparisons: int) -> float:
    """The smallest true change of an accuracy that McNemar's test would find. flipping: share of samples that flipped.

    A loss of d adds the share d to the samples that flip anyway, so its standard error is sqrt((flipping + d) / n), and d must
    be `_quantiles` times that. Where no sample flipped, this gives about 8 / n: enough that with a probability of 80 % there are
    the 6 flips in one direction that the exact test needs.
    """
    c = _quantiles(comparisons) ** 2 / n
    return (c + math.sqrt(c * c + 4 * c * flipping)) / 2


def _bootstrap(difference: NDArray[np.float64], seed: int) -> float:
    """The p-value: the share of resamples whose mean is as far from the samples' mean as that is from 0, both measured in the
    standard deviations of their own samples."""
    n = len(difference)
    mean = difference.mean()
    observed = _studentized(np.array([mean]), np.array([difference.std()]))[0]
    if observed == 0:
        return 1.0
    generator, extreme = np.random.default_rng(seed), 0
    rows = max(1, _AT_A_TIME // n)
    for start in range(0, RESAMPLES, rows):
        drawn = difference[generator.integers(0, n, (min(rows, RESAMPLES - start), n))]
        extreme += int((_studentized(drawn.mean(1) - mean, drawn.std(1)) >= observed).sum())
    return (extreme + 1) / (RESAMPLES + 1)


def _studentized(means: NDArray[np.float64], deviations: NDArray[np.float64]) -> NDArray[np.float64]:
    """|mean| / deviation: 0 for a mean of 0, and infinite for another mean around which nothing varies."""
    means, tiny = np.abs(means), 1e-12 * (np.abs(means) + deviations)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(means == 0, 0.0, np.where(deviations <= tiny, np.inf, means / deviations))
