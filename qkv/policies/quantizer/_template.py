"""One line for people: how K and V are stored, at how many bits."""

from dataclasses import dataclass, field

import torch

from qkv.layout import Codes, HeadFormat, KVFormat, LayerShape, Side
from qkv.policies.quantizer.base import QUANTIZERS, Quantizer
from qkv.scales import ScaleFile
from qkv.validate import require

FORMAT = KVFormat(bits=8, storage=torch.int8, scale="token")  # what the store allocates and the kernels read


@QUANTIZERS.register("template")
@dataclass
class Template(Quantizer):
    """Starting point: int8 codes with one scale per token and head, the outermost values clipped.

    Source: where the idea comes from; Differs: what this does otherwise. The fields are the policy's settings.
    """

    encode_rule = "custom"  # the encode below runs as it stands; reading is fused wherever a kernel knows the format
    clip: float = 1.0

    _layers: list[LayerShape] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        require(0 < self.clip <= 1, "clip", self.clip, "above 0 and at most 1")

    def bind(self, layers: list[LayerShape], scales: ScaleFile | None, dtype: torch.dtype, device: torch.device) -> None:
        self._layers = layers

    def formats(self, layer: int) -> list[HeadFormat]:
        return [HeadFormat(range(self._layers[layer].H), FORMAT, FORMAT)]

    def encode(self, x: torch.Tensor, side: Side, layer: int, range_index: int = 0) -> Codes:
        """x [T, H, D] -> data [T, H, D] int8, scale [T, H] float16. Row i may depend on x[i] only."""
        x = x.float()
        scale = (x.abs().amax(-1) * self.clip / 127).clamp(2**-24, 65504).half()  # codes are computed from it as stored
        return Codes((x / scale.float()[..., None]).round().clamp(-127, 127).to(torch.int8), scale)

    def decode(self, codes: Codes, side: Side, layer: int, dtype: torch.dtype, range_index: int = 0) -> torch.Tensor:
        assert codes.scale is not None
        wide, limit = torch.promote_types(dtype, torch.float32), torch.finfo(dtype).max
        x = codes.data.to(wide) * codes.scale.to(wide)[..., None]
        return x.clamp(-limit, limit).to(dtype)  # the rounded scale may reach a little further than float16 does
