"""Codes of less than a byte, packed into bytes. The layout that kernels read.

A row of D codes is stored as one or two bit planes of D * width / 8 bytes: 4 bits as one plane of width 4, 2 bits as one of
width 2, 3 bits as the two low bits (width 2) followed by the high bit (width 1). In a plane of width w, n = 8 / w codes share
a byte: bits i * w and up of byte j are of channel j + i * D / n. So a plane is read as n runs of D / n consecutive channels
with one shift and one mask each, without shuffles; with 4 bits the low nibble is the first half of D.

Signed codes are stored as code + 2^(bits - 1). Does not know about: scales, formats, pools.
"""

import torch

PLANES: dict[int, tuple[int, ...]] = {4: (4,), 3: (2, 1), 2: (2,)}  # bits -> plane widths, low bits first


def multiple_of(bits: int) -> int:
    """D must be a multiple of this."""
    return 8 // min(PLANES[bits])


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Signed codes [..., D], any dtype, in [-2^(bits-1), 2^(bits-1) - 1] -> uint8 [..., D * bits / 8]."""
    unsigned = (codes + 2 ** (bits - 1)).to(torch.uint8)
    planes, shift = [], 0
    for width in PLANES[bits]:
        runs = ((unsigned >> shift) & (2**width - 1)).chunk(8 // width, -1)
        plane = runs[0]
        for i, run in enumerate(runs[1:], 1):
            plane = plane | (run << (i * width))
        planes.append(plane)
        shift += width
    return planes[0] if len(planes) == 1 else torch.cat(planes, -1)


def unpack(data: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [..., D * bits / 8] -> unsigned codes [..., D] as uint8: code + 2^(bits - 1)."""
    widths = PLANES[bits]
    D = data.shape[-1] * 8 // bits
    codes, shift = None, 0
    for plane, width in zip(data.split([D * width // 8 for width in widths], -1), widths, strict=True):
        part = torch.cat([(plane >> i) & (2**width - 1) for i in range(0, 8, width)], -1)
        codes = part if codes is None else codes | (part << shift)
        shift += width
    assert codes is not None
    return codes
