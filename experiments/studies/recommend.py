"""Says what to deploy: puts calibration, accuracy, arithmetic and a short simulation together into one choice with its reason.

Takes: a model, data, a device, limits on quality and waiting. Gives: one row per quantizer, the choice, the runner-up, and the
vLLM flags that come nearest to it.
"""

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from tqdm import tqdm

from calibration.text.data import windows
from experiments.harness.base import EXPERIMENTS, Experiment, Run
from experiments.harness.table import console, number, show
from experiments.harness.workload import Slo
from experiments.measuring import engines
from experiments.measuring.divergence import Accuracy, score_document
from experiments.measuring.rows import serve_row, with_length, with_pool
from experiments.measuring.scales import provide
from experiments.measuring.sizing import Demand, block_size_of, plan_row
from qkv.config import EngineConfig
from qkv.engine import Engine
from qkv.models import LoadedModel, dimensions, load_model
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.scales import ScaleFile
from qkv.simulation import SimulatedModel
from qkv.validate import require

_AS_FAST = 0.02  # two quantizers whose simulated tokens/s differ by no more than this share count as equally fast
# Our name -> vLLM's name for a KV cache dtype that does the same; for the other quantizers it has none.
_VLLM = {"none": "auto", "fp8": "fp8", "int8_token": "int8_per_token_head"}


@dataclass(frozen=True)
class Quality:
    """Limits of quality. kl: the largest KL divergence from the unquantized model, in nats per token."""

    kl: float = 0.01

    def __post_init__(self) -> None:
        require(self.kl >= 0, "kl", self.kl, "at least 0")


@EXPERIMENTS.register("recommend")
@dataclass
class Recommend(Experiment):
    """quantizers: to choose from, besides `none`. plan: what is to be served. quality, slo: limits; slo is about the 95th
    percentile of the requests.

    documents, tokens_per_document: windows of text that are scored. calibration_documents: how many further windows are used for
    scales.
    """

    quantizers: list[Any] = field(default_factory=lambda: ["fp8", "int8", "int8_token"])
    plan: Demand = field(default_factory=Demand)
    quality: Quality = field(default_factory=Quality)
    slo: Slo = field(default_factory=Slo)
    documents: int = 8
    tokens_per_document: int = 512
    calibration_documents: int = 8

    def __post_init__(self) -> None:
        for name in ("documents", "calibration_documents"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(self.tokens_per_document >= 2, "tokens_per_document", self.tokens_per_document, "at least 2")

    def check(self) -> None:
        for spec in self.quantizers:
            QUANTIZERS.build(spec)

    def run(self, run: Run) -> None:
        loaded = load_model(run.engine.model)
        engines.require_positions(loaded, self.tokens_per_document, "tokens_per_document")
        specs: list[Any] = ["none", *(s for s in self.quantizers if engines.label(s) != "none")]
        accuracies = self._accuracies(run, loaded, specs)
        dims = dimensions(run.engine.model)
        model = SimulatedModel.of(run.engine.model)
        rows = []
        for spec, (accuracy, origin) in zip(specs, accuracies, strict=True):
            named = {"name": spec} if isinstance(spec, str) else dict(spec)
            config = replace(run.engine, quantizer=named, scales=None)
            row = plan_row(config, dims, self.plan)
            simulated = self._simulated(config, row["plan"]["kv_budget_bytes"])
            served = serve_row(run, model, simulated, engines.label(spec), slo=self.slo)
            row |= {"label": engines.label(spec), "accuracy": accuracy, "speed": served["speed"], "memory": served["memory"]}
            row |= {"cache": served["cache"], "requests": served["requests"]}
            row["policy"] = engines.policy_part(config, named, origin)
            row["misses"] = self.misses(row)
            rows.append(run.add_row(row))
        self._show(run, rows, block_size_of(run.engine))

    def _simulated(self, config: EngineConfig, budget: int) -> EngineConfig:
        scheduler = replace(config.scheduler, max_num_seqs=max(self.plan.concurrency, 1))
        scheduler = replace(scheduler, max_num_batched_tokens=max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs))
        runner = replace(config.runner, name="simulated")
        return with_length(with_pool(replace(config, scheduler=scheduler, runner=runner), budget), self.plan.context)

    def _accuracies(self, run: Run, loaded: LoadedModel, specs: list[Any]) -> list[tuple[dict[str, Any], str | None]]:
        """For each quantizer, its accuracy against `none` and where its scales come from."""
        texts = windows(run.data, loaded.tokenizer, self.documents, self.tokens_per_document, run.engine.seed)
        single = engines.single_document(run.engine, self.tokens_per_document)
        provided: list[tuple[ScaleFile | None, str | None]] = []
        for spec in specs:
            rest = (self.calibration_documents, self.tokens_per_document, self.documents)
            provided.append(provide(run, loaded, QUANTIZERS.build(spec), *rest))
        found = [Accuracy() for _ in specs]
        with ExitStack() as stack:
            contenders: list[Engine] = []
            for spec, (scales, _) in zip(specs, provided, strict=True):
                contenders.append(engines.build(single, loaded, spec, scales))
                stack.callback(contenders[-1].close)
            run.record.set("model", engines.model_part(loaded, contenders[0]))
            others = list(zip(contenders[1:], found[1:], strict=True))
            for text in tqdm(texts, disable=not run.progress, unit="document", leave=False):
                score_document(text, contenders[0], others, found[0])
            return [
                (accuracy.part(engine.metrics()), origin)
                for accuracy, engine, (_, origin) in zip(found, contenders, provided, strict=True)
            ]

    def misses(self, row: dict[str, Any]) -> list[str]:
        """The limits that the row does not keep, in words."""
        kl, speed = row["accuracy"]["kl_divergence"], row["speed"]
        out = [f"KL {kl:.4g} is above {self.quality.kl:g}"] if kl > self.quality.kl else []
        for name, key, limit in (("TTFT", "ttft_s", self.slo.ttft), ("TPOT", "tpot_s", self.slo.tpot)):
            value = (speed.get(key) or {}).get("p95")
            if limit is not None and value is not None and value > limit:
                out.append(f"{name} p95 {value:.3g} s is above {limit:g} s")
        if not row["plan"]["fits"]:
            out.append(f"{self.plan.concurrency:,} x {self.plan.context:,} tokens do not fit")
        return out

    def _show(self, run: Run, rows: list[dict[str, Any]], block_size: int) -> None:
        columns = ["quantizer", "KL", "top-1", "KV B/token", "requests that fit", "tok/s", "TTFT p95 s", "TPOT p95 ms", "misses"]
        cells = [
            [
                row["label"],
                number(row["accuracy"]["kl_divergence"], 5),
                number(100 * row["accuracy"]["top1_agreement"], 1, suffix=" %"),
                number(row["memory"]["kv_bytes_per_token"], 0),
                number(row["plan"]["requests"]),
                number(row["speed"]["output_tokens_per_s"], 0),
                number((row["speed"].get("ttft_s") or {}).get("p95"), 3),
                number(1e3 * row["speed"]["tpot_s"]["p95"], 1),
                "; ".join(row["misses"]) or "none",
            ]
            for row in rows
        ]
        work = run.workload
        device = run.engine.device.name
        note = f"accuracy on {run.data.name}; tok/s and waiting simulated on {device}: {work.num_requests:,} requests."
        show(f"{run.record.data['model']['name']}: what to deploy", columns, cells, note, text=(0, 8))
        choice = choose(rows)
        run.record.set("recommendation", choice)
        console().print(choice["reason"])
        if choice["choice"] is not None:
            name = next(r for r in rows if r["label"] == choice["choice"])["policy"]["quantizer"]
            console().print(f"vLLM: {vllm_flags(name, block_size, self.plan, run.engine)}")


def _best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The most accurate of the rows that count as equally fast as the fastest."""
    fastest = max(row["speed"]["output_tokens_per_s"] for row in rows)
    near = [row for row in rows if row["speed"]["output_tokens_per_s"] >= (1 - _AS_FAST) * fastest]
    return min(near, key=lambda row: (row["accuracy"]["kl_divergence"], -row["speed"]["output_tokens_per_s"]))


def choose(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The choice, the runner-up and the reason in two sentences. Among the rows that keep all limits, the fastest is chosen;
    among those that count as equally fast, the most accurate."""
    kept = [row for row in rows if not row["misses"]]
    if not kept:
        near = min(rows, key=lambda r: (len(r["misses"]), -r["speed"]["output_tokens_per_s"]))
        reason = f"Nothing keeps every limit. The nearest is {near['label']}: {'; '.join(near['misses'])}."
        return {"choice": None, "runner_up": None, "reason": reason}
    first = _best(kept)
    rest = [row for row in kept if row is not first]
    second = _best(rest) if rest else None
    kl, rate = first["accuracy"]["kl_divergence"], first["speed"]["output_tokens_per_s"]
    fastest = max(row["speed"]["output_tokens_per_s"] for row in kept)
    how = "the fastest" if rate == fastest else f"the most accurate within {_AS_FAST:.0%} of the fastest"
    reason = f"Take {first['label']}: of those that keep every limit it is {how}, {rate:,.0f} tokens/s at KL {kl:.4g}, and "
    reason += f"{first['plan']['requests']:,} requests fit. "
    if second is None:
        reason += "Nothing else keeps every limit."
    else:
        there, other = second["speed"]["output_tokens_per_s"], second["accuracy"]["kl_divergence"]
        reason += f"The runner-up is {second['label']}: {there / rate:.0%} of its tokens/s at KL {other:.4g}."
    return {"choice": first["label"], "runner_up": second and second["label"], "reason": reason}


def vllm_flags(quantizer: str, block_size: int, demand: Demand, config: EngineConfig) -> str:
    """The vLLM flags that come nearest to these settings, or a sentence that says that there are none."""
    if quantizer not in _VLLM:
        return f"no KV cache dtype that does what {quantizer} does"
    caching = "--enable-prefix-caching" if config.cache.enable_prefix_caching else "--no-enable-prefix-caching"
    limits = f"--max-model-len {demand.context} --max-num-seqs {demand.concurrency}"
    return f"--kv-cache-dtype {_VLLM[quantizer]} --block-size {block_size} {limits} {caching}"
