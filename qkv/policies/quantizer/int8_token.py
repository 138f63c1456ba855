"""int8 for K and V with one scale per token and head: the one that needs no calibration."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from qkv.layout import HeadFormat, KVFormat
from qkv.policies.quantizer._affine import AffineQuantizer
from qkv.policies.quantizer.base import QUANTIZERS


@QUANTIZERS.register("int8_token")
@dataclass
class Int8TokenQuantizer(AffineQuantizer):
    """value = code * scale, scale = max |row| / 127 as float16, codes in [-127, 127]: 8 + 16/D bits per element.

    Source: the per-token KV int8 of LMDeploy and SmoothQuant's activations. Ours is symmetric (no zero point) and divides by the
    scale as stored. A K channel far larger than the others (Qwen2's biases) eats the range of its whole row: use int8 there.
    """

    encode_rule: ClassVar[Literal["absmax"]] = "absmax"

    def formats(self, layer: int) -> list[HeadFormat]:
        token = KVFormat(bits=8, storage=torch.int8, scale="token")
        return self.whole(layer, token, token)
