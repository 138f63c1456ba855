"""Quantizers for kernel tests: any pair of formats, statics drawn at random where the format wants them."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch

from qkv.layout import SIDES, HeadFormat, HeadStatics, LayerShape, Statics
from qkv.policies.quantizer._affine import AffineQuantizer
from qkv.scales import ScaleFile
from qkv_kernels.format import STATIC_SCALES, KVFormat


@dataclass
class Stored(AffineQuantizer):
    """A quantizer that stores K and V in the given formats."""

    k: KVFormat = field(default_factory=lambda: KVFormat(32, torch.float32))
    v: KVFormat = field(default_factory=lambda: KVFormat(32, torch.float32))
    encode_rule = "static"
    name = "stored"

    def bind(self, layers: list[LayerShape], scales: ScaleFile | None, dtype: torch.dtype, device: torch.device) -> None:
        super().bind(layers, scales, dtype, device)
        self._statics = []
        generator = torch.Generator().manual_seed(3)
        for la in layers:
            statics = []
            for fmt, D in zip((self.k, self.v), map(la.dim, SIDES), strict=True):
                shape = {"tensor": (), "head": (la.H,), "channel": (la.H, D)}.get(fmt.scale)
                largest = 448 if fmt.storage.is_floating_point else 2 ** (fmt.bits - 1) - 1
                scale = None if shape is None else (2 + torch.rand(shape, generator=generator)) / largest
                zero = None
                if scale is not None and fmt.zero != "none":
                    reach = 3 if fmt.bits > 3 else 1
                    zero = torch.randint(-reach, reach + 1, scale.shape, generator=generator).float()
                    zero = zero * scale if fmt.zero == "float" else zero
                statics.append(Statics(scale, zero))
            self._statics.append(HeadStatics(*statics))

    def statics(self, layer: int) -> list[HeadStatics]:
        return [self._statics[layer]]

    def formats(self, layer: int) -> list[HeadFormat]:
        return self.whole(layer, self.k, self.v)


def variants() -> dict[str, KVFormat]:
    """Every format of single tokens that the kernels run, by name. Groups of 8 channels."""
    out = {"raw16": KVFormat(16, torch.bfloat16), "half": KVFormat(16, torch.float16), "raw32": KVFormat(32, torch.float32)}
    scale: Any
    zero: Any
    for name, storage in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        for scale in ("tensor", "head", "channel", "token"):
            out[f"{name}-{scale}"] = KVFormat(8, storage, scale, torch.float16 if scale == "token" else torch.float32)
    codes: tuple[tuple[str, Any, torch.dtype], ...] = (
        ("int8", 8, torch.int8),
        ("int4", 4, torch.uint8),
        ("int3", 3, torch.uint8),
        ("int2", 2, torch.uint8),
    )
    for name, bits, storage in codes:
        for scale in ("tensor", "head", "channel", "token", "token_group"):
            for zero in ("none", "code", "float") if bits > 3 else ("float",):
                dtype = torch.float32 if scale in STATIC_SCALES else torch.float16
                group = 8 if scale == "token_group" else None
                out[f"{name}-{scale}-{zero}"] = KVFormat(bits, storage, scale, dtype, zero, group)
                if scale != "channel" and zero != "code":
                    out[f"{name}-{scale}-{zero}-rotated"] = dataclasses.replace(out[f"{name}-{scale}-{zero}"], rotate=True)
    out["int8-token-wide"] = dataclasses.replace(out["int8-token-float"], scale_dtype=torch.float32)
    out["e4m3-token_group"] = KVFormat(8, torch.float8_e4m3fn, "token_group", group=8)
    return out


def keepers(plain: dict[str, KVFormat]) -> dict[str, KVFormat]:
    """Formats that keep raw rows: whole blocks with a scale per channel, recent blocks, first tokens."""
    out: dict[str, KVFormat] = {}
    bits: Any
    for bits, storage in ((8, torch.int8), (4, torch.uint8), (3, torch.uint8), (2, torch.uint8)):
        out[f"int{bits}-block-float"] = KVFormat(bits, storage, "block_channel", zero="float", unit="block")
    out["int4-block-code-tail2"] = KVFormat(4, torch.uint8, "block_channel", zero="code", unit="block", tail_blocks=2)
    out["int8-block-none-wide"] = KVFormat(8, torch.int8, "block_channel", torch.float32, unit="block")
    out["e4m3-block-sinks3"] = KVFormat(8, torch.float8_e4m3fn, "block_channel", unit="block", sink_tokens=3)
    out["int4-block-rotated-tail1"] = dataclasses.replace(out["int4-block-float"], rotate=True, tail_blocks=1)
    for name, tail, sinks in (
        ("int4-token_group-float", 0, 0),
        ("int3-token_group-float", 2, 4),
        ("int4-token-float-rotated", 1, 3),
        ("int8-token-none", 3, 0),
        ("int4-channel-code", 0, 5),
        ("int8-channel-none", None, 5),
        ("int4-token-float-rotated", None, 4),
        ("e4m3-head", 1, 2),
    ):
        unit: Any = "token" if tail is None else "block"
        fmt = dataclasses.replace(plain[name], unit=unit, tail_blocks=tail or 0, sink_tokens=sinks)
        out[f"{name}-{'' if tail is None else f'tail{tail}-'}sinks{sinks}"] = fmt
    return out


FORMATS = variants()
KEEPERS = keepers(FORMATS)
