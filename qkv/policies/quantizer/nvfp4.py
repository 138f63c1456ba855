"""NVIDIA's 4-bit floats: a scale in e4m3 for every 16 channels, one in float32 for the layer."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from qkv.layout import SIDES, Codes, KVFormat, Side
from qkv.policies.quantizer._fp4 import LARGEST, Fp4Quantizer
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.scales import StaticTensor
from qkv_kernels.reference import codec


@QUANTIZERS.register("nvfp4")
@dataclass
class NvFp4(Fp4Quantizer):
    """value = e2m1 * scale(16 channels of a token, e4m3) * scale(layer, float32): 4 + 8/16 bits per element.

    A group's scale is its largest magnitude / 6, so that this becomes the largest code; the layer's is the largest magnitude of
    the calibration data / (6 * 448), so that scales use all of e4m3; 1.0 without a scale file.
    search: of largest / 6 and largest / 4 take what has the lower squared error (4 is the largest code with finer ones around).
    Source: NVFP4 as in vLLM (PR 40177) and its "four over six" search (PR 45187). Ours keeps scales in a plane of their own
    and rounds ties down where hardware rounds them to even.
    """

    search: bool = True

    encode_rule: ClassVar[Literal["custom"]] = "custom"

    def static_tensors(self) -> list[StaticTensor]:
        def scale(absmax: torch.Tensor) -> torch.Tensor:
            return (absmax.amax() / (LARGEST * torch.finfo(torch.float8_e4m3fn).max)).clamp(min=codec.MIN_SCALE)

        return [StaticTensor(side, "scale", (), ("head_absmax",), scale, positive=True, default=1.0) for side in SIDES]

    def format_of(self, D: int) -> KVFormat:
        group = math.gcd(16, D)
        return KVFormat(4, torch.uint8, "token_group", torch.float8_e4m3fn, group=group, reading="codebook", tensor_scale=True)

    def encode(self, x: torch.Tensor, side: Side, layer: int, range_index: int = 0) -> Codes:
        plain = super().encode(x, side, layer, range_index)
        if not self.search:
            return plain
        fmt, statics = self.formats(layer)[range_index].of(side), self.statics(layer)[range_index].of(side)
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        assert plain.scale is not None
        wider = (plain.scale.float() * (LARGEST / 4)).clamp(max=torch.finfo(fmt.scale_dtype).max).to(fmt.scale_dtype)
        errors = []
        for codes in (plain, codec.look_up(x, fmt, self._table, wider, None, statics.scale)):
            difference = codec.dequantize(*codes, fmt, x.dtype, *statics) - x
            errors.append(codec.row_sum(difference.square().unflatten(-1, (-1, fmt.group))))
        chosen = torch.where(errors[1] < errors[0], wider.float(), plain.scale.float()).to(fmt.scale_dtype)
        return Codes(*codec.look_up(x, fmt, self._table, chosen, None, statics.scale))
