"""Decides what each step runs: it continues decodes, prefills in chunks, admits and preempts.

Takes: requests. Gives: a StepPlan; the block tables are already changed to match it. Every running decode advances by one
token in every step, so it is known in advance when a request next needs a block, and planning visits only those that do.
Does not know about: tensors, models, text, clocks (time is the step counter).
"""

import heapq
from collections.abc import Iterator, Sequence

from qkv.cache.block_manager import BlockManager
from qkv.config import SchedulerConfig
from qkv.policies.preemptor.base import CostModel, Preemptor
from qkv.types import FinishReason, PrefillChunk, Request, Status, StepPlan, SwapCopy


class Scheduler:
    """Serves by priority, and equal priorities in order of arrival. A preempted request returns to its place. The loop calls
    add, plan, complete, finish and roll_back."""

    def __init__(self, manager: BlockManager, preemptor: Preemptor, config: SchedulerConfig, costs: CostModel) -> None:
        self.manager, self.preemptor, self.config, self.costs = manager, preemptor, config, costs
        self.recorder = manager.recorder
        self.step = 0
        self._waiting: list[tuple[tuple[int, int], Request]] = []  # heap; finished requests are skipped when popped
        self._running: dict[int, Request] = {}  # all that hold device blocks
        self._prefilling: dict[int, Request] = {}
        self._decoding: dict[int, Request] = {}
        self._due: dict[int, list[Request]] = {}  # step -> requests that need a block then; stale entries are skipped
        self._plan = StepPlan(0, [], [], [], [], [])  # of the current step, perhaps unfinished; roll_back needs it
        self._stalled = False  # the next waiting request cannot be admitted before another gives blocks back
        self.current: Request | None = None  # whose blocks are being seen to: the one to end if a policy raises
        self.token_limit: int | None = None  # tokens of a step, and running requests, at most: set after a lack of memory
        self.allowed: frozenset[int] | None = None  # ids that may be admitted: set while looking for who makes steps fail

    # -- queue -------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Put a request that is new, or was preempted, into the queue."""
        self._stalled = False
        heapq.heappush(self._waiting, (request.sort_key, request))

    def requests(self) -> Iterator[Request]:
        """Every unfinished request."""
        yield from self._running.values()
        yield from (r for _, r in self._waiting if r.status is not Status.FINISHED)

    @property
    def running(self) -> list[Request]:
        """All that hold device blocks."""
        return list(self._running.values())

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return sum(r.status is not Status.FINISHED for _, r in self._waiting)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to run."""
        return not self._running and not self._next_waiting()

    # -- plan --------------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Decide the next step. Changes block tables, never token lists. Blocks that this step fills are published only after
        it ran: until then their content does not exist."""
        self.step += 1
        self.manager.allocator.step = self.step
        plan = self._plan = StepPlan(self.step, [], [], [], [], [])
        for request in sorted(self._due.pop(self.step, ()), key=lambda r: r.sort_key):
            if request.due_step == self.step and request.status is Status.RUNNING:
                self.current = request
                self._grow(request, plan)
        most = self.config.max_num_batched_tokens
        budget = min(most, self.token_limit or most) - len(self._decoding)
        scored = self.config.max_num_scored_tokens
        for request in sorted(self._prefilling.values(), key=lambda r: r.sort_key):
            budget, scored = self._add_chunk(request, plan, budget, scored)
        if not plan.preempted:
            self._admit(plan, budget, scored)
        self.current = None
        plan.decodes = list(self._decoding.values())
        if plan.empty and (self._running or self._next_waiting()):
            raise RuntimeError(f"nothing can run: {self.num_running} running, {self.num_waiting} waiting requests")
        return plan

    def _grow(self, request: Request, plan: StepPlan) -> None:
        """Give the request its next block; preempt others for it, or, where the policy says so, the request itself."""
        self.manager.seal(request)
        while not self.manager.grow(request):
            victims = self._victims(self.manager.allocator.blocks_for(request.num_computed + 1) - len(request.blocks))
            for victim in victims:
                self._preempt(victim, plan)
                if victim is request:
                    return
                if self.manager.grow(request):
                    break
        self._set_due(request, self.step)

    def _victims(self, need: int) -> list[Request]:
        """The policy's choice, never with the first request in serving order, so that one request always makes progress."""
        running = sorted(self._running.values(), key=lambda r: r.sort_key)
        chosen = self.preemptor.victims([self.manager.view(r) for r in running], need)
        allowed = {r.id: r for r in running[1:]}
        victims = [allowed[i] for i in dict.fromkeys(chosen) if i in allowed] or running[1:][-1:]
        if not victims:
            raise RuntimeError("the pool cannot hold a single running request; it should have been refused")
        return victims

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        view = self.manager.view(request)
        raw = self.manager.host_blocks(request) - view.num_blocks  # host blocks for its raw rows
        host_free = self.manager.host.num_free - raw
        swap = self.preemptor.mode(view, host_free, self.costs) == "swap" and 0 < view.num_blocks <= host_free
        self._leave(request)
        plan.preempted.append(request)
        if swap:
            plan.swap_out.append(self.manager.swap_out(request))
            request.status = Status.SWAPPED
        else:
            self.manager.drop(request)
            request.status = Status.WAITING
        request.preemptions += 1
        self.add(request)

    def _add_chunk(self, request: Request, plan: StepPlan, budget: int, scored: int) -> tuple[int, int]:
        """Plan to prefill as much of the request as both budgets allow, and return what is left of them.

        budget: tokens. scored: rows of logits, of which a scoring request wants one for most of its positions. A request that
        generates wants one row, which is not counted.
        """
        start, end = request.num_computed, request.num_inputs
        size = min(end - start, budget)
        if request.score_from is not None:
            unwanted = max(0, max(request.score_from, request.scored_to) - 1 - start)
            size = min(size, unwanted + scored)
            scored -= max(0, size - unwanted)
        if size > 0:
            plan.prefills.append(PrefillChunk(request, start, start + size))
        return budget - size, scored

    def _admit(self, plan: StepPlan, budget: int, scored: int) -> None:
        self._stalled = False
        most = min(self.config.max_num_seqs, self.token_limit or self.config.max_num_seqs)
        while budget > 0 and len(self._running) < most and (request := self._next_allowed()):
            self.current, alone = request, not self._running
            if request.status is Status.SWAPPED:
                copy = self.manager.swap_in(request, alone)
                if copy is None:
                    self._stalled = True
                    return
                plan.swap_in.append(copy)
            elif not self.manager.admit(request, alone):
                self._stalled = True
                return
            self._pop_waiting(request)
            request.status = Status.RUNNING
            self._running[request.id] = request
            if request.decoding:
                self._decoding[request.id] = request
                self._set_due(request, self.step)
                budget -= 1
            else:
                self._prefilling[request.id] = request
                budget, scored = self._add_chunk(request, plan, budget, scored)

    def _next_waiting(self) -> Request | None:
        while self._waiting and self._waiting[0][1].status is Status.FINISHED:
            heapq.heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

    def _next_allowed(self) -> Request | None:
        request = self._next_waiting()
        if request is None or self.allowed is None or request.id in self.allowed:
            return request
        found = [r for _, r in self._waiting if r.id in self.allowed and r.status is not Status.FINISHED]
        return min(found, key=lambda r: r.sort_key, default=None)

    def _pop_waiting(self, request: Request) -> None:
        if self._waiting[0][1] is request:
            heapq.heappop(self._waiting)
        else:
            self._waiting = [entry for entry in self._waiting if entry[1] is not request]
            heapq.heapify(self._waiting)

    def _set_due(self, request: Request, next_step: int) -> None:
        """Note the step in which the request needs another block. `next_step`: the step that stores its next token."""
        request.due_step = next_step + self.manager.room(request)
        self._due.setdefault(request.due_step, []).append(request)

    # -- many steps at once ------------------------------------------------------------------------------------------

    @property
    def decoding(self) -> list[Request]:
        """The requests that get a token in every step, in the order in which a StepPlan lists them."""
        return list(self._decoding.values())

    def quiet_steps(self, limit: int) -> int:
        """How many of the next `limit` steps only decode: no request can be admitted or prefilled, and the pool has every block
        that the decodes need. The caller's limit ends before a request ends or arrives. (A block that fills up in one of these
        steps could complete the prefix of a stalled request, which is then admitted after them and not between them.)"""
        if self._prefilling or not self._decoding:
            return 0
        if self._next_waiting() and not self._stalled and len(self._running) < self.config.max_num_seqs:
            return 0
        B, left, again = self.manager.block_size, self.manager.allocator.num_available, dict[int, int]()
        for ahead in range(1, limit + 1):
            need = len(self._due.get(self.step + ahead, ())) + again.get(ahead, 0)
            left -= need
            if left < 0:
                return ahead - 1
            again[ahead + B] = need
        return limit

    def advance(self, seconds: Sequence[float]) -> None:
        """Take len(seconds) quiet steps at once, with the result of as many plan() and complete(); seconds[i] is how long step i
        took. The caller has appended the tokens. The work is in proportion to the blocks that fill up, not to requests x steps.
        """
        allocator, recorder, running = self.manager.allocator, self.recorder, self._running.values()
        written, held = sum(r.num_computed for r in running), sum(len(r.blocks) for r in running) * allocator.block_size
        for duration in seconds:
            self.step += 1
            allocator.step = self.step
            for request in sorted(self._due.pop(self.step, ()), key=lambda r: r.sort_key):
                if request.due_step == self.step and request.status is Status.RUNNING:
                    self.current, before = request, len(request.blocks)
                    request.num_computed = before * allocator.block_size  # being due means that its blocks are full
                    self.manager.seal(request)
                    if not self.manager.grow(request):
                        raise RuntimeError("more steps than quiet_steps() allows")
                    held += (len(request.blocks) - before) * allocator.block_size
                    self._set_due(request, self.step)
            written += len(running)
            recorder.count_step(allocator.num_referenced, written, held)
            recorder.weigh_step(duration)
        self.current = None
        for request in running:
            request.num_computed = len(request.token_ids) - 1

    # -- outcome -----------------------------------------------------------------------------------------------------

    def complete(self, plan: StepPlan) -> list[Request]:
        """Called after the step ran: the keys and values of its tokens are in the cache. Returns the requests that get a new
        token from this step's logits, in plan order."""
        for request in plan.decodes:
            request.num_computed += 1
        ready = list(plan.decodes)
        for request, _, end in plan.prefills:
            request.num_computed = end
            self.current = request
            self.manager.seal(request)
            if end == request.num_inputs:
                del self._prefilling[request.id]
                if request.score_from is None:
                    self._decoding[request.id] = request
                    self._set_due(request, self.step + 1)
                    ready.append(request)
        self.current = None
        self._count()
        return ready

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End the request, whatever its state, and release all that it holds. Nothing happens if it has ended already."""
        if request.status is Status.FINISHED:
            return
        self.current = request
        if request.status is Status.RUNNING:
            self.manager.seal(request)
            self._leave(request)
            self.recorder.finished_tokens += request.num_computed
            self.recorder.finished_held_tokens += len(request.blocks) * self.manager.block_size
        self.manager.release(request)
        request.status, request.finish_reason = Status.FINISHED, reason
        self.current = None
        self.recorder.finished(reason)

    def roll_back(self) -> list[Request]:
        """Called when a step failed, at any point from plan() on. All running requests go back to the queue, to be prefilled
        again, and so do those that this step swapped out, since the copy may not have been made. Returns them and the other
        requests that the step preempted; all keep their tokens and their places."""
        swapped = [r for r in self._plan.preempted if r.status is Status.SWAPPED]
        running = list(self._running.values())
        for request in running:
            self._leave(request)
            self.add(request)
        for request in running + swapped:
            self.manager.reset(request)
            request.status = Status.WAITING
        return running + self._plan.preempted

    def start_over(self) -> list[Request]:
        """A policy raised half-way through the bookkeeping. Every unfinished request waits to be prefilled again, in its place
        and with its tokens, and the pools are new. Returns these requests; asks no policy."""
        known = [*self._running.values(), *(r for _, r in self._waiting), *self._plan.preempted, self.current]
        unfinished = {r.id: r for r in known if r is not None and r.status is not Status.FINISHED}
        for queue in (self._running, self._prefilling, self._decoding, self._due):
            queue.clear()
        self.current, self._waiting, self._stalled = None, [], False
        self.manager.start_over(unfinished.values())
        for request in unfinished.values():
            request.status = Status.WAITING
            self.add(request)
        return list(unfinished.values())

    def stop_swapping(self) -> None:
        """Between steps: swapped requests, too, wait to be prefilled again."""
        for request in self.requests():
            if request.status is Status.SWAPPED:
                self.manager.reset(request)
                request.status = Status.WAITING
        self.manager.stop_swapping()

    def _leave(self, request: Request) -> None:
        """Take the request out of what runs; the caller deals with its blocks."""
        self._stalled = False
        del self._running[request.id]
        self._prefilling.pop(request.id, None)
        self._decoding.pop(request.id, None)

    def _count(self) -> None:
        allocator, running = self.manager.allocator, self._running.values()
        held = sum(len(r.blocks) for r in running) * allocator.block_size
        self.recorder.count_step(allocator.num_referenced, sum(r.num_computed for r in running), held)


def copies(swaps: list[SwapCopy]) -> tuple[list[int], list[int]]:
    """The swaps' block copies, joined: (device blocks, host blocks), pair by pair."""
    return [b for s in swaps for b in s.device], [b for s in swaps for b in s.host]
