"""Continues prompts and shows the text, with the metrics of the engine that wrote it.

Takes: prompts and sampling settings. Gives: text, a table, one row.
"""

import re
import time
from dataclasses import dataclass, field, replace
from typing import Any

from rich.markup import escape

from calibration.text.data import encode
from experiments.harness.base import EXPERIMENTS, Experiment, Run
from experiments.harness.table import console, number, show
from experiments.measuring import engines
from experiments.measuring.scales import provide, used_by
from qkv.errors import ConfigError, RequestError
from qkv.models import load_model
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.types import RequestOutput, SamplingParams
from qkv.validate import require


@EXPERIMENTS.register("generate")
@dataclass
class Generate(Experiment):
    """prompts: texts to continue. chat: put each into the model's chat template, where its tokenizer has one. sampling.stop: a
    backslash begins an escape, since a command line has no other way to say a line break."""

    prompts: list[str] = field(default_factory=list)
    chat: bool = True
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        require(bool(self.prompts), "prompts", self.prompts, "at least one prompt: prompts='[\"...\"]'")
        self.sampling = replace(self.sampling, stop=tuple(unescaped(stop) for stop in self.sampling.stop))

    def run(self, run: Run) -> None:
        quantizer = QUANTIZERS.build(run.engine.quantizer)
        used_by(run, [quantizer])
        loaded = load_model(run.engine.model)
        scales, origin = provide(run, loaded, quantizer, documents=8, tokens=512, skip=0)
        engine = engines.build(run.engine, loaded, run.engine.quantizer, scales)
        run.watch(engine)
        try:
            self._generate(run, engine, origin)
        finally:
            engine.close()

    def _generate(self, run: Run, engine: Any, origin: str | None) -> None:
        run.record.set("model", engines.model_part(engine.loaded, engine))
        tokens = [self._tokens(engine.tokenizer, prompt) for prompt in self.prompts]
        start = time.perf_counter()
        outputs: list[RequestOutput] = engine.generate(tokens, self.sampling, progress=run.progress)
        wall = time.perf_counter() - start
        screen = console()
        metrics = engine.metrics()
        run.record.set("attention", metrics["attention"])
        served = [o for o in outputs if o.finish_reason != "error"]
        run.add_row(
            {
                "policy": engines.policy_part(run.engine, run.engine.quantizer, origin),
                "memory": metrics["memory"],
                "speed": {**metrics["speed"], **engines.throughput(served, wall)},
                "cache": metrics["cache"],
                "warnings": metrics["warnings"],
                "outputs": [_summary(prompt, output) for prompt, output in zip(self.prompts, outputs, strict=True)],
            }
        )
        for prompt, output in zip(self.prompts, outputs, strict=True):
            screen.rule(escape((prompt.splitlines() or ["(empty)"])[0][:100]), align="left")
            print(output.error or output.text or f"(no text) token ids: {output.token_ids}")
        screen.rule()
        columns = ["request", "prompt tokens", "cached", "new tokens", "ended by", "TTFT s", "s/token", "total s"]
        show(f"{engine.loaded.name}, KV quantizer {run.engine.quantizer['name']}", columns, [_line(o) for o in outputs])
        if outputs and not served:
            raise RequestError(outputs[0].error or "no request was served")

    def _tokens(self, tokenizer: Any, prompt: str) -> list[int]:
        if tokenizer is not None and self.chat and getattr(tokenizer, "chat_template", None):
            message = [{"role": "user", "content": prompt}]
            return encode(tokenizer, tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
        return list(tokenizer.encode(prompt)) if tokenizer is not None else encode(None, prompt)


_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}


def unescaped(text: str) -> str:
    """With \\n, \\t, \\r, \\\\ and \\u followed by four hexadecimal digits turned into what they mean. Raises ConfigError."""

    def meaning(match: re.Match[str]) -> str:
        code = match[1]
        if len(code) == 5:
            return chr(int(code[1:], 16))
        if code not in _ESCAPES:
            raise ConfigError(
                f"sampling.stop: '\\{code}' in {text!r} is no escape; there are \\n, \\t, \\r, \\uXXXX, and \\\\ for a backslash"
            )
        return _ESCAPES[code]

    return re.sub(r"\\(u[0-9a-fA-F]{4}|.|$)", meaning, text, flags=re.DOTALL)


def _summary(prompt: str, output: RequestOutput) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "prompt": prompt,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
    }
    if output.error:
        summary["error"] = output.error
    if output.logprobs is not None:
        summary["logprobs"] = [[t.token_id, t.logprob, [list(pair) for pair in t.top]] for t in output.logprobs]
    return summary


def _line(output: RequestOutput) -> list[str]:
    m = output.metrics
    counts = [len(output.prompt_token_ids), m.cached_tokens, len(output.token_ids)]
    times = [number(m.ttft, 3), number(m.tpot, 4), number(m.e2e, 3)]
    return [str(output.id), *(number(c) for c in counts), str(output.finish_reason), *times]
