"""8-bit floats with one static scale per head."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from qkv.layout import SIDES, HeadFormat, KVFormat
from qkv.policies.quantizer._affine import AffineQuantizer
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.scales import StaticTensor
from qkv_kernels.reference.codec import MIN_SCALE


@QUANTIZERS.register("fp8")
@dataclass
class Fp8Quantizer(AffineQuantizer):
    """value = code * scale, code = saturate(x / scale) in e4m3 (largest 448) or e5m2 (57344).

    scale [H] = absmax of the head over the calibration data / largest code. Without a scale file it is 1.0, as in vLLM's
    `--kv-cache-dtype fp8`, and we say so. Unlike vLLM: one scale per head, not per layer, and scales in a file are never dropped.
    """

    format: Literal["e4m3", "e5m2"] = "e4m3"

    encode_rule: ClassVar[Literal["static"]] = "static"

    def static_tensors(self) -> list[StaticTensor]:
        largest = torch.finfo(self._storage).max

        def scale(absmax: torch.Tensor) -> torch.Tensor:
            return (absmax / largest).clamp(min=MIN_SCALE)

        return [StaticTensor(side, "scale", ("H",), ("head_absmax",), scale, positive=True, default=1.0) for side in SIDES]

    def formats(self, layer: int) -> list[HeadFormat]:
        head = KVFormat(bits=8, storage=self._storage, scale="head", scale_dtype=torch.float32)
        return self.whole(layer, head, head)

    @property
    def _storage(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.format == "e4m3" else torch.float8_e5m2
