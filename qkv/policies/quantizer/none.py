"""No quantization: the baseline every other quantizer is compared with."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from qkv.layout import HeadFormat, KVFormat
from qkv.policies.quantizer._affine import AffineQuantizer
from qkv.policies.quantizer.base import QUANTIZERS


@QUANTIZERS.register("none")
@dataclass
class NoneQuantizer(AffineQuantizer):
    """Stores K and V as they come, in the model's compute dtype: value = code."""

    encode_rule: ClassVar[Literal["static"]] = "static"

    def formats(self, layer: int) -> list[HeadFormat]:
        bits: dict[int, Literal[64, 32, 16]] = {8: 64, 4: 32, 2: 16}
        raw = KVFormat(bits=bits[self._dtype.itemsize], storage=self._dtype)
        return self.whole(layer, raw, raw)
