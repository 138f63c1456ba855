"""Base of quantizers that an affine KVFormat describes completely: they choose formats and statics, the codec does the rest.

Does not know about: blocks, requests, attention.
"""

from dataclasses import dataclass

import torch

from qkv.layout import Codes, HeadFormat, LayerShape, Statics
from qkv.policies.quantizer.base import Quantizer
from qkv.scales import ScaleFile
from qkv_kernels.format import KVFormat
from qkv_kernels.reference import codec


@dataclass
class AffineQuantizer(Quantizer):
    """A subclass gives formats() and, where scales are static, fills self._statics (one per layer) in bind()."""

    def bind(self, layers: list[LayerShape], scales: ScaleFile | None, dtype: torch.dtype, device: torch.device) -> None:
        self._layers, self._dtype = layers, dtype
        self._statics = [Statics() for _ in layers]

    def whole(self, layer: int, k: KVFormat, v: KVFormat) -> list[HeadFormat]:
        """One pair of formats for all heads of the layer."""
        return [HeadFormat(range(self._layers[layer].H), k, v)]

    def statics(self, layer: int) -> list[Statics]:
        return [self._statics[layer]]

    def encode_k(self, x: torch.Tensor, layer: int, part: int = 0) -> Codes:
        s = self.statics(layer)[part]
        return Codes(*codec.encode(x, self.formats(layer)[part].k, s.k_scale, s.k_zero))

    def encode_v(self, x: torch.Tensor, layer: int, part: int = 0) -> Codes:
        s = self.statics(layer)[part]
        return Codes(*codec.encode(x, self.formats(layer)[part].v, s.v_scale, s.v_zero))

    def decode_k(self, codes: Codes, layer: int, dtype: torch.dtype, part: int = 0) -> torch.Tensor:
        s = self.statics(layer)[part]
        return codec.decode(*codes, self.formats(layer)[part].k, dtype, s.k_scale, s.k_zero)

    def decode_v(self, codes: Codes, layer: int, dtype: torch.dtype, part: int = 0) -> torch.Tensor:
        s = self.statics(layer)[part]
        return codec.decode(*codes, self.formats(layer)[part].v, dtype, s.v_scale, s.v_zero)
