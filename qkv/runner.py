"""Turns a StepPlan into tensors, runs the model, and says whose logits are whose.

Takes: a StepPlan. Gives: logits. Does not know about: queues, policies, sampling, text.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from qkv.attention.base import AttentionBackend, Observer, StepContext
from qkv.graphs import DecodeGraphs
from qkv.layout import AttentionMetadata
from qkv.metrics.reads import CountReads
from qkv.types import Request, StepPlan

if TYPE_CHECKING:
    from qkv.attention.hf import HFAdapter

DETERMINISTIC_ROWS = 16  # fewer than 4 rows take another path in the matrix library, with other last bits


class Scored(NamedTuple):
    """Logits of a scoring request: row i of the slice predicts token first + i."""

    request: Request
    first: int
    rows: slice


@dataclass(slots=True)
class StepResult:
    """logits [n, V]: one row per request that gets a new token, in plan order, then the rows of scoring requests.
    tokens: instead of logits, from a runner that has none to sample from."""

    logits: torch.Tensor | None
    scored: list[Scored]
    tokens: list[int] | None = None


class Runner:
    """Metadata buffers are allocated once, at maximum size, and filled in place. Block tables are kept between steps and
    only extended, so a step costs what changed and not what the context holds."""

    def __init__(
        self,
        adapter: "HFAdapter",
        backend: AttentionBackend,
        count_reads: CountReads,
        block_size: int,
        max_num_seqs: int,
        max_num_tokens: int,
        max_blocks: int,
        deterministic: bool,
        cuda_graphs: bool = False,
    ) -> None:
        self.adapter, self.backend, self.count_reads = adapter, backend, count_reads
        self.block_size = block_size
        self.row_multiple = DETERMINISTIC_ROWS if deterministic else 1
        self.observer: Observer | None = None
        T, R = max_num_tokens + DETERMINISTIC_ROWS, max_num_seqs
        device = adapter.device
        self._input_ids = _Buffer((T,), torch.int64, device)
        self._positions = _Buffer((T,), torch.int64, device)
        self._slots = _Buffer((T,), torch.int64, device)
        self._seq_lens = _Buffer((R,), torch.int32, device)
        self._query_start = _Buffer((R + 1,), torch.int32, device)
        self._tail_slots, self._sink_slots = _Buffer((R,), torch.int64, device), _Buffer((R,), torch.int64, device)
        self._block_table = _Buffer((R, max_blocks), torch.int32, device)
        self._tables = np.zeros((R, max_blocks), np.int32)  # a row per running request, whatever its place in the batch
        self._rows: dict[int, int] = {}  # request id -> row of _tables
        self._free_rows = list(range(R - 1, -1, -1))
        self._synced = [0] * R  # blocks of the request that the row reflects
        self._kept = False, False  # whether requests own raw tails, and sinks
        self._all_rows = torch.arange(R, device=device)
        self.graphs = DecodeGraphs(self._decode_rows, R) if cuda_graphs and backend.capturable and device.type == "cuda" else None

    def model_changed(self) -> bool:
        """Whether the model's user changed it since the last step. Raises ModelError if it cannot be served any more."""
        changed = self.adapter.model_changed()
        if changed and self.graphs is not None:
            self.graphs.forget()
        return changed

    def run(self, plan: StepPlan) -> StepResult:
        """One forward over the plan's tokens."""
        if not plan.num_tokens:
            return StepResult(None, [])
        if self.graphs is not None and not plan.prefills and self.observer is None and self.adapter.replayable:
            logits = self._replay(self.graphs, plan)
            if logits is not None:
                return StepResult(logits, [])
        meta, rows = self._metadata(plan)
        index, scored = self._logits_index(plan, meta)
        context = StepContext(self.backend, meta, self.observer, self.row_multiple > 1)
        logits = self.adapter.forward(
            self._input_ids.device(rows), self._positions.device(rows), torch.tensor(index, device=self.adapter.device), context
        )
        return StepResult(logits, scored)

    def _replay(self, graphs: DecodeGraphs, plan: StepPlan) -> torch.Tensor | None:
        """A step of decodes through a captured graph: logits [n, V]; None if it must run as it is."""
        n = len(plan.decodes)
        rows = graphs.size(n)
        if rows is None:
            return None
        if not graphs.has(rows):
            self._kept = plan.decodes[0].tail_slot >= 0, plan.decodes[0].sink_slot >= 0
            self._pad(0, 0, rows)
            self._upload(rows)
            if not graphs.prepare(rows):
                return None
        self._metadata(plan)
        self._pad(n, n, rows)
        self._upload(rows)
        return graphs.replay(rows)[:n]

    def _pad(self, at: int, request: int, rows: int) -> None:
        """Rows from `at` and requests from `request` on become padding: no keys, nothing written."""
        self._input_ids.host[at:rows], self._positions.host[at:rows], self._slots.host[at:rows] = 0, 0, -1
        self._seq_lens.host[request:rows] = 0
        self._block_table.host[request:rows] = 0
        self._query_start.host[request : rows + 1] = np.arange(request, rows + 1)
        self._tail_slots.host[request:rows] = self._sink_slots.host[request:rows] = 0

    def _upload(self, rows: int) -> None:
        for buffer in (self._input_ids, self._positions, self._slots, self._seq_lens, self._block_table):
            buffer.device(rows)
        for buffer, kept in zip((self._tail_slots, self._sink_slots), self._kept, strict=True):
            if kept:
                buffer.device(rows)
        self._query_start.device(rows + 1)

    def _decode_rows(self, rows: int) -> torch.Tensor:
        """The model over the first `rows` rows of the buffers, each a decode of any length: what a graph captures."""
        longest = self._block_table.host.shape[1] * self.block_size  # the split of keys must suit every later length
        meta = AttentionMetadata(
            block_table=self._block_table.view(rows),
            seq_lens=self._seq_lens.view(rows),
            query_start=self._query_start.view(rows + 1),
            slots=self._slots.view(rows),
            positions=self._positions.view(rows),
            seq_lens_list=[longest] * rows,
            query_start_list=list(range(rows + 1)),
            num_decodes=rows,
            block_size=self.block_size,
            tail_slots=self._tail_slots.view(rows) if self._kept[0] else None,
            sink_slots=self._sink_slots.view(rows) if self._kept[1] else None,
        )
        context = StepContext(self.backend, meta)
        return self.adapter.forward(self._input_ids.view(rows), meta.positions, self._all_rows[:rows], context)

    def forget(self, request: Request) -> None:
        """The request holds no device blocks any more."""
        row = self._rows.pop(request.id, None)
        if row is not None:
            self._tables[row] = 0
            self._synced[row] = 0
            self._free_rows.append(row)

    def _metadata(self, plan: StepPlan) -> tuple[AttentionMetadata, int]:
        """Fill the buffers. Returns the metadata and the number of rows, padding included."""
        chunks = [(r, r.num_computed, r.num_computed + 1) for r in plan.decodes] + list(plan.prefills)
        B, ids, positions, slots = self.block_size, self._input_ids.host, self._positions.host, self._slots.host
        starts, lens, table_rows, at = [0], [], [], 0
        for request, start, end in chunks:
            row = self._sync(request)
            n = end - start
            ids[at : at + n] = request.token_ids[start:end]
            where = np.arange(start, end)
            positions[at : at + n] = where
            slots[at : at + n] = self._tables[row, where // B].astype(np.int64) * B + where % B
            at += n
            starts.append(at)
            lens.append(end)
            table_rows.append(row)
            self.count_reads(start, end)
        padded = max(self.adapter.min_rows, -(-at // self.row_multiple) * self.row_multiple)
        ids[at:padded], positions[at:padded], slots[at:padded] = 0, 0, -1
        R, M = len(chunks), -(-max(lens) // B)
        self._seq_lens.host[:R] = lens
        self._query_start.host[: R + 1] = starts
        self._block_table.host[:R, :M] = self._tables[table_rows, :M]
        meta = AttentionMetadata(
            block_table=self._block_table.device(R)[:, :M],
            seq_lens=self._seq_lens.device(R),
            query_start=self._query_start.device(R + 1),
            slots=self._slots.device(padded),
            positions=self._positions.device(padded),
            seq_lens_list=lens,
            query_start_list=starts,
            num_decodes=len(plan.decodes),
            block_size=B,
            tail_slots=self._raw_slots(self._tail_slots, [request.tail_slot for request, *_ in chunks]),
            sink_slots=self._raw_slots(self._sink_slots, [request.sink_slot for request, *_ in chunks]),
        )
        return meta, padded

    def _raw_slots(self, buffer: "_Buffer", slots: list[int]) -> torch.Tensor | None:
        """Every running request has a slot, or none has."""
        if slots[0] < 0:
            return None
        buffer.host[: len(slots)] = slots
        return buffer.device(len(slots))

    def _sync(self, request: Request) -> int:
        """The request's row of the table, extended by the blocks it got since the last step."""
        if request.id not in self._rows:
            self._rows[request.id] = self._free_rows.pop()
        row = self._rows[request.id]
        known, now = self._synced[row], len(request.blocks)
        if known != now:
            self._tables[row, known:now] = request.blocks[known:]
            self._synced[row] = now
        return row

    def _logits_index(self, plan: StepPlan, meta: AttentionMetadata) -> tuple[list[int], list[Scored]]:
        """Rows whose logits are wanted: the last of each request that gets a token, then all wanted ones of scoring requests."""
        index = list(range(len(plan.decodes)))
        scoring: list[tuple[Request, int, range]] = []
        for i, chunk in enumerate(plan.prefills, start=len(plan.decodes)):
            request, base = chunk.request, meta.query_start_list[i] - chunk.start
            if request.score_from is not None:
                first = max(request.score_from, request.scored_to, chunk.start + 1)  # position p predicts token p + 1
                if first <= chunk.end:
                    scoring.append((request, first, range(base + first - 1, base + chunk.end)))
            elif chunk.completes:
                index.append(base + chunk.end - 1)
        scored = []
        for request, first, rows in scoring:
            scored.append(Scored(request, first, slice(len(index), len(index) + len(rows))))
            index += rows
        if not index:
            index = [0]  # nothing is wanted, but a model call needs a row
        index += index[-1:] * (-len(index) % self.row_multiple)
        return index, scored


class _Buffer:
    """A fixed array on the host and, where the device is another, its copy there."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._tensor = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.host = self._tensor.numpy()
        self._copy = None if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)

    def device(self, n: int) -> torch.Tensor:
        """The first n rows, brought to the model's device."""
        return self.view(n) if self._copy is None else self.view(n).copy_(self._tensor[:n], non_blocking=True)

    def view(self, n: int) -> torch.Tensor:
        """The first n rows on the model's device, as they were last brought there."""
        return (self._tensor if self._copy is None else self._copy)[:n]
