"""The Prometheus endpoint and the live view show true figures and never stop a run."""

import builtins
import logging
import re
import socket
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from experiments.harness.monitor import MetricsSettings, Monitor
from qkv.config import EngineConfig
from qkv.engine import Engine
from qkv.metrics import prometheus
from qkv.types import SamplingParams
from qkv.validate import from_mapping


@pytest.fixture
def engine() -> Iterator[Engine]:
    settings: dict[str, Any] = {"model": {"name": "llama2-7b", "dtype": "float16"}, "runner": {"name": "simulated"}}
    settings |= {"cache": {"num_blocks": 100}, "scheduler": {"max_model_len": 512}}
    with Engine.from_config(from_mapping(EngineConfig, settings, "test")) as made:
        made.generate([[1] * 40, [1] * 40 + [2]], SamplingParams(max_tokens=10))
        made.generate([[1] * 40], SamplingParams(max_tokens=10))
        yield made


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def scraped(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}


def test_what_is_scraped_is_what_the_engine_counted(engine: Engine) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    monitor, port = Monitor(MetricsSettings(free_port()), "none"), 0
    monitor.watch(engine)
    port = monitor.settings.port or 0
    with monitor.running():
        found = scraped(port)
    metrics = engine.metrics()
    assert found["qkv:prefix_cache_queries_total"] == metrics["cache"]["prefix_queries_tokens"] == 121
    assert found["qkv:prefix_cache_hits_total"] == metrics["cache"]["prefix_hits_tokens"] > 0
    assert found["qkv:generation_tokens_total"] == 27
    assert found["qkv:kv_effective_bits_k"] == 16
    assert found["qkv:time_to_first_token_seconds_count"] == 3
    assert found['qkv:time_to_first_token_seconds{quantile="0.5"}'] == pytest.approx(metrics["speed"]["ttft_s"]["p50"])
    for name in ("kv_cache_usage_perc", "num_preemptions_total", "recompute_tokens_total", "swap_bytes_total", "kv_scale_bytes"):
        assert f"qkv:{name}" in found
    with pytest.raises(OSError, match=r"refused"):
        scraped(port)  # it ended with the run


def test_nothing_running_is_an_empty_page_and_no_error() -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    monitor = Monitor(MetricsSettings(free_port()), "none")
    with monitor.running():
        assert scraped(monitor.settings.port or 0) == {}


def test_a_port_in_use_is_one_line_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with caplog.at_level(logging.WARNING), Monitor(MetricsSettings(port), "none").running():
            pass
    (message,) = [r.getMessage() for r in caplog.records]
    assert re.fullmatch(rf"metrics\.port={port}: .*in use.*; the run goes on without an endpoint", message)


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    original = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert prometheus.start(0, dict) is None
    assert caplog.text.count("pip install prometheus-client") == 1


def test_the_view_shows_the_pool_the_queue_and_the_rates(engine: Engine) -> None:
    monitor = Monitor(MetricsSettings(), "live")
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(monitor.view())
    assert "nothing runs yet" in console.export_text()
    monitor.watch(engine)
    engine.generate([[3] * 40], SamplingParams(max_tokens=10))
    console.print(monitor.view())
    text = console.export_text()
    for word in ("pool", "prefix hits", "running", "waiting", "preemptions", "tokens/s"):
        assert word in text
