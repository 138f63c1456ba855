"""KVFormat: how K or V of one head range is stored. All that a store must allocate and a kernel must specialise on.

Lives beside the kernels because they specialise on it and never import qkv; `qkv.layout` re-exports it.
"""

import math
from dataclasses import dataclass, fields
from typing import Literal

import torch

Side = Literal["k", "v"]  # whatever is stored, encoded or decoded has one
SIDES: tuple[Side, Side] = ("k", "v")
Reading = Literal["affine", "codebook", "quantizer"]
ScaleKind = Literal["none", "tensor", "head", "channel", "token", "token_group", "block_channel"]
STATIC_SCALES = ("tensor", "head", "channel")  # parameters of the quantizer, not of the pool
UNFUSED = {
    "codebook": "its codes are read from a codebook, which only the reference backend does",
    "quantizer": "its codes are read by the quantizer's own decode, in Python, which only the reference backend does",
}  # reading -> why fused kernels refuse it


@dataclass(frozen=True)
class KVFormat:
    """A storage format of K or V: what the pool holds for a row, and how that becomes values again.

    reading "affine": value = (code - zero) * scale, or the raw value where scale is "none" and bits >= 16. Kernels do it.
    reading "codebook": value = table[code] * scale, + zero with zero="float". The table has 2^bits entries in ascending order, is
        static, and is one for all heads of a layer [entries] or one for each [H, entries]. Only the reference backend reads it.
    reading "quantizer": the value is what the quantizer's own decode makes of codes, scales and zeros, whatever these mean to it.
        The reference backend calls it for every stored row that attention reads; fused kernels refuse such a format.

    bits: payload bits per element; 4, 3 and 2 bits are packed into uint8 rows as reference/packing.py says. 64 stores
        float64 models raw.
    storage: dtype of the codes.
    scale: who shares one scale. "tensor", "head" [H] and "channel" [H, D] are static (per layer, not in the pool);
        "token" [N, H, B], "token_group" [N, H, B, D/group] and "block_channel" [N, H, D] are planes of the pool.
    scale_dtype: dtype of stored scales (and float zeros). Encoding divides by the scale as stored.
    zero: "none" (symmetric), "code" (zero point as an integer code), "float" (value = code * scale + zero).
    group: channels sharing one scale, for "token_group".
    unit: the smallest piece that is encoded, once, never again. With "block", the open block is kept raw in a tail of its
        request; a query sees its own block and the tail_blocks before it raw, and all earlier blocks quantized.
    tail_blocks: most recent whole blocks kept raw besides the open one (block unit).
    sink_tokens: first tokens of a sequence that are also kept raw, and read raw by every query.
    rotate: block-diagonal Hadamard over the largest power of two dividing D, before encoding.
    tensor_scale: stored scales are multiplied by one more, static and float32, for the whole layer (reading "codebook").

    Raises ValueError for combinations that make no sense.
    """

    bits: Literal[64, 32, 16, 8, 4, 3, 2]
    storage: torch.dtype
    scale: ScaleKind = "none"
    scale_dtype: torch.dtype = torch.float16
    zero: Literal["none", "code", "float"] = "none"
    group: int | None = None
    unit: Literal["token", "block"] = "token"
    tail_blocks: int = 0
    rotate: bool = False
    sink_tokens: int = 0
    reading: Reading = "affine"
    tensor_scale: bool = False

    def __post_init__(self) -> None:
        if (self.group is not None) != (self.scale == "token_group"):
            raise ValueError(f"group={self.group} goes with scale='token_group' only, not with '{self.scale}'")
        if self.unit == "token" and (self.scale == "block_channel" or self.tail_blocks):
            raise ValueError(f"unit='token' does not go with scale='{self.scale}' and tail_blocks={self.tail_blocks}")
        if self.rotate and self.scale == "channel":
            raise ValueError("rotation mixes channels, so static per-channel scales do not fit a rotated format")
        if self.bits >= 16 and (self.scale != "none" or self.zero != "none"):
            raise ValueError(f"a {self.bits}-bit format is stored raw: scale and zero must be 'none'")
        if self.reading == "codebook" and (self.bits > 4 or self.zero == "code" or self.scale in STATIC_SCALES):
            raise ValueError(
                f"reading='codebook' goes with codes of 2, 3 or 4 bits, zero 'none' or 'float' and a scale that is stored "
                f"(got {self.bits} bits, zero='{self.zero}', scale='{self.scale}')"
            )
        if self.tensor_scale and self.reading != "codebook":
            raise ValueError(f"tensor_scale goes with reading='codebook', not with '{self.reading}'")
        if self.reading == "quantizer" and (self.scale in STATIC_SCALES or self.rotate or self.raw):
            raise ValueError(
                f"reading='quantizer' goes with codes of 8 bits or fewer, no rotate and no static scale (got {self.bits} bits, "
                f"rotate={self.rotate}, scale='{self.scale}'): such a quantizer rotates, and keeps its static tensors, itself"
            )

    @property
    def raw(self) -> bool:
        """Stored as it comes, without codes and scales."""
        return self.bits >= 16

    def packed_dim(self, D: int) -> int:
        """Elements of `storage` per row of D channels (Dp)."""
        if self.bits >= 8:
            return D
        return math.ceil(D * self.bits / 8)

    def unpacked_dim(self, Dp: int) -> int:
        """Channels (D) of a row of Dp elements of `storage`."""
        return Dp if self.bits >= 8 else Dp * 8 // self.bits

    def scale_shape(self, N: int, H: int, B: int, D: int) -> tuple[int, ...] | None:
        """Shape of the scale plane in the pool, or None where scales are static or absent."""
        match self.scale:
            case "token":
                return (N, H, B)
            case "token_group":
                assert self.group is not None
                return (N, H, B, D // self.group)
            case "block_channel":
                return (N, H, D)
        return None

    def bytes_per_block(self, B: int, H: int, D: int) -> int:
        """Bytes one block takes in the pool: codes + scales + zeros of B tokens and H heads."""
        codes = B * H * self.packed_dim(D) * self.storage.itemsize
        shape = self.scale_shape(1, H, B, D)
        planes = (1 + (self.zero != "none")) if shape else 0
        return codes + planes * (math.prod(shape) if shape else 0) * self.scale_dtype.itemsize

    def tail_rows(self, B: int) -> int:
        """Raw rows of every request's tail: the open block and tail_blocks more; 0 for token-unit formats."""
        return (self.tail_blocks + 1) * B if self.unit == "block" else 0

    def effective_bits(self, B: int, D: int) -> float:
        """Marginal bits per element of a full block, scales and zeros included."""
        return 8 * self.bytes_per_block(B, 1, D) / (B * D)

    def fingerprint(self) -> str:
        """Identity of the byte layout: two pools may exchange blocks only if these agree."""
        return ":".join(str(getattr(self, f.name)) for f in fields(self))
