"""8-bit floats (e4m3) with one scale per token and head: fp8 without calibration and without scales of 1.0."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from qkv.layout import HeadFormat, KVFormat
from qkv.policies.quantizer._affine import AffineQuantizer
from qkv.policies.quantizer.base import QUANTIZERS


@QUANTIZERS.register("fp8_token")
@dataclass
class Fp8TokenQuantizer(AffineQuantizer):
    """value = code * scale, scale = max |row| / 448 as float16, code in e4m3: 8 + 16/D bits per element.

    Source: vLLM's `fp8_per_token_head` of 2026, which stores float32 scales beside the codes; ours are float16, in a plane of
    their own. A code keeps 4 significant bits whatever the magnitude: small elements of a row gain over int8_token, large ones
    lose.
    """

    encode_rule: ClassVar[Literal["absmax"]] = "absmax"

    def formats(self, layer: int) -> list[HeadFormat]:
        token = KVFormat(bits=8, storage=torch.float8_e4m3fn, scale="token")
        return self.whole(layer, token, token)
