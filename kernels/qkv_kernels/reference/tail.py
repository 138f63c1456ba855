"""Raw tails and sinks. Tails: the most recent blocks of every request as they came, for formats that encode whole blocks.

A request's tail is a ring of W = (tail_blocks + 1) * B rows in a slot of its own: the token at position p is row p % W. A call
reads what it needs as a window (the ring's rows, then the call's own), encodes the blocks that the call completes from it,
attends, and only then puts its last rows into the ring. Sinks: the first rows of a sequence, in a slot of its first block.
Does not know about: formats, requests, attention.

Legend: R requests with t rows each in this call · starts [R] position of each one's first row · slots [R] its ring.
"""

from typing import NamedTuple

import torch


class Window(NamedTuple):
    """Raw rows [R, n, H, D] at positions [R, n], n whole blocks; zeros beyond the last row of the call."""

    rows: torch.Tensor
    positions: torch.Tensor


def window(ring: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor, B: int) -> Window:
    """From the oldest tail block of each request's first row up to its last row. ring [slots, H, W, D], rows [R, t, H, D]."""
    W, t = ring.shape[2], rows.shape[1]
    first = (starts // B - (W // B - 1)).clamp(min=0) * B
    positions = first[:, None] + torch.arange(-(-(W - 1 + t) // B) * B, device=rows.device)
    age = positions - starts[:, None]
    earlier = ring[slots[:, None], :, positions % W]
    new = rows[torch.arange(len(rows), device=rows.device)[:, None], age.clamp(0, t - 1)]
    values = torch.where((age < 0)[..., None, None], earlier, new)
    return Window(values.masked_fill_((age >= t)[..., None, None], 0), positions)


def completed(raw: Window, starts: torch.Tensor, t: int, B: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The blocks whose last token is in this call: rows [n, B, H, D], which request [n], which of its blocks [n]."""
    block = raw.positions[:, ::B] // B
    full = (block >= starts[:, None] // B) & ((block + 1) * B <= starts[:, None] + t)
    request, which = full.nonzero(as_tuple=True)
    return raw.rows.unflatten(1, (-1, B))[request, which], request, block[request, which]


def keep(ring: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor) -> None:
    """Put the last W rows of the call [R, t, H, D] into the rings, in place."""
    W, t = ring.shape[2], rows.shape[1]
    last = torch.arange(max(0, t - W), t, device=rows.device)
    ring[slots[:, None], :, (starts[:, None] + last) % W] = rows[:, last]


def keep_first(sinks: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor) -> None:
    """Put the rows [R, t, H, D] at positions below n into sinks [slots, H, n, D], in place."""
    positions = starts[:, None] + torch.arange(rows.shape[1], device=rows.device)
    request, which = (positions < sinks.shape[2]).nonzero(as_tuple=True)
    sinks[slots[request], :, positions[request, which]] = rows[request, which]
