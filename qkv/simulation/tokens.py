"""Makes output tokens up: a token is a function of (seed, request, position), so preemption and batching cannot change it."""

import random

_RING = 1 << 16
_SPREAD = 0x9E3779B1  # odd and large: consecutive requests start far apart


class SimulatedTokens:
    """Every request gets a slice of one random sequence, which begins at another place for every request."""

    def __init__(self, seed: int, vocab: int) -> None:
        ring = random.Random(f"tokens {seed}").choices(range(vocab), k=_RING)
        self._ring = ring + ring

    def at(self, request_id: int, position: int) -> int:
        return self._ring[(request_id * _SPREAD + position) % _RING]

    def __call__(self, request_id: int, start: int, end: int) -> list[int]:
        """The tokens at positions start..end-1 of a request, at most 65,536."""
        at = (request_id * _SPREAD + start) % _RING
        return self._ring[at : at + end - start]
