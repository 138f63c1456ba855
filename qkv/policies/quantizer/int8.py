"""int8 with a static scale per K channel and a dynamic scale per V token: the default for quality."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from qkv.errors import ScaleError
from qkv.layout import HeadFormat, HeadStatics, KVFormat, LayerShape, Statics
from qkv.policies.quantizer._affine import AffineQuantizer
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.scales import ScaleFile
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
    needs_scales: ClassVar[bool] = True

    def bind(self, layers: list[LayerShape], scales: ScaleFile | None, dtype: torch.dtype, device: torch.device) -> None:
        super().bind(layers, scales, dtype, device)
        if scales is None:
            raise ScaleError(
                "quantizer int8 needs a scale file: write one with `python -m calibration.run quantizer=int8` and pass it as "
                "scales=<file>, or use int8_token, which needs none"
            )
        if not self.zero_point and any(name.endswith("k_zero") for name in scales.tensors):
            raise ScaleError(
                "scale file holds zero points, but int8 runs with zero_point=false; set zero_point=true or calibrate again"
            )
        for i, layer in enumerate(layers):
            shape = (layer.H, layer.Dk)
            zero = scales.tensor(layer, "k_zero", shape).to(device) if self.zero_point else None
            self._statics[i] = HeadStatics(k=Statics(scales.tensor(layer, "k_scale", shape).to(device), zero))

    def formats(self, layer: int) -> list[HeadFormat]:
        zero: Literal["float", "none"] = "float" if self.zero_point else "none"
        channel = KVFormat(bits=8, storage=torch.int8, scale="channel", scale_dtype=torch.float32, zero=zero)
        return self.whole(layer, channel, KVFormat(bits=8, storage=torch.int8, scale="token"))

    def observers(self) -> frozenset[str]:
        return frozenset({"k_channel_min", "k_channel_max"} if self.zero_point else {"k_channel_absmax"})

    def tensors_from_stats(self, stats: dict[int, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        out = {}
        for i, s in stats.items():
            if self.zero_point:
                low, high = s["k_channel_min"].float(), s["k_channel_max"].float()
                out[f"layers.{i}.k_scale"] = ((high - low) / 255).clamp(min=MIN_SCALE)
                out[f"layers.{i}.k_zero"] = low + 128 * out[f"layers.{i}.k_scale"]
            else:
                out[f"layers.{i}.k_scale"] = (s["k_channel_absmax"].float() / 127).clamp(min=MIN_SCALE)
        return out
