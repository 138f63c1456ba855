"""runner.compile: the same tokens, one compilation for every batch, and the model given back as it was."""

from typing import Any

import pytest
import torch

from qkv.types import SamplingParams
from tests.engine.support import make, model, tokens

pytestmark = pytest.mark.slow  # minutes of compiling

PROMPTS = [tokens(i, n) for i, n in enumerate((3, 41, 1, 20, 70, 8))]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["gpt2", "gemma3_text", "gpt_oss"])
def test_one_compilation_serves_every_batch(name: str) -> None:
    from torch._dynamo.utils import counters

    settings: dict[str, Any] = {"model_name": name, "fused": False, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    with make(**settings) as engine:
        expected = [out.token_ids for out in engine.generate(PROMPTS, PARAMS)]
    torch._dynamo.reset()
    counters.clear()
    with make(compile=True, **settings) as engine:
        assert engine.metrics()["attention"]["forward"] == "compiled: runner.fused is false"
        assert [out.token_ids for out in engine.generate(PROMPTS, PARAMS)] == expected
        assert counters["stats"]["unique_graphs"] == 1  # prefill, mixed and decode steps of 1 to 16 rows
        assert not counters["graph_break"]
        with make(compile=True, **settings) as other:  # an engine beside it shares what was compiled
            assert [out.token_ids for out in other.generate(PROMPTS[:2], PARAMS)] == expected[:2]
        assert counters["stats"]["unique_graphs"] == 1


def test_where_the_fused_forward_runs_nothing_is_compiled() -> None:
    with make(compile=True) as engine:
        assert engine.metrics()["attention"]["forward"] == "fused"
        assert engine._parts.adapter._compiled is None  # type: ignore[attr-defined]


def test_a_closed_model_generates_as_before() -> None:
    with make(compile=True, model_name="gpt2") as engine:
        engine.generate(PROMPTS[:1], SamplingParams(max_tokens=2))
    gpt2: Any = model("gpt2")
    assert gpt2.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False).shape == (1, 5)
