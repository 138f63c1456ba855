"""The transformers adapter alone: packed chunks through it give the logits of the model's own eager attention."""

import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from qkv.attention.base import StepContext, step_context
from qkv.attention.hf import HFAdapter
from qkv.errors import ModelError
from tests.engine.dense_backend import DenseBackend, dense_metadata
from tests.engine.tiny_models import ARCHITECTURES, VOCAB, WINDOW, random_model, tiny_model

pytestmark = pytest.mark.cpu

LENGTHS = (37, 5, 20)
# Each step: (sequence, start, end) in the order of the packed batch. Chunks cross window borders; sequences interleave.
STEPS = (
    [(0, 0, 13), (1, 0, 5), (2, 0, 1)],
    [(2, 1, 3), (0, 13, 30)],
    [(0, 30, 31), (2, 3, 20)],
    [(0, 31, 37)],
)


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (n,), generator=generator) for n in LENGTHS]


@torch.no_grad()
def eager_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    out = model(input_ids=ids[None], use_cache=False).logits[0]
    model.set_attn_implementation(before)
    return out


def run_steps(adapter: HFAdapter, ids: list[torch.Tensor], padding: int = 0, observer=None) -> list[torch.Tensor]:
    """Logits of every token of every sequence, through the packed STEPS."""
    backend = DenseBackend(adapter.layers)
    logits: list[list[torch.Tensor]] = [[] for _ in ids]
    for chunks in STEPS:
        meta = dense_metadata(chunks, padding)
        packed = torch.cat([ids[s][a:b] for s, a, b in chunks] + [torch.zeros(padding, dtype=torch.int64)])
        out = adapter.forward(
            packed, meta.positions, torch.arange(meta.query_start_list[-1]), StepContext(backend, meta, observer)
        )
        for (s, _, _), rows in zip(chunks, out.split([b - a for _, a, b in chunks]), strict=True):
            logits[s].append(rows)
    return [torch.cat(x) for x in logits]


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("padding", [0, 3])
def test_packed_chunks_equal_eager_forward(name, padding):
    model = tiny_model(name)
    ids = sequences()
    expected = [eager_logits(model, x) for x in ids]
    original = model.config._attn_implementation
    adapter = HFAdapter(model)
    got = run_steps(adapter, ids, padding)
    adapter.close()
    for e, g in zip(expected, got, strict=True):
        assert e.std() > 0.05  # a collapsed model would make the comparison empty
        assert (e - g).abs().max() <= 1e-5 * max(1.0, float(e.abs().max()))
    assert model.config._attn_implementation == original
    assert torch.equal(eager_logits(model, ids[0]), expected[0])


def test_layer_shapes_come_from_the_model():
    gemma = HFAdapter(tiny_model("gemma2"))
    assert [s.window for s in gemma.layers] == [WINDOW, None, WINDOW]
    assert {s.softcap for s in gemma.layers} == {5.0}
    assert gemma.layers[0].scaling == pytest.approx(24**-0.5)
    oss = HFAdapter(tiny_model("gpt_oss"))
    assert all(s.sink_logits for s in oss.layers)
    gpt2 = HFAdapter(tiny_model("gpt2"))
    assert [s.scaling for s in gpt2.layers] == pytest.approx([1 / 4, 1 / 8, 1 / 12])
    llama = HFAdapter(tiny_model("llama"))
    assert [s.index for s in llama.layers] == [0, 1, 2]
    assert (llama.layers[0].H, llama.layers[0].Hq, llama.layers[0].Dk, llama.layers[0].Dv) == (2, 4, 16, 16)


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama"])
def test_given_positions_are_used(name):
    adapter = HFAdapter(tiny_model(name))
    ids = torch.full((2,), 9)

    def logits(position: int) -> torch.Tensor:
        meta = dense_metadata([(0, 0, 1), (1, 0, 1)])
        keys = []
        context = StepContext(DenseBackend(adapter.layers), meta, lambda layer, q, k, v: keys.append(k.clone()))
        adapter.forward(ids, torch.full((2,), position), torch.arange(2), context)
        return keys[0]

    at_5, at_40 = logits(5), logits(40)
    assert torch.allclose(at_5[0], at_5[1], atol=1e-6)
    assert not torch.allclose(at_5[0], at_40[0], atol=1e-3)


def test_only_the_wanted_rows_get_logits():
    adapter = HFAdapter(tiny_model("llama"))
    ids = sequences()[0]
    meta = dense_metadata([(0, 0, len(ids))])

    def forward(index: list[int]) -> torch.Tensor:
        context = StepContext(DenseBackend(adapter.layers), meta)
        return adapter.forward(ids, meta.positions, torch.tensor(index, dtype=torch.int64), context)

    everything = forward(list(range(len(ids))))
    assert torch.allclose(forward([3, 30]), everything[[3, 30]], atol=1e-5)
    assert forward([]).shape == (0, VOCAB)


def test_observer_sees_real_rows_only():
    adapter = HFAdapter(tiny_model("qwen2"))
    seen = []
    run_steps(adapter, sequences(), padding=3, observer=lambda layer, q, k, v: seen.append((layer, k.shape, v.shape)))
    assert [layer for layer, _, _ in seen] == [0, 1, 2] * len(STEPS)
    rows = [sum(b - a for _, a, b in chunks) for chunks in STEPS]
    assert [k[0] for _, k, _ in seen[::3]] == rows
    assert all(k[1:] == (2, 16) and v[1:] == (2, 16) for _, k, v in seen)


def test_properties():
    model = tiny_model("llama")
    adapter = HFAdapter(model)
    assert (adapter.vocab_size, adapter.max_positions) == (VOCAB, 512)
    assert (adapter.device, adapter.dtype) == (torch.device("cpu"), torch.float32)
    assert adapter.eos_token_ids == {2}
    model.generation_config.eos_token_id = [5, 6]
    assert adapter.eos_token_ids == {5, 6}
    assert HFAdapter(tiny_model("gpt2")).max_positions == 512


def test_longrope_is_limited_to_its_original_length():
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 128,
    }
    model = tiny_model("phi3", rope_parameters=rope, original_max_position_embeddings=128)
    assert HFAdapter(model).max_positions == 128


def test_adapters_share_a_model_and_one_that_closes_leaves_it_to_the_other():
    model = tiny_model("gemma3_text")
    first, second = HFAdapter(model, fused=False), HFAdapter(model, fused=False)
    first.close()
    first.close()
    with pytest.raises(ModelError, match="closed"):
        run_steps(first, sequences())
    run_steps(second, sequences())
    second.close()


def test_between_forwards_a_model_is_as_its_user_left_it():
    """Its attention, its mode, and what it computes; also after a forward that failed."""
    model = tiny_model("gemma2")
    ids = sequences()[0]
    expected = eager_logits(model, ids)
    adapter = HFAdapter(model, fused=False)
    model.set_attn_implementation("eager")
    model.model.layers[1].train()
    got = run_steps(adapter, sequences())[0]

    class Broken(DenseBackend):
        def attend(self, *args, **kwargs):
            raise RuntimeError("broken backend")

    with pytest.raises(RuntimeError, match="broken"):
        adapter.forward(
            ids[:2], torch.arange(2), torch.arange(2), StepContext(Broken(adapter.layers), dense_metadata([(0, 0, 2)]))
        )
    assert model.config._attn_implementation == "eager"
    assert [layer.mlp.training for layer in model.model.layers] == [False, True, False]
    assert (got - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
    assert torch.equal(eager_logits(model, ids), expected)


def test_forwards_run_in_eval_mode():
    model = tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5)
    expected = run_steps(HFAdapter(model), sequences())
    got = run_steps(HFAdapter(model.train()), sequences())
    assert model.training
    assert all(torch.equal(e, g) for e, g in zip(expected, got, strict=True))


def test_using_a_model_in_the_middle_of_a_forward_is_an_error():
    model = tiny_model("llama")
    adapter = HFAdapter(model, fused=False)
    caught = []

    class Meanwhile(DenseBackend):
        def attend(self, *args, **kwargs):
            def use():
                try:
                    model(input_ids=torch.tensor([[5, 6]]))
                except ModelError as error:
                    caught.append(str(error))

            thread = threading.Thread(target=use)
            thread.start()
            thread.join()
            return super().attend(*args, **kwargs)

    backend, meta = Meanwhile(adapter.layers), dense_metadata([(0, 0, 2)])
    adapter.forward(torch.tensor([5, 6]), meta.positions, torch.arange(2), StepContext(backend, meta))
    assert len(caught) == 3
    assert "use a copy of it" in caught[0]
    model(input_ids=torch.tensor([[5, 6]]))


def test_a_layer_that_leaves_the_attention_interface_is_noticed():
    model = tiny_model("llama")
    adapter = HFAdapter(model, fused=False)
    model.model.layers[1].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(ModelError, match="2 of 3 attention layers"):
        run_steps(adapter, sequences())


@pytest.mark.parametrize("name", ["scaling", "sliding_window"])
def test_attention_that_is_not_what_it_was_is_refused(name):
    model = tiny_model("mistral")
    adapter = HFAdapter(model, fused=False)
    setattr(model.model.layers[1].self_attn, name, 3) if name == "scaling" else setattr(model.config, name, 3)
    with pytest.raises(ModelError, match=r"attention of layer [01] changed while the engine was open"):
        run_steps(adapter, sequences())


def test_an_adapter_does_not_keep_a_closed_model_alive():
    model = tiny_model("llama")
    adapter = HFAdapter(model)
    adapter.close()
    gone = weakref.ref(model)
    del model, adapter
    gc.collect()
    assert gone() is None


SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "falcon": (SMALL | {"alibi": False}, "AttentionInterface"),
    "bloom": (
        SMALL | {"n_layer": 2, "n_head": 4, "num_hidden_layers": None, "num_attention_heads": None},
        "AttentionInterface|position",
    ),
    "mpt": (
        SMALL
        | {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "hidden_size": None,
            "num_hidden_layers": None,
            "num_attention_heads": None,
        },
        "AttentionInterface|position",
    ),
    "mamba": (SMALL | {"num_attention_heads": None}, "layers|trial forward|AttentionInterface|position_ids"),
    "rwkv": (
        SMALL | {"attention_hidden_size": 64, "num_attention_heads": None},
        "layers|trial forward|AttentionInterface|position_ids",
    ),
    "lfm2": (
        SMALL | {"num_key_value_heads": 2, "intermediate_size": 64, "layer_types": ["conv", "full_attention"]},
        "layers of type conv",
    ),
    "llama4_text": (
        SMALL
        | {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 64,
            "intermediate_size_mlp": 64,
            "num_local_experts": 2,
            "layer_types": ["chunked_attention", "full_attention"],
        },
        "layers of type chunked_attention",
    ),
    "gemma3n_text": (
        SMALL
        | {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 64,
            "num_kv_shared_layers": 1,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "layer_types": ["full_attention", "full_attention"],
            "activation_sparsity_pattern": [0.0, 0.0],
            "laurel_rank": 4,
        },
        "share the keys and values",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_architectures_that_cannot_be_paged_are_refused_with_the_reason(kind):
    config, reason = REFUSED[kind]
    model = random_model(kind, **config)
    before = model.config._attn_implementation
    with pytest.raises(ModelError, match=reason) as caught:
        HFAdapter(model)
    assert "\n" not in str(caught.value)
    assert model.config._attn_implementation == before
    model(input_ids=torch.tensor([[5, 6, 7]]))


def test_encoder_decoders_are_refused():
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    config = AutoConfig.for_model("t5", vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(ModelError, match="encoder-decoder"):
        HFAdapter(AutoModelForSeq2SeqLM.from_config(config))


def test_bidirectional_attention_is_refused_and_the_model_restored():
    model = tiny_model("llama")
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(ModelError, match="layer 1 is bidirectional"):
        HFAdapter(model)
    assert model.config._attn_implementation == "sdpa"


def test_a_window_that_is_not_passed_to_attention_is_refused():
    model = tiny_model("qwen2_moe", use_sliding_window=True, sliding_window=WINDOW, layer_types=["sliding_attention"] * 3)
    with pytest.raises(ModelError, match="layer 0 has a sliding window by its config"):
        HFAdapter(model)


def test_unknown_attention_arguments_are_refused():
    model = tiny_model("llama")
    inner = model.model.layers[0].self_attn.forward
    model.model.layers[0].self_attn.forward = lambda *a, **k: inner(*a, position_bias=torch.zeros(1), **k)
    with pytest.raises(ModelError, match="passes position_bias"):
        HFAdapter(model)


def test_mixing_tokens_outside_attention_is_refused():
    model = tiny_model("llama")

    class Smear(torch.nn.Module):
        def forward(self, x):
            return x + x.cumsum(1)

    model.model.layers[0].input_layernorm = torch.nn.Sequential(model.model.layers[0].input_layernorm, Smear())
    with pytest.raises(ModelError, match="neighbours"):
        HFAdapter(model)


def test_a_refused_layer_count_is_explained():
    model = tiny_model("llama")
    model.config.num_hidden_layers = 4
    with pytest.raises(ModelError, match="3 of its 4 layers"):
        HFAdapter(model)


def test_contexts_of_other_threads_and_errors_do_not_leak():
    adapter = HFAdapter(tiny_model("llama"))

    class Broken(DenseBackend):
        def attend(self, *args, **kwargs):
            raise RuntimeError("broken backend")

    meta = dense_metadata([(0, 0, 2)])
    outer = object()
    with step_context(outer):
        with pytest.raises(RuntimeError, match="broken"):
            adapter.forward(torch.tensor([5, 6]), meta.positions, torch.tensor([1]), StepContext(Broken(adapter.layers), meta))
        from qkv.attention.base import current_context

        assert current_context() is outer


def test_transformers_imports_from_the_repository_root_beside_a_kernels_package(tmp_path):
    """PyPI has a package called `kernels` that transformers imports when it is installed; our folder of that name must not
    stand in its way, whichever of the two is found first on the path."""
    root = Path(__file__).parents[2]
    assert not (root / "kernels" / "__init__.py").exists()
    stub = tmp_path / "kernels"
    stub.mkdir()
    (stub / "__init__.py").write_text("__version__ = '0.0.1'\nstub = True\n")
    info = tmp_path / "kernels-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.0.1\n")
    (info / "RECORD").write_text("kernels/__init__.py,,\n")
    code = f"""
        import sys
        sys.path.append({str(tmp_path)!r})
        import kernels
        assert kernels.stub
        from transformers import AutoModelForCausalLM, PreTrainedModel
        from transformers.integrations import hub_kernels
        import qkv.attention.hf, qkv.models, qkv_kernels.format
    """
    env = {"PYTHONPATH": f"{root}:{root / 'kernels'}", "PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
