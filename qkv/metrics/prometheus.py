"""A Prometheus endpoint for a running engine: metrics under the names that vLLM uses, and some that only this engine has.

Takes: a function that returns the engine's metrics, called at every scrape. Gives: an HTTP endpoint. prometheus-client is
optional and imported only here. Does not know about: experiments.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

log = logging.getLogger(__name__)

Source = Callable[[], dict[str, Any]]  # Engine.metrics(), or {} while none runs
_PREFIX = "qkv:"

# name -> (what it is, section and key of Engine.metrics()); the suffix _total marks counters, as is usual
_NAMES: dict[str, tuple[str, str, str]] = {
    "kv_cache_usage_perc": ("Share of the pool in use now; 1 is full", "memory", "utilization_now"),
    "num_requests_running": ("Requests that hold blocks", "requests", "running"),
    "num_requests_waiting": ("Requests that wait for blocks", "requests", "waiting"),
    "prefix_cache_queries_total": ("Prompt tokens looked up", "cache", "prefix_queries_tokens"),
    "prefix_cache_hits_total": ("Prompt tokens found in the cache", "cache", "prefix_hits_tokens"),
    "num_preemptions_total": ("Requests that gave way", "cache", "preemptions"),
    "prompt_tokens_total": ("Tokens prefilled", "tokens", "prefill"),
    "generation_tokens_total": ("Tokens decoded", "tokens", "decode"),
    "kv_cache_evictions_total": ("Cached blocks evicted", "cache", "evictions"),
    "recompute_tokens_total": ("Tokens prefilled a second time because of preemption", "cache", "recompute_tokens"),
    "swap_bytes_total": ("Bytes copied to and from host memory", "cache", "swap_bytes"),
    "kv_effective_bits_k": ("Bits per element of K, scales included", "memory", "effective_bits_k"),
    "kv_effective_bits_v": ("Bits per element of V, scales included", "memory", "effective_bits_v"),
    "kv_scale_bytes": ("Bytes of scales and zero points", "memory", "scale_bytes"),
    "kv_pool_bytes": ("Bytes of the pool", "memory", "pool_bytes"),
    "kv_clipping_rate": ("Share of values beyond the range of their format", "memory", "clipping_rate"),
}
_SUMMARIES: dict[str, tuple[str, str]] = {
    "time_to_first_token_seconds": ("From arrival to the first token", "ttft_s"),
    "inter_token_latency_seconds": ("Between tokens of a request", "itl_s"),
    "time_per_output_token_seconds": ("Mean per request, after the first token", "tpot_s"),
    "e2e_request_latency_seconds": ("From arrival to the last token", "e2e_s"),
    "request_queue_time_seconds": ("From arrival to the first step", "queue_s"),
}
_QUANTILES = {"p50": "0.5", "p95": "0.95", "p99": "0.99"}


class _Collector:
    def __init__(self, source: Source) -> None:
        self._source = source

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

        metrics = self._source()
        for name, (text, section, key) in _NAMES.items():
            value = metrics.get(section, {}).get(key)
            if value is not None:
                family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                yield family(_PREFIX + name, text, value=float(value))
        for name, (text, key) in _SUMMARIES.items():
            found = metrics.get("speed", {}).get(key)
            if found is None:
                continue
            count = metrics["latency_counts"][key]
            summary = SummaryMetricFamily(_PREFIX + name, text, count_value=count, sum_value=count * found["mean"])
            for quantile, label in _QUANTILES.items():
                summary.add_sample(_PREFIX + name, {"quantile": label}, found[quantile])
            yield summary


def start(port: int, source: Source, address: str = "127.0.0.1") -> Callable[[], None] | None:
    """Serve http://address:port/metrics until the returned function is called. Returns None, with one line in the log, where
    prometheus-client is missing or the port cannot be had: metrics must not stop a run."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        log.warning("metrics.port: the package 'prometheus-client' is not installed (pip install prometheus-client); no endpoint")
        return None
    registry = CollectorRegistry()
    registry.register(_Collector(source))
    try:
        server, thread = start_http_server(port, address, registry)
    except (OSError, OverflowError) as error:
        log.warning("metrics.port=%s: %s; the run goes on without an endpoint", port, error)
        return None

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
