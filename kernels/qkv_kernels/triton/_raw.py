"""Device functions for keys that are read raw: sinks, the blocks of block-unit formats that are not encoded yet.

A raw row lies in what a request keeps (a ring or its sinks, see reference/tail.py), or, if it is of this call, among the call's
own rows. Does not know about: codes, formats' scales.
"""

import triton
import triton.language as tl


@triton.jit
def raw_rows(new, kept, position, first_row, start, slot, head, stride_t, stride_h, S: tl.constexpr, SINK: tl.constexpr):
    """Pointers to the raw rows at `position` [n] of one head. first_row, start: row and position of the call's first token.

    kept: rings [slots, H, ring, D], where a token at p is row p % ring, until this call's rows are put in at its end; or, with
    SINK, sinks [slots, H, n, D], which hold this call's rows already.
    """
    if SINK:
        at = kept + (slot * S.sink[0] + head * S.sink[1] + position * S.sink[2])
    else:
        ring = kept + (slot * S.tail[0] + head * S.tail[1] + position % S.ring * S.tail[2])
        own = new + ((first_row + position - start).to(tl.int64) * stride_t + head * stride_h)
        at = tl.where(position >= start, own, ring)
    return at


@triton.jit
def load_raw(rows, keep, stream: tl.constexpr, S: tl.constexpr, MAT):
    """Raw rows at pointers [keys] as a tile [keys, lanes] of one stream; 0 where not kept."""
    c = tl.arange(0, S.lanes)
    mask = keep[:, None] & (c < S.width)[None, :]
    return tl.load(rows[:, None] + stream * S.width + c[None, :], mask=mask, other=0).to(MAT)


@triton.jit
def raw_from(position, S: tl.constexpr):
    """The first position that a query reads raw: its own block and tail_blocks before it. Below 0 where those do not exist."""
    return (position // S.B - S.tail_blocks) * S.B
