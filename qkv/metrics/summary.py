"""Numbers for records: percentiles of request latencies, and rates from counters.

Does not know about: the engine, sinks.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from qkv.metrics.recorder import Recorder
from qkv.types import RequestMetrics


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """mean, p50, p95, p99 (linear interpolation), or None without values."""
    if not values:
        return None
    p50, p95, p99 = np.percentile(values, (50, 95, 99))
    return {"mean": float(np.mean(values)), "p50": float(p50), "p95": float(p95), "p99": float(p99)}


def latencies(metrics: Iterable[RequestMetrics]) -> dict[str, Any]:
    """ttft_s, tpot_s (one value per request), itl_s (one per token), e2e_s and queue_s; those without values are absent."""
    metrics = list(metrics)
    groups = {
        "ttft_s": [m.ttft for m in metrics if m.ttft is not None],
        "tpot_s": [m.tpot for m in metrics if m.tpot is not None],
        "itl_s": [gap for m in metrics for gap in m.itl],
        "e2e_s": [m.e2e for m in metrics if m.e2e is not None],
        "queue_s": [m.queue_time for m in metrics if m.queue_time is not None],
    }
    return {name: d for name, values in groups.items() if (d := distribution(values)) is not None}


def rates(recorder: Recorder) -> dict[str, float]:
    """prefill and decode tokens/s, each over the steps that did only that; absent when there were none."""
    out = {}
    if recorder.prefill_seconds and (tokens := recorder.prefill_tokens - recorder.mixed_prefill_tokens):
        out["prefill_tokens_per_s"] = tokens / recorder.prefill_seconds
    if recorder.decode_seconds and (tokens := recorder.decode_tokens - recorder.mixed_decode_tokens):
        out["decode_tokens_per_s"] = tokens / recorder.decode_seconds
    return out


def cache_counters(recorder: Recorder, evictions: int) -> dict[str, Any]:
    """The record's `cache` part; hit_rate is absent before the first lookup."""
    out: dict[str, Any] = {
        "prefix_queries_tokens": recorder.prefix_queries_tokens,
        "prefix_hits_tokens": recorder.prefix_hits_tokens,
        "resumed_queries_tokens": recorder.resumed_queries_tokens,
        "resumed_hits_tokens": recorder.resumed_hits_tokens,
        "evictions": evictions,
        "preemptions": recorder.preemptions,
        "recompute_tokens": recorder.recompute_tokens,
        "swap_bytes": recorder.swap_out_bytes + recorder.swap_in_bytes,
    }
    if recorder.hit_rate is not None:
        out["hit_rate"] = recorder.hit_rate
    return out
