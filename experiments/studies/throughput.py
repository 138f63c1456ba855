"""Measures tokens/s, memory use and waiting under load: contiguous, paged, paged with a prefix cache, and that with quantizers.

Takes: a workload. Gives: one row per policy, all with a pool of equally many bytes; and how the gain of paging depends on the
size of the pool and on the longest request allowed.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from tqdm import tqdm

from experiments.harness.base import EXPERIMENTS, Experiment, Run
from experiments.harness.plots import bars, heat_map
from experiments.harness.table import console, number, show
from experiments.measuring import engines
from experiments.measuring.rows import Model, for_workload, serve_row, traffic, with_length, with_pool
from experiments.measuring.serving import serve
from experiments.measuring.sizing import REST, block_size_of, bytes_per_block
from qkv.config import EngineConfig
from qkv.models import dimensions
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.simulation import SimulatedModel
from qkv.validate import parse_bytes, require

_TRIES = 6  # the simulator runs at most so often to find a pool size
_CLOSE = 0.01  # a utilization that differs by no more than this from the wanted one is close enough


@EXPERIMENTS.register("throughput")
@dataclass
class Throughput(Experiment):
    """quantizers: names or {name: ..., field: value}, each on the paged pool with prefix cache; null: the configured one.

    pool_tokens: size of the pool, in tokens that are stored unquantized. null: the size of which `none` on a paged pool without
    prefix cache uses the share `utilization` on average, found by simulating on `device`, but with room for the longest request
    allowed, and no more than the device holds beside the weights and `reserve` (null: a tenth of its memory). surface_pools,
    surface_lengths: pool sizes in tokens, and lengths of the longest request, for which contiguous and paged are also compared in
    the simulator.
    """

    runners = ("model", "simulated")

    quantizers: list[Any] | None = None
    pool_tokens: int | None = None
    utilization: float = 0.7
    reserve: int | str | None = None
    surface_pools: list[int] = field(default_factory=list)
    surface_lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        require(self.pool_tokens is None or self.pool_tokens >= 64, "pool_tokens", self.pool_tokens, "at least 64, or null")
        require(0 < self.utilization < 1, "utilization", self.utilization, "above 0 and below 1")
        parse_bytes(self.reserve, "reserve")
        both = bool(self.surface_pools) == bool(self.surface_lengths)
        require(both, "surface_pools", self.surface_pools, "given together with surface_lengths, or both empty")

    def check(self) -> None:
        for spec in self.quantizers or []:
            QUANTIZERS.build(spec)

    def run(self, run: Run) -> None:
        config, model = for_workload(run)
        pool = self._pool(run, config)
        run.record.set("pool", pool)
        rows = []
        cases = self._cases(config, pool["bytes"])
        with tqdm(total=len(cases), disable=not run.progress, unit="policy", leave=False) as bar:
            for label, case in cases:
                bar.set_description(label)
                rows.append(run.add_row(serve_row(run, model, case, label)))
                bar.update()
        self._show(run, rows, pool)
        if self.surface_pools:
            self._surface(run, config, pool["bytes_per_token"])

    def _cases(self, config: EngineConfig, num_bytes: int) -> list[tuple[str, EngineConfig]]:
        plain = with_pool(replace(config, quantizer={"name": "none"}, scales=None), num_bytes)
        paged = {"name": "paged", "block_size": block_size_of(config)}
        off, on = (replace(plain.cache, enable_prefix_caching=flag) for flag in (False, True))
        contiguous = replace(plain, cache=off, allocator={"name": "contiguous", "block_size": paged["block_size"]})
        cached = replace(plain, cache=on, allocator=paged)
        cases = [("contiguous", contiguous), ("paged", replace(cached, cache=off)), ("paged + prefix cache", cached)]
        for spec in self.quantizers if self.quantizers is not None else [config.quantizer]:
            named = {"name": spec} if isinstance(spec, str) else dict(spec)
            if named != {"name": "none"}:
                cases.append((f"+ {engines.label(named)}", replace(cached, quantizer=named, scales=config.scales)))
        return cases

    def _pool(self, run: Run, config: EngineConfig) -> dict[str, Any]:
        """The size of the pool by the rule in the class's docstring, in tokens and bytes, with the numbers behind it."""
        dims, size = dimensions(config.model), block_size_of(config)
        block = bytes_per_block(dims, config.model.dtype, "none", size)
        wanted = None
        if self.pool_tokens is None:
            tokens, wanted = self._by_utilization(run, config, block, size)
            weights = SimulatedModel.of(config.model).weight_bytes
            memory = config.device.memory_bytes
            reserve = parse_bytes(self.reserve, "reserve")
            room = memory - weights - (int(REST * memory) if reserve is None else reserve)
            tokens = min(tokens, room // block * size)
        else:
            tokens = self.pool_tokens
        found = {"tokens": tokens, "bytes": (tokens // size + 1) * block, "bytes_per_token": block / size}
        return found | ({"tokens_for_utilization": wanted, "utilization_wanted": self.utilization} if wanted else {})

    def _by_utilization(self, run: Run, config: EngineConfig, block: int, size: int) -> tuple[int, int]:
        model = SimulatedModel.of(config.model)
        simulated = replace(config, runner=replace(config.runner, name="simulated"), quantizer={"name": "none"}, scales=None)
        simulated = replace(simulated, cache=replace(config.cache, enable_prefix_caching=False))
        simulated = replace(simulated, allocator={"name": "paged", "block_size": size})
        mean = run.workload.prefix_tokens + run.workload.prompt_tokens + run.workload.output_tokens
        tokens = max(int(min(run.workload.concurrency, run.workload.num_requests) * mean / self.utilization), 4 * size)
        longest = (simulated.scheduler.max_model_len or model.dims.max_positions or 0) + size
        tokens = max(tokens, longest)
        for _ in range(_TRIES):
            used = _utilization(run, model, with_pool(simulated, (tokens // size + 1) * block))
            better = max(longest, int(tokens * used / self.utilization))
            if abs(used - self.utilization) < _CLOSE or better == tokens:
                break
            tokens = better
        return tokens // size * size, tokens // size * size

    def _show(self, run: Run, rows: list[dict[str, Any]], pool: dict[str, Any]) -> None:
        columns = ["policy", "capacity", "utilization", "tok/s", "x contiguous", "x paged", "TTFT mean s", "TTFT p50 s"]
        columns += ["TTFT p95 s", "TPOT p50 ms", "hit rate", "preempted"]
        work = run.workload
        where = f"simulated {run.engine.device.name}" if run.engine.runner.name == "simulated" else "for real"
        name = run.record.data["model"]["name"]
        burst = work.concurrency if work.arrivals == "closed" else 0
        note = (
            f"pool {pool['bytes'] / 2**30:.2f} GiB in every row ({pool['tokens']:,} tokens unquantized). utilization: written "
            f"tokens / pool tokens, mean over time. TTFT leaves out the {burst} requests of the start."
        )
        first, second = rows[0]["speed"]["output_tokens_per_s"], rows[1]["speed"]["output_tokens_per_s"]
        show(
            f"{name}, {where}: {rows[0]['requests']['served']:,} requests",
            columns,
            [_cells(row, first, second) for row in rows],
            note,
        )
        if (wanted := pool.get("tokens_for_utilization")) and wanted > pool["tokens"]:
            name_of = run.engine.device.name
            console().print(f"{self.utilization:.0%} utilization would need {wanted:,} tokens; the pool is what fits {name_of}.")
        panels = {
            "output tokens/s": [r["speed"]["output_tokens_per_s"] for r in rows],
            "pool utilization": [r["memory"].get("utilization_mean") for r in rows],
            "TTFT p50, s": [(r["speed"].get("ttft_s") or {}).get("p50") for r in rows],
        }
        bars(run.folder / "throughput.png", [r["label"] for r in rows], panels, f"{name}, {where}")

    def _surface(self, run: Run, config: EngineConfig, per_token: float) -> None:
        """The gain of paged over contiguous in the simulator, by pool size and longest request."""
        model: Model = SimulatedModel.of(config.model)
        config = replace(config, runner=replace(config.runner, name="simulated"))
        size, shared, ratios = block_size_of(config), run.workload.prefix_tokens, dict[tuple[int, int], float]()
        jobs = [(n, length) for length in self.surface_lengths for n in self.surface_pools if shared + 3 <= length < n]
        for tokens, length in tqdm(jobs, disable=not run.progress, unit="point", leave=False):
            limited = with_length(config, length)
            work = replace(run.workload, max_tokens=length)
            cases = dict(self._cases(limited, int((tokens // size + 1) * size * per_token)))
            rates = {
                label: serve_row(run, model, cases[label], label, work)["speed"]["output_tokens_per_s"]
                for label in ("contiguous", "paged")
            }
            ratios[tokens, length] = rates["paged"] / rates["contiguous"]
            point = {"pool_tokens": tokens, "max_length": length, "ratio": ratios[tokens, length], **rates}
            run.record.set("surface", [*run.record.data.get("surface", []), point])
        pools, lengths = [f"{n:,}" for n in self.surface_pools], [f"{n:,}" for n in self.surface_lengths]
        values = [[ratios.get((tokens, n)) for tokens in self.surface_pools] for n in self.surface_lengths]
        title = f"Output tokens/s of paged over contiguous, simulated on {config.device.name}"
        cells = [[length, *(number(value, 2) for value in row)] for length, row in zip(lengths, values, strict=True)]
        show(title, ["longest request", *(f"pool of {n}" for n in pools)], cells)
        heat_map(run.folder / "surface.png", lengths, pools, values, title, "pool, tokens", "longest request, tokens")


def _utilization(run: Run, model: SimulatedModel, config: EngineConfig) -> float:
    engine = engines.build(config, model)
    serve(engine, traffic(run, model))
    return float(engine.metrics()["memory"].get("utilization_mean", 0.0))


def _cells(row: dict[str, Any], contiguous: float, paged: float) -> list[str]:
    speed, memory, cache = row["speed"], row["memory"], row["cache"]
    rate, ttft, tpot = speed["output_tokens_per_s"], speed.get("ttft_s") or {}, speed.get("tpot_s") or {}
    used, hits = memory.get("utilization_mean"), cache.get("hit_rate")
    return [
        row["label"],
        number(memory["capacity_tokens"]),
        number(used and 100 * used, 1, suffix=" %"),
        number(rate, 1),
        number(rate / contiguous, 2),
        number(rate / paged, 2),
        number(ttft.get("mean"), 3),
        number(ttft.get("p50"), 3),
        number(ttft.get("p95"), 3),
        number(1e3 * tpot["p50"] if tpot else None, 1),
        number(hits and 100 * hits, 1, suffix=" %"),
        number(cache["preemptions"]),
    ]
