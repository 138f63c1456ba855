"""Requests and plans: the data that flows through the engine. Data only; no torch.

Units: times are seconds of the engine's clock, sizes are tokens or blocks as named.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

from qkv.validate import check_types, require

BlockId = int
BlockHash = bytes
NULL_BLOCK: BlockId = 0  # reserved; its content stays zero, padding of block tables points at it


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue one prompt.

    max_tokens: new tokens at most; None means up to the model's or the pool's limit.
    temperature: 0 is greedy. top_k 0, top_p 1 and min_p 0 switch those filters off.
    seed: makes the request's samples independent of everything else in the batch.
    stop, stop_token_ids: strings and ids that end the text; the stop itself is not part of the output text.
    logprobs: number of alternatives reported per token (0: just the chosen one; None: nothing).
    priority: a lower value is served earlier; equal values in order of arrival.

    Raises ConfigError when constructed out of range.
    """

    max_tokens: int | None = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        check_types(self)
        require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1, or null")
        require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            "temperature",
            self.temperature,
            "a finite number of at least 0 (0 is greedy)",
        )
        require(self.top_k >= 0, "top_k", self.top_k, "at least 0 (0 is off)")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1 (1 is off)")
        require(0 <= self.min_p < 1, "min_p", self.min_p, "at least 0 (off) and below 1")
        require(self.logprobs is None or 0 <= self.logprobs <= 100, "logprobs", self.logprobs, "null or 0 to 100")
        require(all(self.stop), "stop", self.stop, "non-empty strings")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))


class Status(Enum):
    WAITING = "waiting"  # holds no blocks
    RUNNING = "running"  # holds device blocks
    SWAPPED = "swapped"  # holds host blocks
    FINISHED = "finished"  # holds nothing


FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(eq=False, slots=True)
class Request:
    """One sequence and all its mutable state. Touched by the stepping thread only.

    token_ids is prompt + output. The keys and values of the first `num_computed` tokens are in the cache; a decoding
    request has exactly one token (its newest) whose K and V are not. `blocks` is its block table.
    """

    id: int
    prompt_len: int
    token_ids: list[int]
    params: SamplingParams
    max_tokens: int  # resolved: never None
    arrival: float = 0.0
    score_from: int | None = None  # a scoring request: logits wanted for tokens score_from..end; nothing is sampled
    salt: str = ""  # separates prefix caches of tenants

    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_computed: int = 0
    blocks: list[BlockId] = field(default_factory=list)
    host_blocks: list[BlockId] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)  # of full blocks of token_ids, extended as they fill
    num_sealed: int = 0  # blocks whose content is complete
    admissions: int = 0  # times it got blocks: a lookup after the first is not evidence that prompts repeat
    scored_to: int = 0  # scoring requests: tokens before this index have their log-probability
    due_step: int = -1  # step at which its next block is needed
    tail_slot: int = -1  # where its raw tail and the raw first tokens of its sequence are, while it runs
    sink_slot: int = -1

    num_dropped: int = 0  # tokens computed before a recompute preemption
    cached_tokens: int = 0  # prefix hit at first admission
    preemptions: int = 0
    first_scheduled: float | None = None
    token_times: list[float] = field(default_factory=list)

    @property
    def num_inputs(self) -> int:
        """Tokens that go through the model before anything is sampled: all of them, but a scoring request's last."""
        return len(self.token_ids) - (self.score_from is not None)

    @property
    def decoding(self) -> bool:
        return self.score_from is None and self.num_computed == len(self.token_ids) - 1 and self.num_computed >= self.prompt_len

    @property
    def sort_key(self) -> tuple[int, int]:
        """Serving order: priority, then arrival. Kept through preemption, so a victim returns to its place."""
        return (self.params.priority, self.id)


class RequestView(NamedTuple):
    """What a preemptor may look at."""

    id: int
    priority: int
    prompt_len: int
    num_tokens: int
    num_computed: int
    num_blocks: int
    num_private_blocks: int  # blocks nobody else references: what preempting it would free
    preemptions: int


class PrefillChunk(NamedTuple):
    request: Request
    start: int  # first token index of the chunk
    end: int  # one past the last

    @property
    def completes(self) -> bool:
        return self.end == self.request.num_inputs


class SwapCopy(NamedTuple):
    """Byte copies of one request between the device pool and the host pool: blocks pairwise, then its raw rows, if any."""

    device: list[BlockId]
    host: list[BlockId]
    tail_slot: int = -1
    sink_slot: int = -1
    raw_host: Sequence[BlockId] = ()  # host blocks that hold the raw rows


@dataclass(slots=True)
class StepPlan:
    """What one step does: copy out, copy in, then one forward over `decodes` (one token each) and `prefills`."""

    step: int
    decodes: list[Request]
    prefills: list[PrefillChunk]
    swap_out: list[SwapCopy]
    swap_in: list[SwapCopy]
    preempted: list[Request]

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(c.end - c.start for c in self.prefills)

    @property
    def empty(self) -> bool:
        return not (self.decodes or self.prefills or self.swap_out or self.swap_in)


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds, from the moment the engine accepted the request. None when it did not get that far."""

    queue_time: float | None = None
    ttft: float | None = None
    tpot: float | None = None  # mean time per output token after the first
    itl: list[float] = field(default_factory=list)
    e2e: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0


class TokenLogprob(NamedTuple):
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # alternatives, best first


@dataclass(slots=True)
class RequestOutput:
    """A finished request, or (finish_reason None) its state so far when streaming. id: -1 if it was refused at the door."""

    id: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    metrics: RequestMetrics
    logprobs: list[TokenLogprob] | None = None
    error: str | None = None
