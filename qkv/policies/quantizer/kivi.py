"""4, 3 or 2 bits with a range per K channel of every block: the best quality per bit here, without calibration."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from qkv.layout import HeadFormat, KVFormat
from qkv.policies.quantizer._affine import AffineQuantizer
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.validate import require


@QUANTIZERS.register("kivi")
@dataclass
class KiviQuantizer(AffineQuantizer):
    """value = code * scale + zero. K: [min, max] of each channel over the tokens of a full block onto 2^bits codes, bits +
    32/block_size per element. V: [min, max] of each token's group of channels, bits + 32/group. A block is encoded once, when
    its last token arrives; the open block stays raw in a tail of its request, which costs block_size raw rows per request.

    bits: of K, and of V unless v_bits says otherwise. group: V channels that share a range, at most the head dim.
    tail_blocks: most recent full blocks that are read raw besides the open one; above 0 prefix caching is off.
    Source: KIVI (Liu et al. 2024, github.com/jy-yuan/KIVI): K per channel over 32 tokens, V per token over 32 channels, a raw
    residual of 128 tokens. In ours the block of the pool is the group of tokens, the residual is the open block (and
    tail_blocks), and K and V leave it together.
    """

    bits: Literal[4, 3, 2] = 4
    v_bits: Literal[4, 3, 2] | None = None
    group: Literal[32, 64] = 32
    tail_blocks: int = 0

    encode_rule: ClassVar[Literal["minmax"]] = "minmax"

    def __post_init__(self) -> None:
        require(0 <= self.tail_blocks <= 64, "tail_blocks", self.tail_blocks, "0 to 64")

    def formats(self, layer: int) -> list[HeadFormat]:
        group = math.gcd(self.group, self._layers[layer].Dv)
        k = KVFormat(self.bits, torch.uint8, "block_channel", zero="float", unit="block", tail_blocks=self.tail_blocks)
        v = KVFormat(
            self.v_bits or self.bits,
            torch.uint8,
            "token_group",
            zero="float",
            group=group,
            unit="block",
            tail_blocks=self.tail_blocks,
        )
        return self.whole(layer, k, v)
