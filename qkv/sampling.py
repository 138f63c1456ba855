"""Logits to tokens, and tokens to text.

Takes: one row of logits per request. Gives: a token id each, log-probabilities where asked for, text as it becomes whole.
Does not know about: scheduling, the cache.
"""

from collections.abc import Sequence
from typing import Any

import torch
import xxhash

from qkv.types import SamplingParams, TokenLogprob

NOT_FINITE = -1  # instead of a token id
GREEDY_BELOW = torch.finfo(torch.float32).tiny  # temperatures that float32 cannot divide by: the best token, as in their limit


class Sampler:
    """A draw is a function of the request's seed, the position and the logits: not of its batch, nor of how often the step was
    tried."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generator = torch.Generator(device="cpu")

    def sample(self, logits: torch.Tensor, requests: Sequence[tuple[int, SamplingParams, int]]) -> list[int | Exception]:
        """logits [R, V]; requests: (id, params, position of the new token) per row. Returns R token ids, NOT_FINITE for rows
        whose largest logit is NaN or infinite, and where a row's draw raised, its exception. One synchronisation for all greedy
        rows."""
        best = argmax(logits)
        finite = logits.gather(1, best[:, None])[:, 0].isfinite().tolist()
        tokens: list[int | Exception] = best.tolist()
        for row, (request_id, params, position) in enumerate(requests):
            if not finite[row]:
                tokens[row] = NOT_FINITE
            elif params.temperature >= GREEDY_BELOW:
                try:
                    tokens[row] = self._draw(logits[row].float(), request_id, params, position)
                except Exception as error:
                    tokens[row] = error
        return tokens

    def _draw(self, logits: torch.Tensor, request_id: int, params: SamplingParams, position: int) -> int:
        # Without a seed of its own a request draws from the engine's seed and its number, which is its order of arrival.
        seed = params.seed if params.seed is not None else self._seed * 1_000_003 + request_id
        self._generator.manual_seed(xxhash.xxh32_intdigest(f"{seed} {position}".encode()))  # it uses 32 bits of a seed
        probs = filter_logits(logits, params).softmax(-1)
        return int(torch.multinomial(probs.cpu(), 1, generator=self._generator))


SCORED_ROWS = 32  # rows of logits that are turned into log-probabilities at a time: 6 MB of a vocabulary of 50,000, not 100


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Index of each row's largest logit, the first of equals: [R, V] -> [R]. On the CPU torch's own takes 5 to 28 times as long,
    since NumPy's search is vectorized."""
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    exact = logits if logits.dtype == torch.float64 else logits.float()
    return torch.from_numpy(exact.numpy().argmax(-1))


def filter_logits(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Temperature, then top_k, top_p and min_p, in that order. logits [V] float32; removed tokens get -inf."""
    logits = (logits - logits.max()) / params.temperature  # the largest stays 0, however small the temperature
    if 0 < params.top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(params.top_k).values[-1], -torch.inf)
    if params.top_p < 1:
        probs, order = logits.softmax(-1).sort(descending=True)
        beyond = probs.cumsum(-1) - probs >= params.top_p  # the token that crosses top_p stays
        beyond[0] = False  # whatever rounding does to a tiny top_p
        logits = logits.index_fill(0, order[beyond], -torch.inf)
    if params.min_p > 0:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < params.min_p * probs.max(), -torch.inf)
    return logits


def token_logprob(logits: torch.Tensor, token: int, top: int) -> TokenLogprob:
    """Log-probability of `token` and of the `top` best alternatives (all, if there are fewer), before any filter. logits [V]."""
    logprobs = logits.float().log_softmax(-1)
    values, ids = logprobs.topk(min(top, len(logprobs)))
    return TokenLogprob(token, float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


class Detokenizer:
    """Text of a growing token list, by a Hugging Face tokenizer (None: no text).

    Holds back the end while it may be half a character. By hand, since tokenizers' DecodeStream serves fast tokenizers only and
    never hands out an unfinished character at the end."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.text = ""
        self._done = 0  # tokens whose text is in self.text
        self._context = 0  # start of the tokens decoded together with new ones, so that word joins come out right

    def update(self, tokens: Sequence[int]) -> str:
        """All output tokens so far -> all text so far."""
        if self._tokenizer is None:
            return ""
        before = self._decode(tokens[self._context : self._done])
        now = self._decode(tokens[self._context :])
        if len(now) > len(before) and not now.endswith("�"):
            self.text += now[len(before) :]
            self._context, self._done = self._done, len(tokens)
        return self.text

    def finish(self, tokens: Sequence[int]) -> str:
        """The final text, an unfinished character included."""
        if self._tokenizer is not None:
            self.update(tokens)
            self.text += self._decode(tokens[self._context :])[len(self._decode(tokens[self._context : self._done])) :]
            self._context = self._done = len(tokens)
        return self.text

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


class StopSearch:
    """Looks for stop strings in a text that only grows. safe: characters that no stop string can begin in any more, or, once one
    is found, that come before the first of them."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._searched = 0  # characters
        self.safe = 0

    def found(self, text: str) -> bool:
        """Whether the text has a stop string. Only what is new is looked at."""
        hits = [text.find(stop, max(0, self._searched - len(stop) + 1)) for stop in self._stops]
        self._searched = len(text)
        first = min((hit for hit in hits if hit >= 0), default=None)
        if first is not None:
            self.safe = first
            return True
        while self.safe < len(text) and not self._may_begin(text, self.safe):
            self.safe += 1
        return False

    def _may_begin(self, text: str, at: int) -> bool:
        rest = len(text) - at
        return any(rest < len(stop) and text.startswith(stop[:rest], at) for stop in self._stops)
