"""One line for people: how K and V are stored, at how many bits."""

from dataclasses import dataclass

import torch

from qkv.layout import Codes, HeadFormat, KVFormat, Side
from qkv.policies.quantizer.base import QUANTIZERS, Quantizer
from qkv.validate import require

# What the pool holds. reading="quantizer": what attention reads is what the decode below makes of it, on the reference backend.
# For values of the form code * scale + zero leave that out: then the format says it all, and fused kernels read it.
FORMAT = KVFormat(bits=8, storage=torch.int8, scale="token", reading="quantizer")


@QUANTIZERS.register("template")
@dataclass
class Template(Quantizer):
    """Starting point: value = scale * sign(code) * (code / 127)^2, fine steps near zero; one scale per token and head.

    Source: where the idea comes from; Differs: what this does otherwise. The fields are the policy's settings.
    """

    encode_rule = "custom"  # the encode below runs as it stands
    clip: float = 1.0

    def __post_init__(self) -> None:
        require(0 < self.clip <= 1, "clip", self.clip, "above 0 and at most 1")

    def formats(self, layer: int) -> list[HeadFormat]:
        return self.whole(layer, FORMAT, FORMAT)

    def encode(self, x: torch.Tensor, side: Side, layer: int, range_index: int = 0) -> Codes:
        """x [T, H, D] -> data [T, H, D] int8, scale [T, H] float16. Row i may depend on x[i] only."""
        x = x.float()
        scale = (x.abs().amax(-1) * self.clip).clamp(2**-24, 65504).half()  # codes are computed from it as stored
        root = (x.abs() / scale.float()[..., None]).clamp(max=1).sqrt()
        return Codes((root * 127).round().mul(x.sign()).to(torch.int8), scale)

    def decode(self, codes: Codes, side: Side, layer: int, dtype: torch.dtype, range_index: int = 0) -> torch.Tensor:
        """Codes of n rows, as encode gave them -> values [n, H, D] in dtype. Row i may depend on the codes of row i only."""
        assert codes.scale is not None
        root = codes.data.to(torch.promote_types(dtype, torch.float32)) / 127
        return (root * root.abs() * codes.scale.to(root.dtype)[..., None]).to(dtype)
