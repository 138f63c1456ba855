"""The data that flows through the engine: sampling parameters, requests, step plans, outputs. It does nothing and needs no torch.

Units: times are seconds of the engine's clock; sizes are tokens or blocks, as the names say.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

from qkv.validate import check_types, require

BlockId = int
BlockHash = bytes
NULL_BLOCK: BlockId = 0  # reserved; its content stays zero, and the padding of block tables points at it


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue one prompt.

    max_tokens: how many new tokens at most; None: as many as the model and the pool allow.
    temperature: 0 is greedy. top_k 0, top_p 1 and min_p 0 switch those filters off.
    seed: makes the request's samples independent of everything else in the batch.
    stop, stop_token_ids: strings and ids that end the text, which does not contain them.
    logprobs: how many alternatives are reported per token (0: only the chosen one; None: nothing).
    priority: requests of a lower value are served earlier, and those of equal values in order of arrival.

    Raises ConfigError for a value of a wrong type or out of range.
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
    """One sequence and all its mutable state. Only the stepping thread changes it.

    token_ids: the prompt and the output so far. The keys and values of the first `num_computed` tokens are in the cache; those
    of a decoding request's newest token are not yet. blocks: the block table.
    """

    id: int
    prompt_len: int
    token_ids: list[int]
    params: SamplingParams
    max_tokens: int  # a number, where the parameters' may be None
    arrival: float = 0.0
    score_from: int | None = None  # of a scoring request: the first token whose log-probability is wanted; nothing is sampled
    salt: str = ""  # requests with different salts share no blocks

    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None
    failure: Exception | None = None  # what `error` tells in words, where an exception ended it
    num_computed: int = 0
    blocks: list[BlockId] = field(default_factory=list)
    host_blocks: list[BlockId] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)  # of the full blocks of token_ids, extended as blocks fill up
    num_sealed: int = 0  # how many blocks were full and offered for publication
    admissions: int = 0  # how often it got blocks: prefix lookups after the first time are counted apart
    scored_to: int = 0  # of a scoring request: tokens before this index have their log-probability
    due_step: int = -1  # the step in which it needs its next block
    tail_slot: int = -1  # slot of its raw tail while it runs, where the formats keep tails
    sink_slot: int = -1  # slot of the raw rows of its sequence's sink tokens, where the formats keep them

    num_dropped: int = 0  # tokens that were computed when it was last preempted by recomputation
    cached_tokens: int = 0  # tokens found in the prefix cache when it was first admitted
    preemptions: int = 0
    first_scheduled: float | None = None
    token_times: list[float] = field(default_factory=list)

    @property
    def num_inputs(self) -> int:
        """How many tokens go through the model as input: all, or all but the last of a scoring request."""
        return len(self.token_ids) - (self.score_from is not None)

    @property
    def decoding(self) -> bool:
        """Whether all tokens but the newest, an output token, are in the cache."""
        return self.score_from is None and self.num_computed == len(self.token_ids) - 1 and self.num_computed >= self.prompt_len

    @property
    def sort_key(self) -> tuple[int, int]:
        """Serving order: priority, then arrival. Preemption does not change it, so a victim returns to its place."""
        return (self.params.priority, self.id)


class RequestView(NamedTuple):
    """What a preemptor may look at."""

    id: int
    priority: int
    prompt_len: int
    num_tokens: int
    num_computed: int
    num_blocks: int
    num_private_blocks: int  # blocks that no other request references: those that preempting it would free
    preemptions: int


class PrefillChunk(NamedTuple):
    """Consecutive tokens of one request that one step prefills."""

    request: Request
    start: int  # first token index of the chunk
    end: int  # one past the last

    @property
    def completes(self) -> bool:
        """Whether the request's prefill ends with this chunk."""
        return self.end == self.request.num_inputs


class SwapCopy(NamedTuple):
    """The copies that swap one request out or in: device[i] to or from host[i], and its raw rows, if it has any."""

    device: list[BlockId]
    host: list[BlockId]
    tail_slot: int = -1
    sink_slot: int = -1
    raw_host: Sequence[BlockId] = ()  # host blocks that hold the raw rows


@dataclass(slots=True)
class StepPlan:
    """What one step does: it copies swapped requests out and in, then runs one forward over `decodes`, one token each, and
    `prefills`. preempted: the requests that gave way, swapped or not."""

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
    """Times in seconds; queue_time, ttft and e2e count from the arrival. None: the request did not get that far."""

    queue_time: float | None = None  # until the first step that computed some of its tokens
    ttft: float | None = None  # until the first output token
    tpot: float | None = None  # mean time per output token after the first
    itl: list[float] = field(default_factory=list)  # times between one output token and the next
    e2e: float | None = None  # until the last token
    cached_tokens: int = 0
    preemptions: int = 0


class TokenLogprob(NamedTuple):
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # alternatives, best first


@dataclass(slots=True)
class RequestOutput:
    """A finished request or, in a stream, what it has so far (finish_reason None). id: -1 for a request that was refused."""

    id: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    metrics: RequestMetrics
    logprobs: list[TokenLogprob] | None = None
    error: str | None = None
