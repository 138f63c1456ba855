"""The engine as a model of lm-eval: every score is computed through the paged, quantized cache, as generation is.

Takes: lm-eval's requests. Gives: log-likelihoods and texts, in order. Does not know about: tasks, metrics, tables.
It is fast by continuous batching and shared prefixes. Requests are sent in waves, so that the context of a question is prefilled
once; its other answers, or other questions after the same examples, find it in the prefix cache. Answers that differ only in
their last token are one sequence. Its scores can be compared with others': tokens, windows, truncation and stop rules are those
of lm-eval's own `hf` model (lm_eval/models/huggingface.py), against which it is tested.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from lm_eval.api.model import CacheHook, TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from experiments.lm import settings
from experiments.lm.waves import Job, rounds
from qkv.engine import Engine
from qkv.errors import ConfigError, RequestError
from qkv.types import SamplingParams

log = logging.getLogger(__name__)

_IDENTITY = "qkv: whose answers these are"  # the key in lm-eval's answer cache under which identity() is kept


class Truncation(NamedTuple):
    """How many requests were longer than the model takes, and how many tokens were cut from their beginnings."""

    requests: int = 0
    tokens: int = 0


@register_model("qkv")
class QkvLM(TemplateLM):
    """Called by lm-eval. truncated, scored_tokens and generated_tokens count since the start or the last reset_counts()."""

    def __init__(self, engine: Engine, max_gen_toks: int = 256, progress: bool = True) -> None:
        """progress: show a bar if stderr is a terminal. Raises ConfigError for a model without a tokenizer."""
        super().__init__()
        if engine.tokenizer is None:
            raise ConfigError(f"lm-eval works on text, and {engine.loaded.name} has no tokenizer; choose another model")
        self.engine, self.max_gen_toks, self._progress = engine, max_gen_toks, progress
        self.tokenizer: Any = engine.tokenizer
        self._device = torch.device("cpu") if engine.config.model.device == "cpu" else torch.device(engine.config.model.device)
        self.max_length = min(engine.intake.max_model_len, engine.intake.pool_tokens)
        self.reset_counts()

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> "QkvLM":
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> "QkvLM":
        """Build the model from lm-eval's --model_args: settings by the names that experiments use, e.g.
        model=smollm2,quantizer=kivi,quantizer.bits=2.

        Of additional_config only the device counts. lm-eval sets it to cuda:0 unless told otherwise, so without a GPU such a
        device is ignored. batch_size is ignored: batching is continuous (scheduler.max_num_seqs). Raises ConfigError, ModelError
        or ScaleError.
        """
        device = (additional_config or {}).get("device")
        given = {"model.device": device} if device and (torch.cuda.is_available() or "cuda" not in str(device)) else {}
        return cls(settings.engine(given | arg_dict))

    def reset_counts(self) -> None:
        self.truncated = self._reported = Truncation()
        self.scored_tokens = self.generated_tokens = 0

    # -- text --------------------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path or self.engine.loaded.name).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None:
            add_special_tokens = not has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id))
        ids: list[int] = self.tokenizer.encode(string, add_special_tokens=add_special_tokens)
        return ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Raises ConfigError for a model that has no template."""
        if self.tokenizer.chat_template is None:
            raise ConfigError(f"{self.engine.loaded.name} has no chat template; run without apply_chat_template")
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    # -- log-likelihoods ---------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        for request in requests:
            context, answer = request.args
            if not answer:
                raise _empty_answer(request.doc_id, request.task_name, context)
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm or not self._progress)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts. A text is cut into windows of the model's length, and every token is predicted once,
        from as many tokens before it as fit."""
        windows, owners = [], []
        for i, (text,) in enumerate(request.args for request in requests):
            for pair in get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(pair)))
                owners.append(i)
        totals = [0.0] * len(requests)
        for i, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[i] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """For each request (key of lm-eval's answer cache or None, context, continuation): the log-probability of the
        continuation, and whether greedy decoding would produce it."""
        jobs: dict[tuple[int, ...], Job] = {}
        for i, (key, context, answer) in enumerate(requests):
            if not answer:
                raise _empty_answer(None, None, key[0] if key else "")
            if len(answer) > self.max_length:
                raise RequestError(f"an answer of {len(answer)} tokens does not fit the {self.max_length} that the model takes")
            tokens = self._cut(context + answer, self.max_length + 1)
            jobs.setdefault(tuple(tokens[:-1]), Job(tokens)).add(i, answer)
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)

        def score(wave: list[Job]) -> None:
            scores = self.engine.score(
                [job.tokens for job in wave],
                first=[job.first for job in wave],
                on_logits=lambda i, start, logits: wave[i].keep_last(start, logits),
            )
            for job, score in zip(wave, scores, strict=True):
                self.scored_tokens += len(score.logprobs)
                for i, result in job.results(score.logprobs, score.greedy_match):
                    results[i] = result
                    if requests[i][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[i][0], result)

        with self._bar(len(jobs), "log-likelihoods", disable_tqdm) as bar:
            for waves in self._rounds(list(jobs.values())):
                for wave in waves:
                    score(wave)
                    bar.update(len(wave))
        return results

    # -- generation --------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts up to a stop string, an end-of-text token or max_gen_toks tokens. A request samples with a seed made of the
        engine's and of its place in the list, so batching does not change the texts. Raises RequestError for options that the
        engine does not have."""
        jobs = []
        for i, (context, options) in enumerate(request.args for request in requests):
            params = self._sampling(options, self.engine.config.seed * 1_000_003 + i)
            room = self.max_length - (params.max_tokens or 0)
            if room < 1:
                raise RequestError(
                    f"max_gen_toks={params.max_tokens} leaves no room for a prompt in the model's {self.max_length} tokens"
                )
            jobs.append(Job(self._cut(self.tok_encode(context) or [self.prefix_token_id], room), i, params))
        texts = [""] * len(requests)

        def generate(together: list[Job]) -> None:
            outputs = self.engine.generate([job.tokens for job in together], [job.params for job in together if job.params])
            for job, output in zip(together, outputs, strict=True):
                if output.error is not None:
                    raise RequestError(output.error)
                self.generated_tokens += len(output.token_ids)
                i = job.members[0][0]
                texts[i] = output.text
                self.cache_hook.add_partial("generate_until", requests[i].args, output.text)

        with self._bar(len(jobs), "generations", disable_tqdm) as bar:
            for waves in self._rounds(jobs):
                for wave in waves[:-1]:  # fills the prefix cache; the whole round is then decoded together
                    self.engine.generate([job.tokens for job in wave], SamplingParams(max_tokens=1, ignore_eos=True))
                generate([job for wave in waves for job in wave])
                bar.update(sum(map(len, waves)))
        return texts

    def _sampling(self, options: dict[str, Any], seed: int) -> SamplingParams:
        values = normalize_gen_kwargs(options, self.max_gen_toks)
        until = [s for s in handle_stop_sequences(values.pop("until", None), eos=None) if s]
        # Special tokens never appear in a text, so one that is given as a stop string stops by its token id.
        named = {s: self.tokenizer.convert_tokens_to_ids(s) for s in until if s in self.tokenizer.all_special_tokens}
        values.pop("do_sample", None)
        known = {"temperature": values.pop("temperature", 0.0), "max_tokens": values.pop("max_gen_toks")}
        known |= {key: values.pop(key) for key in ("top_k", "top_p", "min_p") if values.get(key) is not None}
        if values:
            raise RequestError(
                f"generation option '{next(iter(values))}' is not supported; supported are until, max_gen_toks, do_sample, "
                "temperature, top_k, top_p, min_p"
            )
        stop = tuple(s for s in until if s not in named)
        return SamplingParams(stop=stop, stop_token_ids=(*named.values(), self.eot_token_id), seed=seed, **known)

    # -- both --------------------------------------------------------------------------------------------------------

    def _cut(self, tokens: list[int], limit: int) -> list[int]:
        """The last `limit` tokens, as the `hf` model does; counted."""
        over = len(tokens) - limit
        if over <= 0:
            return tokens
        self.truncated = Truncation(self.truncated.requests + 1, self.truncated.tokens + over)
        return tokens[over:]

    def _rounds(self, jobs: list[Job]) -> Iterator[list[list[Job]]]:
        yield from rounds(jobs, self.engine.scheduler.manager.block_size, self.engine.intake.pool_tokens)
        if self.truncated != self._reported:
            cut = [now - before for now, before in zip(self.truncated, self._reported, strict=True)]
            log.warning(f"{cut[0]} requests were longer than {self.max_length} tokens: their first {cut[1]} in all were left out")
            self._reported = self.truncated

    def _bar(self, total: int, what: str, disable_tqdm: bool) -> Any:
        hidden = None if self._progress and not disable_tqdm else True
        return tqdm(total=total, disable=hidden, desc=what, unit="request", leave=False)

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Called for lm-eval's --use_cache. The keys of that cache are the requests alone, so a file with another model's or
        quantizer's answers would return them as this one's. Raises ConfigError for such a file."""
        answers, mine = cache_hook.dbdict, self.identity()
        if answers is not None:
            theirs = answers.get(_IDENTITY) if len(answers) else mine
            if theirs != mine:
                raise ConfigError(
                    f"use_cache: the file holds answers of {theirs or 'another model'}, not of {mine}; give each its own file"
                )
            answers[_IDENTITY] = mine
        super().set_cache_hook(cache_hook)

    def identity(self) -> str:
        """All that an answer depends on besides the request, as one string."""
        config, loaded = self.engine.config, self.engine.loaded
        values = " ".join(f"{key}={value}" for key, value in config.quantizer.items())
        return (
            f"{loaded.name} {loaded.fingerprint} {config.model.dtype} {values} reads={config.attention.reads} "
            f"block_size={config.allocator.get('block_size', 16)} scales={self.engine.metrics()['scales']}"
        )

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its result files about the model."""
        config, metrics = self.engine.config, self.engine.metrics()
        return {
            "model_name": self.engine.loaded.name,
            "model_dtype": config.model.dtype,
            "quantizer": config.quantizer,
            "attention": metrics["attention"],
            "fraction_read_from_cache": metrics["fraction_read_from_cache"],
            "truncated": self.truncated._asdict(),
        }


def _empty_answer(doc: int | None, task: str | None, context: str) -> RequestError:
    where = f"task {task}, sample {doc}: " if task else ""
    shown = context if len(context) < 60 else f"…{context[-60:]}"
    return RequestError(f"{where}the answer after {shown!r} is empty and has no likelihood; give every choice some text")
