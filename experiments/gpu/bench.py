"""Times the Triton kernels, and the libraries they compete with, on pools of random codes that are larger than the GPU's caches.

Takes: shapes. Gives: seconds per call. Needs torch and triton; FlashInfer and flash-attn are timed where they can be imported.
Does not know about: what is worth measuring, records.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from experiments.gpu.kernel_cases import empty_plane
from qkv_kernels.format import KVFormat
from qkv_kernels.reference.attend import Plane, Rule
from qkv_kernels.reference.overlay import Rows

ROTATE_BYTES = 512 << 20  # the calls of a measurement touch new pages until they have covered this much, more than any L2


@dataclass(frozen=True)
class Shape:
    """A batch of decodes or of prompts."""

    requests: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16

    def __str__(self) -> str:
        return f"{self.requests}x{self.context} {self.heads}/{self.kv_heads}/{self.head_dim}"

    def kv_bytes(self, formats: tuple[KVFormat, KVFormat]) -> float:
        """Bytes of the pages that one decode step reads."""
        per_block = sum(f.bytes_per_block(self.block_size, self.kv_heads, self.head_dim) for f in formats)
        return self.requests * self.context * per_block / self.block_size


@dataclass
class Pages:
    """Pages of random codes, and several sets of block tables, each over other pages."""

    k: Plane
    v: Plane
    tables: list[torch.Tensor]
    seq_lens: torch.Tensor


def make_pages(formats: tuple[KVFormat, KVFormat], shape: Shape, device: torch.device, rotate_bytes: int = ROTATE_BYTES) -> Pages:
    blocks = -(-shape.context // shape.block_size)
    sets = max(1, min(16, -(-rotate_bytes // int(shape.kv_bytes(formats)))))
    N = 1 + sets * shape.requests * blocks
    plane = partial(empty_plane, slots=shape.requests, raw_dtype=torch.bfloat16)
    k, v = (_filled(plane(f, N, shape.kv_heads, shape.block_size, shape.head_dim, device)) for f in formats)
    order = (torch.randperm(N - 1, device=device) + 1).int().view(sets, shape.requests, blocks)
    seq_lens = torch.full((shape.requests,), shape.context, dtype=torch.int32, device=device)
    return Pages(k, v, [t.contiguous() for t in order], seq_lens)


def _filled(plane: Plane) -> Plane:
    """The plane filled with random codes and scales, which decode to finite numbers of about 1."""
    if plane.fmt.raw:
        plane.codes.normal_()
    elif plane.fmt.storage.is_floating_point:  # random bits without the largest exponents, so without NaN and infinity
        plane.codes.view(torch.uint8).random_(0, 256).bitwise_and_(0xB7)
    else:
        plane.codes.view(torch.uint8).random_(0, 256)
    step = 1 / 3 if plane.fmt.bits == 4 else 0.3 if plane.fmt.storage.is_floating_point else 1 / 48
    for scale in (plane.scale, plane.static_scale):
        if scale is not None:
            scale.fill_(step)
    if plane.zero is not None:
        plane.zero.zero_()
    for raw in (plane.tail, plane.sink):
        if raw is not None:
            raw.normal_()
    return plane


def seconds(calls: list[Callable[[], object]], device: torch.device, repeats: int = 20) -> float:
    """The median seconds of one call; the calls take turns. On a GPU they are captured, so that launches take no time."""
    for call in calls:
        call()
    if device.type != "cuda":
        return statistics.median(_timed(call) for call in calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return _replayed(graph.replay, repeats) / len(calls)


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _replayed(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Bytes per second of a copy, where both what is read and what is written counts."""
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * size / seconds([lambda: target.copy_(source)], device)


def _queries(shape: Shape, rows: int, device: torch.device) -> torch.Tensor:
    return torch.randn(rows, shape.heads, shape.head_dim, dtype=torch.bfloat16, device=device)


def _rows(shape: Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one new token per request."""
    size = (shape.requests, shape.kv_heads, shape.head_dim)
    return torch.randn(size, dtype=torch.bfloat16, device=device), torch.randn(size, dtype=torch.bfloat16, device=device)


def decode_seconds(
    formats: tuple[KVFormat, KVFormat], shape: Shape, device: torch.device, rotate_bytes: int = ROTATE_BYTES
) -> float:
    """Seconds of one decode step of attention."""
    from qkv_kernels.triton import tuning
    from qkv_kernels.triton.decode import decode, split_count

    pages, q = make_pages(formats, shape, device, rotate_bytes), _queries(shape, shape.requests, device)
    out, rule = torch.empty_like(q), Rule(shape.head_dim**-0.5)
    new, slots = _rows(shape, device), torch.arange(shape.requests, device=device)
    rows = Rows(*new, False, slots, slots)
    splits = split_count(shape.requests, shape.kv_heads, shape.context, tuning.processors(device))

    def call(table: torch.Tensor) -> Callable[[], object]:
        return lambda: decode(q, pages.k, pages.v, table, pages.seq_lens, rule, out, splits, rows)

    return seconds([call(table) for table in pages.tables], device)


def extend_seconds(formats: tuple[KVFormat, KVFormat], shape: Shape, new: int, device: torch.device) -> float:
    """Seconds of attention of the last `new` tokens of every request."""
    from qkv_kernels.triton.extend import extend

    pages, q = make_pages(formats, shape, device, 1), _queries(shape, shape.requests * new, device)
    out, rule = torch.empty_like(q), Rule(shape.head_dim**-0.5)
    starts = torch.arange(0, len(q) + 1, new, dtype=torch.int32, device=device)
    return seconds(
        [lambda: extend(q, pages.k, pages.v, pages.tables[0], starts, pages.seq_lens, new, rule, out)], device, repeats=5
    )


def append_seconds(formats: tuple[KVFormat, KVFormat], shape: Shape, device: torch.device) -> float:
    """Seconds to encode and store one token per request."""
    from qkv_kernels.triton.append import append

    pages = make_pages(formats, shape, device)
    k, v = _rows(shape, device)
    slots = [table[:, -1].long() * shape.block_size for table in pages.tables]
    return seconds([lambda s=s: append(k, v, pages.k, pages.v, s) for s in slots], device)  # type: ignore[misc]


def attention_flops(shape: Shape, new: int) -> float:
    """Floating-point operations of causal attention of the last `new` tokens of every request."""
    pairs = new * (shape.context - new) + new * (new + 1) / 2
    return 4 * shape.requests * shape.heads * shape.head_dim * pairs


def _dense(shape: Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    size = (shape.requests, shape.kv_heads, shape.context, shape.head_dim)
    return torch.randn(size, dtype=torch.bfloat16, device=device), torch.randn(size, dtype=torch.bfloat16, device=device)


def sdpa_decode_seconds(shape: Shape, device: torch.device) -> float:
    """Seconds of torch's attention over contiguous K and V, by the better of two ways to treat heads that share a KV head: folded
    into rows, or by torch's flag."""
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    k, v = _dense(shape, device)
    q = _queries(shape, shape.requests, device)
    folded, flat = q.unflatten(1, (shape.kv_heads, -1)), q[:, :, None]
    return min(
        seconds([lambda: sdpa(folded, k, v)], device),
        seconds([lambda: sdpa(flat, k, v, enable_gqa=True)], device),
    )


def sdpa_extend_seconds(shape: Shape, device: torch.device) -> float:
    """Seconds of causal attention of whole prompts of equal length, by torch's flash kernel where it has one."""
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    k, v = _dense(shape, device)
    q = torch.randn(shape.requests, shape.heads, shape.context, shape.head_dim, dtype=torch.bfloat16, device=device)
    return seconds([lambda: sdpa(q, k, v, is_causal=True, enable_gqa=True)], device, repeats=5)


def flex_decode_seconds(shape: Shape, device: torch.device) -> float:
    """Seconds of torch's compiled flex_attention over contiguous K and V."""
    from torch.nn.attention.flex_attention import flex_attention

    k, v = _dense(shape, device)
    q, compiled = _queries(shape, shape.requests, device)[:, :, None], torch.compile(flex_attention)
    return seconds([lambda: compiled(q, k, v, enable_gqa=True)], device)


def flash_attn_decode_seconds(shape: Shape, device: torch.device) -> float:
    """Seconds of flash-attn over contiguous bf16 K and V, with a cache length per request."""
    from flash_attn import flash_attn_with_kvcache

    k, v = (x.transpose(1, 2).contiguous() for x in _dense(shape, device))
    q = _queries(shape, shape.requests, device)[:, None]
    lens = torch.full((shape.requests,), shape.context, dtype=torch.int32, device=device)
    return seconds([lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=lens)], device)


def flashinfer_decode_seconds(shape: Shape, device: torch.device) -> float:
    """Seconds of FlashInfer's paged decode over bf16 pages in shuffled order."""
    import flashinfer

    blocks = -(-shape.context // shape.block_size)
    total = shape.requests * blocks
    pages = torch.randn(
        total, 2, shape.block_size, shape.kv_heads, shape.head_dim, dtype=torch.bfloat16, device=device
    )  # [page, K or V, row, head, channel]
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    starts = torch.arange(0, total + 1, blocks, dtype=torch.int32, device=device)
    last = torch.full((shape.requests,), (shape.context - 1) % shape.block_size + 1, dtype=torch.int32, device=device)
    order = torch.randperm(total, device=device).int()
    wrapper.plan(starts, order, last, shape.heads, shape.kv_heads, shape.head_dim, shape.block_size, q_data_type=torch.bfloat16)
    q = _queries(shape, shape.requests, device)
    return seconds([lambda: wrapper.run(q, pages)], device)
