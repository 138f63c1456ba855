"""What the append kernel stores equals, byte for byte, what the reference codec and scatter store."""

import pytest
import torch

from experiments.gpu.kernel_cases import FORMATS, Pool, calibrated, empty_plane, make_pool, store
from qkv_kernels.format import KVFormat
from qkv_kernels.reference import append as reference
from qkv_kernels.reference.attend import Plane

pytest.importorskip("triton", reason="triton is not installed")
from qkv_kernels.triton.append import append, scatter

pytestmark = pytest.mark.interpreter
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


def both(formats: tuple[KVFormat, KVFormat], rows: torch.Tensor, **shape: object) -> tuple[Pool, Pool]:
    """Two pools holding k = v = rows [T, H, D]: one filled by the kernel, one by the reference."""
    pools = []
    for fused in (True, False):
        pool = make_pool(formats, [len(rows)], H=rows.shape[1], Dk=rows.shape[2], filled=False, **shape)  # type: ignore[arg-type]
        pool.k, pool.v = calibrated(pool.k, rows), calibrated(pool.v, rows)
        if fused:
            append(rows, rows, pool.k, pool.v, pool.slots)
        else:
            store(pool.k, rows, pool.slots)
            store(pool.v, rows, pool.slots)
        pools.append(pool)
    return pools[0], pools[1]


def assert_same(a: Plane, b: Plane) -> None:
    for name in ("codes", "scale", "zero"):
        x, y = getattr(a, name), getattr(b, name)
        if x is not None:
            assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_bytes_equal_the_reference(name: str, dtype: str) -> None:
    """Ordinary rows, zeros, constants, outliers, tiny and huge values; every page that is not written keeps its poison."""
    if name == "bf16":
        pytest.skip("the interpreter converts to bfloat16 by truncation; the next test copies bfloat16")
    rows = torch.randn(23, 2, 48)
    rows[3], rows[4], rows[5, 0] = 0, 0.75, -1.5
    rows[6], rows[7], rows[8, :, 5] = rows[6] * 1e-7, rows[7] * 1000, 300.0
    rows[9], rows[10] = rows[9].abs() + 3, -rows[10].abs() - 3
    fused, want = both(FORMATS[name], rows.to(DTYPES[dtype]), B=8)
    assert_same(fused.k, want.k)
    assert_same(fused.v, want.v)


def test_bfloat16_is_copied() -> None:
    fused, want = both(FORMATS["bf16"], torch.randn(9, 2, 32).bfloat16())
    assert_same(fused.k, want.k)


@pytest.mark.parametrize("D", [16, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "int4_group", "int4_token"])
def test_head_dims(name: str, D: int) -> None:
    fused, want = both(FORMATS[name], torch.randn(5, 1, D))
    assert_same(fused.k, want.k)
    assert_same(fused.v, want.v)


@pytest.mark.parametrize("storage", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_rounding_over_all_codes(storage: torch.dtype) -> None:
    """Every representable value, the midpoints between neighbours (ties), and values next to them."""
    values = torch.arange(256, dtype=torch.uint8).view(storage).float()
    values = values[values.isfinite()].unique()
    middle = (values[1:] + values[:-1]) / 2
    x = torch.cat(
        [values, middle, middle.nextafter(values[1:]), middle.nextafter(values[:-1]), torch.tensor([-0.0, 1e-9, 1e9, -1e9])]
    )
    rows = torch.cat([x, x.new_zeros(-len(x) % 64)]).view(-1, 1, 64)
    formats = (KVFormat(8, storage), KVFormat(8, storage))
    fused, want = both(formats, rows)
    assert_same(fused.k, want.k)


def test_padding_and_the_null_block_are_never_written() -> None:
    pool = make_pool(FORMATS["int8"], [20], filled=False)
    before = pool.k.codes.clone()
    rows = torch.full((6, 2, 32), torch.nan)
    append(rows, rows, pool.k, pool.v, torch.tensor([-1, 0, 5, 15, -1, -1]))
    assert torch.equal(pool.k.codes, before)
    append(rows[:0], rows[:0], pool.k, pool.v, torch.empty(0, dtype=torch.int64))


def test_strides_of_rows_and_pages_are_honoured() -> None:
    rows = torch.randn(11, 2, 32)
    for view in (rows.transpose(0, 1).contiguous().transpose(0, 1), torch.randn(11, 2, 64)[..., ::2]):
        fused = make_pool(FORMATS["int4_group"], [11], filled=False, gap=3)
        want = make_pool(FORMATS["int4_group"], [11], filled=False)
        append(view, view, fused.k, fused.v, fused.slots)
        store(want.k, view, want.slots)
        assert_same(fused.k, want.k)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float16, torch.float32])
@pytest.mark.parametrize("tail", [(), (24,)], ids=["scales", "codes"])
def test_scatter_equals_the_reference_append(dtype: torch.dtype, tail: tuple[int, ...]) -> None:
    rows = torch.randn(5, 3, *tail).to(dtype)
    slots = torch.tensor([9, -1, 4, 3, 31])
    planes = [torch.zeros(8, 3, 4, *tail).to(dtype) for _ in range(2)]
    scatter(planes[0], rows, slots)
    reference.append(planes[1], rows, slots)
    assert torch.equal(planes[0].float(), planes[1].float())


def test_errors_name_the_argument() -> None:
    pool = make_pool(FORMATS["int8"], [20])
    k, v, slots = pool.k_rows, pool.v_rows, pool.slots
    for arguments, name in (
        ((k.double(), v, pool.k, pool.v, slots), "k must be float32, float16 or bfloat16"),
        ((k, v[:, :1], pool.k, pool.v, slots), "v must have shape"),
        ((k, v, pool.k._replace(codes=pool.k.codes.float()), pool.v, slots), r"k_plane.codes must be torch.int8"),
        ((k, v, pool.k, pool.v._replace(scale=None), slots), r"v_plane.scale must be given"),
        (
            (k, v, pool.k._replace(static_scale=torch.ones(2, 31)), pool.v, slots),
            r"k_plane.static_scale must be torch.float32 of shape",
        ),
        ((k, v, pool.k, pool.v, slots.int()), "slots must be 1-dimensional torch.int64"),
        ((k, v, pool.k, pool.v, slots[1:]), "slots must have an entry for each of the 20 rows"),
        ((k[:, :1], v[:, :1], pool.k, pool.v, slots), "planes must have the 1 heads of k"),
    ):
        with pytest.raises(ValueError, match=name):
            append(*arguments)
    odd = KVFormat(4, torch.uint8, "token_group", group=24)
    plane = empty_plane(odd, 4, 2, 16, 48, "cpu")
    with pytest.raises(ValueError, match="scale groups of 24 channels: must be a power of two that divides 24"):
        append(torch.ones(1, 2, 48), torch.ones(1, 2, 48), plane, plane, torch.tensor([20]))
