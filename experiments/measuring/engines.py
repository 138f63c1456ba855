"""Builds engines that share one loaded model, times workloads, and makes the parts of a row that every experiment writes alike.

Takes: settings, a model, an engine. Gives: engines, and plain numbers for the record. Does not know about: tables, files.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from experiments.harness.workload import Workload
from qkv.config import EngineConfig
from qkv.engine import Engine
from qkv.errors import ConfigError, RequestError
from qkv.models import LoadedModel
from qkv.policies.quantizer.base import QUANTIZERS, Quantizer
from qkv.scales import ScaleFile
from qkv.simulation import SimulatedModel
from qkv.types import RequestOutput, SamplingParams

Spec = str | Mapping[str, Any]


def single_document(config: EngineConfig, tokens: int) -> EngineConfig:
    """The same configuration with a pool for one sequence of `tokens` tokens, so that several engines fit beside one model."""
    block = int(config.allocator.get("block_size", 16))
    cache = replace(
        config.cache,
        num_blocks=-(-tokens // block) + 2,
        memory_bytes=None,
        memory_utilization=None,
        host_memory_bytes=0,
        enable_prefix_caching=False,
    )
    allocator = {
        key: value for key, value in config.allocator.items() if key != "max_len"
    }  # contiguous then reserves as much as the document
    scheduler = replace(config.scheduler, max_model_len=tokens, max_num_seqs=1)
    return replace(config, cache=cache, allocator=allocator, scheduler=scheduler)


def whole_documents(config: EngineConfig, tokens: int) -> EngineConfig:
    """The same configuration for documents of up to `tokens` tokens, each of which runs alone and in one step."""
    config = single_document(config, tokens + 1)  # running a document asks for one new token
    batch = max(tokens, config.scheduler.max_num_batched_tokens)
    return replace(config, scheduler=replace(config.scheduler, max_num_batched_tokens=batch))


def require_positions(model: LoadedModel | SimulatedModel, tokens: int | None, setting: str) -> None:
    """Raise ConfigError, naming the setting that asks for them, if the model has no positions for so many tokens."""
    if isinstance(model, SimulatedModel):
        limit = model.dims.max_positions
    else:
        limit = getattr(model.model.config.get_text_config(), "max_position_embeddings", None)
    if tokens is not None and limit is not None and tokens > limit:
        raise ConfigError(f"{setting}={tokens} is above the {limit} positions of {model.name}; it must be at most {limit}")


def build(
    config: EngineConfig, loaded: LoadedModel | SimulatedModel, quantizer: Spec | None = None, scales: ScaleFile | None = None
) -> Engine:
    """An engine on a model that is already loaded. quantizer, scales: in place of the configured ones. With a `quantizer`, None
    means that it gets no scales."""
    if quantizer is not None:
        spec = {"name": quantizer} if isinstance(quantizer, str) else dict(quantizer)
        config = replace(config, quantizer=spec, scales=scales)
    elif scales is not None:
        config = replace(config, scales=scales)
    return Engine(loaded, config)


def label(spec: Spec) -> str:
    """'int8', or 'kivi(bits=2)' for a quantizer with settings that are not its defaults."""
    if isinstance(spec, str):
        return spec
    default = settings(QUANTIZERS.build(spec["name"]))
    fields = ", ".join(f"{key}={value}" for key, value in spec.items() if key != "name" and default.get(key) != value)
    return f"{spec['name']}({fields})" if fields else str(spec["name"])


def settings(policy: Any) -> dict[str, Any]:
    """All fields of a policy, defaults included."""
    return {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy) if f.init}


def policy_part(config: EngineConfig, spec: Spec, scales: str | None = None) -> dict[str, Any]:
    """The `policy` part of a row. scales: where static scales come from, in words."""
    quantizer: Quantizer = QUANTIZERS.build(spec)
    part: dict[str, Any] = {
        "quantizer": quantizer.name,
        "quantizer_fields": settings(quantizer),
        "allocator": config.allocator["name"],
        "block_size": config.allocator.get("block_size", 16),
        "evictor": config.evictor["name"],
        "preemptor": config.preemptor["name"],
        "prefix_caching": config.cache.enable_prefix_caching,
    }
    return part | ({"scales": scales} if scales else {})


def model_part(loaded: LoadedModel | SimulatedModel, engine: Engine) -> dict[str, Any]:
    """The `model` part of a record. layers: how many attention layers; kv_heads, query_heads, head_dim: those of the first."""
    if isinstance(loaded, SimulatedModel):
        dtype, parameters = loaded.dtype, loaded.dims.parameters
    else:
        weights = list(loaded.model.parameters())
        dtype, parameters = weights[0].dtype, sum(p.numel() for p in weights)
    first = engine.layers[0]
    return {
        "name": loaded.name,
        "source": loaded.source,
        "fingerprint": loaded.fingerprint,
        "layers": len(engine.layers),
        "kv_heads": first.H,
        "query_heads": first.Hq,
        "head_dim": first.Dk,
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": parameters,
    }


def run_workload(engine: Engine, warmup: list[int], prompts: Sequence[list[int]], workload: Workload) -> dict[str, Any]:
    """Run the workload `repeats` times, after one short request to warm up. Returns engine.metrics() of the run with the median
    throughput, with the throughput in its `speed`.

    prefill_tokens_per_s and decode_tokens_per_s are over the steps that did only that; the other rates are over all steps.
    runs_output_tokens_per_s lists the throughput of every run, so that a noisy machine shows.
    """
    params = SamplingParams(max_tokens=workload.output_tokens, ignore_eos=workload.ignore_eos)
    generate(engine, [warmup], SamplingParams(max_tokens=2, ignore_eos=True))
    runs = []
    for _ in range(workload.repeats):
        engine.reset_prefix_cache()
        engine.reset_metrics()
        start = time.perf_counter()
        outputs = generate(engine, prompts, params)
        wall = time.perf_counter() - start
        metrics = engine.metrics()
        runs.append({**metrics, "speed": {**metrics["speed"], **throughput(outputs, wall)}})
    runs.sort(key=lambda run: run["speed"]["output_tokens_per_s"])
    chosen = runs[len(runs) // 2]
    if len(runs) > 1:
        chosen["speed"]["runs_output_tokens_per_s"] = [run["speed"]["output_tokens_per_s"] for run in runs]
    return chosen


def throughput(outputs: Sequence[RequestOutput], wall_s: float) -> dict[str, float]:
    """output_tokens_per_s, total_tokens_per_s (which counts prompt tokens too) and requests_per_s."""
    prompt, new = sum(len(o.prompt_token_ids) for o in outputs), sum(len(o.token_ids) for o in outputs)
    return {
        "output_tokens_per_s": new / wall_s,
        "total_tokens_per_s": (prompt + new) / wall_s,
        "requests_per_s": len(outputs) / wall_s,
    }


def generate(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> list[RequestOutput]:
    """Like engine.generate, but a refused request ends the measurement: raises RequestError with its reason."""
    outputs: list[RequestOutput] = engine.generate(prompts, params)
    for output in outputs:
        if output.finish_reason == "error":
            raise RequestError(output.error or "a request failed without a reason")
    return outputs
