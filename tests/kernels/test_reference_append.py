"""Scattering rows into the pool writes exactly the slots named, and nothing else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv_kernels.reference.append import append

N, H, B = 4, 2, 3


@given(slots=st.lists(st.integers(B, N * B - 1), unique=True, max_size=8), padding=st.integers(0, 3))
def test_rows_land_in_their_slots_and_padding_writes_nothing(slots: list[int], padding: int) -> None:
    plane = torch.zeros(N, H, B, 5, dtype=torch.int8)
    rows = torch.randint(1, 127, (len(slots) + padding, H, 5), dtype=torch.int8)
    append(plane, rows, torch.tensor(slots + [-1] * padding, dtype=torch.int64))
    expected = torch.zeros_like(plane)
    for row, slot in zip(rows, slots, strict=False):
        expected[slot // B, :, slot % B] = row
    assert torch.equal(plane, expected)


def test_padding_slot_does_not_write_the_last_slot() -> None:
    """Used as a Python index, a slot of -1 would write the last one."""
    plane = torch.zeros(N, H, B)
    append(plane, torch.ones(1, H), torch.tensor([-1]))
    assert not plane.any()


def test_null_block_is_never_written() -> None:
    plane = torch.zeros(N, H, B)
    append(plane, torch.ones(B, H), torch.arange(B))
    assert not plane.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8])
@pytest.mark.parametrize("tail", [(), (7,)], ids=["scales", "codes"])
def test_every_storage_dtype_and_plane_shape(dtype: torch.dtype, tail: tuple[int, ...]) -> None:
    plane = torch.zeros(N, H, B, *tail).to(dtype)
    rows = torch.rand(2, H, *tail).to(dtype)
    append(plane, rows, torch.tensor([B, N * B - 1]))
    assert torch.equal(plane[1, :, 0].float(), rows[0].float())
    assert torch.equal(plane[-1, :, -1].float(), rows[1].float())


def test_address_derives_from_strides() -> None:
    """There is padding between pages, and only the pages are written."""
    whole = torch.zeros(N, 2 * H, B, 4)
    append(whole[:, :H], torch.ones(1, H, 4), torch.tensor([2 * B + 1]))
    assert whole[2, :H, 1].all()
    assert whole.sum() == H * 4
