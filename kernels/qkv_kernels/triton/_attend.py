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

from qkv_kernels.triton._tiles import load_keys, load_rows, load_static, row_at, values

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
    q_low, q_high, q_total, factor, bias, position, acc_low, acc_high, top, total, offset, start, stop, head, table,
    k_codes, k_scale, k_zero, v_codes, v_scale, v_zero,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds keys start ... stop - 1 (start a multiple of P.keys) to the running state, which it returns.

    position [rows]: of each query row. Without MASKED, stop is a multiple of P.keys and every row sees every key.
    """
    for begin in range(start, stop, P.keys):
        j = begin + tl.arange(0, P.keys)
        keep = j < stop
        if K.B % P.keys == 0:  # one page per tile
            page = tl.load(table + begin // K.B).to(tl.int64) + tl.full([P.keys], 0, tl.int64)
            within = begin % K.B + tl.arange(0, P.keys)
        else:
            page = tl.load(table + j // K.B, mask=keep, other=0).to(tl.int64)
            within = j % K.B
        row = row_at(page, head, within, K.codes[0], K.codes[1], K.codes[2], K.far)
        k_stored = load_rows(k_codes, row, keep, MASKED, K.width, K.lanes)
        row = row_at(page, head, within, V.codes[0], V.codes[1], V.codes[2], V.far)
        v_stored = load_rows(v_codes, row, keep, MASKED, V.width, V.lanes)
        k_scale_row, k_zero_row, v_scale_row, v_zero_row = page, page, page, page
        if K.scale == "token" or K.scale == "group":
            k_scale_row = row_at(page, head, within, K.scales[0], K.scales[1], K.scales[2], K.far)
            if K.zero != "none":
                k_zero_row = row_at(page, head, within, K.zeros[0], K.zeros[1], K.zeros[2], K.far)
        if V.scale == "token" or V.scale == "group":
            v_scale_row = row_at(page, head, within, V.scales[0], V.scales[1], V.scales[2], V.far)
            if V.zero != "none":
                v_zero_row = row_at(page, head, within, V.zeros[0], V.zeros[1], V.zeros[2], V.far)

        k = values(k_stored, k_scale, k_zero, k_scale_row, k_zero_row, keep, 0, K, P.mat_k, True, MASKED)
        score = tl.dot(q_low, tl.trans(k), input_precision="ieee")
        if K.streams == 2:
            k = values(k_stored, k_scale, k_zero, k_scale_row, k_zero_row, keep, 1, K, P.mat_k, True, MASKED)
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
        v = values(v_stored, v_scale, v_zero, v_scale_row, v_zero_row, keep, 0, V, P.mat_v, False, MASKED)
        acc_low = tl.dot(weight, v, acc_low * fade[:, None], input_precision="ieee")
        if V.streams == 2:
            v = values(v_stored, v_scale, v_zero, v_scale_row, v_zero_row, keep, 1, V, P.mat_v, False, MASKED)
            acc_high = tl.dot(weight, v, acc_high * fade[:, None], input_precision="ieee")
    return acc_low, acc_high, top, total, offset


@triton.jit
def softcap(x, CAP: tl.constexpr):
    """CAP * tanh(x / CAP), by exp2; large |x| give +-CAP."""
    return CAP - (2 * CAP) / (tl.exp2(x * (2 * 1.4426950408889634 / CAP)) + 1)


@triton.jit
def attend_rows(
    q_rows, row_kept, position, start, full, stop, head, table,
    k_codes, k_scale, k_zero, k_static_scale, k_static_zero, v_codes, v_scale, v_zero,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Rows over keys start ... stop - 1, of which start ... full - 1 are whole tiles that every row sees.

    Returns acc of both streams in units of codes with zero points added, top and total [rows].
    """
    q_low, q_high, q_total, factor, bias = load_query(q_rows, row_kept, head, k_static_scale, k_static_zero, K, P)
    acc_low = tl.full([P.rows, V.lanes], 0, tl.float32)
    acc_high = tl.full([P.rows, V.lanes if V.streams == 2 else 1], 0, tl.float32)
    top = tl.full([P.rows], float("-inf"), tl.float32)
    total = tl.full([P.rows], 0, tl.float32)
    offset = tl.full([P.rows], 0, tl.float32)
    if P.window is None:
        acc_low, acc_high, top, total, offset = scan(
            q_low, q_high, q_total, factor, bias, position, acc_low, acc_high, top, total, offset, start, full, head, table,
            k_codes, k_scale, k_zero, v_codes, v_scale, v_zero, K, V, P, False,
        )  # fmt: skip
        start = full
    acc_low, acc_high, top, total, offset = scan(
        q_low, q_high, q_total, factor, bias, position, acc_low, acc_high, top, total, offset, start, stop, head, table,
        k_codes, k_scale, k_zero, v_codes, v_scale, v_zero, K, V, P, True,
    )  # fmt: skip
    acc_low = acc_low * V.unit
    acc_high = acc_high * V.unit
    if V.scale == "token" and V.zero != "none":
        acc_low += offset[:, None]
        acc_high += offset[:, None]
    return acc_low, acc_high, top, total


@triton.jit
def finish(acc, share, total, head, stream: tl.constexpr, v_static_scale, v_static_zero, V: tl.constexpr):
    """acc [rows, lanes] -> attention output: static scales and zeros, then the division.

    share [rows]: sum of the weights of keys; total [rows]: the same with the sink's weight. Rows without any weight give 0.
    """
    if V.scale == "static":
        s = load_static(v_static_scale, head, stream, 0.0, False, V)[None, :]
        if V.zero == "float":
            acc = acc * s + share[:, None] * load_static(v_static_zero, head, stream, 0.0, True, V)[None, :]
        elif V.zero == "code":
            acc = (acc - share[:, None] * load_static(v_static_zero, head, stream, 0.0, True, V)[None, :]) * s
        else:
            acc = acc * s
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def add_sink(top, total, logit):
    """The sink's logit joins the denominator of its query head."""
    return total + tl.exp2(logit.to(tl.float32) * LOG2E - tl.where(top == float("-inf"), 0.0, top))
