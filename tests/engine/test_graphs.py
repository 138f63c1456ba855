"""Decode steps from graphs are padded to some fixed sizes, write into fixed buffers, and equal steps that run without graphs.

Capturing itself needs a GPU. Here a stand-in runs the same call on the same buffers, which is what a captured graph does.
"""

from typing import Any

import pytest
import torch

from qkv.engine import Engine
from qkv.graphs import DecodeGraphs, Forward
from qkv.types import SamplingParams
from tests.engine.support import make, scales, tokens
from tests.engine.tiny_models import tiny_model


class Rerun:
    """Runs the captured call again on the buffers it was captured with."""

    captures = 0
    replays = 0

    def __init__(self, forward: Forward) -> None:
        self._forward, self.logits = forward, forward().clone()
        Rerun.captures += 1

    def replay(self) -> None:
        self.logits.copy_(self._forward())
        Rerun.replays += 1


def generate(
    graphs: bool, quantizer: str | dict[str, object], backend: str = "reference", lengths: tuple[int, ...] = (12, 3, 9, 6, 20)
) -> list[list[int]]:
    with make(quantizer, backend=backend, max_num_seqs=6) as engine:
        runner: Any = engine._parts.runner
        if graphs:
            runner.graphs = DecodeGraphs(runner._decode_rows, 6, capture=Rerun)
        prompts = [tokens(i, n) for i, n in enumerate((30, 9, 17, 5, 3))]
        outputs = engine.generate(prompts[: len(lengths)], [SamplingParams(max_tokens=n) for n in lengths])
        engine.check()
        engine._parts.store.check_null()
        return [o.token_ids for o in outputs]


@pytest.mark.parametrize("quantizer", ["none", "int8"])
def test_replayed_steps_give_the_same_tokens(quantizer: str) -> None:
    Rerun.captures = Rerun.replays = 0
    want = generate(False, quantizer)
    assert generate(True, quantizer) == want
    assert Rerun.captures == 4  # 5 requests run in the graph of 6; then 4, 2 and 1
    assert Rerun.replays > 10


@pytest.mark.slow
@pytest.mark.parametrize("quantizer", ["int8", {"name": "kivi", "bits": 2}], ids=["int8", "kivi2"])
def test_padding_rows_write_nothing_in_the_kernels(monkeypatch: pytest.MonkeyPatch, quantizer: str | dict[str, object]) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from qkv.attention.triton import TritonBackend

    scales("int8", "llama")
    monkeypatch.setattr(TritonBackend, "supports", lambda *_: None)
    assert generate(True, quantizer, "triton", (3, 2, 3)) == generate(False, quantizer, "triton", (3, 2, 3))


def test_sizes_are_a_ladder() -> None:
    graphs = DecodeGraphs(lambda n: torch.zeros(n, 1), 21, capture=Rerun)
    assert graphs.sizes == [1, 2, 4, 8, 16, 21]
    assert [graphs.size(n) for n in (1, 3, 5, 17, 21, 22)] == [1, 4, 8, 21, 21, None]
    assert DecodeGraphs(lambda n: torch.zeros(n, 1), 4, capture=Rerun).sizes == [1, 2, 4]


def test_a_model_that_cannot_be_captured_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(forward: Forward) -> Rerun:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = DecodeGraphs(lambda n: torch.zeros(n, 1), 8, capture=refuse)
    assert not graphs.prepare(graphs.size(3) or 0)
    assert graphs.size(3) is None
    assert "could not be captured (operation not permitted" in caplog.text


def test_a_changed_model_is_captured_anew_and_one_with_hooks_is_not_replayed() -> None:
    """A graph holds the addresses of the weights that it was captured with, and calls no hooks."""
    Rerun.captures = Rerun.replays = 0
    model: Any = tiny_model("llama")
    with Engine.create(model, num_blocks=64, max_num_seqs=2) as engine:
        runner: Any = engine._parts.runner
        runner.graphs = DecodeGraphs(runner._decode_rows, 2, capture=Rerun)
        params, calls = SamplingParams(max_tokens=6), []
        engine.generate([tokens(0, 9)], params)
        assert (Rerun.captures, Rerun.replays) == (1, 5)
        model.load_state_dict({n: 1.2 * t for n, t in model.state_dict().items()}, assign=True)
        engine.generate([tokens(0, 9)], params)
        assert (Rerun.captures, Rerun.replays) == (2, 10)
        model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
        engine.generate([tokens(0, 9)], params)
        assert (len(calls), Rerun.replays) == (6, 10)


def test_graphs_are_off_without_a_gpu() -> None:
    with make("none") as engine:
        assert engine._parts.runner.graphs is None  # type: ignore[attr-defined]
