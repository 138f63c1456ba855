"""Settings as small dataclasses; they are also the schemas that experiments validate YAML against.

Does not know about: Hydra, omegaconf, how settings are used.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qkv.validate import parse_bytes, require

if TYPE_CHECKING:
    from qkv.scales import ScaleFile
else:
    ScaleFile = Any  # settings are read without torch; ScaleFile.of() says what is none

_SEEDS = 2**63  # what torch's and numpy's generators both take
Dtype = Literal["float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True)
class ModelConfig:
    """Where a model comes from.

    name: smollm2 | gemma3 (GGUF in an installed package), hub (needs id), path (needs path), gguf (needs path), a named
        shape with random weights (llama2-7b, llama3-8b, qwen2.5-7b, mistral-7b, each also with -tiny), or directly a
        hub id or a local path; shape: only the dimensions below, for planning and simulation.
    id: hub id, e.g. HuggingFaceTB/SmolLM2-135M-Instruct. path: local folder or .gguf file.
    seed: of random weights.
    layers, kv_heads, head_dim, query_heads (None: kv_heads), parameters, vocab, max_positions: of name=shape only.
    """

    name: str = "smollm2"
    id: str | None = None
    path: str | None = None
    dtype: Dtype = "float32"
    device: str = "cpu"
    seed: int = 0
    layers: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    query_heads: int | None = None
    parameters: int | None = None
    vocab: int | None = None
    max_positions: int | None = None

    def __post_init__(self) -> None:
        require(0 <= self.seed < _SEEDS, "seed", self.seed, "0 to 2^63 - 1")
        for name in SHAPE_FIELDS:
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "at least 1, or null")
            require(value is None or self.name == "shape", name, value, "null, unless model=shape: other models know their own")


SHAPE_FIELDS = ("layers", "kv_heads", "head_dim", "query_heads", "parameters", "vocab", "max_positions")


@dataclass(frozen=True)
class DeviceConfig:
    """The machine that a plan or a simulation is about. All rates are what is sustained, not what a data sheet promises.

    memory: bytes, or text like 80GiB. bandwidth: bytes/s at which weights are read; kv_bandwidth: at which attention reads
    the cache. flops: floating point operations/s in matrix products; attention_flops: in attention.
    overlap: share of the shorter of both times, moving bytes and computing, that hides behind the longer: 1 is the ideal
    roofline, 0 a machine that does one after the other.
    overhead_s: seconds per forward that no byte and no operation accounts for (launches, planning, sampling).
    host_link: bytes/s between the cache and host memory, for swapping.
    """

    name: str = "cpu"
    memory: int | str = "8GiB"
    bandwidth: float = 3.0e10
    kv_bandwidth: float = 1.0e10
    flops: float = 3.0e11
    attention_flops: float = 5.0e10
    overlap: float = 1.0
    overhead_s: float = 0.03
    host_link: float = 5.0e9

    def __post_init__(self) -> None:
        parse_bytes(self.memory, "memory")
        for name in ("bandwidth", "kv_bandwidth", "flops", "attention_flops", "host_link"):
            require(0 < getattr(self, name) < float("inf"), name, getattr(self, name), "above 0 and finite")
        require(0 <= self.overlap <= 1, "overlap", self.overlap, "0 to 1")
        require(0 <= self.overhead_s < float("inf"), "overhead_s", self.overhead_s, "at least 0 and finite")

    @property
    def memory_bytes(self) -> int:
        return parse_bytes(self.memory, "memory") or 0


@dataclass(frozen=True)
class CacheConfig:
    """The pool. Exactly one of num_blocks, memory_bytes, memory_utilization decides its size; with none of them it is
    sized for max_num_seqs sequences of the model's length, within memory_utilization's default.

    memory_bytes, host_memory_bytes: bytes, or text like 2GiB. host_memory_bytes 0 means no swap.
    memory_utilization: share of the device's memory (of free memory on CPU) the pool may take.
    prefix_hash: xxh3_128 (fast; tokens are verified on a hit) or sha256.
    poison: fill free pages with NaN (tests).
    """

    num_blocks: int | None = None
    memory_bytes: int | float | str | None = None
    memory_utilization: float | None = None
    host_memory_bytes: int | float | str = "1GiB"
    enable_prefix_caching: bool = True
    prefix_hash: Literal["xxh3_128", "sha256"] = "xxh3_128"
    poison: bool = False

    def __post_init__(self) -> None:
        given = [n for n in ("num_blocks", "memory_bytes", "memory_utilization") if getattr(self, n) is not None]
        require(len(given) <= 1, "cache", given, "given by at most one of num_blocks, memory_bytes, memory_utilization")
        n = self.num_blocks
        require(n is None or n >= 2, "num_blocks", n, "at least 2 (one is the null block)")
        u = self.memory_utilization
        require(u is None or 0 < u <= 1, "memory_utilization", u, "above 0 and at most 1")
        parse_bytes(self.memory_bytes, "memory_bytes")
        parse_bytes(self.host_memory_bytes, "host_memory_bytes")


@dataclass(frozen=True)
class SchedulerConfig:
    """How steps are put together.

    max_num_seqs: running requests at most. max_num_batched_tokens: tokens per forward at most (decodes + prefill chunks).
    max_num_scored_tokens: prefill tokens per forward when they need logits (score), since those take vocabulary x 4 bytes.
    max_model_len: tokens per request at most; None means the model's limit.
    watermark: share of the pool kept free when admitting; never holds back the only request.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_num_scored_tokens: int = 512
    max_model_len: int | None = None
    watermark: float = 0.01

    def __post_init__(self) -> None:
        require(self.max_num_seqs >= 1, "max_num_seqs", self.max_num_seqs, "at least 1")
        require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "max_num_batched_tokens",
            self.max_num_batched_tokens,
            f"at least max_num_seqs ({self.max_num_seqs}), so that every running request advances each step",
        )
        require(self.max_num_scored_tokens >= 1, "max_num_scored_tokens", self.max_num_scored_tokens, "at least 1")
        require(self.max_model_len is None or self.max_model_len >= 2, "max_model_len", self.max_model_len, "at least 2")
        require(0 <= self.watermark < 1, "watermark", self.watermark, "at least 0 and below 1")


@dataclass(frozen=True)
class AttentionConfig:
    """backend: auto, or a backend by name. reads: cache (attention reads what is stored) or raw (tokens of the current
    call are read unquantized: what much research code does; for comparison, and logged). allow_reference: whether auto
    may fall back to the unfused reference."""

    backend: str = "auto"
    reads: Literal["cache", "raw"] = "cache"
    allow_reference: bool = True


@dataclass(frozen=True)
class RunnerConfig:
    """name: model (run it) or simulated (the same engine, but a step costs what a DeviceConfig says, and tokens are made up).
    clock: wall, or cpu: this process's own time, summed over its threads, for measuring with one thread on a busy machine.
    deterministic: pad rows to a multiple of 16 and attend in fixed tiles, so that codes and logits do not depend on
    how requests are batched, chunked, cached or preempted. Slower. cuda_graphs: on a GPU, replay decode steps from graphs
    captured per batch size, where the backend can be captured. fused: on the CPU, run llama-like decoders through fused
    operators instead of transformers' code. compile: torch.compile the models that this leaves to transformers' code."""

    name: Literal["model", "simulated"] = "model"
    clock: Literal["wall", "cpu"] = "wall"
    deterministic: bool = False
    cuda_graphs: bool = True
    fused: bool = True
    compile: bool = False


@dataclass(frozen=True)
class EngineConfig:
    """All settings of an engine. Policies are named: {"name": "lru", field: value, ...}.

    device: what a plan or a simulation assumes; a real run takes its machine as it is.
    scales: for quantizers with static scales: the path of a scale file, or a ScaleFile. policy_modules: modules with policies of
    your own.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    quantizer: dict[str, Any] = field(default_factory=lambda: {"name": "none"})
    allocator: dict[str, Any] = field(default_factory=lambda: {"name": "paged"})
    evictor: dict[str, Any] = field(default_factory=lambda: {"name": "lru"})
    preemptor: dict[str, Any] = field(default_factory=lambda: {"name": "auto"})
    scales: str | Path | ScaleFile | None = None
    seed: int = 0
    policy_modules: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        require(0 <= self.seed < _SEEDS, "seed", self.seed, "0 to 2^63 - 1")
