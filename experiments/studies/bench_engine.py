"""Times how fast the engine reads prompts and writes tokens, by batch, context and quantizer, beside transformers' generate.

Takes: cases like 8x256 (requests x prompt tokens). Gives: a row per case and contender, with medians of runs that take turns.
Does not know about: accuracy, kernels by themselves.
"""

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from calibration.text.data import windows
from experiments.harness.base import EXPERIMENTS, Experiment, Run
from experiments.harness.table import number, show
from experiments.measuring import engines
from experiments.measuring.scales import provide
from qkv.config import EngineConfig
from qkv.engine import Engine
from qkv.errors import ConfigError
from qkv.models import LoadedModel, load_model
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.scales import ScaleFile
from qkv.types import SamplingParams
from qkv.validate import require, suggest

_TRANSFORMERS = "transformers"
_CALIBRATION = (8, 512)  # documents x tokens, for quantizers that need scales and have no file


class Times(NamedTuple):
    """Times of one run. prefill: seconds until every request had its first token. decode: seconds after that. decoded: tokens
    written in these."""

    prefill: float
    decode: float
    decoded: int


@dataclass
class Contender:
    """Who is timed. run(prompts, new tokens): runs the case and returns Times and engine.metrics(), {} for transformers."""

    label: str
    run: Callable[[list[list[int]], int], tuple[Times, dict[str, Any]]]
    policy: dict[str, Any] | None = None
    times: list[Times] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)


@EXPERIMENTS.register("bench_engine")
@dataclass
class BenchEngine(Experiment):
    """cases: REQUESTSxPROMPT tokens, all sent at once. quantizers: names or {name: ..., field: value}.

    output_tokens: per request. repeats: how often every contender runs; they take turns, and medians are reported.
    baseline: "transformers" times its generate() too; null does not.
    """

    cases: list[str] = field(default_factory=lambda: ["1x256"])
    quantizers: list[Any] = field(default_factory=lambda: ["none"])
    output_tokens: int = 64
    repeats: int = 3
    baseline: str | None = None

    def __post_init__(self) -> None:
        require(bool(self.cases), "cases", self.cases, "at least one, like 8x256")
        for case in self.cases:
            shaped = re.fullmatch(r"[1-9]\d*x[1-9]\d*", str(case)) is not None
            require(shaped, "cases", case, "REQUESTSxPROMPT tokens, like 8x256")
        require(bool(self.quantizers), "quantizers", self.quantizers, "at least one quantizer")
        require(self.output_tokens >= 2, "output_tokens", self.output_tokens, "at least 2 (the first one counts as prefill)")
        require(self.repeats >= 1, "repeats", self.repeats, "at least 1")
        if self.baseline not in (None, _TRANSFORMERS):
            raise ConfigError(f"unknown baseline '{self.baseline}'; {suggest(str(self.baseline), [_TRANSFORMERS])}, or null")

    def check(self) -> None:
        for spec in self.quantizers:
            QUANTIZERS.build(spec)

    def run(self, run: Run) -> None:
        loaded = load_model(run.engine.model)
        scales = [provide(run, loaded, QUANTIZERS.build(spec), *_CALIBRATION, skip=0) for spec in self.quantizers]
        with engines.build(engines.single_document(run.engine, 16), loaded, "none") as engine:
            run.record.set("model", engines.model_part(loaded, engine))
            run.record.set("attention", engine.metrics()["attention"])
        count = len(self.cases) * (len(self.quantizers) + (self.baseline is not None)) * self.repeats
        rows = []
        with tqdm(total=count, disable=not run.progress, unit="run", leave=False) as bar:
            for case in self.cases:
                requests, tokens = map(int, case.split("x"))
                prompts = windows(run.data, loaded.tokenizer, requests, tokens, run.engine.seed, cycle=True)
                contenders = self._contenders(run.engine, loaded, scales, requests, tokens)
                for _ in range(self.repeats):
                    for contender in contenders:
                        bar.set_description(f"{case}: {contender.label}")
                        times, contender.metrics = contender.run(prompts, self.output_tokens)
                        contender.times.append(times)
                        bar.update()
                rows += [run.add_row(row) for row in self._rows(contenders, requests, tokens)]
        self._show(loaded, rows)

    def _contenders(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        scales: list[tuple[ScaleFile | None, str | None]],
        requests: int,
        tokens: int,
    ) -> list[Contender]:
        """All contenders of a case. Each run builds an engine of its own, with a pool just large enough for the case, and
        closes it, because transformers' generate() needs the model to itself."""
        block = int(config.allocator.get("block_size", 16))
        sized = engines.single_document(config, tokens + self.output_tokens)
        limits = replace(config.scheduler, max_model_len=tokens + self.output_tokens, max_num_seqs=requests)
        limits = replace(limits, max_num_batched_tokens=max(requests, limits.max_num_batched_tokens))
        blocks = 1 + requests * (1 + -(-(tokens + self.output_tokens) // block))
        sized = replace(sized, cache=replace(sized.cache, num_blocks=blocks), scheduler=limits)

        def engine_run(spec: engines.Spec, file: ScaleFile | None) -> Callable[..., tuple[Times, dict[str, Any]]]:
            def once(prompts: list[list[int]], new: int) -> tuple[Times, dict[str, Any]]:
                with engines.build(sized, loaded, spec, file) as engine:
                    engines.generate(engine, [prompts[0][:64]], SamplingParams(max_tokens=2, ignore_eos=True))  # warm up
                    return _timed(engine, prompts, new), engine.metrics()

            return once

        found = [
            Contender(engines.label(spec), engine_run(spec, file), engines.policy_part(sized, spec, origin))
            for spec, (file, origin) in zip(self.quantizers, scales, strict=True)
        ]
        return found + ([Contender(_TRANSFORMERS, _generate(loaded))] if self.baseline else [])

    def _rows(self, contenders: list[Contender], requests: int, tokens: int) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for c in contenders:
            prefill = [requests * tokens / t.prefill for t in c.times]
            decode = [t.decoded / t.decode if t.decoded else float("nan") for t in c.times]
            row: dict[str, Any] = {"label": c.label} | ({"policy": c.policy} if c.policy else {})
            row["case"] = {"requests": requests, "prompt_tokens": tokens, "output_tokens": self.output_tokens}
            row["speed"] = {
                "prefill_tokens_per_s": statistics.median(prefill),
                "decode_tokens_per_s": statistics.median(decode),
                "runs_prefill_tokens_per_s": prefill,
                "runs_decode_tokens_per_s": decode,
            }
            rows.append(row | {key: c.metrics[key] for key in ("attention", "memory") if key in c.metrics})
        if self.baseline:
            theirs = rows[-1]["speed"]
            for row in rows[:-1]:
                for phase in ("prefill", "decode"):
                    key = f"{phase}_tokens_per_s"
                    row["speed"][f"{phase}_speedup_vs_transformers"] = row["speed"][key] / theirs[key]
        return rows

    def _show(self, loaded: LoadedModel, rows: list[dict[str, Any]]) -> None:
        columns = [
            "case",
            "quantizer",
            "prefill tok/s",
            "decode tok/s",
            "prefill x",
            "decode x",
            "KV B/token",
            "forward",
            "attention",
        ]
        cells = []
        for row in rows:
            case, speed, attention = row["case"], row["speed"], row.get("attention", {})
            cells.append(
                [
                    f"{case['requests']}x{case['prompt_tokens']}",
                    row["label"],
                    number(speed["prefill_tokens_per_s"], 0),
                    number(speed["decode_tokens_per_s"]),
                    number(speed.get("prefill_speedup_vs_transformers"), 2),
                    number(speed.get("decode_speedup_vs_transformers"), 2),
                    number(row.get("memory", {}).get("kv_bytes_per_token")),
                    attention.get("forward", _TRANSFORMERS).split(":")[0],
                    attention.get("backend", "sdpa"),
                ]
            )
        note = (
            f"medians of {self.repeats} runs each, in turn, {torch.get_num_threads()} threads; x: against transformers' generate"
        )
        show(f"{loaded.name}, {loaded.model.dtype}".replace("torch.", ""), columns, cells, note)


def _timed(engine: Engine, prompts: list[list[int]], new: int) -> Times:
    """Send all prompts at once and let each request write `new` tokens. Decode begins when the last prompt has been read."""
    start = time.perf_counter()
    waiting = {engine.add_request(prompt, SamplingParams(max_tokens=new, ignore_eos=True)) for prompt in prompts}
    written, first, begin = 0, start, 0
    while engine.has_work:
        advanced = engine.advance()
        written += len(advanced)
        if waiting:
            waiting -= {request.id for request in advanced}
            first, begin = time.perf_counter(), written
    return Times(first - start, time.perf_counter() - first, written - begin)


def _generate(loaded: LoadedModel) -> Callable[..., tuple[Times, dict[str, Any]]]:
    """transformers' own generate, greedy, on all prompts as one batch."""
    model: Any = loaded.model

    def once(prompts: list[list[int]], new: int) -> tuple[Times, dict[str, Any]]:
        ids = torch.tensor(prompts, device=model.device)
        at: list[float] = []  # when each of the batch's new tokens was there

        def clock(ids: torch.Tensor, scores: Any) -> torch.Tensor:
            at.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        def generate(ids: torch.Tensor, n: int) -> None:
            mask = torch.ones_like(ids)
            model.generate(
                ids, attention_mask=mask, max_new_tokens=n, min_new_tokens=n, do_sample=False, stopping_criteria=[clock]
            )

        generate(ids[:1, :64], 2)
        at.clear()
        start = time.perf_counter()
        generate(ids, new)
        return Times(at[0] - start, at[-1] - at[0], len(prompts) * (new - 1)), {}

    return once
