"""KVFormat's arithmetic against tensors actually allocated."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.layout import KVFormat

FORMATS = [
    KVFormat(bits=64, storage=torch.float64),
    KVFormat(bits=16, storage=torch.bfloat16),
    KVFormat(bits=8, storage=torch.float8_e4m3fn, scale="head", scale_dtype=torch.float32),
    KVFormat(bits=8, storage=torch.int8, scale="channel", scale_dtype=torch.float32, zero="float"),
    KVFormat(bits=8, storage=torch.int8, scale="token"),
    KVFormat(bits=4, storage=torch.uint8, scale="token", zero="code"),
    KVFormat(bits=4, storage=torch.uint8, scale="token_group", group=8, zero="float"),
    KVFormat(bits=4, storage=torch.uint8, scale="token_group", group=8, zero="float", reading="quantizer"),
    KVFormat(bits=2, storage=torch.uint8, scale="block_channel", unit="block", zero="float", tail_blocks=1),
    KVFormat(bits=3, storage=torch.uint8, scale="block_channel", unit="block"),
]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.fingerprint())
@given(B=st.sampled_from([8, 16, 32]), H=st.integers(1, 4), D=st.sampled_from([8, 64, 80]))
def test_bytes_per_block_is_what_the_planes_take(fmt: KVFormat, B: int, H: int, D: int) -> None:
    allocated = torch.empty(1, H, B, fmt.packed_dim(D), dtype=fmt.storage).nbytes
    shape = fmt.scale_shape(1, H, B, D)
    if shape:
        allocated += torch.empty(shape, dtype=fmt.scale_dtype).nbytes * (2 if fmt.zero != "none" else 1)
    assert fmt.bytes_per_block(B, H, D) == allocated
    assert fmt.effective_bits(B, D) == 8 * allocated / (H * B * D)


def test_effective_bits_are_those_of_the_literature() -> None:
    assert KVFormat(bits=8, storage=torch.int8, scale="token").effective_bits(16, 64) == 8.25
    assert KVFormat(bits=8, storage=torch.int8, scale="channel").effective_bits(16, 64) == 8
    assert KVFormat(bits=4, storage=torch.uint8, scale="token_group", group=32, zero="float").effective_bits(16, 64) == 5
    assert KVFormat(bits=2, storage=torch.uint8, scale="block_channel", unit="block", zero="float").effective_bits(32, 128) == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 8, "storage": torch.int8, "scale": "token", "group": 8}, "group"),
        ({"bits": 8, "storage": torch.int8, "scale": "token_group"}, "group"),
        ({"bits": 8, "storage": torch.int8, "scale": "block_channel"}, "unit"),
        ({"bits": 8, "storage": torch.int8, "scale": "token", "tail_blocks": 1}, "unit"),
        ({"bits": 8, "storage": torch.int8, "scale": "channel", "rotate": True}, "rotation"),
        ({"bits": 16, "storage": torch.float16, "scale": "token"}, "raw"),
        ({"bits": 32, "storage": torch.float32, "zero": "float"}, "raw"),
        ({"bits": 32, "storage": torch.float32, "reading": "quantizer"}, "got 32 bits"),
        ({"bits": 8, "storage": torch.int8, "scale": "head", "reading": "quantizer"}, "scale='head'"),
        ({"bits": 8, "storage": torch.int8, "scale": "token", "rotate": True, "reading": "quantizer"}, "rotate=True"),
    ],
)
def test_senseless_combinations_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVFormat(**fields)


def test_fingerprints_tell_formats_apart() -> None:
    assert len({f.fingerprint() for f in FORMATS}) == len(FORMATS)
