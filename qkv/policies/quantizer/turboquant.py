"""Keys as a rotated direction in the best codebook of the normal distribution, times their norm; values in plain 3 or 4 bits."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from qkv.layout import Codes, HeadFormat, KVFormat, LayerShape, Side
from qkv.policies.quantizer._affine import AffineQuantizer
from qkv.policies.quantizer._normal import lloyd_max
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.scales import ScaleFile
from qkv_kernels.reference import codec
from qkv_kernels.reference.hadamard import hadamard

Bits = Literal[8, 4, 3]
BITS: dict[str, tuple[Bits, Bits]] = {"k8v4": (8, 4), "4bit": (4, 4), "k3v4": (3, 4), "3bit": (3, 3)}  # preset -> of K, of V


@QUANTIZERS.register("turboquant")
@dataclass
class TurboQuant(AffineQuantizer):
    """K: value = rotation(table[code]) * scale. The rotated row has nearly normal elements, each stored as the nearest entry of
    the Lloyd-Max table of N(0, 1): bits + 16/D per element. V: 3 or 4 bits onto [min, max] of the row, bits + 32/D.

    preset: k8v4 (K is cast to e4m3, unrotated), 4bit, k3v4 or 3bit, as vLLM names them.
    norm_correction: the scale makes the stored row as long as the row was (vLLM's "nc"); otherwise it is norm / sqrt(D).
    rotate_values: V is stored as K is, as in the paper; vLLM stores it as above.
    Source: TurboQuant (Zandieh et al. 2025, arXiv 2504.19874) as vLLM ships it (PR 38479): Hadamard without random signs, no QJL
    residual. Ours stores the corrected scale itself where vLLM stores the norm and corrects on reading, rotates by blocks where D
    is no power of two, and keeps no layers at full precision: use it as protected's inner for that.
    """

    preset: Literal["k8v4", "4bit", "k3v4", "3bit"] = "4bit"
    norm_correction: bool = True
    rotate_values: bool = False

    encode_rule: ClassVar[Literal["custom"]] = "custom"

    def bind(self, layers: list[LayerShape], scales: ScaleFile | None, dtype: torch.dtype, device: torch.device) -> None:
        super().bind(layers, scales, dtype, device)
        tables = {bits: torch.tensor(lloyd_max(2**bits), dtype=torch.float32, device=device) for bits in (3, 4)}
        self._tables = {"k": tables.get(BITS[self.preset][0])}
        self._tables["v"] = tables[BITS[self.preset][1]] if self.rotate_values else None

    def table(self, layer: int, side: Side) -> torch.Tensor | None:
        return self._tables[side]

    def formats(self, layer: int) -> list[HeadFormat]:
        k_bits, v_bits = BITS[self.preset]
        k = KVFormat(8, torch.float8_e4m3fn) if k_bits == 8 else self._rotated(k_bits)
        v = self._rotated(v_bits) if self.rotate_values else KVFormat(v_bits, torch.uint8, "token", zero="float")
        return self.whole(layer, k, v)

    def _rotated(self, bits: Bits) -> KVFormat:
        return KVFormat(bits, torch.uint8, "token", rotate=True, reading="codebook")

    def encode(self, x: torch.Tensor, side: Side, layer: int, range_index: int = 0) -> Codes:
        fmt, table = self.formats(layer)[range_index].of(side), self._tables[side]
        if table is None:
            return super().encode(x, side, layer, range_index)
        y = hadamard(x.to(torch.promote_types(x.dtype, torch.float32)).clamp(-codec.HUGE, codec.HUGE))
        largest = y.abs().amax(-1).clamp(min=1e-30)
        norm = largest * codec.row_sum((y / largest[..., None]).square()).sqrt()
        scale = norm / math.sqrt(y.shape[-1])
        data = codec.look_up(y, fmt, table, scale, None)[0]
        if self.norm_correction:
            entries = codec.dequantize(data, None, None, fmt, y.dtype, table=table)
            scale = norm / codec.row_sum(entries.square()).sqrt()
        return Codes(data, scale.clamp(max=torch.finfo(fmt.scale_dtype).max).to(fmt.scale_dtype))
