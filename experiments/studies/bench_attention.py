"""Times how fast the CPU kernels store to scattered pages and attend to them, beside torch on K and V that lie together.

Takes: ops, formats, shapes. Gives: one row each, with the read bandwidth that the machine had in the same run.
Does not know about: models, engines, quantizers; formats are those of the kernel tests.

All contenders take turns, so that a busy machine slows them alike; medians are reported.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from tqdm import tqdm

from experiments.gpu.kernel_cases import CPU_FORMATS as FORMATS
from experiments.gpu.kernel_cases import calibrated, empty_plane
from experiments.harness.base import EXPERIMENTS, Experiment, Run
from experiments.harness.table import number, show
from qkv.errors import ConfigError
from qkv.validate import require, suggest
from qkv_kernels import cpu

OPS = ("decode", "extend", "append")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
READ_BYTES = 1 << 28  # the bandwidth measurement reads so many, far more than any cache holds


@dataclass(frozen=True)
class Shape:
    """seqs requests of context tokens, query_heads on kv_heads of head_dim channels."""

    seqs: int
    context: int
    query_heads: int
    kv_heads: int
    head_dim: int


@EXPERIMENTS.register("bench_attention")
@dataclass
class BenchAttention(Experiment):
    """ops, formats, shapes (query heads / kv heads / head dim), seqs, contexts: every combination is timed.

    chunk: tokens per request that extend and append bring. dtype: of q, k, v and the baselines. instruction_set: null takes the
    best one. clock: cpu runs on one thread and counts only the processor time of that thread, which other processes lengthen far
    less than wall time.
    """

    ops: list[str] = field(default_factory=lambda: [*OPS])
    formats: list[str] = field(default_factory=lambda: ["bf16", "int8", "int8_token", "fp8_e4m3", "int4_token"])
    shapes: list[str] = field(default_factory=lambda: ["32/8/128", "9/3/64", "4/1/256"])
    seqs: list[int] = field(default_factory=lambda: [16])
    contexts: list[int] = field(default_factory=lambda: [4096])
    chunk: int = 32
    block_size: int = 16
    dtype: str = "bfloat16"
    repeats: int = 15
    instruction_set: str | None = None
    clock: Literal["wall", "cpu"] = "wall"

    def __post_init__(self) -> None:
        for name, allowed in (("ops", OPS), ("formats", FORMATS)):
            for value in getattr(self, name):
                if value not in allowed:
                    raise ConfigError(f"{name}: unknown '{value}'; {suggest(value, allowed)}")
        require(self.dtype in DTYPES, "dtype", self.dtype, ", ".join(DTYPES))
        require(self.chunk >= 2, "chunk", self.chunk, "at least 2")
        require(min(self.contexts, default=0) >= self.chunk, "contexts", self.contexts, f"at least chunk ({self.chunk})")
        for name in ("seqs", "shapes", "ops", "formats"):
            require(bool(getattr(self, name)), name, getattr(self, name), "at least one")
        require(min(self.seqs) >= 1, "seqs", self.seqs, "numbers of at least 1")
        require(self.block_size >= 1, "block_size", self.block_size, "at least 1")
        require(self.repeats >= 1, "repeats", self.repeats, "at least 1")
        for shape in self.shapes:
            _heads(shape)
        whole = [name for name in self.formats if any(f.unit == "block" for f in FORMATS[name])]
        if whole and "append" in self.ops:
            raise ConfigError(
                f"formats: {whole} encode whole blocks, as part of decode and extend; ops=[append] is for the others"
            )

    def run(self, run: Run) -> None:
        try:
            cpu.load()
            isa = cpu.instruction_set(self.instruction_set)
        except (cpu.BuildError, ValueError) as error:
            raise ConfigError(str(error)) from None
        run.record.set("attention", {"backend": "cpu", "reads": "cache", "reason": f"kernels for {isa}"})
        cases = [Shape(n, c, *_heads(s)) for s, n, c in itertools.product(self.shapes, self.seqs, self.contexts)]
        if self.clock == "cpu":
            torch.set_num_threads(1)
        table = []
        for shape, op in tqdm(list(itertools.product(cases, self.ops)), disable=not run.progress):
            for row in self.measure(shape, op, isa, run.engine.seed):
                k = run.add_row(row)["kernel"]
                cells = (
                    k["ms"],
                    k["tokens_per_s"] / 1e6,
                    k["gb_per_s"],
                    k["fraction_of_read_bandwidth"],
                    k.get("speedup_vs_sdpa"),
                )
                heads = f"{shape.query_heads}/{shape.kv_heads}/{shape.head_dim}"
                name = [f"{op} {k['format']}", heads, f"{shape.seqs} x {shape.context}"]
                table.append([*name, *(number(cell, 2) for cell in cells)])
        columns = ["op, format", "heads", "seqs x context", "ms", "M tokens/s", "GB/s", "of read bandwidth", "x torch"]
        show(f"CPU attention ({isa}, {self.dtype}, {torch.get_num_threads()} threads)", columns, table, _NOTE)

    def measure(self, shape: Shape, op: str, isa: str, seed: int) -> list[dict[str, Any]]:
        """One row per format."""
        torch.manual_seed(seed)
        workload = _Workload(shape, 1 if op == "decode" else self.chunk, self.block_size, DTYPES[self.dtype])
        buffer = torch.ones(READ_BYTES // 4)
        contenders: dict[str, Callable[[], object]] = {"read": buffer.sum}
        contenders |= {name: workload.kernel(name, isa, attends=op != "append") for name in self.formats}
        if op != "append":
            contenders |= workload.baselines()
        times = _take_turns(contenders, self.repeats, time.thread_time if self.clock == "cpu" else time.perf_counter)
        median = {name: statistics.median(t) for name, t in times.items()}
        bandwidth = READ_BYTES / median["read"]
        best = min((n for n in median if n.startswith("torch")), key=median.__getitem__, default=None)
        rows: list[dict[str, Any]] = []
        for name in self.formats:
            seconds, moved = median[name], workload.bytes(name, attends=op != "append")
            quarter = statistics.quantiles(times[name], n=4) if len(times[name]) > 1 else [seconds] * 3
            kernel: dict[str, Any] = {
                "op": op,
                "format": name,
                "backend": "cpu",
                "arch": isa,
                "seqs": shape.seqs,
                "context": shape.context,
                "new_tokens": workload.new,
                "query_heads": shape.query_heads,
                "kv_heads": shape.kv_heads,
                "head_dim": shape.head_dim,
                "dtype": self.dtype,
                "block_size": self.block_size,
                "clock": self.clock,
                "threads": torch.get_num_threads(),
                "ms": 1e3 * seconds,
                "ms_quartiles": [1e3 * quarter[0], 1e3 * quarter[2]],
                "ms_best": 1e3 * min(times[name]),
                "tokens_per_s": workload.tokens(op) / seconds,
                "gb_per_s": moved / seconds / 1e9,
                "read_bandwidth_gb_per_s": bandwidth / 1e9,
                "fraction_of_read_bandwidth": moved / seconds / bandwidth,
            }
            if best is not None:
                kernel["speedup_vs_sdpa"], kernel["baseline"] = median[best] / seconds, best
                kernel["baselines_ms"] = {n: 1e3 * s for n, s in median.items() if n.startswith("torch")}
            rows.append({"label": f"{op} {name}", "kernel": kernel})
        return rows


_NOTE = (
    "M tokens/s: cached tokens attended to by decode and extend, tokens stored by append. "
    "x torch: against the fastest of SDPA (enable_gqa, folded) and matmul on K and V gathered beforehand in the compute dtype."
)


class _Workload:
    """Requests of `context` tokens on shuffled blocks. Each call stores the last `new` tokens of each and attends from them."""

    def __init__(self, shape: Shape, new: int, block_size: int, dtype: torch.dtype) -> None:
        self.shape, self.new, self.B, self.dtype = shape, new, block_size, dtype
        R, L, H, D = shape.seqs, shape.context, shape.kv_heads, shape.head_dim
        blocks = -(-L // block_size)
        self.N = 1 + R * blocks
        self.table = (1 + torch.randperm(self.N - 1)).view(R, blocks).int()
        self.k, self.v = (torch.randn(R, L, H, D, dtype=dtype) for _ in range(2))
        self.q = torch.randn(R * new, shape.query_heads, D, dtype=dtype)
        self.positions = torch.arange(L).repeat(R, 1)
        self.slots = self.table.long().gather(1, self.positions // block_size) * block_size + self.positions % block_size
        self._planes: dict[str, list[torch.Tensor]] = {}

    def kernel(self, name: str, isa: str, attends: bool) -> Callable[[], torch.Tensor]:
        """A function that calls the operator once, on a pool of this format which the operator itself has filled."""
        shape, R, new = self.shape, self.shape.seqs, self.new
        planes, numbers = [], []
        for fmt, rows in zip(FORMATS[name], (self.k, self.v), strict=True):
            if reason := cpu.refusal(fmt, shape.head_dim):
                raise ConfigError(f"formats: {name}: {reason}")
            plane = empty_plane(fmt, self.N, shape.kv_heads, self.B, shape.head_dim, "cpu", slots=R, raw_dtype=self.dtype)
            p = calibrated(plane, rows[0])
            for pool in (p.codes, p.scale, p.zero):
                if pool is not None:
                    torch.ops.qkv_cpu.advise_huge(pool)
            planes += cpu.expand(p, shape.head_dim)
            numbers += cpu.format_numbers(fmt)
        self._planes[name] = planes
        call = partial(cpu.attend, planes=planes, formats=numbers, scaling=shape.head_dim**-0.5, sink_logits=None, isa=isa)
        nobody, everybody = torch.zeros(1, dtype=torch.int32), torch.arange(R + 1, dtype=torch.int32) * new
        requests = torch.arange(R)
        for r in range(R):
            q = self.q.new_zeros(shape.context, *self.q.shape[1:])
            call(
                q,
                self.k[r],
                self.v[r],
                block_table=self.table[r : r + 1],
                query_start=torch.tensor([0, shape.context], dtype=torch.int32),
                slots=self.slots[r],
                positions=self.positions[r],
                tail_slots=requests[r : r + 1],
                window=1,  # attends to one key only, since here only storing matters
            )
        last = [x[:, -new:].flatten(0, 1).contiguous() for x in (self.k, self.v, self.slots, self.positions)]
        table, start = (self.table, everybody) if attends else (self.table[:0], nobody)
        return partial(
            call, self.q, *last[:2], block_table=table, query_start=start, slots=last[2], positions=last[3], tail_slots=requests
        )

    def baselines(self) -> dict[str, Callable[[], torch.Tensor]]:
        """The ways people write attention in torch, by name, on K and V [R, H, L, D] that were gathered beforehand."""
        s, R, new = self.shape, self.shape.seqs, self.new
        G = s.query_heads // s.kv_heads
        K, V = (x.transpose(1, 2).contiguous() for x in (self.k, self.v))
        q = self.q.view(R, new, s.query_heads, s.head_dim).transpose(1, 2).contiguous()
        hidden = torch.arange(s.context)[None, :] > torch.arange(s.context - new, s.context)[:, None]
        mask = None if new == 1 else torch.zeros(hidden.shape, dtype=self.dtype).masked_fill(hidden, -torch.inf)
        folded = q.view(R, s.kv_heads, G * new, s.head_dim)
        folded_mask = None if mask is None else mask.repeat(G, 1)

        def matmul() -> torch.Tensor:
            scores = folded @ K.transpose(-1, -2) * s.head_dim**-0.5
            return (scores if folded_mask is None else scores + folded_mask).softmax(-1) @ V

        return {
            "torch sdpa enable_gqa": lambda: F.scaled_dot_product_attention(q, K, V, attn_mask=mask, enable_gqa=True),
            "torch sdpa folded": lambda: F.scaled_dot_product_attention(folded, K, V, attn_mask=folded_mask),
            "torch matmul": matmul,
        }

    def bytes(self, name: str, attends: bool) -> int:
        """How many bytes of pool pages one call must read or, for append, write."""
        s = self.shape
        per_block = sum(f.bytes_per_block(self.B, s.kv_heads, s.head_dim) for f in FORMATS[name])
        return s.seqs * (s.context if attends else self.new) * per_block // self.B

    def tokens(self, op: str) -> int:
        return self.shape.seqs * (self.new if op == "append" else self.shape.context)


def _take_turns(contenders: dict[str, Callable[[], object]], repeats: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """The seconds of every call. Each round makes one call of each contender; the first round is not timed, `repeats` are."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(repeats + 1):
        for name, call in contenders.items():
            start = clock()
            call()
            if i:
                times[name].append(clock() - start)
    return times


def _heads(text: str) -> tuple[int, int, int]:
    """(query heads, KV heads, head dim) from e.g. '32/8/128'. Raises ConfigError."""
    parts = text.split("/")
    if len(parts) == 3 and all(p.isdigit() and int(p) for p in parts):
        heads, kv, D = map(int, parts)
        if heads % kv == 0:
            return heads, kv, D
    raise ConfigError(
        f"shapes: '{text}' is not query heads / kv heads / head dim, e.g. 32/8/128, the first a multiple of the second"
    )
