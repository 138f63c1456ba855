"""8-bit floats with one static scale per head."""

import logging
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from qkv.layout import SIDES, HeadFormat, HeadStatics, KVFormat, LayerShape, Statics
from qkv.policies.quantizer._affine import AffineQuantizer
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.scales import ScaleFile


@QUANTIZERS.register("fp8")
@dataclass
class Fp8Quantizer(AffineQuantizer):
    """value = code * scale, code = saturate(x / scale) in e4m3 (largest 448) or e5m2 (57344).

    scale [H] = absmax of the head over the calibration data / largest code. Without a scale file it is 1.0, as in vLLM's
    `--kv-cache-dtype fp8`, and we say so. Unlike vLLM: one scale per head, not per layer, and scales in a file are never dropped.
    """

    format: Literal["e4m3", "e5m2"] = "e4m3"

    encode_rule: ClassVar[Literal["static"]] = "static"

    def bind(self, layers: list[LayerShape], scales: ScaleFile | None, dtype: torch.dtype, device: torch.device) -> None:
        super().bind(layers, scales, dtype, device)
        self._uncalibrated = scales is None
        for i, layer in enumerate(layers):
            found = (
                torch.ones(layer.H) if scales is None else scales.tensor(layer, f"{side}_scale", (layer.H,)) for side in SIDES
            )
            self._statics[i] = HeadStatics(*(Statics(scale.to(device)) for scale in found))
        for warning in self.warnings():
            logging.getLogger(__name__).warning(warning)

    def warnings(self) -> list[str]:
        return (
            ["fp8: no scale file, so every scale is 1.0: values beyond the format's range saturate"] if self._uncalibrated else []
        )

    def formats(self, layer: int) -> list[HeadFormat]:
        head = KVFormat(bits=8, storage=self._storage, scale="head", scale_dtype=torch.float32)
        return self.whole(layer, head, head)

    def observers(self) -> frozenset[str]:
        return frozenset(f"{side}_head_absmax" for side in SIDES)

    def tensors_from_stats(self, stats: dict[int, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        largest = torch.finfo(self._storage).max
        return {
            f"layers.{i}.{side}_scale": (s[f"{side}_head_absmax"].float() / largest).clamp(min=2.0**-24)
            for i, s in stats.items()
            for side in SIDES
        }

    @property
    def _storage(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.format == "e4m3" else torch.float8_e5m2
