"""4 bits with a static range per K channel and a dynamic range per group of V channels: the cheapest 4 bits to read."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from qkv.layout import HeadFormat, KVFormat
from qkv.policies.quantizer._affine import AffineQuantizer
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.scales import StaticTensor
from qkv_kernels.reference.codec import MIN_SCALE


@QUANTIZERS.register("int4")
@dataclass
class Int4Quantizer(AffineQuantizer):
    """K: value = code * scale[h, c] + zero[h, c], the channel's [min, max] over the calibration data onto 16 codes.
    V: the same per token and group of channels, from the row itself. K costs 4 bits, V 4 + 32/group: 4.5 together.

    group: V channels that share a range; at most the head dim (the largest common divisor is used).
    Source: KVQuant (Hooper et al. 2024, github.com/SqueezeAILab/KVQuant): static per-channel K, per-token V. Ours is uniform
    where theirs has codebooks and outlier lists, quantizes K after RoPE where theirs does before, and gives V groups; the zero
    point costs nothing to read, since q . zero is one number per query.
    """

    group: Literal[32, 64] = 32

    encode_rule: ClassVar[Literal["minmax"]] = "minmax"

    def static_tensors(self) -> list[StaticTensor]:
        def scale(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
            return ((high - low) / 15).clamp(min=MIN_SCALE)

        def zero(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
            return low + 8 * scale(low, high)

        seen = ("channel_min", "channel_max")
        return [
            StaticTensor("k", "scale", ("H", "D"), seen, scale, positive=True),
            StaticTensor("k", "zero", ("H", "D"), seen, zero),
        ]

    def formats(self, layer: int) -> list[HeadFormat]:
        group = math.gcd(self.group, self._layers[layer].Dv)
        k = KVFormat(bits=4, storage=torch.uint8, scale="channel", scale_dtype=torch.float32, zero="float")
        return self.whole(layer, k, KVFormat(bits=4, storage=torch.uint8, scale="token_group", zero="float", group=group))
