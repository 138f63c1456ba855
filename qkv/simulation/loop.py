"""The loop of a simulated engine. It takes consecutive steps that only decode at once; the result is that of taking them one by
one.

Takes: the connected parts. Gives: the requests that advanced. Does not know about: how a step's seconds come about.
"""

from collections.abc import Callable
from typing import cast

from qkv.assemble import Parts
from qkv.loop import Loop
from qkv.outputs import Outputs
from qkv.simulation.runner import SimulatedRunner
from qkv.types import Request, SamplingParams

LONGEST = 4096  # the most steps that are taken at once


class SimulatedLoop(Loop):
    """jumps: False takes every step by itself, which tests compare with."""

    def __init__(self, parts: Parts, outputs: Outputs, seed: int, clock: Callable[[], float], jumps: bool = True) -> None:
        super().__init__(parts, outputs, seed, clock)
        self._simulated = cast(SimulatedRunner, parts.runner)
        self.jumps = jumps

    def _step(self, advanced: list[Request]) -> None:
        decoding = self.scheduler.decoding if self.jumps else []
        steps = self.scheduler.quiet_steps(self._until_an_end(decoding))
        if steps > 1:
            self._jump(decoding, steps, advanced)
        else:
            super()._step(advanced)

    def _until_an_end(self, decoding: list[Request]) -> int:
        """How many steps until the first of the requests reaches max_tokens; 0 where one of them may end earlier."""
        if not decoding or not all(self._plain(r.params) for r in decoding):
            return 0
        return min(LONGEST, min(r.max_tokens + r.prompt_len - len(r.token_ids) for r in decoding))

    def _plain(self, params: SamplingParams) -> bool:
        """Whether a request with these parameters can only end by length and reports nothing per token."""
        return not (params.stop or params.stop_token_ids or params.logprobs is not None)

    def _jump(self, decoding: list[Request], most: int, advanced: list[Request]) -> None:
        """Take up to `most` decode steps of these requests; after the first, none that begins at or after the next arrival."""
        clock, cost, n = self._simulated.clock, self._simulated.cost, len(decoding)
        keys, pairs = sum(len(r.token_ids) for r in decoding), 0
        times: list[float] = []
        seconds: list[float] = []
        last = clock.now
        while len(times) < most and (not times or last < clock.deadline):
            clock.advance(cost.seconds(n, keys, (), n))
            times.append(clock.now)
            seconds.append(clock.now - last)
            pairs, keys, last = pairs + keys, keys + n, clock.now
        steps, recorder = len(times), self.recorder
        for request in decoding:
            length = len(request.token_ids)
            request.token_ids += self._simulated.tokens(request.id, length, length + steps)
            request.token_times += times
        recorder.decode_tokens += n * steps
        for duration in seconds:
            recorder.decode_seconds += duration
        recorder.pairs_attended += pairs
        recorder.pairs_from_cache += pairs
        try:
            self.scheduler.advance(seconds)
        except Exception:  # from a policy: the one it was asked about will end, the others take these steps again
            for request in decoding:
                del request.token_ids[-steps:], request.token_times[-steps:]
            raise
        for request in decoding:
            if len(request.token_ids) - request.prompt_len >= request.max_tokens:
                self.finish(request, "length", advanced)
            else:
                advanced.append(request)
