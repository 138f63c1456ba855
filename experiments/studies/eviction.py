"""Measures the hit rate of the prefix cache by its size and the eviction policy, beside Belady's optimum, which none can exceed.

Takes: traces on which policies differ. Gives: one row per trace and policy, a chart. Runs the real block manager, and no model.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from experiments.harness.base import EXPERIMENTS, Experiment, Run
from experiments.harness.plots import lines
from experiments.harness.table import number, show
from experiments.harness.workload import Traffic
from qkv.cache.block_manager import BlockManager
from qkv.cache.host_pool import HostPool
from qkv.cache.prefix import PrefixHasher
from qkv.errors import ConfigError
from qkv.metrics.recorder import Recorder
from qkv.policies.allocator.base import ALLOCATORS
from qkv.policies.evictor.base import EVICTORS
from qkv.types import Request, SamplingParams
from qkv.validate import require, suggest

B = 16  # tokens per block; since only whole blocks are shared here, hit rates do not depend on it
OWN = "workload"  # name of the trace that the configured workload gives
OPTIMUM = "belady"  # its name in tables and records; it is a bound, not a policy
_VOCAB = 32_000
_PARAMS = SamplingParams(max_tokens=1)
Chain = tuple[int, ...]  # a prompt, as the ids of its blocks; equal beginnings have equal content


@EXPERIMENTS.register("eviction")
@dataclass
class Eviction(Experiment):
    """evictors: names or {name: ..., field: value}; null: all. traces: any of scan, loop, zipf, multi_turn, and workload, which
    stands for the prompts of the configured workload (the first turns of its conversations). requests: how many per trace.

    sizes: of the cache, as shares of the distinct blocks of the trace.
    """

    runners = ("model", "simulated")

    evictors: list[Any] | None = None
    traces: list[str] = field(default_factory=lambda: list(TRACES))
    sizes: list[float] = field(default_factory=lambda: [0.05, 0.1, 0.2, 0.4, 0.8])
    requests: int = 1500

    def __post_init__(self) -> None:
        for name in self.traces:
            if name not in (*TRACES, OWN):
                raise ConfigError(f"unknown trace '{name}'; {suggest(name, (*TRACES, OWN))}")
        require(bool(self.sizes) and all(0 < size <= 1 for size in self.sizes), "sizes", self.sizes, "above 0 and at most 1")
        require(self.requests >= 10, "requests", self.requests, "at least 10")

    def check(self) -> None:
        for spec in self.evictors or []:
            EVICTORS.build(spec)

    def run(self, run: Run) -> None:
        specs: list[Any] = self.evictors if self.evictors is not None else EVICTORS.names()
        panels: dict[str, dict[str, list[tuple[float, float | None]]]] = {}
        table = []
        with tqdm(total=len(self.traces) * (len(specs) + 1), disable=not run.progress, unit="policy", leave=False) as bar:
            for name in self.traces:
                made = TRACES[name](random.Random(f"{run.engine.seed} {name}")) if name != OWN else prompts(run)
                trace = list(itertools.islice(made, self.requests))
                distinct, longest = len({chain[: i + 1] for chain in trace for i in range(len(chain))}), max(map(len, trace))
                blocks = {size: max(longest, round(size * distinct)) for size in self.sizes}
                for spec in [OPTIMUM, *specs]:
                    label = spec if isinstance(spec, str) else ", ".join(f"{v}" for v in spec.values())
                    bar.set_description(f"{name}: {label}")
                    rates = {
                        size: belady(trace, n) if spec == OPTIMUM else hit_rate(trace, n, spec) for size, n in blocks.items()
                    }
                    run.add_row(
                        {
                            "label": f"{name}: {label}",
                            "policy": {"evictor": label, "trace": name},
                            "cache": {
                                "hit_rates": rates,
                                "blocks": blocks,
                                "distinct_blocks": distinct,
                                "hit_rate": max(rates.values()),
                            },
                        }
                    )
                    panels.setdefault(name, {})[label] = [(100 * size, 100 * rate) for size, rate in rates.items()]
                    table.append([name, label, *(number(100 * rate, 1) for rate in rates.values())])
                    bar.update()
        columns = ["trace", "policy", *(f"{size:.0%}" for size in self.sizes)]
        note = "Hit rate, % of prompt blocks, by size of the cache as a share of the trace's distinct blocks."
        show("Prefix cache: which block to evict", columns, table, note, text=(0, 1))
        lines(run.folder / "eviction.png", panels, "Hit rate, %", "cache size, % of distinct blocks")


def hit_rate(trace: Sequence[Chain], blocks: int, evictor: Any) -> float:
    """The share of prompt blocks that the real block manager finds in a cache of `blocks` blocks, one request at a time."""
    allocator = ALLOCATORS.build({"name": "paged", "block_size": B})
    allocator.bind(blocks + 2, EVICTORS.build(evictor), blocks + 1)  # the null block, and the token after the prompt
    manager = BlockManager(allocator, PrefixHasher("xxh3_128", B, ["eviction"]), HostPool(0), Recorder())
    hits = total = 0
    for i, chain in enumerate(trace):
        allocator.step = i
        tokens = [token for block in chain for token in range(block * B, block * B + B)]
        request = Request(i, len(tokens) + 1, [*tokens, 0], _PARAMS, 1)
        if not manager.admit(request, alone=True):
            raise RuntimeError(f"a prompt of {len(chain)} blocks does not fit a cache of {blocks}")
        hits, total = hits + request.num_computed // B, total + len(chain)
        request.num_computed = len(tokens)
        manager.seal(request)
        manager.release(request)
    return hits / total


def belady(trace: Sequence[Chain], blocks: int) -> float:
    """The same share for a cache that knows the future and evicts the block whose next use is furthest away. No policy can do
    better. A use of a block is a use of all blocks before it, so the furthest next use is always that of a leaf, and like the
    real policies this one evicts only leaves.

    Source: Belady, 1966.
    """
    never = len(trace)
    upcoming: list[list[int]] = []
    seen: dict[Chain, int] = {}
    for i in range(len(trace) - 1, -1, -1):
        prefixes = [trace[i][: n + 1] for n in range(len(trace[i]))]
        upcoming.append([seen.get(prefix, never) for prefix in prefixes])
        seen |= dict.fromkeys(prefixes, i)
    upcoming.reverse()
    cached: dict[Chain, int] = {}  # -> next use
    heap: list[tuple[int, int, Chain]] = []
    hits = total = 0
    for i, chain in enumerate(trace):
        prefixes = [chain[: n + 1] for n in range(len(chain))]
        hits, total = hits + sum(prefix in cached for prefix in prefixes), total + len(chain)
        for prefix, use in zip(prefixes, upcoming[i], strict=True):
            cached[prefix] = use
            heapq.heappush(heap, (-use, -len(prefix), prefix))
        pinned, kept = set(prefixes), []
        while len(cached) > blocks:
            entry = heapq.heappop(heap)
            if cached.get(entry[2]) != -entry[0]:
                continue
            if entry[2] in pinned:
                kept.append(entry)
            else:
                del cached[entry[2]]
        for entry in kept:
            heapq.heappush(heap, entry)
    return hits / total


# -- traces: endless, seeded, in block ids ---------------------------------------------------------------------------


def _document(rng: random.Random, length: int) -> Chain:
    return tuple(rng.randrange(1 << 40) for _ in range(length))


def _zipf(rng: random.Random, items: Sequence[Chain], exponent: float = 1.0) -> Callable[[], Chain]:
    weights = list(itertools.accumulate((i + 1) ** -exponent for i in range(len(items))))
    return lambda: rng.choices(items, cum_weights=weights)[0]


def scan(rng: random.Random) -> Iterator[Chain]:
    """Popular prompts, with long runs of documents between them that never come back."""
    popular = _zipf(rng, [_document(rng, 8) for _ in range(40)])
    while True:
        for _ in range(30):
            yield popular()
        for _ in range(20):
            yield _document(rng, 12)


def loop(rng: random.Random) -> Iterator[Chain]:
    """The same documents in the same order, again and again, as an evaluation harness does."""
    documents = [_document(rng, 10) for _ in range(100)]
    yield from itertools.cycle(documents)


def zipf(rng: random.Random) -> Iterator[Chain]:
    """Independent requests for documents of very different popularity."""
    popular = _zipf(rng, [_document(rng, rng.randrange(4, 16)) for _ in range(400)])
    while True:
        yield popular()


def multi_turn(rng: random.Random) -> Iterator[Chain]:
    """Conversations that grow by a few blocks a turn, 30 at a time, over a few system prompts."""
    system = _zipf(rng, [_document(rng, 6) for _ in range(8)])
    active: list[tuple[Chain, int]] = []
    while True:
        if len(active) < 30:
            active.append((system() + _document(rng, 3), rng.randrange(1, 9)))
        at = rng.randrange(len(active))
        history, left = active.pop(at)
        yield history
        if left:
            active.append((history + _document(rng, rng.randrange(2, 6)), left - 1))


def prompts(run: Run) -> Iterator[Chain]:
    """The prompts of the configured workload, but for those shorter than a block, which have nothing to share. Raises ConfigError
    if all are."""
    known = dict[tuple[int, ...], int]()
    for arrival in Traffic(run.workload, run.engine.seed, _VOCAB):
        cut = [tuple(arrival.prompt[i : i + B]) for i in range(0, len(arrival.prompt) - B + 1, B)]
        if cut:
            yield tuple(known.setdefault(block, len(known)) for block in cut)
    if not known:
        raise ConfigError(f"traces: no prompt of this workload has the {B} tokens of a block; raise workload.prompt_tokens")


TRACES: dict[str, Callable[[random.Random], Iterator[Chain]]] = {
    "scan": scan,
    "loop": loop,
    "zipf": zipf,
    "multi_turn": multi_turn,
}
