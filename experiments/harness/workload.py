"""The requests that speed is measured with: how long, when, and what they share. Seeded: the same settings, the same requests.

Takes: settings, a vocabulary or text. Gives: requests, one at a time, so that a million of them take no memory.
Does not know about: engines, clocks, what is measured.
"""

import json
import math
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qkv.errors import ConfigError
from qkv.validate import require

_RING = 1 << 16  # tokens of text or noise that prompts are cut from


@dataclass(frozen=True)
class Workload:
    """num_requests of about prompt_tokens in and output_tokens out. ignore_eos: every request runs to its output length.
    repeats: of `compare`: runs of the whole workload, each with an empty prefix cache; the one of median throughput counts.

    lengths: fixed, uniform (1 to twice the mean), lognormal (cv: standard deviation / mean), or drawn from the lines of `file`.
    max_tokens: prompt and output of a request are cut to fit it.
    arrivals: together (all at once), closed (`concurrency` in flight, the next when one ends), poisson or gamma (`rate`
        requests/s; burstiness: cv of the gaps, 1 is poisson), trace (the lines of `file`, at their times).
    prefix_groups, prefix_tokens: each prompt starts with one of so many shared prefixes; prefix_skew: 0 all alike, 1 Zipf.
    turns: requests of a conversation, each continuing the last; think_s: mean pause between them.
    file: JSON lines {"arrival": s, "prompt_tokens": number or list of ids, "output_tokens": n, "prefix_group": any,
        "prefix_tokens": n}: arrival for traces only; the last two are optional, the shared tokens are part of the prompt's.
    """

    num_requests: int = 16
    prompt_tokens: int = 512
    output_tokens: int = 64
    ignore_eos: bool = True
    repeats: int = 1
    lengths: Literal["fixed", "uniform", "lognormal", "file"] = "fixed"
    cv: float = 1.0
    max_tokens: int | None = None
    arrivals: Literal["together", "closed", "poisson", "gamma", "trace"] = "together"
    concurrency: int = 64
    rate: float = 1.0
    burstiness: float = 1.0
    prefix_groups: int = 0
    prefix_tokens: int = 0
    prefix_skew: float = 0.0
    turns: int = 1
    think_s: float = 0.0
    file: str | None = None

    def __post_init__(self) -> None:
        for name in ("num_requests", "prompt_tokens", "repeats", "concurrency", "turns"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(self.output_tokens >= 2, "output_tokens", self.output_tokens, "at least 2 (the first one counts as prefill)")
        for name in ("prefix_groups", "prefix_tokens", "prefix_skew", "think_s"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        for name in ("cv", "rate", "burstiness"):
            require(0 < getattr(self, name) < math.inf, name, getattr(self, name), "above 0 and finite")
        grouped = (self.prefix_groups > 0) == (self.prefix_tokens > 0)
        require(grouped, "prefix_groups", self.prefix_groups, "given together with prefix_tokens, or both 0")
        limit = self.max_tokens
        require(limit is None or limit >= self.prefix_tokens + 3, "max_tokens", limit, "at least prefix_tokens + 3, or null")
        if "file" in (self.lengths, self.arrivals) or self.arrivals == "trace":
            require(self.file is not None, "file", self.file, "a file of JSON lines, for lengths=file and arrivals=trace")
        if self.file is not None and not os.path.isfile(os.path.expanduser(self.file)):
            raise ConfigError(f"workload.file: '{self.file}' is not a file")

    @property
    def plain(self) -> bool:
        """Fixed lengths, all at once, nothing shared: what `compare` measures with."""
        return (self.lengths, self.arrivals, self.prefix_groups, self.turns) == ("fixed", "together", 0, 1)


@dataclass(slots=True)
class Arrival:
    """One request. at: seconds after the start; None: whenever a place is free. turn: of its conversation, from 0."""

    index: int
    prompt: list[int]
    output_tokens: int
    at: float | None = None
    turn: int = 0


@dataclass
class Line:
    """One line of a workload file."""

    prompt_tokens: int | list[int]
    output_tokens: int
    arrival: float = 0.0
    prefix_group: str | None = None
    prefix_tokens: int = 0


class Traffic:
    """The requests of a workload. text: token ids that prompts are cut from; without it they are noise.

    Prompts share nothing but what the settings say: each own part opens with two tokens that number the request.
    """

    def __init__(self, workload: Workload, seed: int, vocab: int, text: list[int] | None = None) -> None:
        self.workload, self.seed, self.vocab = workload, seed, vocab
        ring = text or random.Random(f"{seed} text").choices(range(vocab), k=_RING)
        self._ring = ring * (1 + -(-_RING // len(ring)))
        self._lines = read_lines(workload.file) if workload.file else []
        groups = range(1, workload.prefix_groups + 1)
        self._weights = [rank**-workload.prefix_skew for rank in groups]

    def __len__(self) -> int:
        """Requests, all turns of all conversations; fewer where one ends early because it no longer fits."""
        work = self.workload
        return min(work.num_requests, len(self._lines)) if work.arrivals == "trace" else work.num_requests

    def __iter__(self) -> Iterator[Arrival]:
        """First turns, in order of arrival."""
        work = self.workload
        if work.arrivals == "trace":
            yield from (self._from_line(i, line, line.arrival) for i, line in enumerate(self._lines[: work.num_requests]))
            return
        lengths, gaps, groups = (random.Random(f"{self.seed} {what}") for what in ("lengths", "arrivals", "groups"))
        at = 0.0
        for index in range(-(-work.num_requests // work.turns)):
            if work.arrivals in ("poisson", "gamma"):
                shape = 1.0 if work.arrivals == "poisson" else work.burstiness**-2
                at += gaps.gammavariate(shape, 1 / (shape * work.rate))
            when = {"together": 0.0, "closed": None}.get(work.arrivals, at)
            if work.lengths == "file":
                yield self._from_line(index, lengths.choice(self._lines), when)
                continue
            own, output = self._length(lengths, work.prompt_tokens), self._length(lengths, work.output_tokens)
            prefix = self._prefix(groups.choices(range(work.prefix_groups), self._weights)[0]) if work.prefix_groups else []
            yield self._fitted(index, prefix, own, output, when, 0)

    def next_turn(self, last: Arrival, history: list[int], now: float) -> Arrival | None:
        """What follows in the conversation of `last`, whose tokens are now `history`; None at its end, or where another
        turn would not fit."""
        work, turn = self.workload, last.turn + 1
        if turn >= work.turns:
            return None
        rng = random.Random(f"{self.seed} turn {last.index} {turn}")
        own, output = self._length(rng, work.prompt_tokens), self._length(rng, work.output_tokens)
        if work.max_tokens is not None and len(history) + 3 > work.max_tokens:
            return None
        pause = rng.expovariate(1 / work.think_s) if work.think_s else 0.0
        return self._fitted(last.index, history, own, output, now + pause, turn)

    def _length(self, rng: random.Random, mean: int) -> int:
        kind, cv = self.workload.lengths, self.workload.cv
        if kind == "uniform":
            return rng.randint(1, 2 * mean - 1)
        if kind == "lognormal":
            sigma = math.sqrt(math.log(1 + cv * cv))
            return max(1, round(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)))
        return mean

    def _fitted(self, index: int, before: list[int], own: int, output: int, at: float | None, turn: int) -> Arrival:
        if (limit := self.workload.max_tokens) is not None:
            own = min(own, limit - len(before) - 2)
            output = min(output, limit - len(before) - own)
        return Arrival(index, before + self._own(index, turn, own), max(2, output), at, turn)

    def _own(self, index: int, turn: int, n: int) -> list[int]:
        start = (index * 0x9E3779B1 + turn * 0x85EBCA6B) % _RING
        name = [index % self.vocab, (index // self.vocab + 31 * turn) % self.vocab]
        return (name + self._ring[start : start + n])[:n]

    def _prefix(self, group: int | str, n: int | None = None) -> list[int]:
        n = self.workload.prefix_tokens if n is None else n
        rng = random.Random(f"{self.seed} prefix {group}")
        start = rng.randrange(_RING)
        parts = [rng.randrange(self.vocab), rng.randrange(self.vocab), *self._ring[start : start + n]]
        while len(parts) < n:
            parts += self._ring[:_RING]
        return parts[:n]

    def _from_line(self, index: int, line: Line, at: float | None) -> Arrival:
        if isinstance(line.prompt_tokens, list):
            return Arrival(index, list(line.prompt_tokens), line.output_tokens, at)
        shared = self._prefix(line.prefix_group, line.prefix_tokens) if line.prefix_group is not None else []
        own = max(0, line.prompt_tokens - len(shared))
        return Arrival(index, (shared + self._own(index, 0, own))[: line.prompt_tokens], line.output_tokens, at)


def read_lines(path: str) -> list[Line]:
    """Raises ConfigError with the number of the first bad line, and what is wrong with it."""
    lines: list[Line] = []
    with Path(os.path.expanduser(path)).open(encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                try:
                    lines.append(_line(json.loads(text)))
                except (ValueError, TypeError, ConfigError) as error:
                    raise ConfigError(f"workload.file: {path} line {number}: {error}") from None
                if len(lines) > 1 and lines[-1].arrival < lines[-2].arrival:
                    raise ConfigError(
                        f"workload.file: {path} line {number}: arrival goes back in time; sort the lines by arrival"
                    )
    if not lines:
        raise ConfigError(f"workload.file: {path} has no requests")
    return lines


def _line(values: Any) -> Line:
    if not isinstance(values, dict):
        raise ConfigError("not a JSON object")
    for key in ("prompt_tokens", "output_tokens"):
        if key not in values:
            raise ConfigError(f"no {key}")
    prompt, output, at = values["prompt_tokens"], values["output_tokens"], values.get("arrival", 0.0)
    ids = isinstance(prompt, list)
    good = bool(prompt) and all(type(t) is int and t >= 0 for t in prompt) if ids else type(prompt) is int and prompt >= 1
    require(good, "prompt_tokens", prompt, "a number of at least 1, or a list of token ids")
    require(type(output) is int and output >= 1, "output_tokens", output, "a number of at least 1")
    require(isinstance(at, int | float) and 0 <= at < math.inf, "arrival", at, "seconds, at least 0")
    group, shared = values.get("prefix_group"), values.get("prefix_tokens", 0)
    require(type(shared) is int and shared >= 0, "prefix_tokens", shared, "a number of at least 0")
    return Line(prompt, output, float(at), None if group is None else str(group), shared)


@dataclass
class Slo:
    """Service levels: a request counts as good when it meets both. Seconds; None: anything is good."""

    ttft: float | None = None
    tpot: float | None = None

    def met(self, ttft: float | None, tpot: float | None) -> bool:
        late = self.ttft is not None and (ttft is None or ttft > self.ttft)
        slow = self.tpot is not None and tpot is not None and tpot > self.tpot
        return not (late or slow)
