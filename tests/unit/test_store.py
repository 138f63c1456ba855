"""The pool's tensors: byte-exact swapping, poison, the null block."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.cache.store import KVStore, block_bytes
from qkv.layout import HeadFormat, KVFormat, LayerShape

CPU = torch.device("cpu")
INT4 = KVFormat(bits=4, storage=torch.uint8, scale="token_group", group=4, zero="float")
INT8 = KVFormat(bits=8, storage=torch.int8, scale="token")
FP8 = KVFormat(bits=8, storage=torch.float8_e4m3fn, scale="head", scale_dtype=torch.float32)
BF16 = KVFormat(bits=16, storage=torch.bfloat16)
LAYERS = [LayerShape(index=0, H=2, Hq=4, Dk=8, Dv=12, scaling=1.0), LayerShape(index=1, H=3, Hq=3, Dk=16, Dv=16, scaling=1.0)]
FORMATS = [[HeadFormat(range(2), INT8, INT4)], [HeadFormat(range(1), BF16, BF16), HeadFormat(range(1, 3), FP8, INT8)]]


def store(**more: object) -> KVStore:
    return KVStore(LAYERS, FORMATS, num_blocks=6, block_size=8, device=CPU, **more)  # type: ignore[arg-type]


def tensors(s: KVStore) -> list[torch.Tensor]:
    return [t for i in range(len(LAYERS)) for p in s.planes(i) for t in p.tensors]


def fill(s: KVStore) -> None:
    for t in tensors(s):
        t[1:].view(torch.uint8).random_(0, 256)


def snapshot(s: KVStore) -> list[torch.Tensor]:
    return [t.view(torch.uint8).clone() for t in tensors(s)]


def test_plane_shapes() -> None:
    (p,) = store().planes(0)
    assert p.k.codes.shape == (6, 2, 8, 8)
    assert p.v.codes.shape == (6, 2, 8, 6)
    assert p.k.scale is not None
    assert p.k.scale.shape == (6, 2, 8)
    assert p.k.zero is None
    assert p.v.scale is not None
    assert p.v.zero is not None
    assert p.v.scale.shape == p.v.zero.shape == (6, 2, 8, 3)
    a, b = store().planes(1)
    assert (a.heads, b.heads) == (range(1), range(1, 3))
    assert a.k.codes.shape == (6, 1, 8, 16)
    assert b.k.scale is None  # static: not in the pool


def test_allocated_bytes_equal_the_formula() -> None:
    s = store(host_blocks=2, static_bytes=8)
    report = s.memory_report()
    assert sum(t.nbytes for t in tensors(s)) == s.pool_bytes == report["pool_bytes"] == 6 * s.block_bytes
    assert s.block_bytes == block_bytes(LAYERS, FORMATS, 8) == report["null_block_bytes"] == report["kv_bytes_per_token"] * 8
    assert report["static_bytes"] == 8
    assert report["allocated_bytes"] == report["pool_bytes"] + report["static_bytes"]
    pool_scales = sum(
        t.nbytes for i in (0, 1) for p in s.planes(i) for t in (p.k.scale, p.k.zero, p.v.scale, p.v.zero) if t is not None
    )
    assert report["scale_bytes"] == pool_scales + report["static_bytes"]
    assert report["effective_bits_k"] == (2 * 8 * (8 + 2) + 16 * 16 + 2 * 16 * 8) / (2 * 8 + 3 * 16)
    assert s.host_bytes == 0
    s.copy_out([1], [0])
    assert s.host_bytes == s.memory_report()["host_bytes"] == 2 * s.block_bytes


@given(ids=st.permutations(range(1, 6)), hosts=st.permutations(range(7)), n=st.integers(0, 5))
@settings(max_examples=25)
def test_swap_round_trip_is_byte_exact(ids: list[int], hosts: list[int], n: int) -> None:
    s = store(host_blocks=7)
    fill(s)
    before = snapshot(s)
    s.copy_out(ids[:n], hosts[:n])
    s.poison_blocks(ids[:n])
    s.copy_in(ids[:n], hosts[:n])
    assert all(torch.equal(a, b) for a, b in zip(snapshot(s), before, strict=True))


def test_swap_into_other_blocks_moves_the_bytes_and_nothing_else() -> None:
    s = store(host_blocks=2)
    fill(s)
    before = snapshot(s)
    s.copy_out([2, 5], [1, 0])
    s.copy_in([1, 4], [1, 0])
    for now, old in zip(snapshot(s), before, strict=True):
        assert torch.equal(now[1], old[2])
        assert torch.equal(now[4], old[5])
        assert torch.equal(now[[0, 2, 3, 5]], old[[0, 2, 3, 5]])


def test_poison_shows_in_every_plane_but_the_null_block() -> None:
    s = store(poison=True)
    s.check_null()
    for t in tensors(s):
        if t.dtype.is_floating_point:
            assert t[1:].float().isnan().all()
        else:
            assert (t[1:] == 127).all()


def test_a_written_null_block_is_found() -> None:
    s = store()
    s.check_null()
    s.planes(1)[1].v.codes[0, 0, 3, 5] = 1
    with pytest.raises(AssertionError, match="layer 1"):
        s.check_null()


@pytest.mark.parametrize(
    ("device_ids", "host_ids"), [([0], [0]), ([6], [0]), ([-1], [0]), ([1], [2]), ([1], [-1]), ([1, 2], [0])]
)
def test_ids_out_of_range_are_refused(device_ids: list[int], host_ids: list[int]) -> None:
    s = store(host_blocks=2)
    for copy in (s.copy_out, s.copy_in):
        with pytest.raises(ValueError, match="must be"):
            copy(device_ids, host_ids)


def test_fingerprint_tells_layouts_apart() -> None:
    prints = {store().fingerprint, store(fingerprint="other").fingerprint}
    prints.add(KVStore(LAYERS, FORMATS, 6, 16, CPU).fingerprint)
    prints.add(KVStore(LAYERS[:1], FORMATS[:1], 6, 8, CPU).fingerprint)
    assert len(prints) == 4
    assert KVStore(LAYERS, FORMATS, 9, 8, CPU).fingerprint == store().fingerprint  # the pool's size may differ
