"""Every tensor shape of the project, stated once.

Legend (used in all docstrings): T tokens in the call · R requests · N blocks · B block size · M max blocks per request ·
H kv heads · Hq query heads · G = Hq/H · D head dim (Dk of K, Dv of V) · Dp packed D · L layers.

Pool, per layer and head range, for K and for V:
    codes         [N, H, B, Dp]     KVFormat.storage
    scale (zero)  [N, H, B] | [N, H, B, D/group] | [N, H, D]    for "token" | "token_group" | "block_channel"
    tail          [slots, H, (tail_blocks + 1) * B, D]    the raw rows of a request that block-unit formats have not encoded
    sink          [slots, H, sink_tokens, D]              the raw first rows of a sequence, shared by who shares its first block
Static scales ("tensor" [], "head" [H], "channel" [H, D]) belong to the quantizer. Kernels take strides.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from qkv_kernels.format import SIDES, STATIC_SCALES, KVFormat, ScaleKind, Side

__all__ = [
    "SIDES",
    "STATIC_SCALES",
    "AttentionMetadata",
    "Codes",
    "HeadFormat",
    "HeadStatics",
    "KVFormat",
    "LayerShape",
    "ScaleKind",
    "Side",
    "Statics",
]


@dataclass(frozen=True)
class LayerShape:
    """One attention layer, as found by probing the model."""

    index: int
    H: int
    Hq: int
    Dk: int
    Dv: int
    scaling: float  # softmax scale
    window: int | None = None  # a query at p sees keys with p - key < window
    softcap: float | None = None
    sink_logits: bool = False  # whether the model has learned attention-sink logits, one per query head

    def dim(self, side: Side) -> int:
        """Head dim of a side: Dk or Dv."""
        return self.Dk if side == "k" else self.Dv


class HeadFormat(NamedTuple):
    """The formats of one range of kv heads of a layer. Ranges of a layer are disjoint and cover it in order."""

    heads: range
    k: KVFormat
    v: KVFormat

    def of(self, side: Side) -> KVFormat:
        return self.k if side == "k" else self.v


class Codes(NamedTuple):
    """Encoded K or V of T tokens. data [T, H, Dp]; scale and zero [T, H] or [T, H, D/group], None where static or absent.

    Of n whole blocks, for block-unit formats: [n, B, ...] for [T, ...], and scale and zero [n, H, D] for "block_channel".
    """

    data: torch.Tensor
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None


class Statics(NamedTuple):
    """Static parameters of one side of one layer and head range, which are not in the pool. float32.

    scale, zero: [] for "tensor", [H] for "head", [H, D] for "channel", else None; scale [] too where a format has a tensor_scale.
    table: the codebook, [entries] or [H, entries], where the format's reading is "codebook".
    """

    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    table: torch.Tensor | None = None

    def of_heads(self, heads: slice) -> "Statics":
        """Those of some of the heads."""
        scale, zero = (t if t is None or not t.dim() else t[heads] for t in (self.scale, self.zero))
        return Statics(scale, zero, self.table if self.table is None or self.table.dim() == 1 else self.table[heads])


class HeadStatics(NamedTuple):
    """Static parameters of both sides of one head range."""

    k: Statics = Statics()
    v: Statics = Statics()

    def of(self, side: Side) -> Statics:
        return self.k if side == "k" else self.v


@dataclass(slots=True)
class AttentionMetadata:
    """Where the tokens of one forward go and what they may see. Built once a step, shared by all layers.

    Rows of the packed batch: first `num_decodes` requests with one token each, then the prefill chunks, then padding.
    block_table [R, M] int32; entries past a request's blocks are the null block (0).
    seq_lens    [R] int32: tokens of each request in the cache once this call has stored its own.
    query_start [R+1] int32: row where each request's tokens begin; query_start[R] is the first padding row.
    slots       [T] int64: block * B + offset where each row is stored; -1 for padding rows, which write nothing.
    positions   [T] int64: index of each row's token in its sequence; 0 for padding.
    tail_slots  [R] int64: slot of each request's raw tail; None where no format has one. Token p is row p % tail rows of it.
    sink_slots  [R] int64: slot of the raw first tokens of each request's sequence; None where no format has them.
    The *_list copies are the same numbers on the host, so that a backend plans without synchronising.
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    seq_lens_list: list[int]
    query_start_list: list[int]
    num_decodes: int
    block_size: int
    tail_slots: torch.Tensor | None = None
    sink_slots: torch.Tensor | None = None
