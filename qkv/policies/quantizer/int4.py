"""4 bits with a static range per K channel and a dynamic range per group of V channels: the cheapest 4 bits to read."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from qkv.errors import ScaleError
from qkv.layout import HeadFormat, HeadStatics, KVFormat, LayerShape, Statics
from qkv.policies.quantizer._affine import AffineQuantizer
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.scales import ScaleFile
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
    needs_scales: ClassVar[bool] = True

    def bind(self, layers: list[LayerShape], scales: ScaleFile | None, dtype: torch.dtype, device: torch.device) -> None:
        super().bind(layers, scales, dtype, device)
        if scales is None:
            raise ScaleError(
                "quantizer int4 needs a scale file: write one with `python -m calibration.run quantizer=int4` and pass it as "
                "scales=<file>, or use rotated, which needs none"
            )
        for i, layer in enumerate(layers):
            scale, zero = (scales.tensor(layer, kind, (layer.H, layer.Dk)).to(device) for kind in ("k_scale", "k_zero"))
            self._statics[i] = HeadStatics(k=Statics(scale, zero))

    def formats(self, layer: int) -> list[HeadFormat]:
        group = math.gcd(self.group, self._layers[layer].Dv)
        k = KVFormat(bits=4, storage=torch.uint8, scale="channel", scale_dtype=torch.float32, zero="float")
        return self.whole(layer, k, KVFormat(bits=4, storage=torch.uint8, scale="token_group", zero="float", group=group))

    def observers(self) -> frozenset[str]:
        return frozenset({"k_channel_min", "k_channel_max"})

    def tensors_from_stats(self, stats: dict[int, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        out = {}
        for i, s in stats.items():
            low, high = s["k_channel_min"].float(), s["k_channel_max"].float()
            out[f"layers.{i}.k_scale"] = ((high - low) / 15).clamp(min=MIN_SCALE)
            out[f"layers.{i}.k_zero"] = low + 8 * out[f"layers.{i}.k_scale"]
        return out
