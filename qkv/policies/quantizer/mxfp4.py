"""4-bit floats of the OCP Microscaling standard: a power of two for every 32 channels."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from qkv.layout import Codes, KVFormat, Side
from qkv.policies.quantizer._fp4 import Fp4Quantizer
from qkv.policies.quantizer.base import QUANTIZERS
from qkv_kernels.reference import codec


@QUANTIZERS.register("mxfp4")
@dataclass
class MxFp4(Fp4Quantizer):
    """value = e2m1 * 2^e, e = floor(log2(largest magnitude of 32 channels of a token)) - 2: 4 + 8/32 bits per element.

    Source: OCP Microscaling Formats 1.0, section 6.3: magnitudes from 6 to 8 times the scale saturate at 6. Groups are the
    largest common divisor of 32 and the head dim; ties are rounded down where the standard rounds them to even.
    """

    encode_rule: ClassVar[Literal["custom"]] = "custom"

    def format_of(self, D: int) -> KVFormat:
        return KVFormat(4, torch.uint8, "token_group", torch.float8_e8m0fnu, group=math.gcd(32, D), reading="codebook")

    def encode(self, x: torch.Tensor, side: Side, layer: int, range_index: int = 0) -> Codes:
        fmt = self.formats(layer)[range_index].of(side)
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        largest = x.unflatten(-1, (-1, fmt.group)).abs().amax(-1)
        exponent = torch.frexp(largest).exponent - 3  # of a number in [0.5, 1), so one more than the floor of log2
        scale = torch.ldexp(torch.ones_like(largest), exponent.clamp(min=-100)).to(fmt.scale_dtype)
        return Codes(*codec.look_up(x, fmt, self._table, scale, None))
