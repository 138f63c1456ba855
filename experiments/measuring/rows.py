"""Makes one row of a served workload: builds the engine, warms it up, serves the workload and collects the numbers.

Takes: a run's settings, a model or its dimensions, an engine configuration. Gives: a row of the record.
Does not know about: which rows an experiment compares.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from calibration.text.data import windows
from experiments.harness.base import Run
from experiments.harness.workload import Slo, Traffic, Workload
from experiments.measuring import engines
from experiments.measuring.scales import provide, stand_in
from experiments.measuring.serving import Served, serve
from qkv.config import EngineConfig
from qkv.engine import Engine
from qkv.errors import RequestError
from qkv.models import LoadedModel, load_model
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.simulation import SimulatedModel
from qkv.types import SamplingParams

log = logging.getLogger(__name__)

Model = LoadedModel | SimulatedModel
_TEXT = 1 << 16  # prompts are cut from so many tokens of the data


def open_model(config: EngineConfig) -> Model:
    """The loaded model or, for a simulation, its dimensions. Raises ModelError."""
    return SimulatedModel.of(config.model) if config.runner.name == "simulated" else load_model(config.model)


def for_workload(run: Run) -> tuple[EngineConfig, Model]:
    """The run's settings, for requests no longer than its workload's where nothing else limits them, and its model. Raises
    ConfigError where they are longer than the model can take."""
    config, model = run.engine, open_model(run.engine)
    if config.scheduler.max_model_len is None:
        engines.require_positions(model, run.workload.max_tokens, "workload.max_tokens")
        config = with_length(config, run.workload.max_tokens)
    return config, model


def traffic(run: Run, model: Model, workload: Workload | None = None) -> Traffic:
    """The workload's requests. Their prompts are cut from the run's text; for a simulation they are made-up tokens."""
    workload = workload or run.workload
    if isinstance(model, SimulatedModel):
        return Traffic(workload, run.engine.seed, model.dims.vocab or 32_000)
    text = windows(run.data, model.tokenizer, 1, _TEXT, run.engine.seed, cycle=True)[0]
    return Traffic(workload, run.engine.seed, model.model.config.get_text_config().vocab_size, text)


def open_engine(run: Run, model: Model, config: EngineConfig) -> tuple[Engine, str | None]:
    """An engine of this configuration, and where its scales come from, in words (None: it needs none, or is simulated)."""
    if isinstance(model, SimulatedModel):
        quantizer = QUANTIZERS.build(config.quantizer)
        scales, origin = stand_in(quantizer, model.dims.layer_shapes()), None
    else:
        scales, origin = provide(run, model, QUANTIZERS.build(config.quantizer), documents=8, tokens=512, skip=0)
    return engines.build(config, model, config.quantizer, scales), origin


def serve_row(
    run: Run, model: Model, config: EngineConfig, label: str, workload: Workload | None = None, slo: Slo | None = None
) -> dict[str, Any]:
    """Serve the workload and return the row `label`, with policy, memory, speed, cache, attention and requests. workload: None
    for the run's. Raises RequestError when no request was served."""
    engine, origin = open_engine(run, model, config)
    try:
        if "model" not in run.record.data:
            run.record.set("model", engines.model_part(model, engine))
        if not isinstance(model, SimulatedModel):
            engines.generate(engine, [[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
            engine.reset_prefix_cache()
            engine.reset_metrics()
        run.watch(engine)
        began = time.perf_counter()
        requests = traffic(run, model, workload)
        served = serve(engine, requests, slo, run.progress, _sampler(run, engine, label, len(requests)))
        metrics = engine.metrics()
        if isinstance(model, SimulatedModel):
            took = time.perf_counter() - began
            rate = served.output_tokens / took
            log.info("%s: %d request-steps simulated in %.1f s, %.0f per second", label, served.output_tokens, took, rate)
    finally:
        engine.close()
    if not served.requests:
        raise RequestError(served.reason or "no request was served")
    if served.refused:
        log.warning("%s: %d requests were refused and are in no figure, e.g. %s", label, served.refused, served.reason)
    peak = engine.recorder.used_blocks_peak * engine.scheduler.manager.block_size * metrics["memory"]["kv_bytes_per_token"]
    return {
        "label": label,
        "policy": engines.policy_part(config, config.quantizer, origin),
        "attention": metrics["attention"],
        "memory": {**metrics["memory"], "peak_bytes": peak},
        "speed": {**{k: v for k, v in metrics["speed"].items() if k.endswith("per_s")}, **served.speed()},
        "cache": metrics["cache"],
        "requests": requests_part(served),
        **({"warnings": metrics["warnings"]} if metrics["warnings"] else {}),
    }


def _sampler(run: Run, engine: Engine, label: str, requests: int) -> Callable[[], None]:
    """A function to call after every step. Each time another percent of the requests has ended, it gives the logger a sample."""
    recorder, allocator, start, last = engine.recorder, engine.scheduler.manager.allocator, engine.clock(), -1

    def look() -> None:
        nonlocal last
        ended = sum(recorder.requests_finished.values())
        if (percent := 100 * ended // requests) > last:
            last = percent
            values = {
                "seconds": engine.clock() - start,
                "requests_finished": ended,
                "requests_running": engine.scheduler.num_running,
                "requests_waiting": engine.scheduler.num_waiting,
                "pool": allocator.num_referenced / (allocator.num_blocks - allocator.num_reserved),
                "tokens_decoded": recorder.decode_tokens,
                "hit_rate": recorder.hit_rate or 0.0,
                "preemptions": recorder.preemptions,
            }
            run.logger.sample(label, values)

    return look


def requests_part(served: Served) -> dict[str, Any]:
    """The `requests` part of a row."""
    part = {"served": served.requests, "prompt_tokens": served.prompt_tokens, "output_tokens": served.output_tokens}
    return part | {"seconds": served.seconds} | ({"refused": served.refused, "reason": served.reason} if served.refused else {})


def with_pool(config: EngineConfig, num_bytes: int) -> EngineConfig:
    """The same configuration with a pool of so many bytes."""
    cache = replace(config.cache, num_blocks=None, memory_bytes=num_bytes, memory_utilization=None)
    return replace(config, cache=cache)


def with_length(config: EngineConfig, tokens: int | None) -> EngineConfig:
    """The same configuration for requests of at most so many tokens; None changes nothing."""
    return replace(config, scheduler=replace(config.scheduler, max_model_len=tokens)) if tokens else config
