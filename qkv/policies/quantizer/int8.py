"""int8 with a static scale per K channel and a dynamic scale per V token: the default for quality."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from qkv.layout import HeadFormat, KVFormat
from qkv.policies.quantizer._affine import AffineQuantizer
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.scales import StaticTensor
from qkv_kernels.reference.codec import MIN_SCALE


@QUANTIZERS.register("int8")
@dataclass
class Int8Quantizer(AffineQuantizer):
    """K: value = code * scale[h, c], scale = absmax of the channel over the calibration data / 127; V: like int8_token.

    zero_point: K's range is [min, max] of the channel instead: value = code * scale + zero, scale = (max - min) / 255.
    Source: per-channel K, per-token V as in KIVI (Liu et al. 2024) and KVQuant (Hooper et al. 2024), at 8 bits. Unlike KIVI the
    K scales are static, so each token is encoded once, alone; K is quantized after RoPE. K costs exactly 8 bits, V 8 + 16/D.
    """

    zero_point: bool = False

    encode_rule: ClassVar[Literal["absmax"]] = "absmax"

    def static_tensors(self) -> list[StaticTensor]:
        def symmetric(absmax: torch.Tensor) -> torch.Tensor:
            return (absmax / 127).clamp(min=MIN_SCALE)

        def scale(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
            return ((high - low) / 255).clamp(min=MIN_SCALE)

        def zero(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
            return low + 128 * scale(low, high)

        if not self.zero_point:
            return [StaticTensor("k", "scale", ("H", "D"), ("channel_absmax",), symmetric, positive=True)]
        seen = ("channel_min", "channel_max")
        return [
            StaticTensor("k", "scale", ("H", "D"), seen, scale, positive=True),
            StaticTensor("k", "zero", ("H", "D"), seen, zero),
        ]

    def formats(self, layer: int) -> list[HeadFormat]:
        zero: Literal["float", "none"] = "float" if self.zero_point else "none"
        channel = KVFormat(bits=8, storage=torch.int8, scale="channel", scale_dtype=torch.float32, zero=zero)
        return self.whole(layer, channel, KVFormat(bits=8, storage=torch.int8, scale="token"))
