"""Base of quantizers that an affine KVFormat describes completely: they choose formats and statics, the codec does the rest.

Does not know about: blocks, requests, attention.
"""

from dataclasses import dataclass

import torch

from qkv.layout import Codes, HeadFormat, HeadStatics, LayerShape, Side
from qkv.policies.quantizer.base import Quantizer
from qkv.scales import ScaleFile
from qkv_kernels.format import KVFormat
from qkv_kernels.reference import codec


@dataclass
class AffineQuantizer(Quantizer):
    """A subclass gives formats() and, where scales are static, fills self._statics (one per layer) in bind()."""

    def bind(self, layers: list[LayerShape], scales: ScaleFile | None, dtype: torch.dtype, device: torch.device) -> None:
        self._layers, self._dtype = layers, dtype
        self._statics = [HeadStatics() for _ in layers]

    def whole(self, layer: int, k: KVFormat, v: KVFormat) -> list[HeadFormat]:
        """One pair of formats for all heads of the layer."""
        return [HeadFormat(range(self._layers[layer].H), k, v)]

    def statics(self, layer: int) -> list[HeadStatics]:
        return [self._statics[layer]]

    def encode(self, x: torch.Tensor, side: Side, layer: int, range_index: int = 0) -> Codes:
        return Codes(*codec.encode(x, self.formats(layer)[range_index].of(side), *self.statics(layer)[range_index].of(side)))

    def decode(self, codes: Codes, side: Side, layer: int, dtype: torch.dtype, range_index: int = 0) -> torch.Tensor:
        fmt, statics = self.formats(layer)[range_index].of(side), self.statics(layer)[range_index].of(side)
        return codec.decode(*codes, fmt, dtype, *statics)
