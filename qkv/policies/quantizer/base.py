"""What a quantizer is: formats for the store and the kernels, and the reference encode and decode.

Takes: K and V rows. Gives: codes, and the values that codes stand for.
Does not know about: blocks, requests, attention.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from qkv.layout import Codes, HeadFormat, LayerShape, Statics
from qkv.registry import Registry
from qkv.scales import ScaleFile


@dataclass
class Quantizer(ABC):
    """A KV quantizer. Registered dataclass = settings = YAML schema.

    Laws (contract tests run them on every registered name): pure; finite in, finite out; zeros stay zeros (to within half a
    step where a zero point is static); for token-unit formats encode(x)[i] equals encode(x[i:i+1]) byte for byte, so that
    chunking, prefix hits and recomputation store the same bytes.
    """

    name: ClassVar[str]
    # "custom": encode_k and encode_v run in Python. Otherwise kernels may encode, by the rule that each format implies:
    # raw, static where the scale is static, else absmax (zero "none") or minmax. The name says which rule is the main one.
    encode_rule: ClassVar[Literal["absmax", "minmax", "static", "custom"]]
    needs_scales: ClassVar[bool] = False  # True: bind() fails without a scale file

    def bind(self, layers: list[LayerShape], scales: ScaleFile | None, dtype: torch.dtype, device: torch.device) -> None:
        """Called once, before the pool is allocated. dtype is the model's compute dtype. Raises ScaleError."""

    @abstractmethod
    def formats(self, layer: int) -> list[HeadFormat]:
        """Formats of a layer (index into the bound layers): one entry normally, several for protected or mixed heads."""

    def statics(self, layer: int) -> list[Statics]:
        """Static scales and zeros, one entry per entry of formats(layer)."""
        return [Statics() for _ in self.formats(layer)]

    @abstractmethod
    def encode_k(self, x: torch.Tensor, layer: int, part: int = 0) -> Codes:
        """K rows [T, H, Dk] of head range `part` -> codes. Pure."""

    @abstractmethod
    def encode_v(self, x: torch.Tensor, layer: int, part: int = 0) -> Codes:
        """V rows [T, H, Dv] of head range `part` -> codes. Pure."""

    @abstractmethod
    def decode_k(self, codes: Codes, layer: int, dtype: torch.dtype, part: int = 0) -> torch.Tensor:
        """Codes -> [T, H, Dk]."""

    @abstractmethod
    def decode_v(self, codes: Codes, layer: int, dtype: torch.dtype, part: int = 0) -> torch.Tensor:
        """Codes -> [T, H, Dv]."""

    def observers(self) -> frozenset[str]:
        """Statistics that calibration must collect for this quantizer, e.g. {"k_channel_absmax"}; empty if none."""
        return frozenset()

    def tensors_from_stats(self, stats: dict[int, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Statistics collected by calibration, {layer index: {name in observers(): tensor}}, to the tensors of a ScaleFile."""
        return {}

    def warnings(self) -> list[str]:
        """What a record must say about the bound quantizer, e.g. that its scales were not calibrated."""
        return []

    def fingerprint(self) -> str:
        """Identity of the stored bytes beyond the formats: goes into the prefix cache's root and host blocks."""
        return repr(self)


QUANTIZERS: Registry[Quantizer] = Registry("quantizer", Quantizer, "qkv.policies.quantizer")
