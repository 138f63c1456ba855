"""Counters of everything that the cache and the scheduler do.

Takes: calls and increments from the scheduler, the block manager, the runner and the loop. Gives: plain numbers, from which
summary.py makes what Engine.metrics() returns. Does not know about: where numbers go (records, Prometheus, W&B).
"""

from dataclasses import dataclass, field


@dataclass
class Recorder:
    """Counters of one engine, in tokens, blocks, bytes or events, as the names say. They only grow; only used_blocks,
    written_tokens and held_tokens describe the last step. Where no method below serves, callers add to the fields."""

    # Prefix lookups when requests are first admitted; hits + misses = queries. Lookups of requests that come back after
    # preemption are counted apart: that they find their own old blocks does not show that prompts repeat.
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
    pairs_from_cache: float = 0.0  # of those, the ones whose key was read as stored; a mean over heads, layers, K and V

    requests_finished: dict[str, int] = field(default_factory=dict)  # by finish reason
    finished_tokens: int = 0  # tokens in the cache of running requests, summed when each ended
    finished_held_tokens: int = 0  # tokens for which the blocks of these requests had room
    used_blocks: int = 0  # blocks referenced after the last step
    used_blocks_peak: int = 0  # the most that used_blocks has been
    written_tokens: int = 0  # tokens in the cache of running requests after the last step
    held_tokens: int = 0  # tokens for which their blocks had room
    busy_seconds: float = 0.0  # time of all steps; the next three sums weigh each step by its seconds
    used_block_seconds: float = 0.0
    written_token_seconds: float = 0.0
    held_token_seconds: float = 0.0

    def count_step(self, used_blocks: int, written_tokens: int, held_tokens: int) -> None:
        """The scheduler calls this at the end of a step, with what the pool holds then (see the fields of these names)."""
        self.steps += 1
        self.used_blocks, self.written_tokens, self.held_tokens = used_blocks, written_tokens, held_tokens
        self.used_blocks_peak = max(self.used_blocks_peak, used_blocks)

    def weigh_step(self, seconds: float) -> None:
        """The loop calls this after count_step, with how long that step took."""
        self.busy_seconds += seconds
        self.used_block_seconds += seconds * self.used_blocks
        self.written_token_seconds += seconds * self.written_tokens
        self.held_token_seconds += seconds * self.held_tokens

    def finished(self, reason: str) -> None:
        """The scheduler calls this when a request ends, the engine when it refuses one."""
        self.requests_finished[reason] = self.requests_finished.get(reason, 0) + 1

    @property
    def preemptions(self) -> int:
        return self.preemptions_recompute + self.preemptions_swap

    @property
    def hit_rate(self) -> float | None:
        """Share of looked-up prompt tokens that the prefix cache had; None before the first lookup."""
        return self.prefix_hits_tokens / self.prefix_queries_tokens if self.prefix_queries_tokens else None

    @property
    def fraction_read_from_cache(self) -> float | None:
        """Share of attended keys that were read as stored; None before the first forward."""
        return self.pairs_from_cache / self.pairs_attended if self.pairs_attended else None
