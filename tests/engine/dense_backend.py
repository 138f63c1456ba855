"""A backend for testing the adapter alone: keeps K and V of every sequence as plain tensors and attends densely."""

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import torch

from qkv.attention.base import AttentionBackend
from qkv.layout import AttentionMetadata, LayerShape


@dataclass
class DenseBackend(AttentionBackend):
    """Tells sequences apart by the first entry of their block table. It is not registered, so that users cannot choose it."""

    name: ClassVar[str] = "dense"
    fused: ClassVar[bool] = False
    layers: list[LayerShape] = field(default_factory=list)

    def __post_init__(self) -> None:
        empty = torch.empty(0)
        self.k: dict[tuple[int, int], torch.Tensor] = defaultdict(lambda: empty)  # (layer, sequence) -> [tokens, H, D]
        self.v: dict[tuple[int, int], torch.Tensor] = defaultdict(lambda: empty)

    def supports(self, *_: Any) -> str | None:
        return None

    def bind(self, *_: Any) -> None:
        raise NotImplementedError("the test passes the layers to the constructor")

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        meta: AttentionMetadata,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        shape = self.layers[layer]
        out = q.new_zeros(q.shape[0], shape.Hq, shape.Dv)
        starts = meta.query_start_list
        for r, (a, b) in enumerate(pairwise(starts)):
            key = (layer, int(meta.block_table[r, 0]))
            self.k[key] = torch.cat([self.k[key].to(k), k[a:b]])
            self.v[key] = torch.cat([self.v[key].to(v), v[a:b]])
            assert len(self.k[key]) == meta.seq_lens_list[r]
            out[a:b] = attend_dense(q[a:b], self.k[key], self.v[key], meta.positions[a:b], shape, sinks)
        return out


def attend_dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, shape: LayerShape, sinks: torch.Tensor | None
) -> torch.Tensor:
    """q [n, Hq, Dk] at `positions` over all keys k [S, H, Dk], v [S, H, Dv] of the sequence -> [n, Hq, Dv]."""
    k, v = (x.repeat_interleave(shape.Hq // shape.H, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * shape.scaling
    if shape.softcap is not None:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    distance = positions[:, None] - torch.arange(len(k))[None, :]
    visible = distance >= 0
    if shape.window is not None:
        visible &= distance < shape.window
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1).to(scores)], dim=-1)
    p = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", p, v)


def dense_metadata(chunks: list[tuple[int, int, int]], padding: int = 0) -> AttentionMetadata:
    """Metadata of one step. chunks: (sequence number, start, end) of the tokens each sequence contributes."""
    starts = [0]
    for _, a, b in chunks:
        starts.append(starts[-1] + b - a)
    positions = torch.cat([torch.arange(a, b) for _, a, b in chunks] + [torch.zeros(padding, dtype=torch.int64)])
    lens = [b for _, _, b in chunks]
    return AttentionMetadata(
        block_table=torch.tensor([[s] for s, _, _ in chunks], dtype=torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        query_start=torch.tensor(starts, dtype=torch.int32),
        slots=torch.cat([torch.arange(starts[-1]), torch.full((padding,), -1)]),
        positions=positions,
        seq_lens_list=lens,
        query_start_list=starts,
        num_decodes=0,
        block_size=16,
    )
