"""The loop over keys that decode and extend share: an online softmax over stored codes, everything affine placed outside.

With rows i (query token and head), keys j, channels c, and log2(e) folded into the scaling:

    score[i, j] = factor[i] * kscale[j] * (q'[i] . code[j]) + bias[i]      q'[c] = q[c] * static_scale[c] / factor[i]
    vscale[j]   = m[j] * 2^e[j], m in [1, 2)
    w[i, j]     = 2^(score[i, j] + e[j] - top[i])                           in (0, 1]
    total[i]    = sum_j w * 2^-e[j]                                         the softmax denominator, without the V scale
    offset[i]   = sum_j w * 2^-e[j] * vzero[j]                              the V zero points, one number for all channels
    acc[i, c]   = sum_j (w * m[j]) * code[j, c]

The exponent of the V scale joins that of the softmax, so numerators stay in float16's range whatever the scales are, and the
online maximum is taken over score + e. Online softmax: Milakov and Gimelshein 2018; split: Flash-Decoding, Dao et al. 2023.
"""

import triton
import triton.language as tl

from qkv_kernels.triton._raw import load_raw, raw_from, raw_rows
from qkv_kernels.triton._tiles import load_codes, load_keys, load_static, row_at, values

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_query(q_rows, keep, head, static_scale, static_zero, K: tl.constexpr, P: tl.constexpr):
    """Rows at q_rows [rows] (pointers) -> q' of both streams, sum of q' over channels, factor, bias; the last three [rows]."""
    c = tl.arange(0, K.lanes)
    mask = keep[:, None] & (c < K.width)[None, :]
    low = tl.load(q_rows[:, None] + c[None, :], mask=mask, other=0).to(tl.float32)
    low, bias = fold_static(low, head, 0, static_scale, static_zero, K)
    largest, total = tl.max(tl.abs(low), 1), tl.sum(low, 1)
    high = low
    if K.streams == 2:
        high = tl.load(q_rows[:, None] + K.width + c[None, :], mask=mask, other=0).to(tl.float32)
        high, more = fold_static(high, head, 1, static_scale, static_zero, K)
        bias += more
        largest = tl.maximum(largest, tl.max(tl.abs(high), 1))
        total += tl.sum(high, 1)
    factor = tl.full(largest.shape, 1.0, tl.float32)
    if P.normalize:
        factor = tl.maximum(largest, 1e-30)
        low, high, total = low / factor[:, None], high / factor[:, None], total / factor
    scaling: tl.constexpr = P.scaling if P.softcap is not None else P.scaling * 1.4426950408889634
    return low.to(P.mat_k), high.to(P.mat_k), total, factor * (scaling * K.unit), bias * scaling


@triton.jit
def fold_static(q, head, stream: tl.constexpr, static_scale, static_zero, K: tl.constexpr):
    """q [rows, lanes] times the static scale of every channel, and what static zero points add to every score of a row."""
    bias = tl.zeros([q.shape[0]], tl.float32)
    if K.scale == "static":
        if K.zero == "float":
            bias = tl.sum(q * load_static(static_zero, head, stream, 0.0, True, K)[None, :], 1)
        q = q * load_static(static_scale, head, stream, 0.0, False, K)[None, :]
        if K.zero == "code":
            bias = -tl.sum(q * load_static(static_zero, head, stream, 0.0, True, K)[None, :], 1)
    return q, bias


@triton.jit
def scan(
    q_low, q_high, q_total, factor, bias, position, acc_low, acc_high, top, total, offset, start, stop, gap, skip, head, table,
    k_codes, k_scale, k_zero, v_codes, v_scale, v_zero,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds keys start ... stop - 1 (start a multiple of P.keys) to the running state, which it returns.

    position [rows]: of each query row. Without MASKED, stop is a multiple of P.keys and every row sees every key. With MASKED,
    `skip` keys from `gap` on are left out (formats with raw rows only; both multiples of P.keys).
    """
    for at in range(start, stop, P.keys):
        begin = at
        if MASKED and K.mixed:
            begin = tl.where(at < gap, at, at + skip)
        last = stop
        if MASKED and K.mixed:
            last = stop + skip
        j = begin + tl.arange(0, P.keys)
        keep = j < last
        if K.B % P.keys == 0:  # one page per tile
            page = tl.load(table + begin // K.B).to(tl.int64) + tl.full([P.keys], 0, tl.int64)
            within = begin % K.B + tl.arange(0, P.keys)
        else:
            page = tl.load(table + j // K.B, mask=keep, other=0).to(tl.int64)
            within = j % K.B
        row = row_at(page, head, within, K.codes[0], K.codes[1], K.codes[2], K.far)
        k_stored = load_codes(k_codes, row, keep, MASKED, K)
        row = row_at(page, head, within, V.codes[0], V.codes[1], V.codes[2], V.far)
        v_stored = load_codes(v_codes, row, keep, MASKED, V)
        k_scale_row, k_zero_row, v_scale_row, v_zero_row = page, page, page, page
        k_keep, v_keep = keep, keep
        if K.scale == "token" or K.scale == "group":
            k_scale_row = row_at(page, head, within, K.scales[0], K.scales[1], K.scales[2], K.far)
            if K.zero != "none":
                k_zero_row = row_at(page, head, within, K.zeros[0], K.zeros[1], K.zeros[2], K.far)
        if V.scale == "token" or V.scale == "group":
            v_scale_row = row_at(page, head, within, V.scales[0], V.scales[1], V.scales[2], V.far)
            if V.zero != "none":
                v_zero_row = row_at(page, head, within, V.zeros[0], V.zeros[1], V.zeros[2], V.far)
        if K.scale == "block":
            k_scale_row, k_zero_row, k_keep = block_rows(table, begin, last, head, P.k_pages, K, P)
        if V.scale == "block":
            v_scale_row, v_zero_row, v_keep = block_rows(table, begin, last, head, P.v_pages, V, P)

        k = values(k_stored, k_scale, k_zero, k_scale_row, k_zero_row, k_keep, 0, K, P.mat_k, True, MASKED)
        score = tl.dot(q_low, tl.trans(k), input_precision="ieee")
        if K.streams == 2:
            k = values(k_stored, k_scale, k_zero, k_scale_row, k_zero_row, k_keep, 1, K, P.mat_k, True, MASKED)
            score = tl.dot(q_high, tl.trans(k), score, input_precision="ieee")
        if K.scale == "token":
            s = load_keys(k_scale, k_scale_row, keep, 1.0, MASKED)
            if K.zero == "code":
                z = load_keys(k_zero, k_zero_row, keep, 0.0, MASKED)
                score = (score - q_total[:, None] * z[None, :]) * s[None, :]
            elif K.zero == "float":
                z = load_keys(k_zero, k_zero_row, keep, 0.0, MASKED)
                score = score * s[None, :] + q_total[:, None] * z[None, :]
            else:
                score = score * s[None, :]
        score = score * factor[:, None] + bias[:, None]
        if P.softcap is not None:
            score = softcap(score, P.softcap) * LOG2E
        if MASKED:
            seen = (j[None, :] <= position[:, None]) & keep[None, :]
            if P.window is not None:
                seen = seen & (position[:, None] - j[None, :] < P.window)
            if K.has_tail:
                seen = seen & (j[None, :] < raw_from(position, K)[:, None])
            if K.has_sink:
                seen = seen & (j >= K.sink_tokens)[None, :]
            score = tl.where(seen, score, float("-inf"))

        if V.scale == "token":
            s = load_keys(v_scale, v_scale_row, keep, 1.0, MASKED)
            bits = s.to(tl.int32, bitcast=True)
            score += ((bits >> 23) - 127).to(tl.float32)[None, :]
        higher = tl.maximum(top, tl.max(score, 1))
        base = higher
        if MASKED:
            base = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen no key yet
        fade = tl.exp2(top - base)
        weight = tl.exp2(score - base[:, None])
        if V.scale == "token":
            share = ((254 << 23) - (bits & 0x7F800000)).to(tl.float32, bitcast=True)  # 2^-exponent
            total = total * fade + tl.sum(weight * share[None, :], 1)
            if V.zero == "float":
                z = load_keys(v_zero, v_zero_row, keep, 0.0, MASKED)
                offset = offset * fade + tl.sum(weight * (z * share)[None, :], 1)
            weight *= (s * share)[None, :]
            if V.zero == "code":
                z = load_keys(v_zero, v_zero_row, keep, 0.0, MASKED)
                offset = offset * fade - tl.sum(weight * z[None, :], 1)
        else:
            total = total * fade + tl.sum(weight, 1)
        top = higher
        weight = weight.to(P.mat_v)
        v = values(v_stored, v_scale, v_zero, v_scale_row, v_zero_row, v_keep, 0, V, P.mat_v, False, MASKED)
        acc_low = tl.dot(weight, v, acc_low * fade[:, None], input_precision="ieee")
        if V.streams == 2:
            v = values(v_stored, v_scale, v_zero, v_scale_row, v_zero_row, v_keep, 1, V, P.mat_v, False, MASKED)
            acc_high = tl.dot(weight, v, acc_high * fade[:, None], input_precision="ieee")
    return acc_low, acc_high, top, total, offset


@triton.jit
def block_rows(table, begin, stop, head, PAGES: tl.constexpr, S: tl.constexpr, P: tl.constexpr):
    """Where scales and zeros of channels begin for the pages of a tile of keys, and which pages exist: [PAGES] each."""
    TILE: tl.constexpr = P.keys
    if TILE == PAGES:  # blocks that do not divide a tile: the page of every key
        block = (begin + tl.arange(0, PAGES)) // S.B
    else:
        block = begin // S.B + tl.arange(0, PAGES)
    keep = block * S.B < stop
    page = tl.load(table + block, mask=keep, other=0).to(tl.int64)
    zero_row = page
    if S.zero != "none":
        zero_row = row_at(page, head, 0, S.zeros[0], S.zeros[1], S.zeros[2], S.far)
    return row_at(page, head, 0, S.scales[0], S.scales[1], S.scales[2], S.far), zero_row, keep


@triton.jit
def scan_raw(
    q_low, q_high, position, acc_low, acc_high, top, total, start, stop, head, k_new, v_new, k_kept, v_kept, slot, first_row,
    first_position, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """Adds the keys among start ... stop - 1 that rows read raw: with SINK the first ones, else what is not encoded yet.

    q_low, q_high: queries as they are. acc in units of values, its weights relative to 2^top.
    """
    scaling: tl.constexpr = P.scaling if P.softcap is not None else P.scaling * 1.4426950408889634
    for begin in range(start, stop, P.raw_keys):
        j = begin + tl.arange(0, P.raw_keys)
        keep = j < stop
        rows = raw_rows(k_new, k_kept, j, first_row, first_position, slot, head, k_stride_t, k_stride_h, K, SINK)
        score = tl.dot(q_low, tl.trans(load_raw(rows, keep, 0, K, P.mat_raw)), input_precision="ieee")
        if K.streams == 2:
            score = tl.dot(q_high, tl.trans(load_raw(rows, keep, 1, K, P.mat_raw)), score, input_precision="ieee")
        score *= scaling
        if P.softcap is not None:
            score = softcap(score, P.softcap) * LOG2E
        seen = (j[None, :] <= position[:, None]) & keep[None, :]
        if P.window is not None:
            seen = seen & (position[:, None] - j[None, :] < P.window)
        if not SINK:
            seen = seen & (j[None, :] >= raw_from(position, K)[:, None]) & (j >= K.sink_tokens)[None, :]
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp2(top - base)
        weight = tl.exp2(score - base[:, None])
        total = total * fade + tl.sum(weight, 1)
        top = higher
        weight = weight.to(P.mat_raw)
        rows = raw_rows(v_new, v_kept, j, first_row, first_position, slot, head, v_stride_t, v_stride_h, V, SINK)
        acc_low = tl.dot(weight, load_raw(rows, keep, 0, V, P.mat_raw), acc_low * fade[:, None], input_precision="ieee")
        if V.streams == 2:
            acc_high = tl.dot(weight, load_raw(rows, keep, 1, V, P.mat_raw), acc_high * fade[:, None], input_precision="ieee")
    return acc_low, acc_high, top, total


@triton.jit
def softcap(x, CAP: tl.constexpr):
    """CAP * tanh(x / CAP), by exp2; large |x| give +-CAP."""
    return CAP - (2 * CAP) / (tl.exp2(x * (2 * 1.4426950408889634 / CAP)) + 1)


@triton.jit
def attend_rows(
    q_rows, row_kept, position, start, full, stop, head, table,
    k_codes, k_scale, k_zero, k_static_scale, k_static_zero, v_codes, v_scale, v_zero, v_static_scale, v_static_zero, raw,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Rows over keys start ... stop - 1, of which start ... full - 1 are whole tiles that every row sees.

    raw: for formats with raw rows, where they are and which keys may be among them (see raw_parts).
    Returns acc of both streams in units of codes with zero points added (of values, for formats with raw rows), top and
    total [rows].
    """
    q_low, q_high, q_total, factor, bias = load_query(q_rows, row_kept, head, k_static_scale, k_static_zero, K, P)
    acc_low = tl.full([P.rows, V.lanes], 0, tl.float32)
    acc_high = tl.full([P.rows, V.lanes if V.streams == 2 else 1], 0, tl.float32)
    top = tl.full([P.rows], float("-inf"), tl.float32)
    total = tl.full([P.rows], 0, tl.float32)
    offset = tl.full([P.rows], 0, tl.float32)
    gap, skip = start, 0
    if P.window is None:
        if K.has_sink:  # the tiles that hold sinks are masked
            gap = tl.minimum(tl.maximum(start, (K.sink_tokens + P.keys - 1) // P.keys * P.keys), full)
        acc_low, acc_high, top, total, offset = scan(
            q_low, q_high, q_total, factor, bias, position, acc_low, acc_high, top, total, offset, gap, full, 0, 0, head, table,
            k_codes, k_scale, k_zero, v_codes, v_scale, v_zero, K, V, P, False,
        )  # fmt: skip
        if K.mixed:
            skip = full - gap
        else:
            start = full
    acc_low, acc_high, top, total, offset = scan(
        q_low, q_high, q_total, factor, bias, position, acc_low, acc_high, top, total, offset, start, stop - skip, gap, skip,
        head, table, k_codes, k_scale, k_zero, v_codes, v_scale, v_zero, K, V, P, True,
    )  # fmt: skip
    acc_low = acc_low * V.unit
    acc_high = acc_high * V.unit
    if V.scale == "token" and V.zero != "none":
        acc_low += offset[:, None]
        acc_high += offset[:, None]
    if K.mixed:
        acc_low = place_static(acc_low, total, head, 0, v_static_scale, v_static_zero, V)
        if V.streams == 2:
            acc_high = place_static(acc_high, total, head, 1, v_static_scale, v_static_zero, V)
        (k_new, v_new, k_tail, v_tail, k_sink, v_sink, tail_slot, sink_slot, first_row, first_position, raw_start, raw_stop,
         sink_stop, k_stride_t, k_stride_h, v_stride_t, v_stride_h) = raw  # fmt: skip
        c = tl.arange(0, K.lanes)
        mask = row_kept[:, None] & (c < K.width)[None, :]
        q_low = tl.load(q_rows[:, None] + c[None, :], mask=mask, other=0).to(P.mat_raw)
        q_high = q_low
        if K.streams == 2:
            q_high = tl.load(q_rows[:, None] + K.width + c[None, :], mask=mask, other=0).to(P.mat_raw)
        if K.has_sink:
            acc_low, acc_high, top, total = scan_raw(
                q_low, q_high, position, acc_low, acc_high, top, total, 0, sink_stop, head, k_new, v_new, k_sink, v_sink,
                sink_slot, first_row, first_position, k_stride_t, k_stride_h, v_stride_t, v_stride_h, K, V, P, True,
            )  # fmt: skip
        if K.has_tail:
            acc_low, acc_high, top, total = scan_raw(
                q_low, q_high, position, acc_low, acc_high, top, total, raw_start, raw_stop, head, k_new, v_new, k_tail, v_tail,
                tail_slot, first_row, first_position, k_stride_t, k_stride_h, v_stride_t, v_stride_h, K, V, P, False,
            )  # fmt: skip
    return acc_low, acc_high, top, total


@triton.jit
def finish(acc, share, total, head, stream: tl.constexpr, v_static_scale, v_static_zero, V: tl.constexpr):
    """acc [rows, lanes] -> attention output: static scales and zeros, unless raw rows are in already, then the division.

    share [rows]: sum of the weights of keys; total [rows]: the same with the sink's weight. Rows without any weight give 0.
    """
    if not V.mixed:
        acc = place_static(acc, share, head, stream, v_static_scale, v_static_zero, V)
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def place_static(acc, share, head, stream: tl.constexpr, v_static_scale, v_static_zero, V: tl.constexpr):
    """acc [rows, lanes] from units of codes to values; share [rows]: the sum of its weights."""
    if V.scale == "static":
        s = load_static(v_static_scale, head, stream, 0.0, False, V)[None, :]
        if V.zero == "float":
            acc = acc * s + share[:, None] * load_static(v_static_zero, head, stream, 0.0, True, V)[None, :]
        elif V.zero == "code":
            acc = (acc - share[:, None] * load_static(v_static_zero, head, stream, 0.0, True, V)[None, :]) * s
        else:
            acc = acc * s
    return acc


@triton.jit
def add_sink(top, total, logit):
    """The sink's logit joins the denominator of its query head."""
    return total + tl.exp2(logit.to(tl.float32) * LOG2E - tl.where(top == float("-inf"), 0.0, top))
