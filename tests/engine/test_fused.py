"""The fused forward: the same logits as transformers' for every architecture it recognises, and no claim on any other."""

import gc
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from qkv.attention import borrow
from qkv.attention.base import StepContext
from qkv.attention.fused import FusedForward
from qkv.attention.hf import HFAdapter
from qkv.engine import Engine
from qkv.types import SamplingParams
from qkv_kernels.cpu import BuildError
from qkv_kernels.cpu.frame import load_frame
from tests.engine.dense_backend import DenseBackend, dense_metadata
from tests.engine.support import make, tokens
from tests.engine.tiny_models import ARCHITECTURES, VOCAB, tiny_model

try:
    load_frame()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.cpu

RECOGNISED = ("llama", "mistral", "qwen2", "qwen2_sliding", "qwen3", "gemma2", "gemma3_text", "phi3", "granite")


def logits(model: PreTrainedModel, fused: bool) -> torch.Tensor:
    """Logits [40, V], float32, of 40 tokens in three packed chunks of two sequences."""
    adapter = HFAdapter(model, fused=fused)
    assert adapter.forward_path.startswith("fused" if fused else "transformers: runner.fused is false")
    backend, rows = DenseBackend(adapter.layers), []
    ids = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(1))
    at = 0
    for chunks in ([(0, 0, 11), (1, 0, 4)], [(0, 11, 12), (1, 4, 5)], [(0, 12, 35)]):
        meta = dense_metadata(chunks)
        n = meta.query_start_list[-1]
        rows.append(adapter.forward(ids[at : at + n], meta.positions, torch.arange(n), StepContext(backend, meta)))
        at += n
    adapter.close()
    return torch.cat(rows).float()


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_who_is_recognised(name: str, dtype: torch.dtype) -> None:
    adapter = HFAdapter(tiny_model(name).to(dtype))
    assert adapter.forward_path.startswith(
        "fused" if name in RECOGNISED else "transformers: its modules are not those of a llama"
    )
    adapter.close()


@pytest.mark.parametrize("name", RECOGNISED)
def test_fused_equals_transformers(name: str) -> None:
    model = tiny_model(name)
    expected = logits(model, fused=False)
    assert (logits(model, fused=True) - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("name", RECOGNISED)
def test_fused_in_bfloat16_is_no_further_from_float32_than_transformers(name: str) -> None:
    exact = logits(tiny_model(name).to(torch.bfloat16).float(), fused=False)
    model = tiny_model(name).to(torch.bfloat16)
    ours, theirs = ((logits(model, fused) - exact).norm() / exact.norm() for fused in (True, False))
    assert ours <= 1.5 * theirs + 1e-3


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_biases_and_tied_embeddings(name: str) -> None:
    model = tiny_model(name, attention_bias=True, tie_word_embeddings=True)
    expected = logits(model, fused=False)
    assert (logits(model, fused=True) - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


def test_nothing_is_copied_and_nothing_changed() -> None:
    """Every tensor that the fused forward holds is memory of the model; the model's own forward is untouched."""
    for name in RECOGNISED:
        model = tiny_model(name)
        before = {n: (id(p), p.data_ptr()) for n, p in model.named_parameters()}
        forwards = {n: m.forward for n, m in model.named_modules()}
        adapter = HFAdapter(model)
        owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
        fused = adapter._fused
        assert isinstance(fused, FusedForward)
        held = [t for layer in fused._layers for t in layer.tensors()] + [fused._norm, *fused._head, *fused._head_bias]
        assert {t.untyped_storage().data_ptr() for t in held} <= owned
        adapter.close()
        assert {n: (id(p), p.data_ptr()) for n, p in model.named_parameters()} == before
        assert {n: m.forward for n, m in model.named_modules()} == forwards
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)


def test_weights_changed_in_place_are_used() -> None:
    model = tiny_model("llama")
    with Engine.create(model, num_blocks=32) as engine:
        prompt, params = tokens(1, 20), SamplingParams(max_tokens=8, ignore_eos=True)
        engine.generate([prompt], params)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.3)
        engine.reset_prefix_cache()
        (after,) = engine.generate([prompt], params)
    with Engine.create(model, num_blocks=32, fused=False) as engine:
        assert engine.generate([prompt], params)[0].token_ids == after.token_ids


def test_engines_share_one_and_the_last_close_forgets_it() -> None:
    model = tiny_model("llama")
    first, second = HFAdapter(model), HFAdapter(model)
    assert first._fused is second._fused
    assert HFAdapter(model, fused=False).forward_path == "transformers: runner.fused is false"
    assert borrow.share(model).fused is first._fused
    first.close()
    second.close()
    del first, second
    gc.collect()
    assert borrow.share(model).fused is None


def refused(model: PreTrainedModel) -> str:
    adapter = HFAdapter(model)
    reason = adapter.forward_path
    adapter.close()
    assert reason.startswith("transformers: ")
    return reason


def test_a_parameter_without_a_place_is_noticed() -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.extra = torch.nn.Linear(4, 4)
    assert "model.layers.1.mlp.extra.weight" in refused(model)


def test_a_layer_that_computes_something_else_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    original = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: 2 * original(self, x))
    assert "other logits" in refused(tiny_model("llama"))


def test_other_activations_and_dtypes_keep_transformers() -> None:
    assert "relu" in refused(tiny_model("llama", hidden_act="relu"))
    assert "float64" in refused(tiny_model("llama").double())


def test_without_a_compiler_transformers_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise BuildError("no C++ compiler")

    monkeypatch.setattr("qkv_kernels.cpu.frame.load_frame", missing)
    assert "no C++ compiler" in refused(tiny_model("llama"))


def test_the_record_says_which_forward_ran() -> None:
    cases: tuple[tuple[dict[str, Any], str], ...] = (({}, "fused"), ({"fused": False}, "transformers: runner.fused is false"))
    for kw, expected in cases:
        with make(**kw) as engine:
            assert engine.metrics()["attention"]["forward"] == expected


def test_a_row_is_the_same_in_every_batch_to_the_bit() -> None:
    """The frame does not depend on the batch even without deterministic mode, and not in bfloat16 either."""
    model: Any = tiny_model("llama").to(torch.bfloat16)
    adapter = HFAdapter(model)

    def run(n: int) -> torch.Tensor:
        meta = dense_metadata([(i, 0, 1) for i in range(n)])
        ids = torch.arange(5, 5 + n)
        return adapter.forward(ids, meta.positions, torch.arange(n), StepContext(DenseBackend(adapter.layers), meta))

    many = run(70)
    for n in (1, 2, 9, 33):
        assert torch.equal(run(n), many[:n])
