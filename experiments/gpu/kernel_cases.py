"""Formats and small paged pools that kernel tests, the compile check and the GPU check share.

Takes: formats, lengths, shapes. Gives: planes filled by the reference, with free pages poisoned.
Does not know about: which kernels read them. Imports torch and the kernels only.
"""

from dataclasses import dataclass, replace

import torch

from qkv_kernels.format import KVFormat
from qkv_kernels.reference import codec
from qkv_kernels.reference.append import append
from qkv_kernels.reference.attend import Plane

_INT8, _INT4, _F32 = torch.int8, torch.uint8, torch.float32
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_TOKEN8, _TOKEN4 = KVFormat(8, _INT8, "token"), KVFormat(4, _INT4, "token", zero="float")


def _same(fmt: KVFormat) -> tuple[KVFormat, KVFormat]:
    return fmt, fmt


# name -> formats of K and of V. Together they cover every storage, scale and zero point that the reference codec knows.
FORMATS: dict[str, tuple[KVFormat, KVFormat]] = {
    "fp32": _same(KVFormat(32, torch.float32)),
    "bf16": _same(KVFormat(16, torch.bfloat16)),
    "fp16": _same(KVFormat(16, torch.float16)),
    "fp8_e4m3": _same(KVFormat(8, _E4M3, "head", _F32)),
    "fp8_e5m2": _same(KVFormat(8, _E5M2, "tensor", _F32)),
    "fp8_e4m3_token": _same(KVFormat(8, _E4M3, "token")),
    "fp8_unscaled": (KVFormat(8, _E4M3), KVFormat(8, _E4M3, "token_group", group=16)),
    "int8": (KVFormat(8, _INT8, "channel", _F32), _TOKEN8),
    "int8_zero": (KVFormat(8, _INT8, "channel", _F32, "float"), KVFormat(8, _INT8, "token", zero="float")),
    "int8_code_zero": (KVFormat(8, _INT8, "channel", _F32, "code"), KVFormat(8, _INT8, "token", zero="code")),
    "int8_static_v": (KVFormat(8, _INT8, "token", zero="code"), KVFormat(8, _INT8, "channel", _F32, "float")),
    "int8_static_v_code": (_TOKEN8, KVFormat(8, _INT8, "head", _F32, "code")),
    "int8_token": _same(_TOKEN8),
    "int8_token_f32": _same(KVFormat(8, _INT8, "token", _F32, "float")),
    "int8_group": _same(KVFormat(8, _INT8, "token_group", group=8, zero="code")),
    "int4_token": _same(_TOKEN4),
    "int4_token_symmetric": _same(KVFormat(4, _INT4, "token")),
    "int4_group": _same(KVFormat(4, _INT4, "token_group", group=8, zero="float")),
    "int4_group_code": _same(KVFormat(4, _INT4, "token_group", group=8, zero="code")),
    "int4_channel": (KVFormat(4, _INT4, "channel", _F32, "float"), _TOKEN4),
    "int4_channel_v": (KVFormat(4, _INT4, "channel", _F32), KVFormat(4, _INT4, "channel", _F32, "float")),
    "raw_k_int4_v": (KVFormat(16, torch.float16), KVFormat(4, _INT4, "token_group", group=8)),
}

# experiment=bench_attention also times these: the formats of the quantizers int4, rotated and kivi, by their names.
_KIVI_V = KVFormat(4, _INT4, "token_group", group=32, zero="float", unit="block")
CPU_FORMATS = FORMATS | {
    "int4": (KVFormat(4, _INT4, "channel", _F32, "float"), KVFormat(4, _INT4, "token_group", group=32, zero="float")),
    "rotated": _same(replace(_TOKEN4, rotate=True)),
    "rotated_group": _same(KVFormat(4, _INT4, "token_group", group=32, zero="float", rotate=True)),
    "kivi": (KVFormat(4, _INT4, "block_channel", zero="float", unit="block"), _KIVI_V),
    "kivi3": (KVFormat(3, _INT4, "block_channel", zero="float", unit="block"), replace(_KIVI_V, bits=3)),
    "kivi2": (KVFormat(2, _INT4, "block_channel", zero="float", unit="block"), replace(_KIVI_V, bits=2)),
}


def _block(bits: int, **more: int) -> tuple[KVFormat, KVFormat]:
    k = KVFormat(bits, _INT4, "block_channel", zero="float", unit="block", **more)  # type: ignore[arg-type]
    return k, KVFormat(bits, _INT4, "token_group", zero="float", group=32, unit="block", **more)  # type: ignore[arg-type]


# Formats that keep raw rows. Other kernels store them, and attention also reads their raw rows.
RAW_ROW_FORMATS: dict[str, tuple[KVFormat, KVFormat]] = {
    "kivi4": _block(4),
    "kivi3": _block(3, tail_blocks=1),
    "kivi2": _block(2),
    "int8_sinks": (replace(FORMATS["int8"][0], sink_tokens=4), replace(_TOKEN8, sink_tokens=4)),
}


@dataclass
class Pool:
    """One layer's pages with `lengths` tokens per request, in shuffled blocks. k_rows, v_rows [T, H, D]: what was encoded."""

    k: Plane
    v: Plane
    k_rows: torch.Tensor
    v_rows: torch.Tensor
    slots: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    lengths: list[int]


def empty_plane(
    fmt: KVFormat,
    N: int,
    H: int,
    B: int,
    D: int,
    device: torch.device | str,
    gap: int = 0,
    slots: int = 0,
    raw_dtype: torch.dtype = torch.float32,
) -> Plane:
    """Planes of N blocks. All but the null block are poisoned, and static scales are not filled in. gap: unused heads between
    pages of codes. slots: how many slots for raw tails and sink tokens there are, where the format keeps such rows, in
    raw_dtype."""

    def raw(rows: int) -> torch.Tensor | None:
        return torch.full((slots, H, rows, D), torch.nan, dtype=raw_dtype, device=device) if rows else None

    def plane(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        pool = torch.empty(N, H + gap, *shape[2:], dtype=dtype, device=device)[:, :H]
        if pool.device.type != "meta":
            pool.view(torch.uint8).fill_(0x7F) if dtype.itemsize == 1 else pool.fill_(torch.nan)
            pool[0].view(torch.uint8).zero_() if dtype.itemsize == 1 else pool[0].zero_()
        return pool

    shape, zero = fmt.scale_shape(N, H, B, D), fmt.zero != "none"
    static = {"tensor": (), "head": (H,), "channel": (H, D)}.get(fmt.scale)
    return Plane(
        fmt,
        plane((N, H, B, fmt.packed_dim(D)), fmt.storage),
        plane(shape, fmt.scale_dtype) if shape else None,
        plane(shape, fmt.scale_dtype) if shape and zero else None,
        torch.ones(static, device=device) if static is not None else None,
        torch.zeros(static, device=device) if static is not None and zero else None,
        raw(fmt.tail_rows(B)),
        raw(fmt.sink_tokens),
    )


def calibrated(plane: Plane, rows: torch.Tensor) -> Plane:
    """The plane with static scales that cover the values of rows [T, H, D]."""
    if plane.static_scale is None:
        return plane
    shared = {"tensor": (0, 1, 2), "head": (0, 2), "channel": (0,)}[plane.fmt.scale]
    x, (least, most) = rows.float(), codec.code_range(plane.fmt)
    low, high = x.amin(shared), x.amax(shared)
    if plane.static_zero is None:
        return plane._replace(static_scale=(torch.maximum(-low, high) / most).clamp(min=2.0**-24))
    scale = ((high - low) / (most - least)).clamp(min=2.0**-24)
    zero = (least - low / scale).round().clamp(least, most) if plane.fmt.zero == "code" else low - least * scale
    return plane._replace(static_scale=scale, static_zero=zero)


def store(plane: Plane, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Encode rows and write them to their slots, as the reference does."""
    encoded = codec.encode(rows, plane.fmt, plane.static_scale, plane.static_zero)
    for pool, part in zip((plane.codes, plane.scale, plane.zero), encoded, strict=True):
        if pool is not None and part is not None:
            append(pool, part, slots)


def make_pool(
    formats: tuple[KVFormat, KVFormat],
    lengths: list[int],
    H: int = 2,
    Dk: int = 32,
    Dv: int | None = None,
    B: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    gap: int = 0,
    filled: bool = True,
) -> Pool:
    """Random K and V of magnitude about 1, with one large K channel per head as real models have."""
    generator = torch.Generator().manual_seed(seed)
    T, Dv = sum(lengths), Dv or Dk
    k_rows, v_rows = (torch.randn(T, H, D, generator=generator) for D in (Dk, Dv))
    k_rows[:, :, 3] *= 8
    k_rows, v_rows = k_rows.to(device, dtype), v_rows.to(device, dtype)
    needed = [-(-n // B) for n in lengths]
    N = 4 + sum(needed)
    free = (1 + torch.randperm(N - 1, generator=generator)).tolist()
    tables = [[free.pop() for _ in range(n)] for n in needed]
    M = max([1, *needed])
    slots = [table[p // B] * B + p % B for table, n in zip(tables, lengths, strict=True) for p in range(n)]
    pool = Pool(
        calibrated(empty_plane(formats[0], N, H, B, Dk, device, gap), k_rows),
        calibrated(empty_plane(formats[1], N, H, B, Dv, device, gap), v_rows),
        k_rows,
        v_rows,
        torch.tensor(slots, dtype=torch.int64, device=device),
        torch.tensor([t + [0] * (M - len(t)) for t in tables], dtype=torch.int32, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        lengths,
    )
    if filled:
        store(pool.k, k_rows, pool.slots)
        store(pool.v, v_rows, pool.slots)
    return pool
