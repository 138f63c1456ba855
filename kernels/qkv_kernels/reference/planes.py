"""What one head range of a layer keeps of K or of V, and what of it belongs to the requests of a call.

Does not know about: how it is read or written.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from qkv_kernels.format import KVFormat

# (codes, scale, zero, dtype) -> values in dtype, of stored rows [n, H, ...], or of whole blocks [n, B, H, ...] where the format's
# unit is "block"; scale and zero in the shapes that encoding gave.
Decode = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.dtype], torch.Tensor]


class Plane(NamedTuple):
    """K or V of one head range: pool planes [N, H, B, ...] and static parameters, as KVFormat says.

    tail [slots, H, (tail_blocks + 1) * B, D], sink [slots, H, sink_tokens, D]: raw rows in the compute dtype, unrotated.
    table [entries] or [H, entries]: given where fmt.reading is "codebook"; decode, where it is "quantizer".
    """

    fmt: KVFormat
    codes: torch.Tensor
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    static_scale: torch.Tensor | None = None
    static_zero: torch.Tensor | None = None
    tail: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    table: torch.Tensor | None = None
    decode: Decode | None = None

    @property
    def pool(self) -> list[torch.Tensor]:
        """The planes of blocks that exist: codes, then scales and zeros."""
        return [t for t in (self.codes, self.scale, self.zero) if t is not None]

    @property
    def raw(self) -> list[torch.Tensor]:
        """The raw rows that exist: the tail, then the sink rows."""
        return [t for t in (self.tail, self.sink) if t is not None]
