"""Counters of everything the cache and the scheduler do. Lower layers call it; nobody below experiments/ exports them.

Does not know about: where numbers go (records, Prometheus, W&B).
"""

from dataclasses import dataclass, field


@dataclass
class Recorder:
    """Monotonic counters, in tokens, blocks, bytes or events as named. One per engine."""

    # Prefix lookups of first admissions; hits + misses = queries. Requests that come back after preemption are counted
    # apart: their own old blocks are not evidence that prompts repeat.
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    resumed_queries_tokens: int = 0
    resumed_hits_tokens: int = 0

    preemptions_recompute: int = 0
    preemptions_swap: int = 0
    recompute_tokens: int = 0  # tokens prefilled a second time because of preemption
    swap_out_bytes: int = 0
    swap_in_bytes: int = 0

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_seconds: float = 0.0  # time of steps without decodes
    decode_seconds: float = 0.0  # time of steps with decodes only
    mixed_seconds: float = 0.0
    mixed_prefill_tokens: int = 0
    mixed_decode_tokens: int = 0
    pairs_attended: int = 0  # (query, key) pairs under the causal mask
    pairs_from_cache: float = 0.0  # of those, pairs whose key was read as stored, as a mean over heads, layers, K and V

    requests_finished: dict[str, int] = field(default_factory=dict)  # by finish reason
    finished_tokens: int = 0  # in the cache for running requests that ended
    finished_held_tokens: int = 0  # that their blocks could hold
    used_blocks: int = 0  # referenced blocks in the last step, and below their peak
    used_blocks_peak: int = 0
    written_tokens: int = 0  # tokens held by running requests in the last step
    held_tokens: int = 0  # tokens that their blocks could hold
    busy_seconds: float = 0.0  # time of all steps; the next three are integrals over it
    used_block_seconds: float = 0.0
    written_token_seconds: float = 0.0
    held_token_seconds: float = 0.0

    def count_step(self, used_blocks: int, written_tokens: int, held_tokens: int) -> None:
        """A step ended with this in the pool."""
        self.steps += 1
        self.used_blocks, self.written_tokens, self.held_tokens = used_blocks, written_tokens, held_tokens
        self.used_blocks_peak = max(self.used_blocks_peak, used_blocks)

    def weigh_step(self, seconds: float) -> None:
        """The step counted last took this long."""
        self.busy_seconds += seconds
        self.used_block_seconds += seconds * self.used_blocks
        self.written_token_seconds += seconds * self.written_tokens
        self.held_token_seconds += seconds * self.held_tokens

    def finished(self, reason: str) -> None:
        self.requests_finished[reason] = self.requests_finished.get(reason, 0) + 1

    @property
    def preemptions(self) -> int:
        return self.preemptions_recompute + self.preemptions_swap

    @property
    def hit_rate(self) -> float | None:
        return self.prefix_hits_tokens / self.prefix_queries_tokens if self.prefix_queries_tokens else None

    @property
    def fraction_read_from_cache(self) -> float | None:
        return self.pairs_from_cache / self.pairs_attended if self.pairs_attended else None
