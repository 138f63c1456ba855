"""Stop strings: a stream never takes text back, and a stop that is a special token is met although texts leave it out."""

from typing import Any

import pytest

from experiments.studies.generate import Generate
from qkv.errors import ConfigError, RequestError
from qkv.types import RequestOutput, SamplingParams
from qkv.validate import from_mapping
from tests.engine.support import make
from tests.engine.tiny_models import VOCAB
from tests.reports.test_bad_requests import Words


class Letters(Words):
    """Three letters a token, so that stop strings begin and end within tokens."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        kept = [t for t in token_ids if not (skip_special_tokens and t in self.added_tokens_decoder)]
        return "".join(chr(97 + t % 5) + chr(97 + t % 7) + chr(97 + t % 3) for t in kept)


def streamed(engine: Any, prompt: list[int], params: SamplingParams) -> list[RequestOutput]:
    outs = list(engine.stream([prompt], params))
    shown = ""
    for out in outs:
        assert out.text.startswith(shown), f"the stream took text back: {shown!r} became {out.text!r}"
        shown = out.text
    return outs


def test_what_may_begin_a_stop_string_is_not_shown_until_it_is_decided() -> None:
    """For stop strings of up to 7 characters that the text has, and for those that only begin like it."""
    prompt = [5, 9, 20]
    with make(tokenizer=Letters()) as engine:
        free = engine.generate([prompt], SamplingParams(max_tokens=12, ignore_eos=True))[0].text
        for at in range(0, 24, 7):
            for length in (1, 2, 3, 5, 7):
                stop = free[at : at + length]
                for stops in ((stop,), (stop + "#",), (stop + "#", free[at + 3 : at + 9])):
                    params = SamplingParams(max_tokens=12, ignore_eos=True, stop=stops)
                    outs = streamed(engine, prompt, params)
                    first = min((free.find(s) for s in stops if s in free), default=len(free))
                    assert outs[-1].text == free[:first]
                    assert outs[-1].finish_reason == ("stop" if first < len(free) else "length")
                    assert all(not any(s in o.text for s in stops) for o in outs)
                    assert engine.generate([prompt], params)[0].text == outs[-1].text


def test_text_that_no_stop_string_can_begin_in_is_shown_at_once() -> None:
    with make(tokenizer=Letters()) as engine:
        plain = streamed(engine, [5, 9], SamplingParams(max_tokens=6, ignore_eos=True))
        held = streamed(engine, [5, 9], SamplingParams(max_tokens=6, ignore_eos=True, stop=("#", "!?")))
        assert [o.text for o in held] == [o.text for o in plain]


def test_a_special_token_as_stop_string_is_met_by_its_id() -> None:
    class Special(Letters):
        added_tokens_decoder: dict[int, Words.Added] = {}  # noqa: RUF012

    tokenizer = Special()
    with make(tokenizer=tokenizer) as engine:
        free = engine.generate([[5, 9, 20]], SamplingParams(max_tokens=8, ignore_eos=True))[0]
    special = free.token_ids[3]
    Special.added_tokens_decoder = {special: Words.Added("<|turn|>"), VOCAB - 1: Words.Added("<|other|>")}
    first = free.token_ids.index(special)
    with make(tokenizer=tokenizer) as engine:
        for stop in (("<|turn|>",), ("<|other|>", "<|turn|>", "#")):
            outs = streamed(engine, [5, 9, 20], SamplingParams(max_tokens=8, ignore_eos=True, stop=stop))
            assert outs[-1].finish_reason == "stop"
            assert outs[-1].token_ids == free.token_ids[: first + 1]
            assert "<|turn|>" not in outs[-1].text
        with pytest.raises(RequestError, match=r"can never be met: the text leaves out the special token '<\|turn\|>'"):
            engine.add_request([5], SamplingParams(stop=("ab<|turn|>",)))


def test_a_stream_that_ends_by_length_shows_what_it_held_back() -> None:
    with make(tokenizer=Letters()) as engine:
        free = engine.generate([[5, 9]], SamplingParams(max_tokens=5, ignore_eos=True))[0].text
        outs = streamed(engine, [5, 9], SamplingParams(max_tokens=5, ignore_eos=True, stop=(free[-2:] + "#",)))
        assert (outs[-1].text, outs[-1].finish_reason) == (free, "length")
        assert outs[-2].text == free[:-3]


def test_escapes_in_stop_strings_of_a_command_line_mean_what_they_say() -> None:
    """A shell and Hydra hand over a backslash and an n."""
    settings = {"prompts": ["x"], "sampling": {"stop": ["\\n", "a\\tb", "\\\\n", "\\u00e9\\u4e2d", "plain", "\n"]}}
    experiment = from_mapping(Generate, settings, "experiment generate")
    assert experiment.sampling.stop == ("\n", "a\tb", "\\n", "é中", "plain", "\n")
    for bad in ("\\d", "end\\", "\\u12"):
        with pytest.raises(ConfigError, match="is no escape; there are"):
            from_mapping(Generate, {"prompts": ["x"], "sampling": {"stop": [bad]}}, "experiment generate")
