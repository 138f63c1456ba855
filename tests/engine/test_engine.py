"""The engine's API as its users meet it, on a tiny model."""

import threading
from itertools import pairwise
from typing import Any

import pytest
import torch

from calibration.fitting.collect import absmax_scales
from qkv.cache.store import KVStore
from qkv.engine import Engine
from qkv.errors import ConfigError, RequestError
from qkv.layout import LayerShape
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.types import SamplingParams
from tests.engine.support import make, model, tokens
from tests.engine.tiny_models import VOCAB, tiny_model


class _Letters:
    """A tokenizer of one letter per token, in the shape of Hugging Face's."""

    eos_token_id = 2

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(c) % 120 for c in text]}

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("a") + t % 26) for t in token_ids)


def test_order_is_kept_and_lengths_are_right() -> None:
    with make() as engine:
        prompts = [tokens(i, 3 + i) for i in range(12)]
        outs = engine.generate(prompts, SamplingParams(max_tokens=5, ignore_eos=True))
        assert [o.prompt_token_ids for o in outs] == prompts
        assert all(len(o.token_ids) == 5 and o.finish_reason == "length" for o in outs)
        engine.check()


def test_batches_do_not_change_answers() -> None:
    prompts = [tokens(i, 20 + 7 * i) for i in range(6)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with make() as engine:
        together = [o.token_ids for o in engine.generate(prompts, params)]
    with make(enable_prefix_caching=False) as engine:
        apart = [engine.generate([p], params)[0].token_ids for p in prompts]
    assert together == apart


def test_sampling_params_per_prompt_and_seeds() -> None:
    hot = SamplingParams(max_tokens=8, temperature=1.0, seed=3, ignore_eos=True)
    with make() as engine:
        p = tokens(0, 9)
        a, b, c = engine.generate([p, p, p], [hot, hot, SamplingParams(max_tokens=2)])
        assert a.token_ids == b.token_ids
        assert len(c.token_ids) <= 2
        with pytest.raises(ConfigError, match="3 prompts but 2 sampling parameters"):
            engine.generate([p, p, p], [hot, hot])


def test_logprobs_are_reported_when_asked_for() -> None:
    with make() as engine:
        (out,) = engine.generate([tokens(0, 9)], SamplingParams(max_tokens=4, logprobs=2, ignore_eos=True))
        assert out.logprobs is not None
        assert [lp.token_id for lp in out.logprobs] == out.token_ids
        assert all(lp.top[0][0] == lp.token_id and len(lp.top) == 2 for lp in out.logprobs)  # greedy: the best is chosen
        (score,) = engine.score([tokens(0, 9) + out.token_ids], first=9)
        assert torch.allclose(score.logprobs, torch.tensor([lp.logprob for lp in out.logprobs]), atol=1e-5)
        assert bool(score.greedy_match.all())


def test_stop_strings_and_stop_tokens() -> None:
    with make(tokenizer=_Letters()) as engine:
        (free,) = engine.generate(["hello"], SamplingParams(max_tokens=12, ignore_eos=True))
        stop = free.text[3:5]
        cut = free.text.index(stop)
        (out,) = engine.generate(["hello"], SamplingParams(max_tokens=12, ignore_eos=True, stop=(stop,)))
        assert (out.text, out.finish_reason) == (free.text[:cut], "stop")
        (out,) = engine.generate(["hello"], SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=(free.token_ids[4],)))
        first = free.token_ids.index(free.token_ids[4])
        assert out.token_ids == free.token_ids[: first + 1]
        assert out.text == free.text[:first]
        (out,) = engine.generate(["hello"], SamplingParams(max_tokens=6, ignore_eos=True, stop=("no such text",)))
        assert out.finish_reason == "length"  # a stop string that is never met


def test_streaming_grows_token_by_token() -> None:
    with make(tokenizer=_Letters()) as engine:
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        final = engine.generate(["ab", "cdef"], params)
        seen: dict[int, list[Any]] = {}
        for out in engine.stream(["ab", "cdef"], params):
            seen.setdefault(out.id, []).append(out)
        for outs, expected in zip(seen.values(), final, strict=True):
            assert [len(o.token_ids) for o in outs] == [1, 2, 3, 4, 5, 6]
            assert all(b.text.startswith(a.text) for a, b in pairwise(outs))
            assert (outs[-1].text, outs[-1].finish_reason) == (expected.text, "length")


def test_leaving_a_stream_early_frees_everything() -> None:
    with make() as engine:
        for _ in engine.stream([tokens(i, 30) for i in range(4)], SamplingParams(max_tokens=50)):
            break
        assert engine.scheduler.idle
        engine.check()
        assert engine.scheduler.manager.allocator.num_referenced == 0


def test_scores_equal_the_models_own_log_probabilities() -> None:
    ids = tokens(5, 90)
    with make(max_num_batched_tokens=16) as engine:
        (score,) = engine.score([ids])
    with torch.inference_mode():
        logits = model()(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = logits[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert torch.allclose(score.logprobs, expected, atol=1e-5)
    assert torch.equal(score.greedy_match, logits[:-1].argmax(-1) == torch.tensor(ids[1:]))


def test_each_list_has_its_own_first_token_and_may_end_one_past_the_models_limit() -> None:
    """The last token is predicted and never fed, so a model of 60 positions scores 61 tokens."""
    lists = [tokens(5, 61), tokens(6, 30)]
    with make(max_model_len=60) as engine:
        whole = engine.score(lists)
        parts = engine.score(lists, first=[60, 7])
        for score, part in zip(whole, parts, strict=True):
            torch.testing.assert_close(part.logprobs, score.logprobs[-len(part.logprobs) :], rtol=0, atol=1e-5)
        assert [len(p.logprobs) for p in parts] == [1, 23]
        with pytest.raises(RequestError, match="62 tokens to score, above 61"):
            engine.score([tokens(5, 62)])
        with pytest.raises(ConfigError, match="2 token lists but 1 values of first"):
            engine.score(lists, first=[1])


def test_bad_requests_get_one_message_each_and_others_finish() -> None:
    with make(num_blocks=1 + 8, max_model_len=120, tokenizer=_Letters()) as engine:
        bad: list[Any] = [[], [5, VOCAB], tokens(0, 119), tokens(0, 130), [-1]]
        outs = engine.generate([[4, 5], *bad, [6, 7]], SamplingParams(max_tokens=10, ignore_eos=True))
        assert [o.finish_reason for o in outs] == ["length", "error", "error", "error", "error", "error", "length"]
        messages = [o.error for o in outs[1:-1]]
        assert messages[0] == "the prompt is empty; give at least one token"
        assert messages[1] == f"token id {VOCAB} is outside the vocabulary; ids go from 0 to {VOCAB - 1}"
        assert messages[2] is not None
        assert "max_tokens can be at most 1" in messages[2]
        assert messages[3] is not None
        assert "the prompt has 130 tokens" in messages[3]
        assert all("\n" not in (m or "") for m in messages)
        engine.check()
        with pytest.raises(RequestError, match="the prompt has 130 tokens"):
            engine.add_request(tokens(0, 130))


def test_a_request_larger_than_the_pool_is_refused_with_the_numbers() -> None:
    with make(num_blocks=1 + 4) as engine:
        with pytest.raises(RequestError, match="the prompt has 70 tokens; the KV pool holds 64"):
            engine.add_request(tokens(0, 70))
        with pytest.raises(RequestError, match=r"60 \+ max_tokens 10 = 70 tokens, above what the KV pool holds .* at most 5"):
            engine.add_request(tokens(0, 60), SamplingParams(max_tokens=10))
        (out,) = engine.generate([tokens(0, 60)], SamplingParams(max_tokens=5, ignore_eos=True))
        assert len(out.token_ids) == 5  # the last block to the brim
        (out,) = engine.generate([tokens(0, 60)], SamplingParams(max_tokens=None, ignore_eos=True))
        assert len(out.token_ids) == 5


def test_text_needs_a_tokenizer() -> None:
    with make() as engine, pytest.raises(RequestError, match="no tokenizer"):
        engine.add_request("text")


def test_score_refuses_what_it_cannot_score_before_running_anything() -> None:
    with make() as engine:
        for first in (0, 9, -1):
            with pytest.raises(RequestError, match="first="):
                engine.score([tokens(0, 20), tokens(0, 9)], first=first)
        assert engine.scheduler.idle or engine.step() is not None
        engine.check()


def test_requests_may_come_and_go_from_many_threads() -> None:
    with make(num_blocks=40) as engine:
        ids: list[int] = []
        lock = threading.Lock()

        def hammer(seed: int) -> None:
            for i in range(25):
                request_id = engine.add_request(tokens(seed * 100 + i, 5 + i), SamplingParams(max_tokens=3, ignore_eos=True))
                with lock:
                    ids.append(request_id)
                if i % 5 == seed % 5:
                    engine.abort(request_id)
                engine.abort(10_000 + i)  # an unknown id is ignored

        threads = [threading.Thread(target=hammer, args=(s,)) for s in range(6)]
        for t in threads:
            t.start()
        ended: dict[int, str] = {}
        while any(t.is_alive() for t in threads) or engine.has_work:
            for out in engine.step():
                if out.finish_reason:
                    assert out.id not in ended, "a request ended twice"
                    ended[out.id] = out.finish_reason
            engine.check()
        assert sorted(ended) == sorted(ids)
        assert len(set(ids)) == 150
        assert set(ended.values()) <= {"length", "abort"}


def test_two_engines_share_a_model_and_it_keeps_its_attention_between_their_steps() -> None:
    m = model()
    original = m.config._attn_implementation
    prompts = [tokens(0, 30)]
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    a, b = make("none"), make("int8_token")
    first = a.generate(prompts, params)[0].token_ids
    b.generate(prompts, params)
    assert a.generate(prompts, params)[0].token_ids == first
    own = m(torch.tensor([[1, 2, 3]])).logits
    for close in (a.close, b.close, b.close):
        close()
        assert m.config._attn_implementation == original
        assert torch.equal(m(torch.tensor([[1, 2, 3]])).logits, own)


def test_settings_fail_before_a_model_is_loaded() -> None:
    for kw, message in (
        ({"quantizer": "int9"}, "unknown quantizer 'int9'; did you mean 'int8'"),
        ({"evictor": {"name": "lfu", "age": 3}}, "evictor.lfu: unknown key 'age'; did you mean 'age_steps'"),
        ({"allocator": {"name": "paged", "block_size": 12}}, "block_size=12 is not allowed"),
        ({"dtype": "float33"}, "'float33' is not allowed; did you mean 'float32'"),
        ({"reads": "cash"}, "did you mean 'cache'"),
        ({"num_blocks": 4, "memory_bytes": 100}, "at most one of num_blocks, memory_bytes, memory_utilization"),
        ({"memory_bytes": "2 gigs"}, "is not a size"),
    ):
        with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
            Engine.create("no-such-model", **kw)
    with pytest.raises(ConfigError, match=r"max_model_len=100000 is above the model's 512 positions"):
        make(max_model_len=100_000)


def test_the_pool_is_sized_from_bytes_and_says_how() -> None:
    with make(num_blocks=None, memory_bytes="1MiB") as engine:
        memory = engine.metrics()["memory"]
        assert memory["pool_bytes"] <= 2**20 < memory["pool_bytes"] + engine._parts.store.block_bytes
        assert "memory_bytes=1,048,576" in engine.metrics()["pool"]
        assert memory["capacity_tokens"] == (memory["pool_bytes"] // engine._parts.store.block_bytes - 1) * 16
    with pytest.raises(ConfigError, match="needs at least 2"):
        make(num_blocks=None, memory_bytes=100)


def test_metrics_tell_the_truth_about_latency() -> None:
    ticks = iter(range(10**6))
    with make(clock=lambda: float(next(ticks))) as engine:
        (out,) = engine.generate([tokens(0, 20)], SamplingParams(max_tokens=4, ignore_eos=True))
        m = out.metrics
        assert m.queue_time is not None
        assert m.ttft is not None
        assert m.tpot is not None
        assert 0 < m.queue_time < m.ttft < (m.e2e or 0)
        assert len(m.itl) == 3
        assert m.tpot == pytest.approx(sum(m.itl) / 3)
        assert m.e2e == pytest.approx(m.ttft + sum(m.itl))
        again = engine.generate([tokens(0, 20)], SamplingParams(max_tokens=4))[0]
        assert again.metrics.cached_tokens == 16
        assert engine.metrics()["cache"]["hit_rate"] == pytest.approx(16 / 40)
        engine.reset_metrics()
        assert engine.metrics()["cache"]["prefix_queries_tokens"] == 0


def test_resetting_the_prefix_cache_forgets_everything() -> None:
    with make() as engine:
        engine.generate([tokens(0, 40)], SamplingParams(max_tokens=2))
        engine.reset_prefix_cache()
        engine.generate([tokens(0, 40)], SamplingParams(max_tokens=2))
        assert engine.metrics()["cache"]["prefix_hits_tokens"] == 0
        engine.check()


def test_the_quantizer_is_part_of_the_prefix_identity() -> None:
    with make("fp8") as a, make({"name": "fp8", "format": "e5m2"}) as b:
        chain_a: list[bytes] = []
        chain_b: list[bytes] = []
        for engine, chain in ((a, chain_a), (b, chain_b)):
            hasher = engine.scheduler.manager._hasher
            assert hasher is not None
            hasher.extend(chain, tokens(0, 16), 1)
        assert chain_a != chain_b


def test_observers_see_real_tokens_once() -> None:
    rows: dict[int, int] = {}
    with make(deterministic=True) as engine:
        with engine.observe(lambda layer, q, k, v: rows.update({layer: rows.get(layer, 0) + len(k)})):
            engine.generate([tokens(0, 21)], SamplingParams(max_tokens=1))
        engine.generate([tokens(1, 30)], SamplingParams(max_tokens=1))
    assert rows == {0: 21, 1: 21, 2: 21}  # no padding rows, nothing after the with


def test_contiguous_regions_may_be_longer_than_any_request() -> None:
    with make(allocator={"name": "contiguous", "block_size": 16, "max_len": 200}, max_model_len=100, num_blocks=40) as engine:
        outs = engine.generate([tokens(i, 20) for i in range(5)], SamplingParams(max_tokens=5, ignore_eos=True))
        assert all(len(o.token_ids) == 5 for o in outs)
        engine.check()


def test_a_resent_prompt_hits_on_a_model_with_sliding_and_full_layers_and_gives_the_same_answer() -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=1)
    with make(model_name="gemma2", deterministic=True) as engine:
        cold, warm = (engine.generate([tokens(0, 70)], params)[0] for _ in range(2))
        assert warm.metrics.cached_tokens == 64
        assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)


def test_layers_of_different_head_dims_share_a_pool_sized_with_their_scale_bytes() -> None:
    shapes = [LayerShape(0, H=2, Hq=4, Dk=16, Dv=16, scaling=1.0), LayerShape(1, H=1, Hq=4, Dk=64, Dv=32, scaling=1.0)]
    quantizer = QUANTIZERS.build("int8_token")
    quantizer.bind(shapes, None, torch.float32, torch.device("cpu"))
    store = KVStore(shapes, [quantizer.formats(i) for i in range(2)], 5, 16, torch.device("cpu"))
    assert store.block_bytes == 16 * (2 * (16 + 2) * 2 + (64 + 2) + (32 + 2))
    assert (
        store.pool_bytes
        == 5 * store.block_bytes
        == sum(t.numel() * t.element_size() for i in range(2) for p in store.planes(i) for t in p.tensors)
    )


def test_new_weights_need_a_reset_and_then_nothing_old_is_read() -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    changed = tiny_model("llama", seed=1)
    with make() as engine:
        engine.generate([tokens(0, 40)], params)
        model: Any = engine.loaded.model  # type: ignore[union-attr]
        original = {k: v.clone() for k, v in model.state_dict().items()}
        try:
            model.load_state_dict(changed.state_dict())
            engine.reset_prefix_cache()
            after = engine.generate([tokens(0, 40)], params)[0]
        finally:
            model.load_state_dict(original)
    with Engine.create(changed, num_blocks=64) as fresh:
        assert fresh.generate([tokens(0, 40)], params)[0].token_ids == after.token_ids


def test_calibration_does_not_depend_on_what_is_cached() -> None:
    with make() as engine:
        files = [absmax_scales(engine, [tokens(3, 60), tokens(4, 30)], QUANTIZERS.build("int8")) for _ in range(2)]
    assert all(torch.equal(files[0].tensors[name], files[1].tensors[name]) for name in files[0].tensors)


def test_a_stream_ends_although_somebody_else_finished_its_requests() -> None:
    with make() as engine:
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        seen = []
        for out in engine.stream([tokens(0, 20)], params):
            seen.append(out)
            if len(seen) == 1:
                assert len(engine.generate([tokens(1, 20)], params)[0].token_ids) == 6
        assert seen[-1].finish_reason == "length"
        assert len(seen[-1].token_ids) == 6
        assert not engine.has_work


def test_what_others_aborted_or_finished_is_not_lost_to_a_stream_that_is_left() -> None:
    with make() as engine:
        stream: Any = engine.stream([tokens(0, 20)], SamplingParams(max_tokens=50))
        next(stream)
        other = engine.add_request(tokens(1, 20), SamplingParams(max_tokens=1))
        aborted = engine.add_request(tokens(2, 20), SamplingParams(max_tokens=90))
        next(stream)
        engine.abort(aborted)
        stream.close()
        ended = {out.id: out.finish_reason for out in engine.step()}
        assert ended == {other: "length", aborted: "abort"}


def test_a_tiny_temperature_is_greedy_and_a_model_that_overflows_ends_its_own_request_only() -> None:
    with make() as engine:
        (greedy,) = engine.generate([tokens(0, 20)], SamplingParams(max_tokens=5, ignore_eos=True))
        (cold,) = engine.generate([tokens(0, 20)], SamplingParams(max_tokens=5, ignore_eos=True, temperature=1e-40))
        assert cold.token_ids == greedy.token_ids
        adapter: Any = engine._parts.adapter
        forward = adapter.forward
        overflows = iter([True] + [False] * 99)

        def overflow(*a: Any, **kw: Any) -> torch.Tensor:
            logits = forward(*a, **kw).clone()
            logits[0] = torch.nan if next(overflows) else logits[0]
            return logits

        for temperature in (0.0, 1.0):
            adapter.forward = overflow
            overflows = iter([True] + [False] * 99)
            params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=temperature)
            outs = engine.generate([tokens(0, 20), tokens(1, 20), tokens(2, 20)], params)
            assert [o.finish_reason for o in outs] == ["error", "length", "length"]
            assert "not finite" in (outs[0].error or "")
            engine.check()


def test_what_is_no_prompt_is_refused_and_leaves_nothing_behind() -> None:
    with make() as engine:
        outs = engine.generate([tokens(0, 9), 5, [1.7, 2], None], SamplingParams(max_tokens=2, ignore_eos=True))  # type: ignore[list-item]
        assert [o.finish_reason for o in outs] == ["length", "error", "error", "error"]
        assert outs[1].error == "a prompt is text or a list of token ids, not 5; several prompts are a list of those"
        with pytest.raises(RequestError, match="first=30"):
            engine.score([tokens(0, 40), tokens(1, 9)], first=30)
        assert not engine.has_work
        with pytest.raises(RequestError, match="needs a tokenizer"):
            engine.add_request(tokens(0, 9), SamplingParams(stop=("x",)))


def test_only_finished_generations_count_as_latency() -> None:
    with make() as engine:
        engine.abort(engine.add_request(tokens(0, 20)))
        while engine.has_work:
            engine.step()
        assert "e2e_s" not in engine.metrics()["speed"]


def test_closing_gives_the_pool_back() -> None:
    engine = make()
    planes = engine._parts.store.planes(0)[0].tensors
    engine.close()
    assert all(t.untyped_storage().nbytes() == 0 for t in planes)


def test_a_pool_larger_than_memory_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError, match=r"the pool would take .* GiB .* are free; lower cache\.memory_bytes"):
        make(num_blocks=None, memory_bytes="900TiB")


def test_a_contiguous_pool_is_used_to_the_last_region() -> None:
    """No watermark is kept for requests that cannot grow."""
    allocator = {"name": "contiguous", "block_size": 16, "max_len": 64}
    with make(allocator=allocator, num_blocks=1 + 4 * 4, watermark=0.5) as engine:
        for i in range(4):
            engine.add_request(tokens(i, 20), SamplingParams(max_tokens=9, ignore_eos=True))
        engine.step()
        assert engine.scheduler.num_running == 4
