"""The low-bit quantizers in an engine, on models whose attention has a window, a softcap or sink logits."""

import pytest
import torch

from qkv.errors import ConfigError
from qkv.types import SamplingParams
from tests.engine.support import make, scales, tokens

QUANTIZERS = [
    {"name": "int4"},
    {"name": "rotated", "bits": 3},
    {"name": "kivi", "bits": 3},
    {"name": "kivi", "tail_blocks": 2},
    {"name": "protected", "inner": "rotated", "sink_tokens": 3, "tail_blocks": 0, "layers": [-1], "heads": [[0, 1]]},
]
PROMPTS = [tokens(70 + n, n) for n in (3, 30, 61)]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("model_name", ["mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_greedy_tokens_do_not_depend_on_the_schedule(quantizer: dict, model_name: str) -> None:
    """With a sliding window, a softcap and sink logits: in one prefill, in chunks of 7, and with a pool that preempts."""
    results = []
    for more in ({"max_num_batched_tokens": 512}, {"max_num_batched_tokens": 10}, {"num_blocks": 14, "preemptor": "swap"}):
        with make(quantizer, 8, model_name=model_name, deterministic=True, **more) as engine:
            results.append([o.token_ids for o in engine.generate(PROMPTS, PARAMS)])
            engine.check()
            if "num_blocks" in more:
                assert engine.metrics()["cache"]["preemptions"] > 0
    assert results[0] == results[1] == results[2]
    assert all(len(t) == PARAMS.max_tokens for t in results[0])


def test_recent_blocks_exclude_prefix_hits_and_say_so() -> None:
    with make({"name": "kivi", "tail_blocks": 1}, 8) as engine:
        engine.generate([PROMPTS[2]] * 2, PARAMS)
        engine.generate([PROMPTS[2]], PARAMS)
        assert engine.metrics()["cache"]["prefix_hits_tokens"] == 0
        assert any("tail_blocks=1" in warning for warning in engine.metrics()["warnings"])
    with make({"name": "kivi"}, 8) as engine:
        engine.generate([PROMPTS[2]], PARAMS)
        engine.generate([PROMPTS[2]], PARAMS)
        assert engine.metrics()["cache"]["prefix_hits_tokens"] == 56


def test_sinks_are_shared_with_the_prefix_and_read_by_who_hits_it() -> None:
    """There are few slots, so other sequences take the slot of a cached prefix's sink tokens, and the prefix is no hit then."""
    quantizer = {"name": "protected", "inner": "rotated", "sink_tokens": 4}
    with make(quantizer, 8, deterministic=True, max_num_seqs=2) as engine:
        first = engine.generate([PROMPTS[2]], PARAMS)[0].token_ids
        hits = []
        for others in (1, 2):
            for i in range(others):
                engine.generate([tokens(200 + 10 * others + i, 20)], PARAMS)
            before = engine.metrics()["cache"]["prefix_hits_tokens"]
            assert engine.generate([PROMPTS[2]], PARAMS)[0].token_ids == first
            hits.append(engine.metrics()["cache"]["prefix_hits_tokens"] - before)
            engine.check()
    assert hits == [56, 0]


def test_more_sinks_than_a_block_holds_are_refused() -> None:
    with pytest.raises(ConfigError, match="12 sink tokens do not fit the first block of 8 tokens"):
        make({"name": "protected", "inner": "int8_token", "sink_tokens": 12}, 8)


def test_raw_tails_come_out_of_the_memory_budget() -> None:
    sizes = []
    for seqs in (1, 8):
        with make("kivi", 8, num_blocks=None, memory_bytes=200_000, max_num_seqs=seqs, poison=False) as engine:
            memory = engine.metrics()["memory"]
            assert memory["allocated_bytes"] <= 200_000
            sizes.append(memory["pool_bytes"])
    assert sizes[0] > sizes[1]


def test_error_falls_as_bits_rise_and_nothing_is_read_around_the_cache() -> None:
    def kl(spec: object) -> float:
        rows: list[torch.Tensor] = []
        with make(spec, 8, num_blocks=64) as engine:  # type: ignore[arg-type]
            engine.score([PROMPTS[2]], on_logits=lambda _i, _s, x: rows.append(x.float().log_softmax(-1)))
        logs.append(torch.cat(rows))
        return float(torch.nn.functional.kl_div(logs[-1], logs[0], log_target=True, reduction="batchmean"))

    logs: list[torch.Tensor] = []
    assert kl("none") == 0
    for name in ("kivi", "rotated"):
        errors = [kl({"name": name, "bits": bits}) for bits in (2, 3, 4)]
        assert errors[0] > errors[1] > errors[2] > 1e-7
    assert scales("kivi") is None
