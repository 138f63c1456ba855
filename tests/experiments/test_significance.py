"""Paired tests against values worked out by hand or by scipy, and the power that the smallest detectable difference promises."""

import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.measuring.significance import _bootstrap, holm, mcnemar, paired, verdict

flips = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)


def test_mcnemar_by_hand() -> None:
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(1, 0) == 1.0
    assert mcnemar(5, 0) == 2 / 2**5
    assert mcnemar(2, 8) == 2 * (1 + 10 + 45) / 2**10
    assert mcnemar(4, 4) == 1.0


@given(st.integers(0, 400), st.integers(0, 400))
def test_mcnemar_is_the_exact_binomial_test(worse: int, better: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    expected = stats.binomtest(worse, worse + better).pvalue if worse + better else 1.0
    assert math.isclose(mcnemar(worse, better), expected, rel_tol=1e-9)
    assert mcnemar(worse, better) == mcnemar(better, worse)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.7, 0.9]) == [1.0, 1.0]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_holm_keeps_the_order_and_never_helps(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    assert all(p <= a <= 1 for p, a in zip(p_values, adjusted, strict=True))
    assert [a for _, a in sorted(zip(p_values, adjusted, strict=True))] == sorted(adjusted)
    assert min(adjusted) <= min(1.0, len(p_values) * min(p_values)) + 1e-12


@given(flips)
def test_binary_figures_are_those_of_the_flips(pairs: list[tuple[bool, bool]]) -> None:
    base, other = [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
    result = paired(base, other, binary=True, seed=0)
    worse, better = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
    assert result.delta == pytest.approx((better - worse) / len(pairs))
    assert result.changed == worse + better
    assert result.p_value == mcnemar(worse, better)
    assert result.mde > 0
    mirrored = paired(other, base, binary=True, seed=0)
    assert (mirrored.delta, mirrored.p_value, mirrored.mde) == pytest.approx((-result.delta, result.p_value, result.mde))


def _power(n: int, churn: float, loss: float) -> float:
    """Exact probability that McNemar's test finds `loss` where the share `churn` of samples flips anyway, half of it each way."""
    binom = pytest.importorskip("scipy.stats").binom
    total = 0.0
    for count in range(n + 1):
        if (weight := binom.pmf(count, n, churn + loss)) > 1e-9:
            ways = np.arange(count + 1)
            found = np.array([mcnemar(int(count - k), int(k)) < 0.05 for k in ways])
            total += weight * float(binom.pmf(ways, count, (churn / 2 + loss) / (churn + loss))[found].sum())
    return total


@pytest.mark.parametrize(("n", "changed"), [(20, 0), (100, 0), (200, 0), (200, 2), (200, 20), (100, 30)])
def test_the_detectable_loss_is_found_four_times_of_five(n: int, changed: int) -> None:
    base = [1.0] * (n // 2) + [0.0] * (n - n // 2)
    other = list(base)
    for i in range(changed // 2):
        other[i], other[-1 - i] = 0.0, 1.0
    result = paired(base, other, binary=True, seed=0)
    assert result.changed == changed
    assert 0.76 < _power(n, changed / n, result.mde) < 0.87


def test_more_comparisons_need_a_larger_difference() -> None:
    one, many = (paired([0.0] * 100, [0.0] * 100, binary=True, seed=0, comparisons=k).mde for k in (1, 16))
    assert one < many < 2 * one


def test_bootstrap_agrees_with_the_t_test_on_smooth_scores() -> None:
    stats = pytest.importorskip("scipy.stats")
    generator = np.random.default_rng(1)
    for shift in (0.05, 0.2):
        base = generator.normal(size=150)
        other = base + generator.normal(shift, 1.0, size=150)
        result = paired(base.tolist(), other.tolist(), binary=False, seed=3)
        expected = stats.ttest_rel(other, base)
        assert result.p_value == pytest.approx(expected.pvalue, abs=0.03)
        assert result.stderr == pytest.approx(float(np.std(other - base, ddof=1) / math.sqrt(150)))
        assert result.mde == pytest.approx(2.8016 * result.stderr, rel=1e-3)
        assert result == paired(base.tolist(), other.tolist(), binary=False, seed=3)


def test_bootstrap_agrees_with_every_resample_there_is() -> None:
    """Of five samples: 3125, each judged by its mean's distance from theirs, in standard deviations of its own."""
    differences = [0.1, 0.9, 2.0, 0.3, 0.5]
    mean = sum(differences) / 5

    def distance(drawn: tuple[float, ...], center: float) -> float:
        deviation = statistics.pstdev(drawn)
        off = abs(statistics.mean(drawn) - center)
        return off / deviation if deviation > 1e-9 else math.inf if off > 1e-9 else 0.0

    observed = distance(tuple(differences), 0.0)
    resamples = [distance(drawn, mean) for drawn in itertools.product(differences, repeat=5)]
    expected = sum(d >= observed for d in resamples) / len(resamples)
    assert 0.08 < expected < 0.3
    assert _bootstrap(np.array(differences), seed=0) == pytest.approx(expected, abs=0.02)


def test_a_chance_difference_is_rarely_called_real() -> None:
    generator = np.random.default_rng(2)
    for n, draw, mean in ((10, generator.standard_normal, 0.0), (100, generator.standard_exponential, 1.0)):
        found = sum(paired([mean] * n, draw(n).tolist(), binary=False, seed=i).p_value < 0.05 for i in range(60))
        assert found < 10  # 3 expected


def test_few_samples_prove_nothing_however_alike() -> None:
    for binary in (True, False):
        for n in range(1, 6):
            result = paired([1.0] * n, [0.0] * n, binary=binary, seed=0)
            assert result.p_value > 0.05
            assert math.isinf(result.mde)
            assert verdict(result) == f"too few samples to tell ({n})"
    assert verdict(paired([1.0] * 6, [0.0] * 6, binary=False, seed=0)) == "loss of 100.0 points"


def test_one_large_change_among_none_is_no_evidence() -> None:
    result = paired([0.0] * 200, [5.0] + [0.0] * 199, binary=False, seed=0)
    assert result.p_value > 0.3


def test_verdicts_in_words() -> None:
    right = [1.0] * 100 + [0.0] * 100
    same = paired(right, right, binary=True, seed=0)
    assert (same.delta, same.stderr, same.p_value, same.changed) == (0.0, 0.0, 1.0, 0)
    assert verdict(same) == "no sample changed (would have seen 3.9 points)"
    some = paired(right, [0.0] * 3 + right[3:], binary=True, seed=0)
    assert verdict(some) == "no measurable loss at this sample size (would have seen 5.1 points)"
    worse = paired(right, [0.0] * 20 + right[20:], binary=True, seed=0)
    assert verdict(worse) == "loss of 10.0 points"
    assert verdict(worse, adjusted_p=0.2).startswith("no measurable loss")
    better = paired([-2.0] * 50, [-1.5 + 0.01 * i for i in range(50)], binary=False, seed=0)
    assert verdict(better, unit="nats") == "gain of 0.745 nats"
    assert better.p_value >= 1e-4, "10,000 resamples show no smaller one"
    identical = paired([-2.5, -1.0] * 20, [-2.5, -1.0] * 20, binary=False, seed=0)
    assert verdict(identical, unit="nats") == "no sample changed"


@pytest.mark.parametrize(
    ("base", "other", "binary", "message"),
    [
        ([1.0], [1.0, 0.0], True, "got 1 and 2"),
        ([], [], False, "at least one"),
        ([1.0, math.nan], [1.0, 1.0], False, "finite"),
        ([1.0, 0.5], [1.0, 1.0], True, "0 or 1"),
    ],
)
def test_scores_that_cannot_be_compared_are_refused(base: list[float], other: list[float], binary: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paired(base, other, binary=binary, seed=0)
    with pytest.raises(ValueError, match="comparisons"):
        paired([1.0], [1.0], binary=True, seed=0, comparisons=0)
