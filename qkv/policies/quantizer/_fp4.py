"""4-bit floats with 2 exponent bits and 1 mantissa bit (E2M1, OCP Microscaling Formats 1.0) as a codebook; a base class.

Does not know about: how a group of channels gets its scale.
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch

from qkv.layout import SIDES, HeadFormat, KVFormat, LayerShape, Side
from qkv.policies.quantizer._affine import AffineQuantizer
from qkv.scales import ScaleFile

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = _MAGNITUDES[-1]
E2M1 = (*(-x for x in reversed(_MAGNITUDES)), *_MAGNITUDES)  # ascending; both zeros are 0


@dataclass
class Fp4Quantizer(AffineQuantizer):
    """K and V in one format, read through the table of E2M1."""

    def bind(self, layers: list[LayerShape], scales: ScaleFile | None, dtype: torch.dtype, device: torch.device) -> None:
        super().bind(layers, scales, dtype, device)
        self._table = torch.tensor(E2M1, device=device)

    def table(self, layer: int, side: Side) -> torch.Tensor:
        return self._table

    def formats(self, layer: int) -> list[HeadFormat]:
        return self.whole(layer, *(self.format_of(self._layers[layer].dim(side)) for side in SIDES))

    @abstractmethod
    def format_of(self, D: int) -> KVFormat:
        """The format of rows of D channels. formats() calls it, once bound."""
