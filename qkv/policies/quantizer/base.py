"""What a quantizer is: formats for the store and the kernels, and the reference encode and decode.

Takes: K and V rows. Gives: codes, and the values that codes stand for.
Does not know about: blocks, requests, attention.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from qkv.layout import Codes, HeadFormat, HeadStatics, LayerShape, Side
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
    # "custom": encode runs in Python. Otherwise kernels may encode, by the rule that each format implies:
    # raw, static where the scale is static, else absmax (zero "none") or minmax. The name says which rule is the main one.
    encode_rule: ClassVar[Literal["absmax", "minmax", "static", "custom"]]
    needs_scales: ClassVar[bool] = False  # True: bind() fails without a scale file

    def bind(self, layers: list[LayerShape], scales: ScaleFile | None, dtype: torch.dtype, device: torch.device) -> None:
        """The engine calls it once, before it allocates the pool: layers are the attention layers of the model, in order.

        scales: what the user gave, checked; None without a file. dtype: the model's compute dtype. Raises ScaleError.
        """

    @abstractmethod
    def formats(self, layer: int) -> list[HeadFormat]:
        """Formats of a layer (position among the bound layers): one entry normally, several for protected or mixed heads.

        The engine calls it after bind, to size and allocate the pool and to choose a backend; the answer never changes.
        """

    def statics(self, layer: int) -> list[HeadStatics]:
        """Static scales and zeros, one entry per entry of formats(layer). The backend reads them once, when it is bound."""
        return [HeadStatics() for _ in self.formats(layer)]

    @abstractmethod
    def encode(self, x: torch.Tensor, side: Side, layer: int, range_index: int = 0) -> Codes:
        """Rows of one head range -> codes. Pure.

        The backend calls it in every step for K and for V, before it attends: with x [T, H, D] the T new tokens of a packed
        batch, or, for formats whose unit is "block", x [n, B, H, D] the n blocks that the step completes. A backend whose kernels
        encode themselves calls it only where encode_rule is "custom". Calibration calls it to judge ranges. H are the heads of
        formats(layer)[range_index].
        """

    @abstractmethod
    def decode(self, codes: Codes, side: Side, layer: int, dtype: torch.dtype, range_index: int = 0) -> torch.Tensor:
        """What encode gave -> values of encode's shape, in dtype. Calibration calls it, and tests: kernels read by format."""

    def observers(self) -> frozenset[str]:
        """Names of the statistics that calibration must collect for this quantizer: a side and a kind, as in "k_channel_absmax".

        Calibration calls it before it runs the first document, on a quantizer that is not bound. Empty: it needs none.
        """
        return frozenset()

    def tensors_from_stats(self, stats: dict[int, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Statistics, {layer index: {name in observers(): tensor}}, to the tensors of a ScaleFile.

        Calibration calls it once it has run all documents, on a quantizer that is not bound.
        """
        return {}

    def warnings(self) -> list[str]:
        """What a record must say about the bound quantizer, e.g. that its scales were not calibrated. The engine asks once."""
        return []

    def fingerprint(self) -> str:
        """Identity of the stored bytes beyond the formats. The engine puts it into the root of the prefix cache's hash chain and
        into the store, so that blocks of one quantizer are never read by another."""
        return repr(self)


QUANTIZERS: Registry[Quantizer] = Registry("quantizer", Quantizer, "qkv.policies.quantizer")
