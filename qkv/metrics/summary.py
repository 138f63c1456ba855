"""Makes numbers for records: percentiles of request latencies, and rates and shares from counters.

Takes: a Recorder, request metrics. Gives: dictionaries of plain numbers. Does not know about: the engine, who exports them.
"""

from collections.abc import Sequence
from typing import Any

from qkv.metrics.recorder import Recorder
from qkv.metrics.sketch import Sketch
from qkv.types import RequestMetrics


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """mean, p50, p95, p99 (linear interpolation), or None without values."""
    sketch = Sketch()
    sketch.add(values)
    return sketch.distribution()


class Latencies:
    """Collects latencies by name. ttft_s, tpot_s, e2e_s, queue_s: one value per request; itl_s: one per token after the first."""

    def __init__(self) -> None:
        self._sketches = {name: Sketch() for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s")}

    def add(self, metrics: RequestMetrics) -> None:
        values = {"ttft_s": metrics.ttft, "tpot_s": metrics.tpot, "e2e_s": metrics.e2e, "queue_s": metrics.queue_time}
        for name, value in values.items():
            if value is not None:
                self._sketches[name].add((value,))
        self._sketches["itl_s"].add(metrics.itl)

    def counts(self) -> dict[str, int]:
        """How many values there are so far, by name."""
        return {name: len(sketch) for name, sketch in self._sketches.items()}

    def distributions(self) -> dict[str, dict[str, float]]:
        """{name: {mean, p50, p95, p99}}; names without values are absent."""
        found = {name: sketch.distribution() for name, sketch in self._sketches.items()}
        return {name: d for name, d in found.items() if d is not None}


def rates(recorder: Recorder) -> dict[str, float]:
    """Tokens/s of prefill and of decode, each over the steps that did nothing else; absent where there was no such step."""
    out = {}
    if recorder.prefill_seconds and (tokens := recorder.prefill_tokens - recorder.mixed_prefill_tokens):
        out["prefill_tokens_per_s"] = tokens / recorder.prefill_seconds
    if recorder.decode_seconds and (tokens := recorder.decode_tokens - recorder.mixed_decode_tokens):
        out["decode_tokens_per_s"] = tokens / recorder.decode_seconds
    return out


def pool_use(recorder: Recorder, usable: int, referenced: int, block_size: int) -> dict[str, float]:
    """How full the pool is now, was at its fullest and was in the mean over time, and which share of the held room was empty.

    usable: blocks that can be handed out; referenced: how many of them are referenced now."""
    out = {
        "capacity_tokens": usable * block_size,
        "utilization_now": referenced / usable,
        "utilization_peak": recorder.used_blocks_peak / usable,
    }
    if recorder.held_token_seconds:  # means over time
        fill = recorder.written_token_seconds / recorder.held_token_seconds
        out["utilization_mean"] = recorder.used_block_seconds / recorder.busy_seconds / usable * fill
        out["internal_fragmentation"] = 1 - fill
    if recorder.finished_held_tokens:
        out["fragmentation_at_end"] = 1 - recorder.finished_tokens / recorder.finished_held_tokens
    return out


def cache_counters(recorder: Recorder, evictions: int) -> dict[str, Any]:
    """The `cache` part of a row; hit_rate is absent before the first lookup."""
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
