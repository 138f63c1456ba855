"""The keyword arguments of `Engine.create`: the settings of EngineConfig by flat names.

Takes: {"num_blocks": 64, "quantizer": "int8_token"}. Gives: an EngineConfig. Which setting belongs to which part is read from
the dataclasses of config.py; only the types, for editors and type checkers, are written down again here, and a test compares.
Does not know about: models, how settings are used.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from qkv.config import AttentionConfig, CacheConfig, Dtype, EngineConfig, RunnerConfig, SchedulerConfig
from qkv.errors import ConfigError
from qkv.validate import from_mapping, suggest

if TYPE_CHECKING:
    from qkv.scales import ScaleFile
else:
    ScaleFile = Any

Spec = str | Mapping[str, Any]  # a policy: its name, or {"name": ..., field: value}


class EngineSettings(TypedDict, total=False):
    """What config.py says about each, under the same name. Those left out keep their defaults there."""

    dtype: Dtype
    device: str
    quantizer: Spec
    allocator: Spec
    evictor: Spec
    preemptor: Spec
    scales: str | Path | ScaleFile | None
    seed: int
    backend: str
    reads: Literal["cache", "raw"]
    allow_reference: bool
    deterministic: bool
    cuda_graphs: bool
    fused: bool
    compile: bool
    num_blocks: int | None
    memory_bytes: int | float | str | None
    memory_utilization: float | None
    host_memory_bytes: int | float | str
    enable_prefix_caching: bool
    prefix_hash: Literal["xxh3_128", "sha256"]
    poison: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_scored_tokens: int
    max_model_len: int | None
    watermark: float


POLICIES = ("quantizer", "allocator", "evictor", "preemptor")
_PARTS = {"cache": CacheConfig, "scheduler": SchedulerConfig, "attention": AttentionConfig, "runner": RunnerConfig}
_NOT_FLAT = ("name", "clock")  # of the runner: simulations come from from_config, and clock= is a function

# flat name -> where the value goes: (part, its name there), or (its name,) for what EngineConfig holds itself
PLACES: dict[str, list[tuple[str, ...]]] = {
    **{f.name: [(part, f.name)] for part, cls in _PARTS.items() for f in fields(cls) if f.name not in _NOT_FLAT},
    **{name: [(name,)] for name in (*POLICIES, "scales")},
    **{name: [("model", name)] for name in ("dtype", "device")},
    "seed": [("seed",), ("model", "seed")],
}


def engine_config(model: str, **settings: Unpack[EngineSettings]) -> EngineConfig:
    """The settings as an EngineConfig for the model called `model`. Raises ConfigError."""
    values: dict[str, Any] = {"model": {"name": model}}
    for name, value in settings.items():
        if name not in PLACES:
            raise ConfigError(f"Engine.create: unknown setting '{name}'; {suggest(name, PLACES)}")
        if name in POLICIES and isinstance(value, str):
            value = {"name": value}
        for *part, key in PLACES[name]:
            target = values.setdefault(part[0], {}) if part else values
            target[key] = value
    return from_mapping(EngineConfig, values, "engine")
