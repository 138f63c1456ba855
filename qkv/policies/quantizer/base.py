"""What a quantizer is: formats for the store and the kernels, and the reference encode and decode.

Takes: K and V rows. Gives: codes, and the values that codes stand for.
Does not know about: blocks, requests, attention.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from qkv.errors import ScaleError
from qkv.layout import SIDES, Codes, HeadFormat, HeadStatics, KVFormat, LayerShape, Side, Statics
from qkv.registry import Registry
from qkv.scales import ScaleFile, StaticTensor


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

    def static_tensors(self) -> list[StaticTensor]:
        """What the quantizer takes from a scale file, one tensor of each per layer. Depends on its settings only.

        Calibration calls it, on a quantizer that is not bound, to know which statistics to collect and what to make of them; the
        engine, to check a scale file. Empty: there is nothing to calibrate.
        """
        return []

    def raw_sink_tokens(self) -> int:
        """First tokens of a sequence that every query reads raw, in every format that is not raw: no static range need hold
        them. Calibration asks, on a quantizer that is not bound."""
        return 0

    def bind(self, layers: list[LayerShape], scales: ScaleFile | None, dtype: torch.dtype, device: torch.device) -> None:
        """The engine calls it once, before it allocates the pool: layers are the attention layers of the model, in order.

        scales: what the user gave; None without a file. dtype: the model's compute dtype. Afterwards self._layers and self._dtype
        are these, and static_tensor() gives what was declared. Raises ScaleError.
        """
        declared = self.static_tensors()
        if scales is None and self.needs_scales:
            raise ScaleError(
                f"quantizer {self.name} needs a scale file: write one with `python -m calibration.run quantizer={self.name}` and "
                "pass it as scales=<file>, or use a quantizer that needs none, like int8_token"
            )
        if scales is not None:
            scales.check_names(layers, declared)
        self._layers, self._dtype = layers, dtype
        self._defaults = declared if scales is None else []

        def value(layer: LayerShape, t: StaticTensor) -> torch.Tensor:
            if scales is not None:
                return scales.tensor(layer, t)
            assert t.default is not None
            return torch.full(t.shape_in(layer), t.default, dtype=torch.float32)

        self._tensors = [{t.name: value(layer, t).to(device) for t in declared} for layer in layers]
        for warning in self.warnings():
            logging.getLogger(__name__).warning(warning)

    def static_tensor(self, layer: int, side: Side, kind: str) -> torch.Tensor | None:
        """The declared tensor of a layer (position among the bound layers), or None where none of that name is declared."""
        return self._tensors[layer].get(f"{side}_{kind}")

    def static_bytes(self) -> int:
        """Bytes of the static tensors of all layers, codebooks included. The engine adds them to what the cache takes."""
        tables = (self.table(i, side) for i in range(len(self._layers)) for side in SIDES)
        held = [*(t for tensors in self._tensors for t in tensors.values()), *(t for t in tables if t is not None)]
        return sum({id(t): t.nbytes for t in held}.values())  # not by address: a simulation's tensors have none

    @abstractmethod
    def formats(self, layer: int) -> list[HeadFormat]:
        """Formats of a layer (position among the bound layers): one entry normally, several for protected or mixed heads.

        The engine calls it after bind, to size and allocate the pool and to choose a backend; the answer never changes.
        """

    def whole(self, layer: int, k: KVFormat, v: KVFormat) -> list[HeadFormat]:
        """One pair of formats for all heads of a layer: what formats() returns for most quantizers."""
        return [HeadFormat(range(self._layers[layer].H), k, v)]

    def statics(self, layer: int) -> list[HeadStatics]:
        """The static scales, zeros and codebooks by which formats are read, one entry per entry of formats(layer). The backend
        asks once, when it is bound. Declared tensors of the kinds "scale" and "zero" are these."""

        def of(side: Side, heads: range) -> Statics:
            scale, zero = (self.static_tensor(layer, side, kind) for kind in ("scale", "zero"))
            return Statics(scale, zero, self.table(layer, side)).of_heads(slice(heads.start, heads.stop))

        return [HeadStatics(*(of(side, r.heads) for side in SIDES)) for r in self.formats(layer)]

    def table(self, layer: int, side: Side) -> torch.Tensor | None:
        """The codebook of a side, ascending, [entries] or [H, entries]: by default the declared tensor of the kind "table"."""
        return self.static_tensor(layer, side, "table")

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
        """What encode gave -> values of encode's shape, in dtype. Row (block) i depends on codes[i] only.

        The reference backend calls it before it attends, in prefill and in decoding, where the format's reading is "quantizer":
        with the stored rows [n, H, ...] that attention reads, or, where the unit is "block", the stored blocks [n, B, H, ...], of
        all requests together. Where the reading is "affine", kernels read by format and never call it; it must then give what
        the format says, which is checked when an engine starts. Calibration calls it to judge ranges.
        """

    @property
    def needs_scales(self) -> bool:
        """Whether bind() fails without a scale file: some static tensor has no default."""
        return any(t.default is None for t in self.static_tensors())

    def observers(self) -> frozenset[str]:
        """Names of the statistics that calibration must collect, a side and a kind each, as in "k_channel_absmax"."""
        return frozenset(name for t in self.static_tensors() for name in t.observed)

    def tensors_from_stats(self, stats: Mapping[int, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Statistics, {layer index: {name in observers(): tensor}}, to the tensors of a ScaleFile.

        Calibration calls it once it has run all documents, on a quantizer that is not bound.
        """
        return {
            f"layers.{i}.{t.name}": t.make(*(s[name].float() for name in t.observed))
            for i, s in stats.items()
            for t in self.static_tensors()
        }

    def warnings(self) -> list[str]:
        """What a record must say about the bound quantizer: that its scales were not calibrated. The engine asks once."""
        if not self._defaults:
            return []
        values = " and ".join(f"{t.name} is {t.default}" for t in self._defaults)
        return [f"{self.name}: no scale file, so {values} everywhere: values beyond the format's range saturate"]

    def fingerprint(self) -> str:
        """Identity of the stored bytes beyond the formats. The engine puts it into the root of the prefix cache's hash chain and
        into the store, so that blocks of one quantizer are never read by another."""
        return repr(self)


QUANTIZERS: Registry[Quantizer] = Registry("quantizer", Quantizer, "qkv.policies.quantizer")
