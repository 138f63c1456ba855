"""Builds the parts of an engine from its configuration: the one place where everything meets.

Takes: a loaded model and an EngineConfig. Gives: connected parts. Does not know about: requests.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from qkv.attention.base import AttentionBackend, choose_backend
from qkv.attention.hf import HFAdapter
from qkv.cache.block_manager import BlockManager
from qkv.cache.host_pool import HostPool
from qkv.cache.prefix import PrefixHasher
from qkv.cache.sizing import PoolSize, size_pool
from qkv.cache.store import KVStore, block_bytes
from qkv.config import EngineConfig
from qkv.errors import ConfigError
from qkv.intake import Intake
from qkv.metrics.recorder import Recorder
from qkv.models import LoadedModel
from qkv.policies.allocator.base import ALLOCATORS, BlockAllocator
from qkv.policies.evictor.base import EVICTORS, Evictor
from qkv.policies.preemptor.base import PREEMPTORS, CostModel, Preemptor
from qkv.policies.quantizer.base import QUANTIZERS, Quantizer
from qkv.registry import import_policy_modules
from qkv.runner import Runner
from qkv.scales import ScaleFile
from qkv.scheduler import Scheduler

log = logging.getLogger("qkv")
UNLIMITED = 1 << 20  # tokens per request for models that state no limit; the pool's size bounds it


@dataclass
class Policies:
    quantizer: Quantizer
    allocator: BlockAllocator
    evictor: Evictor
    preemptor: Preemptor


@dataclass
class Parts:
    adapter: HFAdapter
    intake: Intake
    scheduler: Scheduler
    runner: Runner
    store: KVStore
    backend: AttentionBackend
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


def assemble(loaded: LoadedModel, config: EngineConfig, scales: ScaleFile | None, clock: Callable[[], float]) -> Parts:
    """Raises ConfigError, ModelError or ScaleError; the model is left as it was then."""
    policies = build_policies(config)
    adapter = HFAdapter(loaded.model, loaded.tokenizer)
    try:
        return _assemble(loaded, config, scales, clock, policies, adapter)
    except BaseException:
        adapter.close()
        raise


def _assemble(
    loaded: LoadedModel,
    config: EngineConfig,
    scales: ScaleFile | None,
    clock: Callable[[], float],
    policies: Policies,
    adapter: HFAdapter,
) -> Parts:
    layers, quantizer, allocator = adapter.layers, policies.quantizer, policies.allocator
    scales = scales or (ScaleFile.load(config.scales) if config.scales else None)
    if scales is not None:
        scales.validate(layers, config.quantizer["name"], loaded.fingerprint)
    quantizer.bind(layers, scales, adapter.dtype, adapter.device)
    formats = [quantizer.formats(i) for i in range(len(layers))]
    B = allocator.block_size
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
    max_model_len = _max_model_len(config, adapter)
    pool = size_pool(
        config.cache,
        block_bytes=block_bytes(layers, formats, B),
        block_size=B,
        wanted_blocks=1 + config.scheduler.max_num_seqs * -(-max_model_len // B),
        device=adapter.device,
    )
    allocator.bind(pool.num_blocks, policies.evictor, -(-max_model_len // B))
    scale_id = scales.fingerprint() if scales is not None else "none"
    store = KVStore(
        layers,
        formats,
        pool.num_blocks,
        B,
        adapter.device,
        host_blocks=pool.host_blocks,
        fingerprint=f"{quantizer.fingerprint()}:{scale_id}",
        poison=config.cache.poison,
    )
    backend.bind(store, quantizer, layers, config.attention.reads, config.runner.deterministic)

    recorder = Recorder()
    identity = (loaded.fingerprint, str(adapter.dtype), quantizer.fingerprint(), scale_id, config.attention.reads)
    hasher = PrefixHasher(config.cache.prefix_hash, B, identity) if config.cache.enable_prefix_caching else None
    manager = BlockManager(allocator, hasher, HostPool(pool.host_blocks), recorder, config.scheduler.watermark, store.block_bytes)
    scheduler = Scheduler(manager, policies.preemptor, config.scheduler, CostModel(B, store.block_bytes))
    runner = Runner(
        adapter,
        backend,
        recorder,
        block_size=B,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_tokens=config.scheduler.max_num_batched_tokens,
        max_blocks=max(min(-(-max_model_len // B), pool.num_blocks), allocator.blocks_for(1)),
        reads=config.attention.reads,
        deterministic=config.runner.deterministic,
    )
    intake = Intake(loaded.tokenizer, adapter.vocab_size, max_model_len, allocator.max_tokens())
    static = any(t is not None for i in range(len(layers)) for s in quantizer.statics(i) for t in s)
    source = f"scale file: {config.scales or scale_id}" if scales is not None else "defaults" if static else "none needed"
    return Parts(
        adapter,
        intake,
        scheduler,
        runner,
        store,
        backend,
        reason,
        pool,
        scales_source=source,
        warnings=[*(scales.warnings if scales is not None else []), *quantizer.warnings()],
    )


def _max_model_len(config: EngineConfig, adapter: HFAdapter) -> int:
    limit, asked = adapter.max_positions or UNLIMITED, config.scheduler.max_model_len
    if asked is not None and asked > limit:
        raise ConfigError(f"scheduler.max_model_len={asked} is above the model's {limit} positions; it must be 2 to {limit}")
    return asked or limit
