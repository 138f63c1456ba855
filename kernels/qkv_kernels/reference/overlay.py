"""What a query reads raw instead of as stored: a call's own rows (reads "raw"), sinks, the recent blocks of block-unit formats.

Takes: values decoded from the pool. Gives: the same tensors with raw values put in, for one run of rows after another.
Does not know about: formats' codes, how attention is computed.

Legend: R requests · t rows each · S keys, at positions k_pos[:, 0], k_pos[:, 0] + 1, ... · B block size.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

from qkv_kernels.reference.hadamard import hadamard
from qkv_kernels.reference.planes import Plane
from qkv_kernels.reference.tail import Window, window

Undo = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Rows(NamedTuple):
    """What a call brings: k [T, H, Dk] and v [T, H, Dv] of its own rows, and whose tails and sinks its requests own.

    raw: every row reads the call's own rows as they came, instead of as stored. tail_slots, sink_slots [R] int64.
    """

    k: torch.Tensor
    v: torch.Tensor
    raw: bool = False
    tail_slots: torch.Tensor | None = None
    sink_slots: torch.Tensor | None = None


class Side(NamedTuple):
    """K or V of a group: values [R, H, S, D] decoded from the pool, and the call's own rows [R, t, H, D]."""

    values: torch.Tensor
    plane: Plane
    rows: torch.Tensor


def runs(
    sides: list[Side],
    q_pos: torch.Tensor,
    k_pos: torch.Tensor,
    raw: bool,
    tail_slots: torch.Tensor | None,
    sink_slots: torch.Tensor | None,
) -> Iterator[slice]:
    """Slices of the rows at q_pos [R, t] that see the same keys raw; while one is out, the sides' values are what it sees."""
    B, t = sides[0].plane.codes.shape[2], q_pos.shape[1]
    tails = []
    for side in sides:
        if raw:
            request = torch.arange(len(q_pos), device=q_pos.device)[:, None]
            side.values[request, :, q_pos - k_pos[:, :1]] = _as_stored(side.rows, side)
        if side.plane.sink is not None:
            assert sink_slots is not None
            _show_sinks(side, side.plane.sink[sink_slots].transpose(1, 2), q_pos, k_pos)
        if side.plane.tail is not None:
            assert tail_slots is not None
            seen = window(side.plane.tail, side.rows, tail_slots, q_pos[:, 0], B)
            tails.append((side, Window(_as_stored(seen.rows, side), seen.positions)))
    start = int(q_pos[0, 0]) if tails and t > 1 else 0
    cuts = [0, *range(B - start % B, t, B), t] if tails else [0, t]  # rows of one block see the same blocks raw
    for first, last in pairwise(cuts):
        undo = [_show_tail(side, seen, q_pos[:, first:last], k_pos) for side, seen in tails]
        yield slice(first, last)
        for (side, _), (request, where, before) in zip(tails, undo, strict=True):
            side.values[request, :, where] = before


def _as_stored(rows: torch.Tensor, side: Side) -> torch.Tensor:
    """Raw K or V in the dtype and basis of the side's values."""
    rows = rows.to(side.values.dtype)
    return hadamard(rows) if side.plane.fmt.rotate else rows


def _show_sinks(side: Side, sinks: torch.Tensor, q_pos: torch.Tensor, k_pos: torch.Tensor) -> None:
    """sinks [R, n, H, D]: the raw first tokens, put in as far as they exist and are in reach."""
    positions = torch.arange(sinks.shape[1], device=sinks.device).expand(len(sinks), -1)
    request, which = ((positions >= k_pos[:, :1]) & (positions <= q_pos[:, -1:])).nonzero(as_tuple=True)
    side.values[request, :, which - k_pos[request, 0]] = _as_stored(sinks[request, which], side)


def _show_tail(side: Side, seen: Window, q_pos: torch.Tensor, k_pos: torch.Tensor) -> Undo:
    """Put the raw blocks in that the rows at q_pos [R, n], all of one block, see."""
    oldest = (q_pos[:, :1] // side.plane.codes.shape[2] - side.plane.fmt.tail_blocks) * side.plane.codes.shape[2]
    reach = (seen.positions >= torch.maximum(oldest, k_pos[:, :1])) & (seen.positions <= q_pos[:, -1:])
    request, which = reach.nonzero(as_tuple=True)
    where = seen.positions[request, which] - k_pos[request, 0]
    before = side.values[request, :, where]
    side.values[request, :, where] = seen.rows[request, which]
    return request, where, before
