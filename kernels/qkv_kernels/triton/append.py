"""Encode K and V of a call and store them in their pages: one launch for both.

Takes: rows as the model made them, pool planes, slots. Gives: bytes equal to the reference codec's.
Does not know about: attention, requests.
"""

import torch
import triton
import triton.language as tl

from qkv_kernels.reference.attend import Plane
from qkv_kernels.triton import tuning
from qkv_kernels.triton._tiles import dynamic_scale, encode_numbers, float8_bits, load_static, spread
from qkv_kernels.triton.launch import Launch
from qkv_kernels.triton.spec import bytes_of, check_index, check_rows, side


def append(k: torch.Tensor, v: torch.Tensor, k_plane: Plane, v_plane: Plane, slots: torch.Tensor) -> None:
    """k [T, H, Dk], v [T, H, Dv] -> pages. slots [T] int64 = block * B + offset; -1 and slots of block 0 write nothing."""
    for launch in append_launches(k, v, k_plane, v_plane, slots, tuning.arch(k.device)):
        launch.run()


def append_launches(
    k: torch.Tensor, v: torch.Tensor, k_plane: Plane, v_plane: Plane, slots: torch.Tensor, arch: str
) -> list[Launch]:
    """Checks the arguments of append (ValueError names them); what to launch on an architecture."""
    k, v = check_rows(k, "k", (None, None, None)), check_rows(v, "v", (*k.shape[:2], None))
    check_index(slots, "slots", torch.int64, 1)
    T, H = k.shape[:2]
    K, V = side(k_plane, k.shape[2], "k_plane", arch), side(v_plane, v.shape[2], "v_plane", arch)
    if k_plane.codes.shape[1] != H or v_plane.codes.shape[:3] != k_plane.codes.shape[:3]:
        raise ValueError(
            f"planes must have the {H} heads of k and agree, got {[*k_plane.codes.shape]} and {[*v_plane.codes.shape]}"
        )
    if len(slots) != T:
        raise ValueError(f"slots must have an entry for each of the {T} rows of k, got {len(slots)}")
    if T == 0:
        return []
    rows, warps = tuning.append(arch, T)
    strides = k.stride()[:2] + v.stride()[:2]
    # A fused multiply-add rounds once where the reference rounds twice.
    options = {"num_warps": warps, "enable_fp_fusion": False}
    args = (k, v, *pointers(k_plane), *pointers(v_plane), slots, T, *strides)
    return [Launch(append_kernel, (-(-T // rows), H), args, {"K": K, "V": V, "ROWS": rows}, options)]


def pointers(plane: Plane) -> tuple[torch.Tensor | None, ...]:
    """Arguments of one side in the order that all kernels take them."""
    return bytes_of(plane.codes), plane.scale, plane.zero, plane.static_scale, plane.static_zero


@triton.jit
def append_kernel(
    k, v, k_codes, k_scale, k_zero, k_static_scale, k_static_zero, v_codes, v_scale, v_zero, v_static_scale, v_static_zero,
    slots, T, k_stride_t, k_stride_h, v_stride_t, v_stride_h, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (i, h): rows i * ROWS ... of kv head h."""
    t, head = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + t, mask=t < T, other=-1)
    store_side(k + t * k_stride_t + head * k_stride_h, slot, head, k_codes, k_scale, k_zero, k_static_scale, k_static_zero, K)
    store_side(v + t * v_stride_t + head * v_stride_h, slot, head, v_codes, v_scale, v_zero, v_static_scale, v_static_zero, V)


@triton.jit
def store_side(x_rows, slot, head, codes, scale, zero, static_scale, static_zero, S: tl.constexpr):
    """Rows at x_rows [ROWS] (pointers) into their slots."""
    write = slot >= S.B  # neither padding nor the null block
    page, offset = slot // S.B, slot % S.B
    c = tl.arange(0, S.lanes)
    keep = write[:, None] & (c < S.width)[None, :]
    at = codes + (page * S.codes[0] + head * S.codes[1] + offset * S.codes[2])[:, None] + c[None, :]
    first = tl.load(x_rows[:, None] + c[None, :], mask=keep, other=0)
    if S.kind == "raw":
        tl.store(at, first.to(codes.dtype.element_ty), mask=keep)
    else:
        low = first.to(tl.float32)
        if S.streams == 2:
            high = tl.load(x_rows[:, None] + S.width + c[None, :], mask=keep, other=0).to(tl.float32)
        else:
            high = low
        if S.scale == "static":
            s_low = load_static(static_scale, head, 0, 1.0, False, S)[None, :]
            s_high, z_low, z_high = s_low, s_low, s_low
            if S.streams == 2:
                s_high = load_static(static_scale, head, 1, 1.0, False, S)[None, :]
            if S.zero != "none":
                z_low = load_static(static_zero, head, 0, 0.0, True, S)[None, :]
                if S.streams == 2:
                    z_high = load_static(static_zero, head, 1, 0.0, True, S)[None, :]
        elif S.scale == "token":
            least, most = tl.minimum(low, high), tl.maximum(low, high)
            least = tl.min(tl.where(keep, least, float("inf")), 1)
            most = tl.max(tl.where(keep, most, float("-inf")), 1)
            least, most = tl.where(write, least, 0.0), tl.where(write, most, 0.0)
            stored, stored_zero = dynamic_scale(least, most, S, scale.dtype.element_ty)
            row = page * S.scales[0] + head * S.scales[1] + offset * S.scales[2]
            tl.store(scale + row, stored, mask=write)
            if S.zero != "none":
                row = page * S.zeros[0] + head * S.zeros[1] + offset * S.zeros[2]
                tl.store(zero + row, stored_zero, mask=write)
            s_low, z_low = stored.to(tl.float32)[:, None], stored_zero.to(tl.float32)[:, None]
            s_high, z_high = s_low, z_low
        elif S.scale == "group":
            s_low, z_low = store_groups(low, scale, zero, page, head, offset, write, 0, S)
            s_high, z_high = s_low, z_low
            if S.streams == 2:
                s_high, z_high = store_groups(high, scale, zero, page, head, offset, write, 1, S)
        else:
            s_low, s_high, z_low, z_high = low, low, low, low  # not used
        q = encode_numbers(low, s_low, z_low, S)
        if S.kind == "int4":
            upper = encode_numbers(high, s_high, z_high, S)
            q = (q + 8).to(tl.int32) | ((upper + 8).to(tl.int32) << 4)
            tl.store(at, q.to(tl.uint8), mask=keep)
        elif S.kind == "int8":
            tl.store(at, q.to(tl.int8), mask=keep)
        else:
            tl.store(at, float8_bits(q, S), mask=keep)


@triton.jit
def store_groups(x, scale, zero, page, head, offset, write, stream: tl.constexpr, S: tl.constexpr):
    """Stores scale and zero of every group of one stream; returns both spread over the channels [rows, lanes], float32."""
    g = tl.arange(0, S.lanes // S.group)
    keep = write[:, None] & (g < S.groups)[None, :]
    rows = tl.reshape(x, (x.shape[0], S.lanes // S.group, S.group))
    stored, stored_zero = dynamic_scale(tl.min(rows, 2), tl.max(rows, 2), S, scale.dtype.element_ty)
    row = page * S.scales[0] + head * S.scales[1] + offset * S.scales[2] + stream * S.groups
    tl.store(scale + row[:, None] + g[None, :], stored, mask=keep)
    if S.zero != "none":
        row = page * S.zeros[0] + head * S.zeros[1] + offset * S.zeros[2] + stream * S.groups
        tl.store(zero + row[:, None] + g[None, :], stored_zero, mask=keep)
    return spread(stored.to(tl.float32), S), spread(stored_zero.to(tl.float32), S)


def scatter(plane: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """The reference's append for rows that Python has encoded: plane [N, H, B, ...], rows [T, H, ...], without synchronising."""
    check_index(slots, "slots", torch.int64, 1)
    plane, rows = bytes_of(plane), bytes_of(rows.contiguous())
    T, H = rows.shape[:2]
    width = rows[0, 0].numel() if T else 0
    if width:
        scatter_kernel[(T, H)](
            plane, rows, slots, *plane.stride()[:3], B=plane.shape[2], WIDTH=width, LANES=1 << (width - 1).bit_length()
        )


@triton.jit
def scatter_kernel(
    plane, rows, slots, stride_n, stride_h, stride_b, B: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Program (t, h): one row of one head."""
    t, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    c = tl.arange(0, LANES)
    slot = tl.load(slots + t) + tl.zeros([LANES], tl.int64)
    keep = (c < WIDTH) & (slot >= B)
    row = tl.load(rows + (t * tl.num_programs(1) + head) * WIDTH + c, mask=keep)
    tl.store(plane + slot // B * stride_n + head * stride_h + slot % B * stride_b + c, row, mask=keep)
