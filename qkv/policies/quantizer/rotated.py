"""Few bits after a Hadamard rotation, which spreads outlier channels over their row: low bits without calibration."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from qkv.layout import HeadFormat, KVFormat
from qkv.policies.quantizer._affine import AffineQuantizer
from qkv.policies.quantizer.base import QUANTIZERS


@QUANTIZERS.register("rotated")
@dataclass
class RotatedQuantizer(AffineQuantizer):
    """value = rotation(code * scale + zero), [min, max] of every rotated row (or group of channels) onto 2^bits codes:
    bits + 32/D per element (bits + 32/group with groups), D the head dim.

    The query is rotated too, so keys never are rotated back; V's rotation is undone once, on the attention output.
    group: rotated channels that share a range, at most the head dim; null: the whole row.
    Source: QuaRot (Ashkboos et al. 2024, github.com/spcl/QuaRot), which folds V's rotation into the weights and rotates K per
    head by one Hadamard; ours touches no weights, and where D is no power of two, blocks of the largest one dividing it rotate.
    """

    bits: Literal[4, 3, 2] = 4
    group: Literal[32, 64] | None = None

    encode_rule: ClassVar[Literal["minmax"]] = "minmax"

    def formats(self, layer: int) -> list[HeadFormat]:
        return self.whole(layer, self._format(self._layers[layer].Dk), self._format(self._layers[layer].Dv))

    def _format(self, D: int) -> KVFormat:
        group = None if self.group is None else math.gcd(self.group, D)
        scale: Literal["token", "token_group"] = "token" if group is None else "token_group"
        return KVFormat(bits=self.bits, storage=torch.uint8, scale=scale, zero="float", group=group, rotate=True)
