"""Paged attention over stored codes. The definition that kernels are compared with.

Takes: queries, the pool planes of K and V of one head range, block tables. Gives: attention output.
Does not know about: layers, quantizers, how rows were encoded or written.

Legend: T rows · R requests of one cohort · t rows of each · m blocks · B block size · S = m * B keys ·
H kv heads · Hq query heads · G = Hq / H · D head dim.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from qkv_kernels.reference import codec
from qkv_kernels.reference.hadamard import hadamard
from qkv_kernels.reference.overlay import Rows, Seen, runs
from qkv_kernels.reference.planes import Decode, Plane

COHORT_ELEMENTS = 2**20  # decodes are batched up to this many elements of padded K: 4 MB stay in a CPU's cache
QUERY_ROWS = 64  # rows of a prefill chunk scored at a time: bounds memory, and skips keys no row of them sees
TILE_Q, TILE_K = 16, 64  # tiles of the deterministic path


class Rule(NamedTuple):
    """How one layer attends. window: a query at p sees keys k with p - k < window. sink_logits [Hq]: one more logit per head."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sink_logits: torch.Tensor | None = None


def attend(
    q: torch.Tensor,
    k: Plane,
    v: Plane,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    query_start: list[int],
    seq_lens: list[int],
    num_decodes: int,
    rule: Rule,
    rows: Rows | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """Causal attention of each row over the stored keys of its request, itself included.

    q [T, Hq, Dk]; block_table [R, M] int32; positions [T] int64; rows query_start[r] to query_start[r+1] belong to request r,
    which has seq_lens[r] keys; the first num_decodes requests have one row each. rows: the call's own K and V, needed where
    they are read raw and for planes with a tail or sinks; tails do not hold them yet. deterministic: a row's result does not
    depend, to the bit, on what else is in the call, on chunking or (token-unit formats) on the block size.
    Returns [T, Hq, Dv] in q's dtype; zeros for padding rows.
    """
    H = k.codes.shape[1]
    T, Hq, _ = q.shape
    queries = q.to(torch.float64 if q.dtype == torch.float64 else torch.float32).unflatten(1, (H, Hq // H))
    if k.fmt.rotate:  # (R q) . (R k) = q . k, so keys are never rotated back
        queries = hadamard(queries)
    out = q.new_zeros(T, Hq, v.fmt.unpacked_dim(v.codes.shape[-1]))
    core = _tiled if deterministic else _dense
    for cohort in cohorts(query_start, seq_lens, num_decodes, H * q.shape[-1]):
        q_pos = positions[cohort.rows].view(cohort.R, cohort.t)
        keys, values, k_pos = _read(
            k, v, block_table[cohort.requests], q_pos, max(seq_lens[cohort.requests]), rule.window, queries.dtype, deterministic
        )
        some, results = queries[cohort.rows].unflatten(0, q_pos.shape), []
        for run in _runs(keys, values, k, v, rows, cohort, q_pos, k_pos):
            results.append(core(some[:, run], keys, values, q_pos[:, run], k_pos, rule))
        result = torch.cat(results, 1)
        if v.fmt.rotate:  # weighted sums of rotated values, rotated back once
            result = hadamard(result)
        out[cohort.rows] = result.flatten(2, 3).flatten(0, 1).to(q.dtype)
    return out


class Cohort(NamedTuple):
    """Requests of a call that are worked on together: R requests of t rows each."""

    requests: slice
    rows: slice
    R: int
    t: int


def cohorts(query_start: list[int], seq_lens: list[int], num_decodes: int, width: int) -> Iterator[Cohort]:
    """The cohorts of a call: decodes by the batch, prefill chunks one by one. width: elements of K per key that one row reads."""
    step = max(1, COHORT_ELEMENTS // (width * max(seq_lens[:num_decodes], default=1)))
    starts = list(range(0, num_decodes, step)) + list(range(num_decodes, len(seq_lens)))
    for first, last in zip(starts, [*starts[1:], len(seq_lens)], strict=False):
        rows = slice(query_start[first], query_start[last])
        if rows.stop > rows.start:
            yield Cohort(slice(first, last), rows, last - first, (rows.stop - rows.start) // (last - first))


def _runs(
    keys: torch.Tensor,
    values: torch.Tensor,
    k: Plane,
    v: Plane,
    rows: Rows | None,
    cohort: Cohort,
    q_pos: torch.Tensor,
    k_pos: torch.Tensor,
) -> Iterator[slice]:
    """Slices of the cohort's rows to attend with, one after the other; meanwhile keys and values hold what those rows see."""
    if rows is None:
        return iter([slice(0, cohort.t)])
    both = [
        Seen(stored, plane, new[cohort.rows].unflatten(0, q_pos.shape))
        for stored, plane, new in ((keys, k, rows.k), (values, v, rows.v))
    ]
    slots = [None if s is None else s[cohort.requests] for s in (rows.tail_slots, rows.sink_slots)]
    return runs(both, q_pos, k_pos, rows.raw, *slots)


def _read(
    k: Plane, v: Plane, table: torch.Tensor, q_pos: torch.Tensor, length: int, window: int | None, dtype: torch.dtype, tiled: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values [R, H, S, Dk], [R, H, S, Dv] and positions [R, S] of the keys that the rows at q_pos [R, t] can see.

    V is zero wherever no row sees it, so that garbage in free pages (0 * NaN) stays out.
    """
    B = k.codes.shape[2]
    last = q_pos[:, -1:]
    oldest = q_pos[:, :1] - (window - 1 if window else length)  # before this nothing is visible
    if tiled:  # whole tiles from position 0
        first_block, count = torch.zeros_like(last), -(-length // TILE_K) * TILE_K
    else:
        first_block = oldest.clamp(min=0) // B
        count = length if window is None else min(length, window + q_pos.shape[1] + B - 2)
    blocks = first_block + torch.arange(-(-count // B), device=table.device)
    table = table.gather(1, blocks.clamp(max=table.shape[1] - 1))
    k_pos = (blocks[..., None] * B + torch.arange(B, device=table.device)).flatten(1)
    seen_k, seen_v = (_seen(plane, k_pos, oldest, last) for plane in (k, v))
    keys, values = _gather(k, table, seen_k, dtype), _gather(v, table, seen_v, dtype).masked_fill_(~seen_v[:, None, :, None], 0)
    if tiled:
        keys, values, k_pos = keys[:, :, :count], values[:, :, :count], k_pos[:, :count]
    return keys, values, k_pos


def _seen(plane: Plane, k_pos: torch.Tensor, oldest: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """bool [R, S]: keys that have codes, and that some row sees."""
    seen = (k_pos <= last) & (k_pos >= oldest)
    if plane.fmt.unit == "block":  # the open block has no codes
        B = plane.codes.shape[2]
        seen &= k_pos < (last + 1) // B * B
    return seen


def _gather(plane: Plane, table: torch.Tensor, seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Blocks table [R, m] of a plane, decoded: [R, H, m * B, D]; anything where not seen [R, m * B]."""
    if plane.decode is not None:
        return _decoded(plane, plane.decode, table, seen, dtype)

    def pages(pool: torch.Tensor) -> torch.Tensor:  # [N, H, ...] -> [R, m, H, ...]
        return _bytes(pool).index_select(0, table.flatten()).unflatten(0, table.shape).view(pool.dtype)

    def keys(pool: torch.Tensor) -> torch.Tensor:  # [N, H, B, ...] -> [R, H, S, ...]
        return pages(pool).transpose(1, 2).flatten(2, 3)

    if plane.fmt.scale == "block_channel":
        scale, zero = (None if pool is None else pages(pool) for pool in (plane.scale, plane.zero))
        codes = pages(plane.codes).transpose(2, 3)
        tokens = codec.dequantize(codes, scale, zero, plane.fmt, dtype, plane.static_scale, None, plane.table)
        return tokens.permute(0, 3, 1, 2, 4).flatten(2, 3)
    scale, zero = (None if pool is None else keys(pool) for pool in (plane.scale, plane.zero))
    static_scale, static_zero = (
        s.unsqueeze(1) if s is not None and s.dim() else s for s in (plane.static_scale, plane.static_zero)
    )
    codebook = plane.table if plane.table is None or plane.table.dim() == 1 else plane.table.unsqueeze(1)
    return codec.dequantize(keys(plane.codes), scale, zero, plane.fmt, dtype, static_scale, static_zero, codebook)


def _decoded(plane: Plane, decode: Decode, table: torch.Tensor, seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same by the quantizer's decode, which gets nothing but rows (blocks) that were encoded; zeros elsewhere."""
    fmt, (H, B) = plane.fmt, plane.codes.shape[1:3]
    rows = seen.unflatten(1, (-1, B))  # [R, m, B]
    if fmt.unit == "block":
        wanted = rows.any(-1)
        ids = table[wanted].long()

        def stored(pool: torch.Tensor) -> torch.Tensor:  # [N, H, B, ...] -> [n, B, H, ...]
            blocks = _bytes(pool)[ids].view(pool.dtype)
            return blocks if pool is not plane.codes and fmt.scale == "block_channel" else blocks.transpose(1, 2)
    else:
        wanted = rows
        request, block, offset = wanted.nonzero(as_tuple=True)
        ids = table[request, block].long()

        def stored(pool: torch.Tensor) -> torch.Tensor:  # [N, H, B, ...] -> [n, H, ...]
            return _bytes(pool)[ids, :, offset].view(pool.dtype)

    scale, zero = (None if pool is None else stored(pool) for pool in (plane.scale, plane.zero))
    values = decode(stored(plane.codes), scale, zero, dtype)
    out = values.new_zeros(*rows.shape, H, values.shape[-1])
    out[wanted] = values
    return out.flatten(1, 2).transpose(1, 2)


def _bytes(pool: torch.Tensor) -> torch.Tensor:
    """fp8 as bytes: it has no indexed reads on every device."""
    return pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool


def _visible(q_pos: torch.Tensor, k_pos: torch.Tensor, window: int | None) -> torch.Tensor:
    """[R, t], [R, S] -> bool [R, t, S]: what each row may see."""
    distance = q_pos[:, :, None] - k_pos[:, None, :]
    return (distance >= 0) & (distance < window) if window else distance >= 0


def _logits(q: torch.Tensor, keys: torch.Tensor, rule: Rule) -> torch.Tensor:
    scores = torch.matmul(q, keys.transpose(-1, -2)).mul_(rule.scaling)
    return scores if rule.softcap is None else (scores / rule.softcap).tanh_().mul_(rule.softcap)


def _dense(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, q_pos: torch.Tensor, k_pos: torch.Tensor, rule: Rule
) -> torch.Tensor:
    """q [R, t, H, G, D] over keys [R, H, S, D]: the textbook. Returns [R, t, H, G, Dv]."""
    R, t, H, G, D = q.shape
    outs = []
    for row in range(0, t, QUERY_ROWS):
        some, pos = q[:, row : row + QUERY_ROWS], q_pos[:, row : row + QUERY_ROWS]
        low, high = 0, keys.shape[2]
        if t > 1:  # one request: leave out the keys that none of these rows sees
            start, first, last = (int(p) for p in (k_pos[0, 0], pos[0, 0], pos[0, -1]))
            high = min(high, last + 1 - start)
            low = max(0, first + 1 - rule.window - start) if rule.window else 0
        K, V, seen = keys[:, :, low:high], values[:, :, low:high], _visible(pos, k_pos[:, low:high], rule.window)
        n, S = some.shape[1], high - low
        scores = _logits(some.permute(0, 2, 3, 1, 4).reshape(R, H, G * n, D), K, rule).view(R, H, G, n, S)
        scores.masked_fill_(~seen[:, None, None], -torch.inf)
        if rule.sink_logits is not None:
            sink = rule.sink_logits.to(scores.dtype).view(1, H, G, 1, 1).expand(R, H, G, n, 1)
            scores = torch.cat([scores, sink], -1)
        weights = scores.softmax(-1)[..., :S].reshape(R, H, G * n, S)
        outs.append((weights @ V).view(R, H, G, n, -1).permute(0, 3, 1, 2, 4))
    return torch.cat(outs, 1)


def _tiled(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, q_pos: torch.Tensor, k_pos: torch.Tensor, rule: Rule
) -> torch.Tensor:
    """The same with a fixed order of operations: products of 16 x 64 only, keys in tiles counted from position 0.

    Online softmax over key tiles (Milakov and Gimelshein 2018). A tile that a row cannot see changes nothing in its sums, to
    the bit, so it does not matter how many such tiles there are. CPU matrix products of fixed shape give a row the same
    bits wherever it stands in the tile or in the batch; products of 1 to 3 rows would not.
    """
    R, t, H, G, D = q.shape
    tiles = -(-t * G // TILE_Q)
    pad = tiles * TILE_Q - t * G
    request = torch.arange(R, device=q.device).repeat_interleave(tiles)
    rows = torch.nn.functional.pad(q.transpose(2, 3).flatten(1, 2), (0, 0, 0, 0, 0, pad))  # [R, t * G + pad, H, D]
    rows = rows.view(R * tiles, TILE_Q, H, D).transpose(1, 2).contiguous()
    pos = torch.nn.functional.pad(q_pos.repeat_interleave(G, 1), (0, pad)).view(R * tiles, TILE_Q)
    if rule.sink_logits is None:
        best, total = rows.new_full((R * tiles, H, TILE_Q, 1), torch.finfo(rows.dtype).min), rows.new_zeros(1)
    else:
        heads = torch.arange(t * G + pad, device=q.device).remainder(G).repeat(R).view(R * tiles, TILE_Q)
        best = rule.sink_logits.to(rows.dtype).view(H, G)[:, heads].transpose(0, 1).unsqueeze(-1).contiguous()
        total = rows.new_ones(1)
    out = rows.new_zeros(1)
    for start in range(0, keys.shape[2], TILE_K):
        tile = slice(start, start + TILE_K)
        seen = _visible(pos, k_pos[:, tile][request], rule.window)
        scores = _logits(rows, keys[:, :, tile][request], rule).masked_fill_(~seen[:, None], -torch.inf)
        higher = torch.maximum(best, scores.amax(-1, keepdim=True))
        weights, fade = (scores - higher).exp_(), (best - higher).exp_()
        total = total * fade + weights.sum(-1, keepdim=True)
        out = out * fade + torch.matmul(weights, values[:, :, tile][request])
        best = higher
    out = (out / total).transpose(1, 2).reshape(R, tiles * TILE_Q, H, -1)[:, : t * G]
    return out.unflatten(1, (t, G)).transpose(2, 3)
