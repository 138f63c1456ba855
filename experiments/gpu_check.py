"""Checks and times the Triton kernels on a real GPU in a few minutes, the most important things first.

    PYTHONPATH=.:kernels python -m experiments.gpu_check --minutes 6 --out outputs/gpu_check

It compares every op and format with the reference, then times bandwidth, decode, append, extend, and a model end to end. It stops
when the minutes are over; <out>/record.json has what was measured until then, and a table is printed last. Needs torch, triton,
transformers, xxhash and the standard library. `--smoke` runs every part on tiny shapes, also on a CPU in Triton's interpreter: it
checks this script, and its times mean nothing.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch

from experiments.gpu import bench
from experiments.gpu.bench import Shape
from experiments.gpu.kernel_cases import FORMATS, RAW_ROW_FORMATS, Pool, make_pool
from experiments.gpu.raw_rows import check_raw_rows
from experiments.harness.record import Record
from qkv_kernels.format import KVFormat
from qkv_kernels.reference.attend import Plane, Rule, attend

_CHANNEL8 = KVFormat(8, torch.int8, "channel", torch.float32)
_CHANNEL4 = KVFormat(4, torch.uint8, "channel", torch.float32, "float")
TIMED = {
    "bf16": FORMATS["bf16"],
    "int8": (_CHANNEL8, KVFormat(8, torch.int8, "token")),
    "fp8_e4m3": FORMATS["fp8_e4m3"],
    "int4": (_CHANNEL4, KVFormat(4, torch.uint8, "token_group", zero="float", group=32)),
    "int8_token": FORMATS["int8_token"],
    "fp8_e5m2": FORMATS["fp8_e5m2"],
    "int4_token": FORMATS["int4_token"],
    "kivi4": RAW_ROW_FORMATS["kivi4"],
}
# Shapes, the most important first. The project's targets are stated for the first one.
DECODES = [Shape(64, 8192), Shape(1, 8192), Shape(16, 8192), Shape(64, 2048), Shape(256, 2048), Shape(1, 32768), Shape(16, 32768)]
DECODES += [
    Shape(64, 8192, heads=32, kv_heads=32),
    Shape(64, 8192, heads=28, kv_heads=4),
    Shape(64, 8192, heads=16, head_dim=256),
]
DECODES += [Shape(1, 2048), Shape(16, 2048), Shape(256, 8192), Shape(64, 8192, block_size=64), Shape(64, 32768)]
DECODES += [Shape(256, 32768)]
EXTENDS = [(Shape(1, 8192), 8192), (Shape(4, 2048), 2048), (Shape(1, 8192), 512), (Shape(1, 32768), 2048)]
MEMORY_SHARE = 0.6  # one case may take at most this share of the GPU's memory


def check_format(name: str, device_name: str, dtype_name: str, head_dim: int = 128) -> dict[str, Any]:
    """Compare append, decode and extend of one format with the reference on the CPU. errors: empty if all is well.

    Formats that keep raw rows are checked in whole steps, because no single op stores all that they store.
    """
    if name in RAW_ROW_FORMATS:
        return check_raw_rows(name, device_name, dtype_name, head_dim)
    from qkv_kernels.triton.append import append
    from qkv_kernels.triton.decode import decode
    from qkv_kernels.triton.extend import extend

    device, dtype = torch.device(device_name), getattr(torch, dtype_name)
    formats = (TIMED | FORMATS)[name]
    lengths, H, G = [133, 1, 64, 300], 2, 4
    want = make_pool(formats, lengths, H, head_dim, B=16, dtype=dtype)
    got = make_pool(formats, lengths, H, head_dim, B=16, dtype=dtype, filled=False)
    pool = _moved(got, device)
    append(pool.k_rows, pool.v_rows, pool.k, pool.v, pool.slots)
    errors = [f"append: {side}.{part} differs" for side, part in _differences(pool, want)]
    out: dict[str, Any] = {"format": name, "dtype": dtype_name}
    pool = _moved(want, device)
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(sum(lengths), H * G, head_dim, generator=generator).to(dtype)
    rule, ends = Rule(head_dim**-0.5), [sum(lengths[: i + 1]) for i in range(len(lengths))]
    limit = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]
    for op in ("decode", "extend"):
        counts = [1] * len(lengths) if op == "decode" else [min(n, 100) for n in lengths]
        rows = torch.cat([q[e - c : e] for e, c in zip(ends, counts, strict=True)])
        starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
        positions = torch.cat([torch.arange(n - c, n) for n, c in zip(lengths, counts, strict=True)])
        right = attend(
            rows.double(),
            want.k,
            want.v,
            want.block_table,
            positions,
            starts,
            lengths,
            len(counts) if op == "decode" else 0,
            rule,
        )
        x = rows.to(device)
        y = torch.full_like(x, torch.nan)
        if op == "decode":
            decode(x, pool.k, pool.v, pool.block_table, pool.seq_lens, rule, y, 3)
        else:
            start = torch.tensor(starts, dtype=torch.int32, device=device)
            extend(x, pool.k, pool.v, pool.block_table, start, pool.seq_lens, max(counts), rule, y)
        error = float((y.double().cpu() - right).abs().max() / right.abs().max())
        out[f"{op}_error"] = error
        if not error <= limit:
            errors.append(f"{op}: off by {error:.1e} of the largest value, allowed {limit:.0e}")
    return out | {"errors": errors}


def _moved(pool: Pool, device: torch.device) -> Pool:
    def plane(p: Plane) -> Plane:
        parts = {name: t.to(device) for name, t in p._asdict().items() if isinstance(t, torch.Tensor)}
        return p._replace(**parts)  # type: ignore[arg-type]

    names = ("k_rows", "v_rows", "slots", "block_table", "seq_lens")
    return replace(pool, k=plane(pool.k), v=plane(pool.v), **{n: getattr(pool, n).to(device) for n in names})


def _differences(pool: Pool, want: Pool) -> Iterator[tuple[str, str]]:
    """The side and the plane of every tensor that differs from the reference in any byte of any page."""
    for side in ("k", "v"):
        for part in ("codes", "scale", "zero"):
            a, b = getattr(getattr(pool, side), part), getattr(getattr(want, side), part)
            if a is not None and not torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8)):
                yield side, part


def verdicts(kernels: list[dict[str, Any]], shape: str) -> Iterator[tuple[str, float, float, bool]]:
    """(what, value, wanted, whether at least that is wanted) for every target whose figures are in the record's kernel rows."""
    seconds = {(k["op"], k["backend"], k["format"], k["shape"], k.get("new")): k["seconds"] for k in kernels}
    decoded = {k["format"]: k for k in kernels if (k["op"], k["backend"], k["shape"]) == ("decode", "triton", shape)}
    for name, wanted in (("bf16", 0.85), ("int8", 0.75)):
        if (fraction := decoded.get(name, {}).get("fraction_of_copy_bandwidth")) is not None:
            yield f"decode {name}, of copy bandwidth", fraction, wanted, True
    for name, wanted in (("int8", 1.7), ("fp8_e4m3", 1.7), ("int4", 2.6)):
        if (times := decoded.get(name, {}).get("speedup_vs_bf16")) is not None:
            yield f"decode {name}, times bf16", times, wanted, True
    stored, read = (seconds.get((op, "triton", "int8", shape, None)) for op in ("append", "decode"))
    if stored and read:
        yield "append int8, of decode", stored / read, 0.03, False
    for (op, backend, _, prompts, new), flash in seconds.items():
        for name, wanted in (("bf16", 0.6), ("int8", 0.5)):
            mine = seconds.get(("extend", "triton", name, prompts, new))
            if (op, backend) == ("extend", "sdpa") and mine:
                yield f"extend {name} {prompts}, of sdpa", flash / mine, wanted, True


class Check:
    """The parts of the check, a deadline, and the record they fill."""

    def __init__(self, device: torch.device, minutes: float, folder: Path, smoke: bool) -> None:
        self.device, self.smoke = device, smoke
        self.end = time.monotonic() + 60 * minutes
        self.record = Record(folder, "gpu_check", {"minutes": minutes, "smoke": smoke})
        self.table: list[tuple[str, str, str, str]] = []
        self.copy: float | None = None

    def left(self) -> float:
        return self.end - time.monotonic()

    def run(self) -> int:
        """Run all parts, the most important first. Returns how many formats are wrong."""
        wrong = self.correctness(["bf16", "int8", "fp8_e4m3", "int4"])
        self.bandwidth()
        shapes = [Shape(2, 64, 4, 2, 64)] if self.smoke else DECODES
        self.decode(shapes[:1], list(TIMED))
        self.baselines(shapes[:1])
        self.append(shapes[0])
        self.extend([(Shape(1, 48, 4, 2, 64), 20)] if self.smoke else EXTENDS[:2])
        self.decode(shapes[1:5], ["bf16", "int8", "fp8_e4m3", "int4"])
        wrong += self.correctness(
            [n for n in (RAW_ROW_FORMATS | TIMED | FORMATS) if n not in ("bf16", "int8", "fp8_e4m3", "int4")]
        )
        self.model()
        self.baselines(shapes[1:5])
        self.decode(shapes[5:], ["bf16", "int8", "fp8_e4m3", "int4"])
        self.extend([] if self.smoke else EXTENDS[2:])
        if not self.smoke:
            self.baselines(shapes[:1], slow=True)
        self.targets(shapes[0])
        return wrong

    def targets(self, shape: Shape) -> None:
        """Report what the kernels are meant to reach and whether they did, as far as it was measured."""
        kernels = [row["kernel"] for row in self.record.data["rows"] if "kernel" in row]
        for what, value, wanted, least in verdicts(kernels, str(shape)):
            met = (value >= wanted) == least
            self.record.data.setdefault("targets", {})[what] = {"value": value, "wanted": wanted, "met": met}
            self._say(
                "target",
                what,
                "",
                f"{value:.2f}, wanted {'at least' if least else 'below'} {wanted}: {'met' if met else 'missed'}",
            )

    def correctness(self, names: list[str]) -> int:
        """Check formats in several processes, since compiling takes most of the time. Skip what there is no time left for."""
        dtypes = ["bfloat16"] if self.device.type == "cuda" else ["float32"]
        names = [n for n in names if self.device.type == "cuda" or "bf16" not in n][: 2 if self.smoke else None]
        jobs = [(n, str(self.device), d, 64 if self.smoke else 128) for n in names for d in dtypes]
        wrong = 0
        with ProcessPoolExecutor(min(8, os.cpu_count() or 1, len(jobs)), mp_context=get_context("spawn")) as workers:
            futures = {workers.submit(check_format, *job): job for job in jobs}
            waiting = set(names)
            with contextlib.suppress(TimeoutError):
                for future in as_completed(futures, timeout=None if self.smoke else max(self.left(), 30)):
                    name = futures[future][0]
                    try:
                        row = future.result()
                    except Exception as error:
                        row = {"format": name, "errors": [f"{type(error).__name__}: {(str(error).splitlines() or [''])[-1]}"]}
                    waiting.discard(name)
                    self.record.add_row({"correctness": row})
                    wrong += bool(row["errors"])
                    self._say("correct", name, "", "; ".join(row["errors"]) or "yes")
            workers.shutdown(cancel_futures=True)
        self.record.data.setdefault("skipped", []).extend(f"correctness {name}" for name in sorted(waiting))
        return wrong

    def bandwidth(self) -> None:
        with self._part("copy bandwidth", 5):
            self.copy = bench.copy_bandwidth(self.device, 1 << (20 if self.smoke else 31))
            self.record.set("copy_bytes_per_s", self.copy)
            self._say("copy", "", "", f"{self.copy / 1e9:,.0f} GB/s")

    def decode(self, shapes: list[Shape], names: list[str]) -> None:
        for shape in shapes:
            base: float | None = None
            for name in names[: 3 if self.smoke else None]:
                if not self._fits(shape, TIMED[name]) or (self.device.type != "cuda" and name == "bf16"):
                    continue
                with self._part(f"decode {name} {shape}", 6):
                    s = bench.decode_seconds(TIMED[name], shape, self.device, 1 if self.smoke else bench.ROTATE_BYTES)
                    base = s if name == "bf16" else base
                    rate = shape.kv_bytes(TIMED[name]) / s
                    fraction = rate / self.copy if self.copy else None
                    row = {"op": "decode", "format": name, "backend": "triton", "shape": str(shape), "seconds": s}
                    row |= {"tokens_per_s": shape.requests / s, "gb_per_s": rate / 1e9, "fraction_of_copy_bandwidth": fraction}
                    row |= {"block_size": shape.block_size, "speedup_vs_bf16": base / s if base else None}
                    self.record.add_row({"kernel": row})
                    times = f", {base / s:.2f}x bf16" if base else ""
                    self._say(
                        "decode",
                        name,
                        str(shape),
                        f"{s * 1e6:,.1f} us, {rate / 1e9:,.0f} GB/s = {fraction or 0:.0%} of copy{times}",
                    )

    def baselines(self, shapes: list[Shape], slow: bool = False) -> None:
        contenders: dict[str, Callable[[Shape, torch.device], float]] = {
            "sdpa": bench.sdpa_decode_seconds,
            "flash_attn": bench.flash_attn_decode_seconds,
            "flashinfer": bench.flashinfer_decode_seconds,
        }
        for shape in shapes:
            for name, measure in ({"flex_attention": bench.flex_decode_seconds} if slow else contenders).items():
                if self._fits(shape, FORMATS["bf16"]):
                    with self._part(f"{name} {shape}", 60 if slow else 5):
                        s = measure(shape, self.device)
                        self.record.add_row(
                            {"kernel": {"op": "decode", "format": "bf16", "backend": name, "shape": str(shape), "seconds": s}}
                        )
                        self._say("decode", name, str(shape), f"{s * 1e6:,.1f} us")

    def append(self, shape: Shape) -> None:
        for name in [n for n in TIMED if n not in RAW_ROW_FORMATS][: 2 if self.smoke else None]:
            if self.device.type != "cuda" and name == "bf16":
                continue
            with self._part(f"append {name}", 5):
                s = bench.append_seconds(TIMED[name], replace(shape, context=min(shape.context, 1024)), self.device)
                self.record.add_row(
                    {"kernel": {"op": "append", "format": name, "backend": "triton", "shape": str(shape), "seconds": s}}
                )
                self._say("append", name, f"{shape.requests} tokens", f"{s * 1e6:,.1f} us")

    def extend(self, cases: list[tuple[Shape, int]]) -> None:
        for shape, new in cases:
            flops = bench.attention_flops(shape, new)
            names = [n for n in ("bf16", "int8", "fp8_e4m3", "int4") if self.device.type == "cuda" or n != "bf16"]
            for name in [*names, *(["sdpa"] if new == shape.context else [])]:
                with self._part(f"extend {name} {shape}", 6):
                    if name == "sdpa":
                        s = bench.sdpa_extend_seconds(shape, self.device)
                    else:
                        s = bench.extend_seconds(TIMED[name], shape, new, self.device)
                    backend, fmt = ("sdpa", "bf16") if name == "sdpa" else ("triton", name)
                    row = {"op": "extend", "format": fmt, "backend": backend, "shape": str(shape), "new": new, "seconds": s}
                    self.record.add_row({"kernel": row | {"flops_per_s": flops / s}})
                    self._say("extend", name, f"{shape} last {new}", f"{s * 1e3:,.2f} ms, {flops / s / 1e12:,.0f} TFLOP/s")

    def model(self) -> None:
        """Run a model of a real shape with random weights end to end. Every quantizer's cache gets the same memory, two thirds of
        what the requests need unquantized, so that fewer bits also mean a larger batch."""
        from qkv.engine import Engine
        from qkv.types import SamplingParams

        name, n, length, new = ("llama3-8b-tiny", 2, 20, 4) if self.smoke else ("llama3-8b", 64, 512, 64)
        prompts = torch.randint(3, 200, (n, length), generator=torch.Generator().manual_seed(0)).tolist()
        loaded = None
        for quantizer in ("none", "fp8", "int8_token"):
            with self._part(f"model {quantizer}", 60 if loaded is None else 25):
                from qkv.config import ModelConfig
                from qkv.models import load_model

                if loaded is None:
                    dtype: Literal["bfloat16", "float32"] = "bfloat16" if self.device.type == "cuda" else "float32"
                    loaded = load_model(ModelConfig(name=name, dtype=dtype, device=str(self.device)))
                memory = "8MiB" if self.smoke else "3GiB"
                with Engine.create(
                    loaded, quantizer=quantizer, memory_bytes=memory, max_num_seqs=n, enable_prefix_caching=False
                ) as engine:
                    params = SamplingParams(max_tokens=new, ignore_eos=True)
                    engine.generate(prompts, params)  # the first run compiles kernels and captures graphs
                    start = time.perf_counter()
                    engine.generate(prompts, params)
                    wall = time.perf_counter() - start
                    metrics = engine.metrics()
                speed = {"output_tokens_per_s": n * new / wall, "total_tokens_per_s": n * (new + length) / wall}
                row = {
                    "policy": {"quantizer": quantizer},
                    "attention": metrics["attention"],
                    "memory": metrics["memory"],
                    "speed": speed,
                }
                self.record.add_row(row)
                backend, capacity = metrics["attention"]["backend"], metrics["memory"].get("capacity_tokens")
                self._say(
                    "model",
                    quantizer,
                    f"{n} x {length}+{new}, {backend}",
                    f"{n * new / wall:,.0f} new tok/s, capacity {capacity} tokens",
                )

    @contextlib.contextmanager
    def _part(self, what: str, needs_s: float) -> Iterator[None]:
        """Run one measurement, or skip it when too little time is left. A failure is noted, and the run goes on."""
        try:
            if not self.smoke and self.left() < needs_s:
                raise TimeoutError
            yield
        except TimeoutError:
            self.record.data.setdefault("skipped", []).append(what)
        except Exception as error:
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            self.record.data.setdefault("failed", {})[what] = reason
            print(f"  {what}: {reason}", flush=True)
        finally:
            self.record.save()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _fits(self, shape: Shape, formats: tuple[KVFormat, KVFormat]) -> bool:
        return self.device.type != "cuda" or shape.kv_bytes(formats) < MEMORY_SHARE * torch.cuda.mem_get_info(self.device)[0]

    def _say(self, *row: str) -> None:
        self.table.append(row)  # type: ignore[arg-type]
        print(f"  [{self.left():5.0f} s left] " + "  ".join(row), flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 all correct · 1 a format is wrong · 2 no GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=6, help="stop measuring after this long")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu_check"), help="folder of record.json")
    parser.add_argument("--smoke", action="store_true", help="every part on tiny shapes: checks the script, not the kernels")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available() and not (options.smoke and os.environ.get("TRITON_INTERPRET") == "1"):
        print("error: torch sees no GPU; --smoke with TRITON_INTERPRET=1 runs the script without one", file=sys.stderr)
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check = Check(device, options.minutes, options.out, options.smoke)
    wrong = 1
    try:
        wrong = check.run()
    finally:
        check.record.save()
        widths = [max((len(row[i]) for row in check.table), default=0) for i in range(3)]
        print()
        for row in check.table:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)))
        print(f"record: {check.record.path}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
