"""Shows what Triton's compiler makes of every kernel for GPUs that need not be here: resources, loads, instructions per element.

Takes: ops, formats, architectures, shapes. Gives: one row each, read from the machine code, with what is wrong with it.
Does not know about: running kernels. Needs triton, but no GPU.
"""

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm

from experiments.gpu import machine_code
from experiments.gpu.cards import GPUS
from experiments.gpu.kernel_cases import FORMATS, RAW_ROW_FORMATS, empty_plane
from experiments.harness.base import EXPERIMENTS, Experiment, Run
from experiments.harness.table import number, show
from qkv.errors import ConfigError, QkvError
from qkv.validate import require, suggest
from qkv_kernels.format import KVFormat
from qkv_kernels.reference.attend import Rule

OPS = ("append", "decode", "extend")
_CHANNEL4 = KVFormat(4, torch.uint8, "channel", torch.float32, "float")
COMPILED = FORMATS | RAW_ROW_FORMATS | {"int4": (_CHANNEL4, KVFormat(4, torch.uint8, "token_group", zero="float", group=32))}
_TOKENS, _KV_HEADS, _BLOCKS = 64, 8, 512  # sizes of the launch that is compiled; only its strides change the code
_DECODES, _CONTEXT = 64, 8192  # bound_us is stated for a step of so many decodes, keys and _KV_HEADS KV heads


class CompileError(QkvError):
    """A kernel does not compile, or its machine code is not as it should be."""


@EXPERIMENTS.register("compile_kernels")
@dataclass
class CompileKernels(Experiment):
    """ops, formats (see COMPILED; "all" stands for every one), archs (sm_90, gfx942 ...), head_dims, block_sizes: every
    combination is compiled.

    group: query heads per KV head. dtype: of q, k and v. splits: how many programs share one request in decode.
    """

    ops: list[str] = field(default_factory=lambda: [*OPS])
    formats: list[str] = field(default_factory=lambda: ["bf16", "fp8_e4m3", "int8", "int4"])
    archs: list[str] = field(default_factory=lambda: [*GPUS])
    head_dims: list[int] = field(default_factory=lambda: [128])
    block_sizes: list[int] = field(default_factory=lambda: [16])
    group: int = 4
    dtype: str = "bfloat16"
    splits: int = 4

    def __post_init__(self) -> None:
        if "all" in self.formats:
            self.formats = [*COMPILED]
        for name, allowed in (("ops", OPS), ("formats", COMPILED), ("archs", GPUS)):
            for value in getattr(self, name):
                if value not in allowed:
                    raise ConfigError(f"{name}: unknown '{value}'; {suggest(value, allowed)}")
        require(self.dtype in ("bfloat16", "float16", "float32"), "dtype", self.dtype, "bfloat16, float16 or float32")
        require(1 <= self.group <= 16, "group", self.group, "1 to 16")

    def run(self, run: Run) -> None:
        if os.environ.get("TRITON_INTERPRET") == "1":
            raise ConfigError("TRITON_INTERPRET=1 replaces the compiler by the interpreter: unset it to compile kernels")
        cases = [
            (op, name, arch, D, B)
            for arch in self.archs
            for op in self.ops
            for name in self.formats
            for D in self.head_dims
            for B in self.block_sizes
        ]
        rows = []
        for case in tqdm(cases, disable=not run.progress, unit="kernel", leave=False):
            rows += [run.add_row({"kernel": row}) for row in self._rows(*case)]
        show(
            f"Compiled kernels, q in {self.dtype}, {self.group} query heads per kv head",
            ["op", "format", "arch", "D", "B", "tile", "regs", "spill", "stack", "shared", "load B", "mma", "cvt/el", "instr/el",
             "programs", "headroom", "bound us", "wrong"],
            [_cells(row["kernel"]) for row in rows],
            "load B: narrowest load of codes per thread; per element of K and V in the loop: cvt, conversions, and instr, "
            "instructions x lanes; programs: per processor; headroom: instructions the memory's pace allows / those used; bound: "
            f"{_DECODES} decodes of {_CONTEXT} tokens take at least this long on {', '.join(g.name for g in GPUS.values())}",
            text=(0, 1, 2, 17),
        )  # fmt: skip
        wrong = [row["kernel"] for row in rows if row["kernel"]["wrong"]]
        if wrong:
            first = wrong[0]
            raise CompileError(
                f"{len(wrong)} of {len(rows)} kernels: {first['op']} {first['format']} {first['arch']}: {first['wrong']}"
            )

    def _rows(self, op: str, name: str, arch: str, D: int, B: int) -> list[dict[str, Any]]:
        """One row for every kernel that the op launches."""
        out = []
        for launch in self._launches(op, name, arch, D, B):
            try:
                code = machine_code.read(launch.compile(_target(arch)), arch)
            except Exception as error:
                raise CompileError(f"{op} {name} {arch} head dim {D}: {(str(error).splitlines() or ['?'])[-1]}") from error
            kernel = launch.kernel.__name__.removesuffix("_kernel")
            out.append(_row(kernel, name, arch, D, B, launch, code) | {"group": self.group, "dtype": self.dtype})
        return out

    def _launches(self, op: str, name: str, arch: str, D: int, B: int) -> list[Any]:
        from qkv_kernels.reference.overlay import Rows
        from qkv_kernels.triton.append import append_launches
        from qkv_kernels.triton.blocks import keep_launches, seal_launches
        from qkv_kernels.triton.decode import decode_launches
        from qkv_kernels.triton.extend import extend_launches

        dtype, T, H = getattr(torch, self.dtype), _TOKENS, _KV_HEADS

        def meta(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(*shape, dtype=of, device="meta")

        k, v = (empty_plane(fmt, _BLOCKS, H, B, D, "meta", slots=T, raw_dtype=dtype) for fmt in COMPILED[name])
        q, out, rule = meta(T, H * self.group, D), meta(T, H * self.group, D), Rule(D**-0.5)
        table, lens = meta(T, 512, of=torch.int32), meta(T, of=torch.int32)
        start, slots = meta(T + 1, of=torch.int32), meta(T, of=torch.int64)
        rows = Rows(meta(T, H, D), meta(T, H, D), False, slots, slots)
        if op == "append":
            launches = keep_launches(rows, k, v, start, lens, T, True, arch) if k.sink is not None else []
            if k.tail is None:
                return launches + append_launches(rows.k, rows.v, k, v, slots, arch)
            launches += seal_launches(rows, k, v, table, start, lens, T, arch)
            return launches + keep_launches(rows, k, v, start, lens, T, False, arch)
        if op == "decode":
            return decode_launches(q, k, v, table, lens, rule, out, self.splits, arch, rows)
        return extend_launches(q, k, v, table, start, lens, T, rule, out, arch, rows)


def _row(kernel: str, name: str, arch: str, D: int, B: int, launch: Any, code: machine_code.Code) -> dict[str, Any]:
    gpu, warps = GPUS[arch], launch.options["num_warps"]
    row: dict[str, Any] = {
        "op": kernel,
        "format": name,
        "backend": "triton",
        "arch": arch,
        "head_dim": D,
        "block_size": B,
        "warps": warps,
        "registers": code.registers,
        "spill_bytes": code.spill_bytes,
        "stack_bytes": code.stack_bytes,
        "shared_bytes": code.shared_bytes,
        "mma_instructions": dict(code.matrix),
        "programs_per_processor": gpu.programs_per_processor(warps, code.registers, code.shared_bytes),
        "load_bytes": dict(Counter(code.load_widths)),
    }
    wrong = [f"spills {code.spill_bytes} bytes"] if code.spill_bytes else []
    if kernel in ("decode", "extend"):
        P, K, V = (launch.constants[key] for key in ("P", "K", "V"))
        row |= {"tile_rows": P.rows, "tile_keys": P.keys, "stages": launch.options["num_stages"]}
        if not code.matrix and _multiplies_16_bits(P):
            wrong.append("no matrix instruction")
        if code.loops:
            loop, threads, elements = min(code.loops[:2], key=len), warps * gpu.wave, P.keys * (K.D + V.D)
            used = len(loop) * threads / elements
            read = sum(S.fmt.bytes_per_block(B, 1, S.D) for S in (K, V)) / (B * (K.D + V.D))
            row |= {
                "load_bytes_min": _narrowest(loop, P.keys * sum(S.row_bytes for S in (K, V)), threads),
                "conversions_per_element": machine_code.conversions(loop) * threads / elements,
                "lane_instructions_per_element": used,
            }
            if kernel == "decode":  # bandwidth bounds only decode; extend is bound by arithmetic
                available, elements = gpu.lane_instructions_per_byte * read, _DECODES * _CONTEXT * _KV_HEADS * (K.D + V.D)
                slowest = max(read / gpu.bandwidth, used / (gpu.lanes * gpu.processors * gpu.clock))
                row |= {"bytes_per_element": read, "lane_instructions_available": available, "headroom": available / used}
                row["bound_us"] = 1e6 * elements * slowest
            wanted = min(8, *(_power_of_two_in(S.row_bytes) for S in (K, V)))
            if kernel == "decode" and row["load_bytes_min"] < wanted:
                wrong.append(f"loads codes {row['load_bytes_min']} bytes at a time, not {wanted}")
        else:
            wrong.append("no loop found")
    return row | {"wrong": "; ".join(wrong)}


def _multiplies_16_bits(P: Any) -> bool:
    """Whether the matrix unit multiplies 16-bit values. Float32 is multiplied exactly, on NVIDIA outside the matrix unit;
    attention all in float32 is for tests."""
    return any(kind.primitive_bitwidth == 16 for kind in (P.mat_k, P.mat_v))


def _narrowest(loop: list[machine_code.Instruction], code_bytes: int, threads: int) -> int:
    """The width of the narrowest loads that are needed to bring a tile's codes. Narrower loads bring scales and block tables."""
    widths = sorted((w for i in loop if (w := machine_code.load_width(i.name))), reverse=True)
    total = 0
    for width in widths:
        total += width * threads
        if total >= code_bytes:
            return width
    return 0


def _power_of_two_in(n: int) -> int:
    return n & -n


def _target(arch: str) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", int(arch[3:]), 32)


def _cells(row: dict[str, Any]) -> list[str]:
    tile = f"{row['tile_rows']}x{row['tile_keys']}/{row['warps']}" if "tile_rows" in row else f"-/{row['warps']}"
    cells = [row["op"], row["format"], row["arch"], str(row["head_dim"]), str(row["block_size"]), tile]
    cells += [number(row[k]) for k in ("registers", "spill_bytes", "stack_bytes", "shared_bytes")]
    cells += [number(row.get("load_bytes_min")), number(sum(row["mma_instructions"].values()))]
    cells += [number(row.get(k), 2) for k in ("conversions_per_element", "lane_instructions_per_element")]
    return [
        *cells,
        number(row["programs_per_processor"]),
        number(row.get("headroom"), 2),
        number(row.get("bound_us"), 0),
        row["wrong"] or "-",
    ]
