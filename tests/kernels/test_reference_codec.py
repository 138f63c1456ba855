"""The codec's arithmetic: error bounds, purity of rows, guards, saturation, packing."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qkv_kernels.format import KVFormat
from qkv_kernels.reference import codec
from qkv_kernels.reference.hadamard import block_size, hadamard
from qkv_kernels.reference.packing import pack, unpack

INT8 = KVFormat(bits=8, storage=torch.int8, scale="token")
INT4 = KVFormat(bits=4, storage=torch.uint8, scale="token")
E4M3 = KVFormat(bits=8, storage=torch.float8_e4m3fn, scale="head", scale_dtype=torch.float32)
E5M2 = dataclasses.replace(E4M3, storage=torch.float8_e5m2)


def grouped(fmt: KVFormat) -> KVFormat:
    return dataclasses.replace(fmt, scale="token_group", group=4)


def zeroed(fmt: KVFormat, zero: Any) -> KVFormat:
    return dataclasses.replace(fmt, zero=zero)


INT3, INT2 = (dataclasses.replace(INT4, bits=bits) for bits in (3, 2))
DYNAMIC = {
    f"{name}{'-group' if group else ''}-{zero}": zeroed(grouped(fmt) if group else fmt, zero)
    for name, fmt in (("int8", INT8), ("int4", INT4), ("int3", INT3), ("int2", INT2))
    for group in (False, True)
    for zero in ("none", "float", "code")
}
ROTATED = dataclasses.replace(INT4, zero="float", rotate=True)
DYNAMIC["int4-rotated"] = ROTATED
DYNAMIC["fp8-token"] = dataclasses.replace(E4M3, scale="token", scale_dtype=torch.float16)

VALUES = st.floats(-1e4, 1e4, width=32) | st.floats(-1, 1, width=32) | st.sampled_from([0.0, 1e-6, 3e5, -3e38])
ROWS = hnp.arrays(np.float32, (3, 2, 8), elements=VALUES)


def roundtrip(x: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    return codec.decode(*codec.encode(x, fmt), fmt, torch.float32)


@pytest.mark.parametrize("fmt", DYNAMIC.values(), ids=DYNAMIC)
@given(x=ROWS)
@settings(max_examples=60)
def test_rows_are_finite_pure_and_independent(fmt: KVFormat, x: np.ndarray) -> None:
    rows = torch.from_numpy(x)
    before = rows.clone()
    whole = codec.encode(rows, fmt)
    assert torch.equal(rows, before)
    assert codec.decode(*whole, fmt, torch.float32).isfinite().all()
    for i in range(len(rows)):
        for all_rows, one in zip(whole, codec.encode(rows[i : i + 1], fmt), strict=True):
            if all_rows is not None and one is not None:
                assert torch.equal(all_rows[i].view(torch.uint8), one[0].view(torch.uint8))


@pytest.mark.parametrize("name", [n for n in DYNAMIC if n.startswith("int") and n != "int4-rotated"])
@given(x=hnp.arrays(np.float32, (3, 2, 8), elements=st.floats(-1e4, 1e4, width=32)))
@settings(max_examples=60)
def test_error_is_at_most_half_a_step(name: str, x: np.ndarray) -> None:
    """With an integer zero point, which is rounded too, a whole step. For small rows the rounding of float16 scales is added."""
    fmt = DYNAMIC[name]
    rows = torch.from_numpy(x)
    data, scale, zero = codec.encode(rows, fmt)
    assert scale is not None
    error = (codec.decode(data, scale, zero, fmt, torch.float32) - rows).abs()
    step = scale.float().repeat_interleave(fmt.group, -1) if fmt.group else scale.float()[..., None]
    # rounding the scale to float16 (by at most 2^-11, or 2^-25 below its normal range) may clip the largest codes by that much
    slack = 128 * (step * 2**-11 + 2**-25) + rows.abs() * 2**-20
    bound = step * (1.0 if fmt.zero == "code" else 0.5) + slack
    assert (error <= bound).all()


@pytest.mark.parametrize("fmt", DYNAMIC.values(), ids=DYNAMIC)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-30, 1.0, -3.75, 65504.0, 1e30])
def test_constant_rows_stay_finite_and_zeros_stay_zeros(fmt: KVFormat, value: float) -> None:
    out = roundtrip(torch.full((2, 2, 8), value), fmt)
    assert out.isfinite().all()
    if abs(value) < 1e-20:
        assert not out.any()
    elif abs(value) < (5e4 if fmt.rotate else 1e5):  # rotated, a constant row is one value sqrt(8) times as large
        torch.testing.assert_close(out, torch.full_like(out, value), rtol=2**-9, atol=1e-6)


@pytest.mark.parametrize("fmt", DYNAMIC.values(), ids=DYNAMIC)
def test_codes_are_computed_from_the_scale_as_stored(fmt: KVFormat) -> None:
    """So encoding what was decoded, with the stored scale, gives the same codes."""
    x = torch.randn(5, 2, 8)
    data, scale, zero = codec.encode(x, fmt)
    values = codec.dequantize(data, scale, zero, fmt, torch.float32)
    wide = values.unflatten(-1, (-1, fmt.group)) if fmt.group else values
    s = scale[..., None].float()  # type: ignore[index]
    q = wide / s
    if fmt.zero == "float":
        q = (wide - zero[..., None].float()) / s  # type: ignore[index]
    if fmt.storage != torch.float8_e4m3fn:
        torch.testing.assert_close(q, q.round(), rtol=0, atol=2e-2)


def test_rounding_is_half_to_even_and_int8_is_symmetric() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 127.0, -127.0, -126.5]).view(1, 1, 8)
    data, scale, _ = codec.encode(x, INT8)
    assert scale is not None
    assert scale.item() == 1.0
    assert data.flatten().tolist() == [0, 2, 2, 0, -2, 127, -127, -126]
    assert torch.equal(codec.encode(-x, INT8)[0], -data)


def test_what_is_clipped_is_clipped_alike_on_both_sides() -> None:
    symmetric = KVFormat(bits=8, storage=torch.int8, scale="head", scale_dtype=torch.float32)
    data, _, _ = codec.encode(torch.tensor([[[-1e3, 1e3, -127.0, 1.0]]]), symmetric, torch.ones(1))
    assert data.tolist() == [[[-127, 127, -127, 1]]]


@pytest.mark.parametrize(("fmt", "largest"), [(E4M3, 448.0), (E5M2, 57344.0)])
def test_fp8_saturates(fmt: KVFormat, largest: float) -> None:
    x = torch.tensor([1e30, -1e30, largest * 1.03, largest, 3e38, 0.0]).view(1, 1, 6)
    one = torch.ones(1)
    data, _, _ = codec.encode(x, fmt, one)
    assert codec.decode(data, None, None, fmt, torch.float32, one).flatten().tolist() == [
        largest,
        -largest,
        largest,
        largest,
        largest,
        0.0,
    ]


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_fp8_decodes_every_byte_like_torch(fmt: KVFormat) -> None:
    data = torch.arange(256, dtype=torch.uint8).view(fmt.storage).view(4, 1, 64)
    out = codec.decode(data, None, None, fmt, torch.float32, torch.ones(1))
    torch.testing.assert_close(out, data.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scale", ["tensor", "head", "channel"])
@pytest.mark.parametrize("zero", ["none", "float", "code"])
@pytest.mark.parametrize("bits", [8, 4])
def test_static_parameters_clip_what_is_out_of_range(scale: str, zero: str, bits: int) -> None:
    fmt = KVFormat(bits=bits, storage=torch.int8 if bits == 8 else torch.uint8, scale=scale, scale_dtype=torch.float32, zero=zero)  # type: ignore[arg-type]
    shape = {"tensor": (), "head": (2,), "channel": (2, 8)}[scale]
    s, z = torch.full(shape, 0.5), torch.full(shape, 2.0)
    low, high = codec.code_range(fmt)
    offset = {"none": 0.0, "float": 2.0, "code": -1.0}[zero]
    x = torch.stack([torch.full((2, 8), v) for v in (-1e6, 1e6, offset + 1.5)])
    data, dynamic, _ = codec.encode(x, fmt, s, z)
    assert dynamic is None
    out = codec.decode(data, None, None, fmt, torch.float32, s, z)
    assert out[:, 0, 0].tolist() == [low * 0.5 + offset, high * 0.5 + offset, offset + 1.5]
    assert torch.equal(out, out[:, :1, :1].expand_as(out))


def test_int4_low_nibble_is_the_first_half_of_the_channels() -> None:
    x = torch.arange(-7, 8, 2).float().view(1, 1, 8)
    data, _, _ = codec.encode(x, INT4)
    assert data.dtype == torch.uint8
    assert ((data & 15).int() - 8).flatten().tolist() == [-7, -5, -3, -1]
    assert ((data >> 4).int() - 8).flatten().tolist() == [1, 3, 5, 7]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_raw_formats_return_what_they_were_given(dtype: torch.dtype) -> None:
    fmt = KVFormat(bits=dtype.itemsize * 8, storage=dtype)  # type: ignore[arg-type]
    x = torch.randn(3, 2, 5, dtype=dtype)
    assert torch.equal(codec.decode(*codec.encode(x, fmt), fmt, dtype), x)


def test_float64_input_is_encoded_in_float64() -> None:
    fmt = KVFormat(bits=8, storage=torch.int8, scale="channel", scale_dtype=torch.float32)
    third = torch.full((1, 1, 2), 0.5 + 1e-12, dtype=torch.float64)  # float32 would round this to a tie
    assert codec.encode(third, fmt, torch.ones(1, 2))[0].flatten().tolist() == [1, 1]


@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("D", [8, 64, 80])
def test_packing_is_lossless_and_each_plane_is_runs_of_consecutive_channels(bits: int, D: int) -> None:
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (3, 2, D))
    data = pack(codes, bits)
    assert data.shape == (3, 2, D * bits // 8)
    offset = 2 ** (bits - 1)
    assert torch.equal(unpack(data, bits).int() - offset, codes.int())
    width = 2 if bits < 4 else 4
    low = (data[..., : D * width // 8] & (2**width - 1)).int()  # the first run: the low bits of channels 0, 1, ...
    assert torch.equal(low, (codes[..., : D * width // 8].int() + offset) & (2**width - 1))
    if bits == 3:
        high = (data[..., D // 4 :] >> 7).int()  # the last run of the 1-bit plane
        assert torch.equal(high, (codes[..., D - D // 8 :].int() + offset) >> 2)


@pytest.mark.parametrize(("D", "block"), [(64, 64), (80, 16), (96, 32), (7, 1)])
def test_hadamard_is_orthonormal_block_diagonal_and_its_own_inverse(D: int, block: int) -> None:
    assert block_size(D) == block
    matrix = hadamard(torch.eye(D, dtype=torch.float64))
    torch.testing.assert_close(matrix @ matrix, torch.eye(D, dtype=torch.float64))
    assert torch.equal(matrix, matrix.T)
    blocks = matrix.view(D // block, block, D // block, block).transpose(1, 2)
    assert ((blocks.abs().amax((2, 3)) > 0) == torch.eye(D // block, dtype=torch.bool)).all()
    assert matrix[0, :block].unique().numel() == 1


def test_rotation_spreads_an_outlier_channel_over_its_row() -> None:
    x = torch.randn(100, 2, 64)
    x[..., 17] *= 100
    plain, rotated = ((roundtrip(x, f) - x).square().mean() for f in (zeroed(INT4, "float"), ROTATED))
    assert rotated < plain


def test_error_grows_as_bits_fall() -> None:
    """The mean square error grows by about a factor of 4 per bit; if it were much smaller, something would not be quantized."""
    x = torch.randn(200, 2, 64)
    formats = [INT8, *(zeroed(f, "float") for f in (INT4, INT3, INT2))]
    errors = [float((roundtrip(x, f) - x).square().mean()) for f in formats]
    assert roundtrip(x, KVFormat(bits=32, storage=torch.float32)).equal(x)
    assert all(3 < (b / a) ** (1 / bits) < 6 for a, b, bits in zip(errors, errors[1:], (4, 1, 1), strict=False))


@pytest.mark.parametrize("fmt", DYNAMIC.values(), ids=DYNAMIC)
def test_large_activations_saturate_their_float16_scales(fmt: KVFormat) -> None:
    out = roundtrip(torch.randn(20, 2, 64) * 1e5, dataclasses.replace(fmt, group=fmt.group and 32))
    assert out.isfinite().all()
    small = torch.randn(20, 2, 64).clamp(-0.6, 0.6) * 1e5
    relative = (roundtrip(small, fmt) - small).norm() / small.norm()
    assert relative < 2.0 ** (2 - min(fmt.bits, 5)) or fmt.zero == "code", "float16 scales reach 1e5-sized values"


@pytest.mark.parametrize(
    ("fmt", "D", "reason"),
    [
        (KVFormat(bits=4, storage=torch.uint8, scale="block_channel", unit="block"), 8, None),
        (dataclasses.replace(INT8, rotate=True), 8, None),
        (dataclasses.replace(INT4, bits=3), 8, None),
        (dataclasses.replace(INT4, bits=3), 12, "multiple of 8"),
        (dataclasses.replace(INT4, bits=2), 6, "multiple of 4"),
        (dataclasses.replace(INT8, scale="token_group", group=6), 8, "not a multiple"),
        (INT4, 7, "multiple of 2 (got 7)"),
        (dataclasses.replace(INT8, storage=torch.int16), 8, "int16"),
        (zeroed(E4M3, "float"), 8, "zero point"),
        (KVFormat(bits=16, storage=torch.int16), 8, "float type"),
        (INT8, 7, None),
        (E5M2, 7, None),
        (grouped(INT4), 8, None),
    ],
)
def test_refusal_says_why(fmt: KVFormat, D: int, reason: str | None) -> None:
    said = codec.refusal(fmt, D)
    assert (said is None) if reason is None else (said is not None and reason in said)
