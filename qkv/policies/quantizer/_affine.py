"""Base of quantizers that an affine KVFormat describes completely: they choose formats and statics, the codec does the rest.

Does not know about: blocks, requests, attention.
"""

from dataclasses import dataclass

import torch

from qkv.layout import Codes, Side
from qkv.policies.quantizer.base import Quantizer
from qkv_kernels.reference import codec


@dataclass
class AffineQuantizer(Quantizer):
    """A subclass gives formats() and, where scales are static, static_tensors() of the kinds "scale" and "zero"."""

    def encode(self, x: torch.Tensor, side: Side, layer: int, range_index: int = 0) -> Codes:
        return Codes(*codec.encode(x, self.formats(layer)[range_index].of(side), *self.statics(layer)[range_index].of(side)))

    def decode(self, codes: Codes, side: Side, layer: int, dtype: torch.dtype, range_index: int = 0) -> torch.Tensor:
        fmt, statics = self.formats(layer)[range_index].of(side), self.statics(layer)[range_index].of(side)
        return codec.decode(*codes, fmt, dtype, *statics)
