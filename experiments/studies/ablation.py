"""Checks on a model that runs here what papers found about quantized KV caches: scales per token or per channel, static or online
scales, raw sink tokens, the raw window of recent tokens, and what is measured when attention does not read the cache.

Takes: text to score and text to calibrate on. Gives: one row per finding, with the published figures, ours, and whether ours show
the same. Figures of a 7B model on another benchmark cannot come out equal here; which of two settings is better should.
Does not know about: how the engine stores what a format describes.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from tqdm import tqdm

from calibration.fitting.collect import absmax_scales, run_document
from calibration.text.data import DATA, windows
from experiments.harness.base import EXPERIMENTS, Experiment, Run
from experiments.harness.plots import bars_each
from experiments.harness.table import show
from experiments.measuring import engines
from experiments.measuring.divergence import Accuracy, score_document
from qkv.engine import Engine
from qkv.errors import ConfigError
from qkv.layout import HeadFormat, KVFormat, LayerShape
from qkv.models import LoadedModel, load_model
from qkv.policies.quantizer._affine import AffineQuantizer
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.scales import ScaleFile
from qkv.validate import require
from qkv_kernels.reference import codec

Axis = Literal["token", "channel"]
Values = dict[str, float]  # name of a setting that was compared -> its figure


@dataclass
class Grid(AffineQuantizer):
    """A quantizer of this study only. K and V each have one range per token and head, or one per channel of a block; the block
    that is not yet full stays raw."""

    k: Axis = "channel"
    v: Axis = "token"
    bits: Literal[4, 3, 2] = 2

    name: ClassVar[str] = "grid"
    encode_rule: ClassVar[Literal["minmax"]] = "minmax"

    def formats(self, layer: int) -> list[HeadFormat]:
        return self.whole(layer, grid_format(self.bits, self.k), grid_format(self.bits, self.v))


def grid_format(bits: Literal[4, 3, 2], axis: Axis) -> KVFormat:
    """The format that maps [min, max] of a token's row, or of a channel of a block, onto 2^bits codes."""
    return KVFormat(bits, torch.uint8, "token" if axis == "token" else "block_channel", zero="float", unit="block")


@dataclass(frozen=True)
class Finding:
    """One row. published, ours: the figures of the settings that were compared. agrees: whether our figures show the finding."""

    label: str
    finding: str
    source: str
    published: Values
    published_unit: str
    unit: str
    ours: Values
    agrees: bool


@EXPERIMENTS.register("ablation")
@dataclass
class Ablation(Experiment):
    """See conf/experiment/ablation.yaml for every field."""

    calibration: dict[str, Any] = field(default_factory=lambda: {"name": "business"})
    calibration_documents: int = 8
    documents: int = 8
    tokens_per_document: int = 1024
    short_tokens: int = 128
    block_size: int = 32
    window_blocks: int = 4
    error_documents: int = 2

    def __post_init__(self) -> None:
        for name in ("calibration_documents", "documents", "window_blocks", "error_documents"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(self.block_size >= 8, "block_size", self.block_size, "at least 8")
        raw = (self.window_blocks + 1) * self.block_size
        require(2 <= self.short_tokens <= raw, "short_tokens", self.short_tokens, f"2 to {raw}, which the raw window holds")
        require(self.tokens_per_document > raw, "tokens_per_document", self.tokens_per_document, f"above {raw}, the raw window")

    def check(self) -> None:
        self._calibration = DATA.build(self.calibration)

    def run(self, run: Run) -> None:
        if run.engine.attention.reads != "cache":
            raise ConfigError("attention.reads: ablation compares both ways of reading itself; leave it at cache")
        loaded = load_model(run.engine.model)
        engines.require_positions(loaded, self.tokens_per_document, "tokens_per_document")
        L, count = self.tokens_per_document, self.documents
        text = windows(run.data, loaded.tokenizer, count, L, run.engine.seed)
        short = [document[i : i + self.short_tokens] for document in text for i in range(0, L - self.short_tokens, L // 4)]
        with ExitStack() as opened, tqdm(total=7, disable=not run.progress, unit="part", leave=False) as bar:
            baseline = self._engine(run, loaded, "none", opened)
            run.record.set("model", engines.model_part(loaded, baseline))
            run.record.set("attention", baseline.metrics()["attention"])
            bar.update()
            for finding in self._errors(baseline, text[: self.error_documents]):
                self._add(run, finding)
            bar.update()
            for finding in self._axes(run, loaded, baseline, text):
                self._add(run, finding)
            bar.update()
            self._add(run, self._static(run, loaded, baseline, text))
            bar.update()
            self._add(run, self._sink_tokens(run, loaded, baseline, text))
            bar.update()
            self._add(run, self._window(run, loaded, baseline, text, short))
            bar.update()
            self._add(run, self._reads(run, loaded, baseline, text))
        self._show(run, loaded)

    def _errors(self, engine: Engine, text: list[list[int]]) -> list[Finding]:
        sums: dict[str, list[float]] = {}
        for document in text:
            seen = _Seen()
            with engine.observe(seen):
                run_document(engine, document[:-1])
            for layer in engine.layers:
                for key, value in errors(*seen.of(layer), layer, 4, self.block_size).items():
                    sums.setdefault(key, []).append(value)
        mean = {key: 100 * sum(values) / len(values) for key, values in sums.items()}

        def finding(label: str, text: str, what: str, better: Axis, worse: Axis, published: tuple[float, float]) -> Finding:
            names = (f"per {better}", f"per {worse}")
            ours = {name: mean[f"{what} {axis}"] for name, axis in zip(names, (better, worse), strict=True)}
            figures = dict(zip(names, published, strict=True))
            unit = "relative error, %, mean over layers, 4 bits"
            source = "KIVI (2402.02750) table 2, Llama-2-13B"
            return Finding(label, text, source, figures, "relative error, %", unit, ours, ours[names[0]] < ours[names[1]])

        return [
            finding("K error", "K is stored better per channel than per token", "k", "channel", "token", (4.55, 13.67)),
            finding("score error", "and attention probabilities follow K", "scores", "channel", "token", (9.6, 47.0)),
            finding(
                "V error",
                "attention's output is worse with V per channel than per token",
                "output",
                "token",
                "channel",
                (3.55, 49.89),
            ),
        ]

    def _axes(self, run: Run, loaded: LoadedModel, baseline: Engine, text: list[list[int]]) -> list[Finding]:
        pairs: list[tuple[Axis, Axis]] = [("channel", "token"), ("token", "token"), ("channel", "channel"), ("token", "channel")]
        specs = {f"K {k}, V {v}": Grid(k, v) for k, v in pairs}
        ours = _kl(self._score(run, loaded, baseline, text, specs))
        best, tokens, channels, worst = ours.values()
        source = "KIVI (2402.02750) table 1, Llama-2-7B, 2 bits, no raw window; 63.88 unquantized"
        published, units = dict(zip(ours, (59.08, 39.88, 3.60, 1.30), strict=True)), ("CoQA score", "KL, nats per token, 2 bits")
        both = [f"K {axis}, V {axis}" for axis in ("token", "channel")]

        def some(values: Values) -> Values:
            return {name: values[name] for name in both}

        return [
            Finding(
                "best axes",
                "K per channel with V per token is the best of four, K per token with V per channel the worst",
                source,
                published,
                units[0],
                units[1],
                ours,
                best < min(tokens, channels) and max(tokens, channels) < worst,
            ),
            Finding(
                "worse axis",
                "V per channel is worse than K per token",
                source,
                some(published),
                units[0],
                units[1],
                some(ours),
                tokens < channels,
            ),
        ]

    def _static(self, run: Run, loaded: LoadedModel, baseline: Engine, text: list[list[int]]) -> Finding:
        quantizer = QUANTIZERS.build("int4")
        other = windows(self._calibration, loaded.tokenizer, self.calibration_documents, len(text[0]), run.engine.seed)
        texts = {"static, of other text": other, "of the text itself": text}
        scales = {name: absmax_scales(baseline, [d[:-1] for d in documents], quantizer) for name, documents in texts.items()}
        scored = self._score(run, loaded, baseline, text, dict.fromkeys(scales, "int4"), scales)
        ours = _perplexity(scored)
        static, own = ours.values()
        return Finding(
            "static K scales",
            "K scales calibrated beforehand cost next to nothing (under 2 %) against scales of the text itself",
            "KVQuant (2401.18079) ablation, LLaMA-7B, 3 bits, WikiText-2",
            {"offline": 5.94, "online": 5.91},
            "perplexity",
            "perplexity, int4",
            ours,
            static < 1.02 * own,
        )

    def _sink_tokens(self, run: Run, loaded: LoadedModel, baseline: Engine, text: list[list[int]]) -> Finding:
        kivi = {"name": "kivi", "bits": 2}
        specs = {"first 4 tokens raw": {"name": "protected", "inner": kivi, "sink_tokens": 4}, "quantized": kivi}
        ours = _perplexity(self._score(run, loaded, baseline, text, specs))
        kept, quantized = ours.values()
        return Finding(
            "sinks",
            "keeping the first tokens raw helps low bits",
            "KVQuant (2401.18079) ablation, LLaMA-3-8B, 2 bits: 0.25 lower; theirs keeps 1 token",
            {"first token raw, change": -0.25},
            "perplexity",
            "perplexity, kivi 2 bits",
            ours,
            kept < quantized,
        )

    def _window(self, run: Run, loaded: LoadedModel, baseline: Engine, text: list[list[int]], short: list[list[int]]) -> Finding:
        kivi = {"name": "kivi", "bits": 2}
        specs = {"no window": {**kivi, "tail_blocks": 0}, "window": {**kivi, "tail_blocks": self.window_blocks}}
        hidden = {}
        for documents in (short, text):
            kl = _kl(self._score(run, loaded, baseline, documents, specs))
            without = kl["no window"]
            hidden[f"{len(documents[0])} tokens"] = 100 * (1 - kl["window"] / without) if without else 100.0
        few, many = hidden.values()
        return Finding(
            "raw window",
            "a raw window of recent tokens hides the loss on short prompts, not on long ones",
            "KIVI (2402.02750) table 3, Mistral-7B, GSM8K: 38.36 to 36.01; "
            "KVQuant (2401.18079) table 4, LLaMA-2-7B-32K, RULER: 56.40 to 39.78",
            {"GSM8K, score kept": 100 * 36.01 / 38.36, "RULER 32k, score kept": 100 * 39.78 / 56.40},
            "% of the unquantized score, KIVI 2 bits",
            f"% of the KL of kivi 2 bits that a window of {self.window_blocks * self.block_size} tokens hides",
            hidden,
            few > many,
        )

    def _reads(self, run: Run, loaded: LoadedModel, baseline: Engine, text: list[list[int]]) -> Finding:
        kivi = {"name": "kivi", "bits": 2}
        ours = _kl(self._score(run, loaded, baseline, text, {"raw": kivi, "cache": kivi}, raw=("raw",)))
        return Finding(
            "reads",
            "scores of one prefill that does not read the cache say nothing about the quantizer",
            "lm-evaluation-harness issue 1105: log-likelihoods are one unquantized prefill",
            {"raw": 0.0},
            "difference to unquantized, by construction",
            "KL, nats per token, kivi 2 bits",
            ours,
            ours["raw"] < 0.1 * ours["cache"],
        )

    def _score(
        self,
        run: Run,
        loaded: LoadedModel,
        baseline: Engine,
        text: list[list[int]],
        specs: Mapping[str, Any],
        scales: Mapping[str, ScaleFile] | None = None,
        raw: tuple[str, ...] = (),
    ) -> dict[str, Accuracy]:
        """Score every quantizer in `specs`, by name, beside the baseline. raw: names of those whose attention does not read the
        cache."""
        own, out = Accuracy(), {name: Accuracy() for name in specs}
        with ExitStack() as opened:
            contenders = []
            for name, spec in specs.items():
                engine = self._engine(
                    run, loaded, spec, opened, scales[name] if scales else None, "raw" if name in raw else "cache"
                )
                run.watch(engine)
                contenders.append((engine, out[name]))
            for document in text:
                score_document(document, baseline, contenders, own)
        return out

    def _engine(
        self,
        run: Run,
        loaded: LoadedModel,
        spec: Any,
        opened: ExitStack,
        scales: ScaleFile | None = None,
        reads: Literal["cache", "raw"] = "cache",
    ) -> Engine:
        """An engine for one document at a time. It scores a document in one forward, because with reads=raw a second chunk would
        read what the first one stored. `opened` closes it."""
        config = replace(
            run.engine, allocator=run.engine.allocator | {"block_size": self.block_size}, quantizer=spec, scales=None
        )
        config = engines.single_document(config, self.tokens_per_document)
        whole = replace(config.scheduler, max_num_batched_tokens=self.tokens_per_document)
        config = replace(
            config,
            scheduler=replace(whole, max_num_scored_tokens=self.tokens_per_document),
            attention=replace(config.attention, reads=reads),
        )
        engine = engines.build(
            config, loaded, spec if isinstance(spec, str) else None, scales
        )  # a Quantizer is already in config
        opened.callback(engine.close)
        return engine

    def _add(self, run: Run, finding: Finding) -> None:
        keys = ("finding", "source", "published", "published_unit", "unit", "ours", "agrees")
        run.add_row({"label": finding.label, "ablation": {key: getattr(finding, key) for key in keys}})

    def _show(self, run: Run, loaded: LoadedModel) -> None:
        rows = [(row["label"], row["ablation"]) for row in run.record.data["rows"]]
        size = f"{self.documents} x {self.tokens_per_document} tokens"
        title = f"Published findings on {loaded.name} ({run.engine.model.dtype}), {size}"
        cells = [
            [
                f"{label}: {a['finding']}",
                f"{_figures(a['published'])} ({a['published_unit']}; {a['source']})",
                f"{_figures(a['ours'])} ({a['unit']})",
                "yes" if a["agrees"] else "no",
            ]
            for label, a in rows
        ]
        show(title, ["finding", "published", "here", "agrees"], cells, text=(0, 1, 2))
        bars_each(run.folder / "ablation.png", {f"{label}\n{a['unit']}": a["ours"] for label, a in rows}, title)


class _Seen:
    """An observer that keeps the queries, keys and values of one document in every layer."""

    def __init__(self) -> None:
        self._parts: dict[int, list[tuple[torch.Tensor, ...]]] = {}

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self._parts.setdefault(layer, []).append(tuple(x.detach().float().clone() for x in (q, k, v)))

    def of(self, layer: LayerShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = (torch.cat(parts) for parts in zip(*self._parts[layer.index], strict=True))
        return q, k, v


def errors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: LayerShape, bits: Literal[4, 3, 2], block: int) -> Values:
    """Relative Frobenius errors when K or V is stored with scales per token or per channel of a block and the other side is
    exact, as in table 2 of KIVI.

    q [T, Hq, Dk], k [T, H, Dk], v [T, H, Dv], of which whole blocks are used. Keys of the result, each followed by an axis: k,
    the error of K; scores, of the attention probabilities with K stored; output, of attention's output with V stored. Attention
    is causal and within the layer's window.
    """
    T = len(k) // block * block
    q, k, v = q[:T], k[:T], v[:T]
    exact, out = _probabilities(q, k, shape), {}
    for axis in ("token", "channel"):
        stored = {name: _roundtrip(x, grid_format(bits, axis), block) for name, x in (("k", k), ("v", v))}
        out[f"k {axis}"] = _relative(stored["k"], k)
        out[f"scores {axis}"] = _relative(_probabilities(q, stored["k"], shape), exact)
        out[f"output {axis}"] = _relative(_output(exact, stored["v"]), _output(exact, v))
    return out


def _roundtrip(x: torch.Tensor, fmt: KVFormat, block: int) -> torch.Tensor:
    blocks = x.unflatten(0, (-1, block))
    return codec.decode(*codec.encode(blocks, fmt), fmt, x.dtype).flatten(0, 1)


def _probabilities(q: torch.Tensor, k: torch.Tensor, shape: LayerShape) -> torch.Tensor:
    """Attention probabilities [Hq, T, T], query by key."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    age = torch.arange(len(q))[:, None] - torch.arange(len(k))
    hidden = (age < 0) | (age >= (shape.window or len(k)))
    scores = torch.einsum("qhd,khd->hqk", q, k) * shape.scaling
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def _output(probabilities: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.einsum("hqk,khd->qhd", probabilities, v.repeat_interleave(len(probabilities) // v.shape[1], dim=1))


def _relative(x: torch.Tensor, exact: torch.Tensor) -> float:
    return float((x - exact).norm() / exact.norm().clamp(min=torch.finfo(exact.dtype).tiny))


def _of(scored: Mapping[str, Accuracy], key: str) -> Values:
    return {name: float(accuracy.part({"fraction_read_from_cache": None})[key]) for name, accuracy in scored.items()}


def _kl(scored: Mapping[str, Accuracy]) -> Values:
    return {name: max(0.0, value) for name, value in _of(scored, "kl_divergence").items()}  # rounding goes below 0


def _perplexity(scored: Mapping[str, Accuracy]) -> Values:
    return _of(scored, "perplexity")


def _figures(values: Values) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())
