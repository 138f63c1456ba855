"""Counters, and what records make of them."""

import pytest

from qkv.metrics.recorder import Recorder
from qkv.metrics.sketch import EXACT, Sketch
from qkv.metrics.summary import cache_counters, rates


def test_rates_leave_out_steps_that_did_both() -> None:
    recorder = Recorder(prefill_tokens=150, mixed_prefill_tokens=50, prefill_seconds=2.0)
    recorder.decode_tokens, recorder.mixed_decode_tokens, recorder.decode_seconds = 30, 10, 4.0
    recorder.mixed_seconds = 9.0
    assert rates(recorder) == {"prefill_tokens_per_s": 50.0, "decode_tokens_per_s": 5.0}
    assert rates(Recorder(prefill_tokens=50, mixed_prefill_tokens=50, prefill_seconds=2.0)) == {}


def test_the_hit_rate_is_of_first_admissions() -> None:
    recorder = Recorder(prefix_queries_tokens=100, prefix_hits_tokens=25, resumed_queries_tokens=50, resumed_hits_tokens=40)
    recorder.swap_out_bytes, recorder.swap_in_bytes, recorder.preemptions_swap, recorder.preemptions_recompute = 3, 4, 1, 2
    counters = cache_counters(recorder, evictions=7)
    assert counters["hit_rate"] == 0.25
    assert (counters["swap_bytes"], counters["preemptions"], counters["evictions"]) == (7, 3, 7)
    assert "hit_rate" not in cache_counters(Recorder(), 0)


def test_a_step_weighs_as_long_as_it_took() -> None:
    recorder = Recorder()
    for used, written, held, seconds in ((4, 30, 64, 0.5), (2, 20, 32, 3.0)):
        recorder.count_step(used, written, held)
        recorder.weigh_step(seconds)
    assert (recorder.steps, recorder.used_blocks, recorder.used_blocks_peak) == (2, 2, 4)
    integrals = recorder.busy_seconds, recorder.used_block_seconds, recorder.written_token_seconds, recorder.held_token_seconds
    assert integrals == (3.5, 8.0, 75.0, 128.0)


def test_few_values_have_their_exact_percentiles_and_none_has_none() -> None:
    sketch = Sketch()
    assert sketch.distribution() is None
    sketch.add(float(i) for i in range(101))
    assert sketch.distribution() == {"mean": 50.0, "p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert len(sketch) == 101


def test_the_mean_and_the_count_stay_exact_beyond_what_is_kept() -> None:
    sketch = Sketch()
    for start in range(0, 3 * EXACT, 500):
        sketch.add([1.0 if start < EXACT else 4.0] * 500)
    found = sketch.distribution()
    assert found is not None
    assert found["mean"] == pytest.approx(3.0)
    assert found["p50"] == pytest.approx(4.0, rel=0.01)
    assert len(sketch) == 3 * EXACT
