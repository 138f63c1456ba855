"""Keeps the block tables of requests: finds cached prefixes, grows tables, publishes full blocks, releases and swaps.

Takes: requests. Gives: changed block tables, or False where the pool has too few blocks. Talks to one BlockAllocator and one
HostPool. Does not know about: tensors, queues, which request is preempted.
"""

from bisect import bisect_left
from collections.abc import Iterable

from qkv.cache.host_pool import HostPool
from qkv.cache.prefix import PrefixHasher
from qkv.cache.raw_slots import SinkSlots, TailSlots
from qkv.metrics.recorder import Recorder
from qkv.policies.allocator.base import BlockAllocator, NoFreeBlocks
from qkv.types import NULL_BLOCK, BlockId, Request, RequestView, SwapCopy


class BlockManager:
    """The scheduler calls it; it changes the requests' block tables and slots, and counts in the recorder.

    hasher: None switches prefix caching off. host: the pool for swapped requests; with 0 blocks nothing is swapped.
    watermark: share of the pool that an admission leaves free. tails, sinks: the slots of raw tails and of raw sink tokens,
    where the formats keep such rows. raw_host_blocks: host blocks that the raw rows of one request take.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        hasher: PrefixHasher | None,
        host: HostPool,
        recorder: Recorder,
        watermark: float = 0.0,
        block_bytes: int = 0,
        tails: TailSlots | None = None,
        sinks: SinkSlots | None = None,
        raw_host_blocks: int = 0,
    ) -> None:
        self.allocator, self.host, self.recorder = allocator, host, recorder
        self.block_size = allocator.block_size
        self._hasher = hasher
        self.reuse = True  # False: blocks are still published, but no request takes any
        self._block_bytes = block_bytes
        self._tails, self._sinks, self._raw_host_blocks = tails, sinks, raw_host_blocks
        # Requests that never grow need no blocks kept free for their growth.
        self._reserve = int(watermark * (allocator.num_blocks - allocator.num_reserved)) if allocator.grows else 0

    # -- admission ---------------------------------------------------------------------------------------------------

    def admit(self, request: Request, alone: bool) -> bool:
        """Give a waiting request blocks for all its tokens: those of its longest cached prefix, and new ones for the rest.

        Sets request.blocks and num_computed. Returns False, with nothing changed, if fewer blocks than the watermark would
        remain available. alone: no other request runs, so the watermark does not apply.
        """
        cached = self._match(request)
        need = self.allocator.blocks_for(request.num_inputs) - len(cached)
        idle = sum(not self.allocator.refs[block] for block in cached)  # cached blocks that stop being available
        if self.allocator.num_available - idle - need < (0 if alone else self._reserve):
            return False
        self.allocator.acquire(cached)
        try:
            request.blocks = cached + self.allocator.allocate(need)
        except NoFreeBlocks:
            self.allocator.release(cached[::-1])
            return False
        self._take_slots(request)
        request.num_computed = len(cached) * self.block_size
        request.num_sealed = len(cached)
        self.recorder.recompute_tokens += max(0, request.num_dropped - request.num_computed)
        request.num_dropped = 0
        self._count_lookup(request)
        request.admissions += 1
        return True

    def _match(self, request: Request) -> list[BlockId]:
        """The cached blocks of the request's prefix. They never cover the last token, nor a scoring request's positions whose
        logits are wanted and not yet scored: those must be computed."""
        if self._hasher is None or not self.reuse:
            return []
        last = request.num_inputs - 1
        if request.score_from is not None:
            last = min(last, max(request.score_from, request.scored_to) - 1)
        limit = last // self.block_size
        self._hasher.extend(request.hashes, request.token_ids, limit, request.salt)
        cached = self.allocator.match(request.hashes[:limit], request.token_ids)
        return cached if not cached or self._sinks is None or self._sinks.holds(cached[0]) else []

    def _take_slots(self, request: Request) -> None:
        """Give the request its slots for raw rows."""
        if self._tails is not None:
            request.tail_slot = self._tails.take()
        if self._sinks is not None:
            request.sink_slot = self._sinks.take(request.blocks[0])

    def _release_blocks(self, request: Request) -> None:
        """Give back the slots of raw rows and the blocks, the table's last block first, so that the ends of chains are evicted
        before their beginnings."""
        if self._tails is not None and request.tail_slot >= 0:
            self._tails.give_back(request.tail_slot)
        if self._sinks is not None and request.sink_slot >= 0:
            self._sinks.give_back(request.blocks[0])
        request.tail_slot = request.sink_slot = -1
        if request.blocks:
            self.allocator.release(request.blocks[::-1])
        request.blocks = []

    def _count_lookup(self, request: Request) -> None:
        if self._hasher is None:
            return
        if request.admissions:
            self.recorder.resumed_queries_tokens += request.num_inputs
            self.recorder.resumed_hits_tokens += request.num_computed
        else:
            request.cached_tokens = request.num_computed
            self.recorder.prefix_queries_tokens += request.num_inputs
            self.recorder.prefix_hits_tokens += request.num_computed

    # -- growth ------------------------------------------------------------------------------------------------------

    def room(self, request: Request) -> int:
        """How many more tokens fit the blocks that the request has."""
        return len(request.blocks) * self.block_size - request.num_computed

    def grow(self, request: Request) -> bool:
        """Append the block that one more token needs, if it needs one. False, with nothing changed, if the pool has none."""
        missing = self.allocator.blocks_for(request.num_computed + 1) - len(request.blocks)
        if missing > 0:
            try:
                request.blocks += self.allocator.allocate(missing)
            except NoFreeBlocks:
                return False
        return True

    def seal(self, request: Request) -> None:
        """Publish the blocks that filled up since the last call. A block is full when all its tokens are computed, so the
        scheduler calls this after the step that stored them."""
        full = request.num_computed // self.block_size
        if full == request.num_sealed:
            return
        if self._hasher is not None:
            self._hasher.extend(request.hashes, request.token_ids, full, request.salt)
            B = self.block_size
            for i in range(request.num_sealed, full):
                parent = request.blocks[i - 1] if i else NULL_BLOCK
                tokens = tuple(request.token_ids[i * B : (i + 1) * B])
                self.allocator.publish(request.blocks[i], request.hashes[i], parent, tokens, i)
        request.num_sealed = full

    # -- giving up ---------------------------------------------------------------------------------------------------

    def release(self, request: Request) -> None:
        """Give all device and host blocks of the request back."""
        self._release_blocks(request)
        self.host.release(request.host_blocks)
        request.host_blocks = []

    def reset(self, request: Request) -> None:
        """Give all blocks back and forget what was computed. The tokens stay."""
        self.release(request)
        request.num_computed = request.num_sealed = 0

    def start_over(self, requests: Iterable[Request]) -> None:
        """A policy failed half-way, so no count can be trusted: all pools are new, and these requests, which must be all that
        hold anything, hold nothing. Calls no policy but to make and bind new ones."""
        self.allocator = self.allocator.renewed()
        self.host = HostPool(self.host.num_blocks)
        self._tails = self._tails and TailSlots(self._tails.n)
        self._sinks = self._sinks and SinkSlots(self._sinks.n)
        for request in requests:
            request.blocks, request.host_blocks = [], []
            request.tail_slot = request.sink_slot = -1
            request.num_computed = request.num_sealed = 0

    def stop_swapping(self) -> None:
        """Host memory cannot be had or used: whoever is preempted from now on is recomputed. Nobody is swapped out."""
        self.host = HostPool(0)

    def drop(self, request: Request) -> None:
        """Preempt the request by recomputation: its blocks go back, and its tokens are prefilled again when it is admitted."""
        self.recorder.preemptions_recompute += 1
        request.num_dropped = request.num_computed
        self.reset(request)

    def host_blocks(self, request: Request) -> int:
        """How many host blocks it takes to swap the request out."""
        return self._used_blocks(request) + self._raw_host_blocks

    def swap_out(self, request: Request) -> SwapCopy:
        """Preempt the request by swapping: its used blocks and raw rows get host blocks, and its device blocks go back.
        Returns the copy to make. The caller has checked that the host pool has enough blocks."""
        used = request.blocks[: self._used_blocks(request)]
        request.host_blocks = host = self.host.allocate(len(used) + self._raw_host_blocks)
        self.recorder.preemptions_swap += 1
        self.recorder.swap_out_bytes += len(host) * self._block_bytes
        copy = SwapCopy(used, host[: len(used)], request.tail_slot, request.sink_slot, host[len(used) :])
        self._release_blocks(request)
        return copy

    def swap_in(self, request: Request, alone: bool) -> SwapCopy | None:
        """Give a swapped request device blocks and return the copy that fills them from its host blocks. Those count as free
        from now on: no step swaps both in and out, so the copy is made before anything overwrites them.

        Returns None, with nothing changed, if fewer blocks than the watermark would remain available. alone: as for admit.
        """
        tokens = max(request.num_inputs, request.num_computed + 1)
        need = self.allocator.blocks_for(tokens)
        if self.allocator.num_available - need < (0 if alone else self._reserve):
            return None
        try:
            request.blocks = self.allocator.allocate(need)
        except NoFreeBlocks:
            return None
        self._take_slots(request)
        host, used = request.host_blocks, self._used_blocks(request)
        copy = SwapCopy(request.blocks[:used], host[:used], request.tail_slot, request.sink_slot, host[used:])
        self.recorder.swap_in_bytes += len(host) * self._block_bytes
        self.host.release(host)
        request.host_blocks = []
        request.num_sealed = 0  # the copies are in new blocks, which seal() offers for publication again
        request.admissions += 1
        return copy

    def _used_blocks(self, request: Request) -> int:
        return -(-request.num_computed // self.block_size)

    # -- views -------------------------------------------------------------------------------------------------------

    def view(self, request: Request) -> RequestView:
        """What a preemptor may know of the request."""
        refs = self.allocator.refs
        return RequestView(
            id=request.id,
            priority=request.params.priority,
            prompt_len=request.prompt_len,
            num_tokens=len(request.token_ids),
            num_computed=request.num_computed,
            num_blocks=self._used_blocks(request),
            # a request that shares a block shares all blocks before it, so bisection finds the first private one
            num_private_blocks=len(request.blocks) - bisect_left(request.blocks, True, key=lambda block: refs[block] == 1),
            preemptions=request.preemptions,
        )

    def check(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError on any broken invariant of the pool. `requests`: every unfinished request."""
        requests = list(requests)
        self.allocator.check([r.blocks for r in requests])
        self.host.check([r.host_blocks for r in requests])
        if self._tails is not None:
            self._tails.check(r.tail_slot for r in requests if r.blocks)
        if self._sinks is not None:
            self._sinks.check(r.blocks[0] for r in requests if r.blocks)
        for r in requests:
            assert not (r.blocks and r.host_blocks), f"request {r.id} holds device and host blocks"
            assert r.num_computed <= max(len(r.blocks), len(r.host_blocks)) * self.block_size, f"request {r.id} lacks blocks"
