"""Quantizers that read their codes themselves, for tests of formats whose reading is "quantizer"."""

from dataclasses import dataclass
from typing import Literal

import torch

from qkv.layout import Codes, HeadFormat, KVFormat, Side
from qkv.policies.quantizer.base import Quantizer
from qkv.policies.quantizer.int8_token import Int8TokenQuantizer
from qkv.scales import StaticTensor


@dataclass
class Rooted(Quantizer):
    """value = scale * sign(code) * (code / 127)^2: no affine format is like it.

    unit: one scale per token and head, or per channel of a block. tail_blocks, sink_tokens: as in KVFormat.
    """

    unit: Literal["token", "block"] = "token"
    tail_blocks: int = 0
    sink_tokens: int = 0

    name = "rooted"
    encode_rule = "custom"

    def formats(self, layer: int) -> list[HeadFormat]:
        scale: Literal["token", "block_channel"] = "token" if self.unit == "token" else "block_channel"
        kept = {"tail_blocks": self.tail_blocks, "sink_tokens": self.sink_tokens}
        fmt = KVFormat(8, torch.int8, scale, torch.float32, unit=self.unit, reading="quantizer", **kept)  # type: ignore[arg-type]
        return self.whole(layer, fmt, fmt)

    def encode(self, x: torch.Tensor, side: Side, layer: int, range_index: int = 0) -> Codes:
        over = -1 if self.unit == "token" else -3
        scale = x.float().abs().amax(over).clamp(min=2**-24)
        root = (x.float().abs() / scale.unsqueeze(over)).sqrt()
        return Codes((root * 127).round().mul(x.sign()).to(torch.int8), scale)

    def decode(self, codes: Codes, side: Side, layer: int, dtype: torch.dtype, range_index: int = 0) -> torch.Tensor:
        assert codes.scale is not None
        assert codes.scale.isfinite().all(), "decode was given rows that nobody has encoded"
        root = codes.data.to(torch.promote_types(dtype, torch.float32)) / 127
        return (root * root.abs() * codes.scale.to(root.dtype).unsqueeze(-1 if self.unit == "token" else -3)).to(dtype)


@dataclass
class Zeros(Rooted):
    """Every value is read as zero."""

    name = "zeros"

    def decode(self, codes: Codes, side: Side, layer: int, dtype: torch.dtype, range_index: int = 0) -> torch.Tensor:
        return torch.zeros(codes.data.shape, dtype=dtype)


@dataclass
class Untrue(Int8TokenQuantizer):
    """Its V is read as zero, while its format says code * scale."""

    name = "untrue"

    def decode(self, codes: Codes, side: Side, layer: int, dtype: torch.dtype, range_index: int = 0) -> torch.Tensor:
        values = super().decode(codes, side, layer, dtype, range_index)
        return values if side == "k" else torch.zeros_like(values)


@dataclass
class Spread(Rooted):
    """Rooted, after dividing every channel by its calibrated spread, which is in no format: "spread" [H, D] of K and of V."""

    name = "spread"

    def static_tensors(self) -> list[StaticTensor]:
        def half(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
            return (high - low).clamp(min=1e-3) / 2

        seen = ("channel_min", "channel_max")
        return [StaticTensor(side, "spread", ("H", "D"), seen, half, positive=True) for side in ("k", "v")]

    def _spread(self, side: Side, layer: int) -> torch.Tensor:
        spread = self.static_tensor(layer, side, "spread")
        assert spread is not None
        return spread

    def encode(self, x: torch.Tensor, side: Side, layer: int, range_index: int = 0) -> Codes:
        return super().encode(x.float() / self._spread(side, layer), side, layer)

    def decode(self, codes: Codes, side: Side, layer: int, dtype: torch.dtype, range_index: int = 0) -> torch.Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        return (super().decode(codes, side, layer, wide) * self._spread(side, layer)).to(dtype)
