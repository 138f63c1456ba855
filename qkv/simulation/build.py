"""Builds the parts of a simulated engine: the real ones, and a runner that says how long a step takes instead of running it.

Takes: a model's dimensions, an EngineConfig, policies and a clock. Gives: connected parts. Does not know about: weights.
"""

from dataclasses import dataclass
from functools import partial

import torch

from qkv.assemble import Parts, Policies, bind_quantizer, build_core
from qkv.cache.store import block_bytes
from qkv.config import EngineConfig, ModelConfig
from qkv.layout import LayerShape
from qkv.models import Dimensions, dimensions
from qkv.scales import ScaleFile
from qkv.simulation.clock import SimulatedClock
from qkv.simulation.cost import StepCost
from qkv.simulation.runner import META, SimulatedRunner, SimulatedStore
from qkv.simulation.tokens import SimulatedTokens

VOCAB = 32_000  # used where the dimensions give no vocabulary size


@dataclass(frozen=True)
class SimulatedModel:
    """A model of which only the dimensions are known. A simulated engine takes it in place of a LoadedModel."""

    dims: Dimensions
    dtype: torch.dtype
    fingerprint: str = ""
    tokenizer: None = None

    @classmethod
    def of(cls, config: ModelConfig) -> "SimulatedModel":
        """The model that the settings name. Raises ModelError where its dimensions cannot be found."""
        dims = dimensions(config)
        return cls(dims, getattr(torch, config.dtype), f"simulated {dims.name}")

    @property
    def name(self) -> str:
        return self.dims.name

    @property
    def source(self) -> str:
        return f"simulated, {self.dims.source}"

    @property
    def weight_bytes(self) -> int:
        return (self.dims.parameters or 0) * self.dtype.itemsize


class SimulatedAdapter:
    """Tells the engine from the dimensions what it must know of its model. eos_token_ids is empty, so requests end by length."""

    eos_token_ids: frozenset[int] = frozenset()
    device = META
    forward_path = "simulated"

    def __init__(self, model: SimulatedModel) -> None:
        self.layers: list[LayerShape] = model.dims.layer_shapes()
        self.dtype = model.dtype
        self.vocab_size = model.dims.vocab or VOCAB
        self.max_positions = model.dims.max_positions

    def close(self) -> None:
        pass


def assemble_simulated(
    model: SimulatedModel, config: EngineConfig, policies: Policies, scales: ScaleFile | None, clock: SimulatedClock
) -> Parts:
    """Connect the parts of a simulated engine. scales: of quantizers that need them. Raises ConfigError, ScaleError."""
    adapter = SimulatedAdapter(model)
    formats = bind_quantizer(adapter, "", scales, policies.quantizer)
    B = policies.allocator.block_size
    per_token = block_bytes(adapter.layers, formats, B) / B
    cost = StepCost.of(config.device, model.dims, model.dtype.itemsize, per_token)
    core = build_core(
        adapter,
        model.fingerprint,
        None,
        config,
        policies,
        scales,
        formats,
        partial(SimulatedStore, cost=cost, clock=clock),
        free_bytes=max(0, config.device.memory_bytes - model.weight_bytes),
    )
    tokens = SimulatedTokens(config.seed, adapter.vocab_size)
    runner = SimulatedRunner(cost, clock, tokens, core.scheduler.recorder)
    return core.parts(adapter, runner, runner, f"steps cost what device {config.device.name} says")
