"""A small paged cache to test attention with: requests of random K and V, shuffled blocks, poisoned free pages.

And the oracle: dense attention in float64 over the values that the quantizer says it stores.
"""

import random

import torch
from hypothesis import strategies as st

from qkv.attention.base import AttentionBackend, Reads
from qkv.attention.reference import ReferenceBackend
from qkv.cache.store import KVStore
from qkv.layout import SIDES, AttentionMetadata, LayerShape, Side
from qkv.policies.quantizer.base import QUANTIZERS, Quantizer
from qkv.scales import ScaleFile

CPU = torch.device("cpu")


def shape(H: int = 2, G: int = 2, Dk: int = 16, Dv: int | None = None, **more: object) -> LayerShape:
    return LayerShape(index=0, H=H, Hq=H * G, Dk=Dk, Dv=Dv or Dk, scaling=Dk**-0.5, **more)  # type: ignore[arg-type]


def any_shape(size: int, sizes: int, window: int) -> st.SearchStrategy[LayerShape]:
    """Layers with head dims of 1 to `sizes` times `size`, windows up to `window`, and every other property of one."""
    dims = st.integers(1, sizes).map(lambda n: n * size)
    return st.builds(
        shape,
        H=st.integers(1, 3),
        G=st.integers(1, 8),
        Dk=dims,
        Dv=dims,
        window=st.none() | st.integers(1, window),
        softcap=st.none() | st.floats(1, 30),
        sink_logits=st.booleans(),
    )


def statistics(k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
    """All statistics that calibration can observe of k [T, H, Dk] and v [T, H, Dv]."""
    out = {}
    for side, x in zip(SIDES, (k, v), strict=True):
        out[f"{side}_channel_absmax"], out[f"{side}_head_absmax"] = x.abs().amax(0), x.abs().amax((0, 2))
        out[f"{side}_channel_min"], out[f"{side}_channel_max"] = x.amin(0), x.amax(0)
    return out


def bound(spec: object, layers: list[LayerShape], dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Quantizer:
    """The quantizer, calibrated on normal data where it wants scales, and bound."""
    quantizer = QUANTIZERS.build(spec)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(7)
    scales = None
    if quantizer.observers():
        stats = {}
        for la in layers:
            k, v = (torch.randn(256, la.H, D, generator=generator) * scale for D in (la.Dk, la.Dv))
            stats[la.index] = {name: s for name, s in statistics(k, v).items() if name in quantizer.observers()}
        scales = ScaleFile(quantizer.tensors_from_stats(stats), {"quantizer": quantizer.name})
    quantizer.bind(layers, scales, dtype, CPU)
    return quantizer


class Paged:
    """Requests over one layer. `step` runs a backend on the next tokens of some of them, as an engine would."""

    def __init__(
        self,
        layer: LayerShape,
        quantizer: object,
        lengths: list[int],
        block_size: int = 8,
        dtype: torch.dtype = torch.float32,
        reads: Reads = "cache",
        deterministic: bool = False,
        backend: AttentionBackend | None = None,
        seed: int = 0,
        free_blocks: int = 3,
        block_seed: int = 1,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.layer, self.B, self.dtype = layer, block_size, dtype
        self.quantizer = bound(quantizer, [layer], dtype)
        needed = [-(-n // block_size) for n in lengths]
        N = 1 + sum(needed) + free_blocks
        self.store = KVStore(
            [layer], [self.quantizer.formats(0)], N, block_size, CPU, poison=True, slots=len(lengths) + 2, raw_dtype=dtype
        )
        self.backend = backend or ReferenceBackend()
        self.backend.bind(self.store, self.quantizer, [layer], reads, deterministic)
        free = random.Random(block_seed).sample(range(1, N), N - 1)
        self.raw_slots = random.Random(block_seed).sample(range(len(lengths) + 2), len(lengths))
        self.tables = [[free.pop() for _ in range(n)] for n in needed]
        self.done = [0] * len(lengths)
        self.data = [
            tuple(
                torch.randn(n, H, D, generator=generator).to(dtype)
                for H, D in ((layer.Hq, layer.Dk), (layer.H, layer.Dk), (layer.H, layer.Dv))
            )
            for n in lengths
        ]
        self.sink_logits = torch.randn(layer.Hq, generator=generator) if layer.sink_logits else None

    def step(self, work: dict[int, int], padding: int = 1) -> dict[int, torch.Tensor]:
        """The next work[r] tokens of each request r -> {r: output [n, Hq, Dv]}. Checks padding rows and the null block."""
        order = sorted(work, key=lambda r: (work[r] != 1, r))
        tables, lens, start, slots, rows = [], [], [0], [], []
        positions: list[int] = []
        for r in order:
            span = range(self.done[r], self.done[r] + work[r])
            self.done[r] = span.stop
            tables.append(self.tables[r])
            lens.append(span.stop)
            start.append(start[-1] + work[r])
            slots += [self.tables[r][p // self.B] * self.B + p % self.B for p in span]
            positions += span
            rows.append([x[span.start : span.stop] for x in self.data[r]])
        T = start[-1]
        q, k, v = (
            torch.cat([*parts, parts[0].new_full((padding, *parts[0].shape[1:]), torch.nan)]) for parts in zip(*rows, strict=True)
        )
        M = max(map(len, tables))
        meta = AttentionMetadata(
            block_table=torch.tensor([t + [0] * (M - len(t)) for t in tables], dtype=torch.int32),
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            query_start=torch.tensor(start, dtype=torch.int32),
            slots=torch.tensor(slots + [-1] * padding),
            positions=torch.tensor(positions + [0] * padding),
            seq_lens_list=lens,
            query_start_list=start,
            num_decodes=sum(work[r] == 1 for r in order),
            block_size=self.B,
            tail_slots=torch.tensor([self.raw_slots[r] for r in order]),
            sink_slots=torch.tensor([self.raw_slots[-1 - r] for r in order]),
        )
        out = self.backend.attend(0, q, k, v, meta, self.sink_logits)
        assert not out[T:].any(), "padding rows must be zero"
        self.store.check_null()
        return {r: out[a:b] for r, a, b in zip(order, start, start[1:], strict=False)}

    def run(self, schedule: list[dict[int, int]]) -> list[torch.Tensor]:
        """Steps one after the other -> output of every request, [tokens so far, Hq, Dv]."""
        outs: list[list[torch.Tensor]] = [[] for _ in self.data]
        for work in schedule:
            for r, out in self.step(work).items():
                outs[r].append(out)
        return [torch.cat(o) for o in outs if o]

    def stored(self, r: int) -> dict[Side, torch.Tensor]:
        """K [n, H, Dk] and V [n, H, Dv] of a request as the quantizer stores them, float64."""
        _, k, v = self.data[r]
        return {side: self._stored(x, side) for side, x in zip(SIDES, (k, v), strict=True)}

    def _stored(self, x: torch.Tensor, side: Side) -> torch.Tensor:
        q, out = self.quantizer, []
        for i, heads in enumerate(q.formats(0)):
            rows = x[:, heads.heads]
            if heads.of(side).unit == "token":
                out.append(q.decode(q.encode(rows, side, 0, i), side, 0, torch.float32, i))
            else:  # the open block has no codes
                full = rows[: len(rows) // self.B * self.B].unflatten(0, (-1, self.B))
                values = q.decode(q.encode(full, side, 0, i), side, 0, torch.float32, i).flatten(0, 1)
                out.append(torch.cat([values, torch.full_like(rows[len(values) :], torch.nan)]))
        return torch.cat(out, 1).double()

    def expected(self, r: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Law 2: block by block of queries, each with the raw keys that such a query sees. Computed in dtype."""
        q, k, v = (x.to(dtype) for x in self.data[r])
        raw, stored = {"k": k, "v": v}, {side: x.to(dtype) for side, x in self.stored(r).items()}
        ranges = self.quantizer.formats(0)
        if all(r.of(side).unit == "token" and not r.of(side).sink_tokens for r in ranges for side in SIDES):
            return dense(q, stored["k"], stored["v"], self.layer, self.sink_logits)
        position, outs = torch.arange(len(q)), []
        for start in range(0, len(q), self.B):
            seen = {}
            for side in SIDES:
                values = stored[side].clone()
                for heads in ranges:
                    fmt = heads.of(side)
                    as_it_came = position < fmt.sink_tokens
                    if fmt.unit == "block":
                        as_it_came |= position // self.B >= start // self.B - fmt.tail_blocks
                    mine = slice(heads.heads.start, heads.heads.stop)
                    values[as_it_came, mine] = raw[side][as_it_came, mine]
                seen[side] = values
            outs.append(dense(q[start : start + self.B], seen["k"], seen["v"], self.layer, self.sink_logits, start))
        return torch.cat(outs)


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: LayerShape, sink_logits: torch.Tensor | None = None, first: int = 0
) -> torch.Tensor:
    """Attention of one sequence's queries from position `first` on, one head at a time.

    q [n, Hq, Dk], k, v [at least first + n, H, D] of one dtype, which it computes in -> [n, Hq, Dv].
    """
    last, G = first + len(q), layer.Hq // layer.H
    k, v = k[:last], v[:last]
    distance = torch.arange(first, last)[:, None] - torch.arange(last)[None, :]
    hidden = (distance < 0) | (distance >= (layer.window or last))
    outs = []
    for head in range(layer.Hq):
        scores = q[:, head] @ k[:, head // G].T * layer.scaling
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        weights = scores.masked_fill(hidden, -torch.inf).exp()
        total = weights.sum(-1, keepdim=True) + (0 if sink_logits is None else sink_logits[head].to(q.dtype).exp())
        outs.append(weights @ v[:, head // G] / total)
    return torch.stack(outs, 1)
