"""Builds the parts of an engine from its configuration: the one place where everything meets.

Takes: a loaded model and an EngineConfig. Gives: connected parts. Does not know about: requests.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from qkv.attention.base import Observer, choose_backend
from qkv.attention.hf import HFAdapter
from qkv.cache.block_manager import BlockManager
from qkv.cache.host_pool import HostPool
from qkv.cache.prefix import PrefixHasher
from qkv.cache.raw_slots import SinkSlots, TailSlots
from qkv.cache.sizing import PoolSize, RawRows, size_pool
from qkv.cache.store import KVStore, block_bytes
from qkv.config import EngineConfig
from qkv.errors import ConfigError, ScaleError
from qkv.intake import Intake
from qkv.layout import HeadFormat, LayerShape
from qkv.metrics.reads import CountReads
from qkv.metrics.recorder import Recorder
from qkv.models import LoadedModel
from qkv.models.concerns import concerns
from qkv.policies.allocator.base import ALLOCATORS, BlockAllocator
from qkv.policies.evictor.base import EVICTORS, Evictor
from qkv.policies.preemptor.base import PREEMPTORS, CostModel, Preemptor
from qkv.policies.quantizer.base import QUANTIZERS, Quantizer
from qkv.registry import import_policy_modules
from qkv.runner import Runner, StepResult
from qkv.scales import ScaleFile
from qkv.scheduler import Scheduler
from qkv.types import Request, StepPlan

log = logging.getLogger("qkv")
UNLIMITED = 1 << 20  # tokens per request for models that state no limit; the pool's size bounds it


@dataclass
class Policies:
    quantizer: Quantizer
    allocator: BlockAllocator
    evictor: Evictor
    preemptor: Preemptor


class Adapter(Protocol):
    """What an engine must know of its model."""

    @property
    def layers(self) -> list[LayerShape]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int | None: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    @property
    def forward_path(self) -> str: ...
    def close(self) -> None: ...


class Named(Protocol):
    """Who attends: a backend, or the simulation."""

    @property
    def name(self) -> str: ...


class StepRunner(Protocol):
    """Runs a planned step: the model's forward, or what it would cost."""

    observer: Observer | None

    def model_changed(self) -> bool: ...
    def run(self, plan: StepPlan) -> StepResult: ...
    def forget(self, request: Request) -> None: ...


@dataclass
class Parts:
    adapter: Adapter
    intake: Intake
    scheduler: Scheduler
    runner: StepRunner
    store: KVStore
    backend: Named
    backend_reason: str
    pool: PoolSize
    scales_source: str
    warnings: list[str]


def build_policies(config: EngineConfig) -> Policies:
    """All four policies by name. Raises ConfigError; loads nothing."""
    import_policy_modules(config.policy_modules)
    return Policies(
        QUANTIZERS.build(config.quantizer),
        ALLOCATORS.build(config.allocator),
        EVICTORS.build(config.evictor),
        PREEMPTORS.build(config.preemptor),
    )


def usable_scales(config: EngineConfig, quantizer: Quantizer) -> ScaleFile | None:
    """What the setting `scales` names. Raises ScaleError: it cannot be read, or is needed and not given."""
    scales = ScaleFile.of(config.scales)
    if scales is None and quantizer.needs_scales:
        raise ScaleError(
            f"quantizer {quantizer.name} needs a scale file: write one with `python -m calibration.run "
            f"quantizer={quantizer.name}` and pass it as scales=<file>, or use a quantizer that needs none, like int8_token"
        )
    return scales


def assemble(loaded: LoadedModel, config: EngineConfig, policies: Policies, scales: ScaleFile | None) -> Parts:
    """Raises ConfigError, ModelError or ScaleError; the model is left as it was then."""
    adapter = HFAdapter(loaded.model, loaded.tokenizer, config.runner.fused, config.runner.compile)
    try:
        return _assemble(loaded, config, policies, scales, adapter)
    except BaseException:
        adapter.close()
        raise


def _assemble(
    loaded: LoadedModel, config: EngineConfig, policies: Policies, scales: ScaleFile | None, adapter: HFAdapter
) -> Parts:
    layers, quantizer = adapter.layers, policies.quantizer
    formats = bind_quantizer(adapter, loaded.fingerprint, scales, quantizer)
    B = policies.allocator.block_size
    backend, reason = choose_backend(
        config.attention.backend,
        formats,
        layers,
        B,
        adapter.device,
        config.attention.allow_reference,
        adapter.dtype,
        config.attention.reads,
        config.runner.deterministic,
    )
    core = build_core(adapter, loaded.fingerprint, loaded.tokenizer, config, policies, scales, formats, KVStore)
    backend.bind(core.store, quantizer, layers, config.attention.reads, config.runner.deterministic)
    runner = Runner(
        adapter,
        backend,
        CountReads(core.scheduler.recorder, formats, B, config.attention.reads),
        block_size=B,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_tokens=config.scheduler.max_num_batched_tokens,
        max_blocks=max(min(-(-core.intake.max_model_len // B), core.pool.num_blocks), policies.allocator.blocks_for(1)),
        deterministic=config.runner.deterministic,
        cuda_graphs=config.runner.cuda_graphs,
    )
    core.warnings += loaded.warnings
    core.warnings += concerns(
        loaded.model, loaded.tokenizer, adapter.eos_token_ids, adapter.vocab_size, config.runner.deterministic
    )
    adapter.warnings[:0] = core.warnings
    core.warnings = adapter.warnings  # one list: later on, the adapter adds what it notices
    return core.parts(adapter, runner, backend, reason)


@dataclass
class EngineCore:
    """Everything but the model: what a real engine and a simulated one have alike."""

    intake: Intake
    scheduler: Scheduler
    store: KVStore
    pool: PoolSize
    scales_source: str
    warnings: list[str]

    def parts(self, adapter: Adapter, runner: StepRunner, backend: Named, reason: str) -> Parts:
        rest = (self.pool, self.scales_source, self.warnings)
        return Parts(adapter, self.intake, self.scheduler, runner, self.store, backend, reason, *rest)


def bind_quantizer(adapter: Adapter, fingerprint: str, scales: ScaleFile | None, quantizer: Quantizer) -> list[list[HeadFormat]]:
    """The formats of every layer, once the scales are found to fit the model and the quantizer. Raises ScaleError."""
    if scales is not None:
        scales.validate(adapter.layers, quantizer.name, fingerprint, quantizer.static_tensors())
    quantizer.bind(adapter.layers, scales, adapter.dtype, adapter.device)
    return [quantizer.formats(i) for i in range(len(adapter.layers))]


def build_core(
    adapter: Adapter,
    fingerprint: str,
    tokenizer: Any,
    config: EngineConfig,
    policies: Policies,
    scales: ScaleFile | None,
    formats: list[list[HeadFormat]],
    store_type: Callable[..., KVStore],
    free_bytes: int | None = None,
) -> EngineCore:
    """Pool, store, scheduler and intake. free_bytes: of the device, where it is not this machine's. Raises ConfigError."""
    layers, quantizer, allocator = adapter.layers, policies.quantizer, policies.allocator
    B, max_model_len = allocator.block_size, _max_model_len(config, adapter)
    raw, slots = RawRows.of(layers, formats, B, adapter.dtype), config.scheduler.max_num_seqs
    pool = size_pool(
        config.cache,
        block_bytes=block_bytes(layers, formats, B),
        block_size=B,
        wanted_blocks=1 + config.scheduler.max_num_seqs * -(-max_model_len // B),
        device=adapter.device,
        free_bytes=free_bytes,
        raw_bytes=slots * raw.slot_bytes,
    )
    allocator.bind(pool.num_blocks, policies.evictor, -(-max_model_len // B))
    scale_id = scales.fingerprint() if scales is not None else "none"
    store = store_type(
        layers,
        formats,
        pool.num_blocks,
        B,
        adapter.device,
        host_blocks=pool.host_blocks,
        fingerprint=f"{quantizer.fingerprint()}:{scale_id}",
        poison=config.cache.poison,
        slots=slots,
        raw_dtype=adapter.dtype,
        static_bytes=quantizer.static_bytes(),
    )
    identity = (fingerprint, str(adapter.dtype), quantizer.fingerprint(), scale_id, config.attention.reads)
    # With tail_blocks a hit would need raw rows of the blocks before the first new token. Recomputing them exactly takes the raw
    # rows of the blocks before those, one layer down, and so on: nothing short of the whole prefix will do.
    sharing = config.cache.enable_prefix_caching and not raw.tail_blocks
    manager = BlockManager(
        allocator,
        PrefixHasher(config.cache.prefix_hash, B, identity) if sharing else None,
        HostPool(pool.host_blocks),
        Recorder(),
        config.scheduler.watermark,
        store.block_bytes,
        tails=TailSlots(slots) if raw.tails else None,
        sinks=SinkSlots(slots) if raw.sink_tokens else None,
        raw_host_blocks=-(-raw.slot_bytes // store.block_bytes),
    )
    scheduler = Scheduler(manager, policies.preemptor, config.scheduler, CostModel(B, store.block_bytes))
    intake = Intake(tokenizer, adapter.vocab_size, max_model_len, allocator.max_tokens())
    source = (
        f"scale file: {scale_id if isinstance(config.scales, ScaleFile) else config.scales}"
        if scales is not None
        else "defaults"
        if quantizer.static_tensors()
        else "none needed"
    )
    warnings = [*(scales.warnings if scales is not None else []), *quantizer.warnings()]
    if config.cache.enable_prefix_caching and not sharing:
        warnings.append(f"prefix caching is off: with tail_blocks={raw.tail_blocks} a cached prefix lacks rows that are read raw")
    return EngineCore(intake, scheduler, store, pool, source, warnings)


def _max_model_len(config: EngineConfig, adapter: Adapter) -> int:
    limit, asked = adapter.max_positions or UNLIMITED, config.scheduler.max_model_len
    if asked is not None and asked > limit:
        raise ConfigError(f"scheduler.max_model_len={asked} is above the model's {limit} positions; it must be 2 to {limit}")
    return asked or limit
