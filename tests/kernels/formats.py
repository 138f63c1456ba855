"""Quantizers for kernel tests: any pair of formats, statics drawn at random where the format wants them."""

import dataclasses
from dataclasses import dataclass, field

import torch

from qkv.layout import HeadFormat, LayerShape, Statics
from qkv.policies.quantizer._affine import AffineQuantizer
from qkv.scales import ScaleFile
from qkv_kernels.format import STATIC_SCALES, KVFormat


@dataclass
class Stored(AffineQuantizer):
    """K and V in the given formats. name and rule are the abstract class's."""

    k: KVFormat = field(default_factory=lambda: KVFormat(32, torch.float32))
    v: KVFormat = field(default_factory=lambda: KVFormat(32, torch.float32))
    encode_rule = "static"
    name = "stored"

    def bind(self, layers: list[LayerShape], scales: ScaleFile | None, dtype: torch.dtype, device: torch.device) -> None:
        super().bind(layers, scales, dtype, device)
        generator = torch.Generator().manual_seed(3)
        for i, la in enumerate(layers):
            statics = []
            for fmt, D in ((self.k, la.Dk), (self.v, la.Dv)):
                shape = {"tensor": (), "head": (la.H,), "channel": (la.H, D)}.get(fmt.scale)
                largest = 448 if fmt.storage.is_floating_point else 2 ** (fmt.bits - 1) - 1
                scale = None if shape is None else (2 + torch.rand(shape, generator=generator)) / largest
                zero = None
                if scale is not None and fmt.zero != "none":
                    reach = 3 if fmt.bits > 3 else 1
                    zero = torch.randint(-reach, reach + 1, scale.shape, generator=generator).float()
                    zero = zero * scale if fmt.zero == "float" else zero
                statics += [scale, zero]
            self._statics[i] = Statics(*statics)

    def formats(self, layer: int) -> list[HeadFormat]:
        return self.whole(layer, self.k, self.v)


def variants() -> dict[str, KVFormat]:
    """Every format the kernels run, by name. Groups of 8 channels."""
    out = {"raw16": KVFormat(16, torch.bfloat16), "half": KVFormat(16, torch.float16), "raw32": KVFormat(32, torch.float32)}
    for name, storage in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        for scale in ("tensor", "head", "channel", "token"):
            out[f"{name}-{scale}"] = KVFormat(8, storage, scale, torch.float16 if scale == "token" else torch.float32)
    codes = (("int8", 8, torch.int8), ("int4", 4, torch.uint8), ("int3", 3, torch.uint8), ("int2", 2, torch.uint8))
    for name, bits, storage in codes:
        for scale in ("tensor", "head", "channel", "token", "token_group"):
            for zero in ("none", "code", "float") if bits > 3 else ("float",):
                dtype = torch.float32 if scale in STATIC_SCALES else torch.float16
                group = 8 if scale == "token_group" else None
                out[f"{name}-{scale}-{zero}"] = KVFormat(bits, storage, scale, dtype, zero, group)
                if scale != "channel" and zero != "code":
                    out[f"{name}-{scale}-{zero}-rotated"] = dataclasses.replace(out[f"{name}-{scale}-{zero}"], rotate=True)
    out["int8-token-wide"] = dataclasses.replace(out["int8-token-float"], scale_dtype=torch.float32)
    return out


FORMATS = variants()
