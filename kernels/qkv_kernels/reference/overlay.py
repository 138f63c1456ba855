"""What a query reads raw instead of as stored: a call's own rows (reads "raw"), sinks, the recent blocks of block-unit formats.

Takes: values decoded from the pool. Gives: the same tensors with raw values put in, for one run of rows after another.
Does not know about: what codes mean, how attention is computed.

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


class Seen(NamedTuple):
    """What a cohort sees of K or of V: values [R, H, S, D] decoded from the pool, and the call's own rows [R, t, H, D]."""

    values: torch.Tensor
    plane: Plane
    rows: torch.Tensor


def runs(
    both: list[Seen],
    q_pos: torch.Tensor,
    k_pos: torch.Tensor,
    raw: bool,
    tail_slots: torch.Tensor | None,
    sink_slots: torch.Tensor | None,
) -> Iterator[slice]:
    """Cuts the rows at q_pos [R, t] into runs whose rows all see the same keys raw, and yields their slices one by one.

    The caller attends with a run before it asks for the next one: until then, `values` of K and of V hold what the rows of this
    run see, raw rows included. Afterwards the raw rows of tails are taken out again.
    """
    B, t = both[0].plane.codes.shape[2], q_pos.shape[1]
    tails = []
    for seen in both:
        if raw:
            request = torch.arange(len(q_pos), device=q_pos.device)[:, None]
            seen.values[request, :, q_pos - k_pos[:, :1]] = _as_stored(seen.rows, seen)
        if seen.plane.sink is not None:
            assert sink_slots is not None
            _show_sinks(seen, seen.plane.sink[sink_slots].transpose(1, 2), q_pos, k_pos)
        if seen.plane.tail is not None:
            assert tail_slots is not None
            raw_rows = window(seen.plane.tail, seen.rows, tail_slots, q_pos[:, 0], B)
            tails.append((seen, Window(_as_stored(raw_rows.rows, seen), raw_rows.positions)))
    start = int(q_pos[0, 0]) if tails and t > 1 else 0
    cuts = [0, *range(B - start % B, t, B), t] if tails else [0, t]  # rows of one block see the same blocks raw
    for first, last in pairwise(cuts):
        undo = [_show_tail(seen, recent, q_pos[:, first:last], k_pos) for seen, recent in tails]
        yield slice(first, last)
        for (seen, _), (request, where, before) in zip(tails, undo, strict=True):
            seen.values[request, :, where] = before


def _as_stored(rows: torch.Tensor, seen: Seen) -> torch.Tensor:
    """Raw K or V in the dtype and basis of the values that were decoded."""
    rows = rows.to(seen.values.dtype)
    return hadamard(rows) if seen.plane.fmt.rotate else rows


def _show_sinks(seen: Seen, sinks: torch.Tensor, q_pos: torch.Tensor, k_pos: torch.Tensor) -> None:
    """sinks [R, n, H, D]: the raw first tokens, put in as far as they exist and are in reach."""
    positions = torch.arange(sinks.shape[1], device=sinks.device).expand(len(sinks), -1)
    request, which = ((positions >= k_pos[:, :1]) & (positions <= q_pos[:, -1:])).nonzero(as_tuple=True)
    seen.values[request, :, which - k_pos[request, 0]] = _as_stored(sinks[request, which], seen)


def _show_tail(seen: Seen, recent: Window, q_pos: torch.Tensor, k_pos: torch.Tensor) -> Undo:
    """Put the raw blocks in that the rows at q_pos [R, n], all of one block, see."""
    oldest = (q_pos[:, :1] // seen.plane.codes.shape[2] - seen.plane.fmt.tail_blocks) * seen.plane.codes.shape[2]
    reach = (recent.positions >= torch.maximum(oldest, k_pos[:, :1])) & (recent.positions <= q_pos[:, -1:])
    request, which = reach.nonzero(as_tuple=True)
    where = recent.positions[request, which] - k_pos[request, 0]
    before = seen.values[request, :, where]
    seen.values[request, :, where] = recent.rows[request, which]
    return request, where, before
