"""Encode K and V of a call and store them in their pages: one launch for both.

Takes: rows as the model made them, pool planes, slots. Gives: bytes equal to the reference codec's.
Does not know about: attention, requests.
"""

import torch
import triton
import triton.language as tl

from qkv_kernels.reference.attend import Plane
from qkv_kernels.triton import tuning
from qkv_kernels.triton._tiles import dynamic_scale, encode_numbers, float8_bits, spread
from qkv_kernels.triton.launch import Launch
from qkv_kernels.triton.spec import bytes_of, check_index, check_rows, plane_spec


def append(k: torch.Tensor, v: torch.Tensor, k_plane: Plane, v_plane: Plane, slots: torch.Tensor) -> None:
    """k [T, H, Dk], v [T, H, Dv] -> pages. slots [T] int64 = block * B + offset; -1 and slots of block 0 write nothing.

    For formats that encode single tokens; blocks.seal encodes whole ones.
    """
    for launch in append_launches(k, v, k_plane, v_plane, slots, tuning.arch(k.device)):
        launch.run()


def append_launches(
    k: torch.Tensor, v: torch.Tensor, k_plane: Plane, v_plane: Plane, slots: torch.Tensor, arch: str
) -> list[Launch]:
    """Checks the arguments of append (ValueError names them); what to launch on an architecture."""
    k, v = check_rows(k, "k", (None, None, None)), check_rows(v, "v", (*k.shape[:2], None))
    check_index(slots, "slots", torch.int64, 1)
    T, H = k.shape[:2]
    K, V = plane_spec(k_plane, k.shape[2], "k_plane", arch), plane_spec(v_plane, v.shape[2], "v_plane", arch)
    if k_plane.codes.shape[1] != H or v_plane.codes.shape[:3] != k_plane.codes.shape[:3]:
        raise ValueError(
            f"planes must have the {H} heads of k and agree, got {[*k_plane.codes.shape]} and {[*v_plane.codes.shape]}"
        )
    if K.has_tail or V.has_tail:
        raise ValueError("these formats encode whole blocks: use blocks.seal")
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
    rows = k + t * k_stride_t + head * k_stride_h
    store_rows(rows, slot, head, k_codes, k_scale, k_zero, k_static_scale, k_static_zero, None, None, K)
    rows = v + t * v_stride_t + head * v_stride_h
    store_rows(rows, slot, head, v_codes, v_scale, v_zero, v_static_scale, v_static_zero, None, None, V)


@triton.jit
def lanes(S: tl.constexpr):
    """What rows are encoded in: every run of channels padded to a power of two. Channel of each lane, and whether it exists."""
    c = tl.arange(0, S.runs * S.run_lanes)
    return c // S.run_lanes * S.run + c % S.run_lanes, c % S.run_lanes < S.run


@triton.jit
def store_rows(
    x_rows, slot, head, codes, scale, zero, static_scale, static_zero, block_scale, block_zero, S: tl.constexpr
):  # fmt: skip
    """Rows at x_rows [ROWS] (pointers) into their slots. block_scale, block_zero [lanes]: of all rows, for scales of blocks."""
    write = slot >= S.B  # neither padding nor the null block
    page, offset = slot // S.B, slot % S.B
    channel, real = lanes(S)
    keep = write[:, None] & real[None, :]
    at = codes + (page * S.codes[0] + head * S.codes[1] + offset * S.codes[2])
    x = tl.load(x_rows[:, None] + channel[None, :], mask=keep, other=0)
    if S.kind == "raw":
        tl.store(at[:, None] + channel[None, :], x.to(codes.dtype.element_ty), mask=keep)
    else:
        x = x.to(tl.float32)
        s, z = x, x  # not used without a scale
        if S.scale == "static":
            at_channel = head * S.static_scales[0] + channel * S.static_scales[1]
            s = tl.load(static_scale + at_channel, mask=real, other=1.0)[None, :]
            if S.zero != "none":
                at_channel = head * S.static_zeros[0] + channel * S.static_zeros[1]
                z = tl.load(static_zero + at_channel, mask=real, other=0.0)[None, :]
        elif S.scale == "token":
            least = tl.min(tl.where(keep, x, float("inf")), 1)
            most = tl.max(tl.where(keep, x, float("-inf")), 1)
            least, most = tl.where(write, least, 0.0), tl.where(write, most, 0.0)
            stored, stored_zero = dynamic_scale(least, most, S, scale.dtype.element_ty)
            tl.store(scale + (page * S.scales[0] + head * S.scales[1] + offset * S.scales[2]), stored, mask=write)
            if S.zero != "none":
                tl.store(zero + (page * S.zeros[0] + head * S.zeros[1] + offset * S.zeros[2]), stored_zero, mask=write)
            s, z = stored.to(tl.float32)[:, None], stored_zero.to(tl.float32)[:, None]
        elif S.scale == "group":
            s, z = store_groups(x, scale, zero, page, head, offset, write, S)
        elif S.scale == "block":
            s, z = block_scale[None, :], block_zero[None, :]
        q = encode_numbers(x, s, z, S)
        if S.kind == "int8":
            tl.store(at[:, None] + channel[None, :], q.to(tl.int8), mask=keep)
        elif S.kind == "e4m3" or S.kind == "e5m2":
            tl.store(at[:, None] + channel[None, :], float8_bits(q, S), mask=keep)
        else:
            unsigned = (q + S.code_offset).to(tl.int32)
            if S.kind == "int4":
                store_bits(unsigned, at, write, 4, S)
            else:
                store_bits(unsigned & 3, at, write, 2, S)
                if S.kind == "int3":
                    store_bits(unsigned >> 2, at + S.D // 4, write, 1, S)


@triton.jit
def store_bits(x, at, write, BITS: tl.constexpr, S: tl.constexpr):
    """One bit plane of rows (reference/packing.py) at pointers `at` [ROWS]: x [ROWS, lanes], BITS each, n = 8/BITS per byte."""
    N: tl.constexpr = 8 // BITS
    LANES: tl.constexpr = S.runs * S.run_lanes // N
    x = tl.reshape(x, (x.shape[0], N, LANES)) << (tl.arange(0, N) * BITS)[None, :, None]
    c = tl.arange(0, LANES)
    byte, real = c // S.run_lanes * S.run + c % S.run_lanes, c % S.run_lanes < S.run
    tl.store(at[:, None] + byte[None, :], tl.sum(x, 1).to(tl.uint8), mask=write[:, None] & real[None, :])


@triton.jit
def store_groups(x, scale, zero, page, head, offset, write, S: tl.constexpr):
    """Stores scale and zero of every group of channels; returns both spread over the lanes [rows, lanes], float32."""
    LANES: tl.constexpr = S.runs * S.run_lanes
    lane = tl.arange(0, LANES // S.group) * S.group
    group = (lane // S.run_lanes * S.run + lane % S.run_lanes) // S.group
    keep = write[:, None] & (lane % S.run_lanes < S.run)[None, :]
    rows = tl.reshape(x, (x.shape[0], LANES // S.group, S.group))
    stored, stored_zero = dynamic_scale(tl.min(rows, 2), tl.max(rows, 2), S, scale.dtype.element_ty)
    row = page * S.scales[0] + head * S.scales[1] + offset * S.scales[2]
    tl.store(scale + row[:, None] + group[None, :], stored, mask=keep)
    if S.zero != "none":
        row = page * S.zeros[0] + head * S.zeros[1] + offset * S.zeros[2]
        tl.store(zero + row[:, None] + group[None, :], stored_zero, mask=keep)
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
