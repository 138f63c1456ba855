"""What users do to a model that an engine serves, and the checkpoints they bring: served right, or refused in one line."""

import copy
import gc
import io
import json
import multiprocessing
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from experiments.lm.text import byte_tokenizer
from qkv import Engine
from qkv.config import ModelConfig
from qkv.errors import ModelError, QkvError, ScaleError
from qkv.models import hub, load_model
from qkv.models.dimensions import dimensions
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.types import SamplingParams
from tests.engine.tiny_models import VOCAB, random_model, tiny_model

pytestmark = pytest.mark.cpu

PROMPT = list(range(5, 25))
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)


def generate(engine: Engine, prompt: list[int] = PROMPT) -> list[int]:
    return engine.generate([prompt], GREEDY)[0].token_ids


def expected(model: PreTrainedModel, prompt: list[int] = PROMPT) -> list[int]:
    """Greedy tokens of the model by its own forward, without any cache."""
    ids = list(prompt)
    training = [m for m in model.modules() if m.training]
    model.eval()
    with torch.no_grad():
        for _ in range(8):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    for m in training:
        m.training = True
    return ids[len(prompt) :]


def warnings(engine: Engine) -> str:
    return " | ".join(engine.metrics()["warnings"])


def forward_of(engine: Engine) -> str:
    return engine.metrics()["attention"]["forward"]


@pytest.fixture(params=["fused", "transformers"])
def fused(request: pytest.FixtureRequest) -> bool:
    return request.param == "fused"


# -- the model changes while an engine is open ---------------------------------------------------------------------------


class Adapted(torch.nn.Module):
    """A linear layer with a low-rank update beside it, as adapters wrap them: it shows the weight of what it wraps."""

    def __init__(self, base: torch.nn.Linear, registered: bool) -> None:
        super().__init__()
        self.base, self.enabled = base, True
        generator = torch.Generator().manual_seed(3)
        down, up = torch.randn(4, base.in_features, generator=generator), torch.zeros(base.out_features, 4)
        self.down = torch.nn.Parameter(down) if registered else down
        self.up = torch.nn.Parameter(up) if registered else up

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (x @ self.down.T @ self.up.T if self.enabled else 0)


def wrap(model: Any, registered: bool = True) -> Adapted:
    wrapped = Adapted(model.model.layers[1].self_attn.q_proj, registered)
    with torch.no_grad():
        wrapped.up += 1.0
    model.model.layers[1].self_attn.q_proj = wrapped
    return wrapped


def steer(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda m, args, out: out + 3)


def steer_before(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda m, args: (args[0] * 3,))


def replace_forward(model: Any) -> None:
    original = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: 2 * original(x)


def replace_layer(model: Any) -> None:
    model.model.layers[1].mlp = copy.deepcopy(model.model.layers[0].mlp)


def load_assigned(model: Any) -> None:
    model.load_state_dict({n: 1.2 * t for n, t in model.state_dict().items()}, assign=True)


def load_copied(model: Any) -> None:
    model.load_state_dict({n: 1.2 * t for n, t in model.state_dict().items()})


@torch.no_grad()
def scale_in_place(model: Any) -> None:
    model.model.layers[1].self_attn.k_proj.weight.mul_(-1)


def scale_through_data(model: Any) -> None:
    model.model.layers[1].self_attn.k_proj.weight.data.mul_(-1)


def replace_data(model: Any) -> None:
    model.model.layers[1].self_attn.k_proj.weight.data = -model.model.layers[1].self_attn.k_proj.weight.data


def replace_parameter(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight)


def move_norm(model: Any) -> None:
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 10.0


def parametrize(model: Any) -> None:
    class Negated(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -x

    torch.nn.utils.parametrize.register_parametrization(model.model.layers[1].self_attn.k_proj, "weight", Negated())


CHANGES: list[Callable[[Any], Any]] = [
    steer,
    steer_before,
    replace_forward,
    replace_layer,
    wrap,
    load_assigned,
    load_copied,
    scale_in_place,
    scale_through_data,
    replace_data,
    replace_parameter,
    move_norm,
    parametrize,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_a_change_of_the_model_is_noticed_and_served_and_nothing_stale_is_read(change: Callable[[Any], Any], fused: bool) -> None:
    """Without reset_prefix_cache: blocks of the model as it was must not be found any more."""
    model = tiny_model("llama")
    with Engine.create(model, num_blocks=64, fused=fused) as engine:
        before = generate(engine)
        assert before == expected(model)
        change(model)
        now = expected(model)
        assert now != before
        assert generate(engine) == now
        assert "the model was changed while the engine was open" in warnings(engine)
        assert generate(engine) == now
        engine.check()


def test_what_runs_when_the_model_changes_goes_on_with_the_new_one_alone() -> None:
    """Its earlier tokens are computed anew: the next token is what the new model says of the whole text."""
    model = tiny_model("llama")
    with Engine.create(model, num_blocks=64, max_num_seqs=2, preemptor="swap") as engine:
        for i in range(3):
            engine.add_request(PROMPT[i:], GREEDY)
        for _ in range(4):
            outputs = engine.step()
        scale_in_place(model)
        sofar = {o.id: list(o.token_ids) for o in outputs}
        after = {o.id: list(o.token_ids) for o in engine.step()}
        for request, tokens in sofar.items():
            assert after[request] == tokens + expected(model, PROMPT[request:] + tokens)[:1]
        while engine.has_work:
            engine.step()
        engine.check()


def test_a_change_that_is_undone_is_a_change_twice() -> None:
    model: Any = tiny_model("llama")
    with Engine.create(model, num_blocks=64) as engine:
        before = generate(engine)
        handle = model.model.layers[1].register_forward_hook(lambda m, args, out: out + 3)
        assert generate(engine) != before
        assert forward_of(engine).startswith("transformers: it has forward hooks or a replaced forward (model.layers.1)")
        handle.remove()
        assert generate(engine) == before
        assert forward_of(engine) == "fused"


def test_observing_hooks_are_called_in_every_step_and_the_record_says_why_it_is_slower(fused: bool) -> None:
    model: Any = tiny_model("llama")
    seen: list[int] = []
    model.model.layers[2].mlp.register_forward_hook(lambda m, args, out: seen.append(args[0].shape[1]))
    with Engine.create(model, num_blocks=64, fused=fused) as engine:
        seen.clear()
        generate(engine)
        assert len(seen) == 8
        assert seen[0] == len(PROMPT)
        assert "model.layers.2.mlp" in forward_of(engine)
        assert "forward hooks" in warnings(engine)


def test_hooks_of_all_modules_are_called() -> None:
    model = tiny_model("llama")
    with Engine.create(model, num_blocks=64) as engine:
        calls: list[str] = []
        handle = torch.nn.modules.module.register_module_forward_hook(lambda m, args, out: calls.append(type(m).__name__))
        try:
            generate(engine)
        finally:
            handle.remove()
        assert "LlamaAttention" in calls


def test_hooks_that_transformers_leaves_behind_do_not_count() -> None:
    model = tiny_model("llama")
    with Engine.create(model, num_blocks=64) as engine:
        before = generate(engine)
        model(torch.tensor([[5, 6]]), output_hidden_states=True)
        assert generate(engine) == before
        assert (forward_of(engine), warnings(engine)) == ("fused", "")


@pytest.mark.parametrize("registered", [True, False])
def test_an_adapter_that_learns_or_is_switched_off_is_followed(registered: bool) -> None:
    model: Any = tiny_model("llama")
    adapter = wrap(model, registered)
    with Engine.create(model, num_blocks=64) as engine:
        assert "Adapted" in forward_of(engine)
        with_adapter = generate(engine)
        assert with_adapter == expected(model)
        with torch.no_grad():
            adapter.up *= -2
        assert generate(engine) == expected(model) != with_adapter
        adapter.enabled = False
        assert generate(engine) == expected(model) == expected(tiny_model("llama"))


def test_training_and_generating_by_turns(fused: bool) -> None:
    """The user's training loop keeps its mode, its dropout and its attention; the engine serves each new state, in eval mode."""
    model = tiny_model("llama", attention_dropout=0.5).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with Engine.create(model, num_blocks=64, fused=fused) as engine:
        answers = []
        for _ in range(3):
            assert generate(engine) == expected(model)
            answers.append(generate(engine))
            assert all(m.training for m in model.modules())
            ids = torch.tensor([PROMPT])
            torch.manual_seed(0)
            first = model(ids, labels=ids).loss
            assert not torch.equal(first, model(ids, labels=ids).loss)  # dropout is on
            first.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert answers[0] != answers[-1]
    assert all(m.training for m in model.modules())


def test_modes_of_single_modules_are_kept(fused: bool) -> None:
    model: Any = tiny_model("llama")
    model.model.layers[1].train()
    with Engine.create(model, num_blocks=64, fused=fused) as engine:
        generate(engine)
    assert [layer.training for layer in model.model.layers] == [False, True, False]
    assert not model.training


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_another_attention_implementation_is_the_users_and_changes_nothing_here(implementation: str, fused: bool) -> None:
    model = tiny_model("llama")
    with Engine.create(model, num_blocks=64, fused=fused) as engine:
        before = generate(engine)
        model.set_attn_implementation(implementation)
        assert generate(engine, PROMPT[1:]) == expected(model, PROMPT[1:])
        assert generate(engine) == before
        assert model.config._attn_implementation == implementation
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize(
    ("change", "undo", "message"),
    [
        (lambda m: m.to(torch.bfloat16), lambda m: m.to(torch.float32), "is torch.bfloat16 on cpu"),
        (lambda m: m.resize_token_embeddings(VOCAB + 8), lambda m: m.resize_token_embeddings(VOCAB), "vocabulary of 136"),
        (lambda m: m.model.layers[1].to("meta"), None, "model.layers.1.self_attn.q_proj.weight (device 'meta')"),
        (lambda m: m.to("meta"), None, "device 'meta'"),
    ],
    ids=["dtype", "vocabulary", "offloaded", "meta"],
)
def test_a_model_that_no_longer_fits_its_cache_is_refused_until_it_does(
    change: Callable[[Any], Any], undo: Callable[[Any], Any] | None, message: str
) -> None:
    model = tiny_model("llama")
    with Engine.create(model, num_blocks=64) as engine:
        generate(engine)
        change(model)
        for _ in range(2):
            with pytest.raises(ModelError) as caught:
                generate(engine)
            assert message in str(caught.value)
            assert "\n" not in str(caught.value)
        if undo is not None:
            undo(model)
            assert generate(engine) == expected(model)
        engine.check()


def test_a_changed_model_is_not_calibrated_under_the_name_of_the_old_one() -> None:
    from calibration.fitting.collect import absmax_scales

    model = tiny_model("llama")
    with Engine.create(model, num_blocks=64) as engine:
        scale_in_place(model)
        with pytest.raises(ScaleError, match="create a new engine to calibrate it"):
            absmax_scales(engine, [PROMPT], QUANTIZERS.build("int8"))


def test_a_layer_that_goes_is_refused(fused: bool) -> None:
    model: Any = tiny_model("llama")
    with Engine.create(model, num_blocks=64, fused=fused) as engine:
        generate(engine)
        del model.model.layers[2]
        output = engine.generate([PROMPT], GREEDY)[0]
        assert output.finish_reason == "error"
        assert "2 of 3 attention layers" in (output.error or "")


def test_models_on_no_device_or_on_several_are_refused() -> None:
    with torch.device("meta"):
        unloaded = tiny_model("llama")
    with pytest.raises(ModelError, match=r"no weights in memory for model\.embed_tokens.weight"):
        Engine.create(unloaded, num_blocks=64)
    offloaded: Any = tiny_model("llama")
    offloaded.model.layers[2].to("meta")
    with pytest.raises(ModelError, match=r"model\.layers\.2.*without device_map"):
        Engine.create(offloaded, num_blocks=64)


# -- whose model it is ---------------------------------------------------------------------------------------------------


def test_a_dropped_engine_leaves_the_model_usable_and_nothing_behind() -> None:
    model = tiny_model("llama")
    before = expected(model)
    engine = Engine.create(model, num_blocks=64, fused=False)
    generate(engine)
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    assert expected(model) == before
    with Engine.create(model, num_blocks=64) as engine:
        assert generate(engine) == before
    gone_model = weakref.ref(model)
    del model, engine
    gc.collect()
    assert gone_model() is None


def test_copies_made_while_an_engine_is_open_are_models_like_any_other(fused: bool) -> None:
    model = tiny_model("llama")
    before = expected(model)
    with Engine.create(model, num_blocks=64, fused=fused) as engine:
        generate(engine)
        copied = copy.deepcopy(model)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        pickled = torch.load(buffer, weights_only=False)
        scale_in_place(copied)
        assert generate(engine) == before == expected(pickled)
        assert "changed" not in warnings(engine)
    for made in (copied, pickled):
        now = expected(made)
        with Engine.create(made, num_blocks=64, fused=fused) as engine:
            assert generate(engine) == now
    assert expected(model) == before != expected(copied)


def test_a_copy_made_in_the_middle_of_a_step_is_repaired_by_the_next_engine() -> None:
    model: Any = tiny_model("llama")
    copies: list[Any] = []
    model.model.layers[1].register_forward_hook(lambda m, args, out: None if copies else copies.append(copy.deepcopy(model)))
    with Engine.create(model, num_blocks=64):
        pass
    (made,) = copies
    with torch.no_grad(), pytest.raises(ModelError, match="use a copy of it, or wait"):
        made(torch.tensor([[5, 6]]))
    Engine.create(made, num_blocks=64).close()
    assert expected(made) == expected(model)


@pytest.mark.parametrize("first_closed", [0, 1])
def test_engines_that_share_a_model_close_in_any_order(first_closed: int, fused: bool) -> None:
    model = tiny_model("llama")
    before = expected(model)
    engines = [Engine.create(model, num_blocks=64, fused=fused) for _ in range(2)]
    assert [generate(e) for e in engines] == [before] * 2
    engines[first_closed].close()
    other = engines[1 - first_closed]
    assert generate(other) == before == expected(model)
    steer(model)
    assert generate(other) == expected(model) != before
    other.close()
    expected(model)


def test_every_engine_of_a_model_notices_its_change(fused: bool) -> None:
    model = tiny_model("llama")
    with Engine.create(model, num_blocks=64, fused=fused) as a, Engine.create(model, num_blocks=64, fused=fused) as b:
        before = generate(a)
        assert generate(b) == before
        scale_in_place(model)
        now = expected(model)
        assert generate(a) == now != before
        assert generate(b) == now


def test_engines_that_share_a_model_step_in_threads_of_their_own() -> None:
    model = tiny_model("gemma2").train()
    implementation = model.config._attn_implementation
    prompts = [PROMPT[i:] for i in range(4)]
    right = [expected(model, p) for p in prompts]
    wrong: list[Any] = []

    def run() -> None:
        with Engine.create(model, num_blocks=64) as engine:
            for _ in range(3):
                got = [o.token_ids for o in engine.generate(prompts, GREEDY)]
                if got != right:
                    wrong.append(got)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert model.training
    assert model.config._attn_implementation == implementation != "qkv"


# -- processes -----------------------------------------------------------------------------------------------------------


def _in_child(engine: Engine, model: PreTrainedModel, threads: int, results: Any) -> None:
    torch.set_num_threads(threads)
    for work in (lambda: generate(engine), lambda: generate(Engine.create(model, num_blocks=64))):
        try:
            results.put(work())
        except QkvError as error:
            results.put(str(error))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_forked_child_says_that_it_cannot_step_unless_it_needs_no_threads(threads: int) -> None:
    model = tiny_model("llama")
    before = expected(model)
    with Engine.create(model, num_blocks=64) as engine:
        generate(engine)
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        child = context.Process(target=_in_child, args=(engine, model, threads, results))
        child.start()
        answers = [results.get(timeout=60) for _ in range(2)]
        child.join()
        for answer in answers:
            assert answer == before if threads == 1 else "multiprocessing's 'spawn'" in answer
        assert generate(engine) == before


# -- models and checkpoints ----------------------------------------------------------------------------------------------


def gemma4() -> PreTrainedModel:
    """Another head size in the layers with full attention."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "num_kv_shared_layers": 0}
    vocab = {"vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}
    return random_model("gemma4_text", layer_types=kinds, sliding_window=8, initializer_range=0.15, **sizes, **heads, **vocab)


@pytest.mark.parametrize("quantizer", ["none", "int8_token"])
def test_layers_with_different_head_sizes_are_served(quantizer: str) -> None:
    model = gemma4()
    with Engine.create(model, num_blocks=64, quantizer=quantizer) as engine:
        assert [layer.Dk for layer in engine.layers] == [16, 16, 32]
        got = generate(engine)
        assert quantizer != "none" or got == expected(model)


def test_a_plan_of_layers_with_different_head_sizes_is_refused(tmp_path: Path) -> None:
    gemma4().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"different head_dim \(16, 32\)"):
        dimensions(ModelConfig("path", path=str(tmp_path)))


def test_mixtures_of_experts_say_that_deterministic_mode_does_not_hold() -> None:
    for name, said in (("llama", False), ("qwen2_moe", True), ("gpt_oss", True)):
        with Engine.create(tiny_model(name), num_blocks=64, deterministic=True) as engine:
            assert ("deterministic mode does not hold to the bit" in warnings(engine)) == said
        with Engine.create(tiny_model(name), num_blocks=64) as engine:
            assert warnings(engine) == ""


def test_models_without_a_language_head_are_refused() -> None:
    from transformers import LlamaForSequenceClassification, LlamaForTokenClassification

    model: Any = tiny_model("llama")
    for headless in (model.model, LlamaForSequenceClassification(model.config), LlamaForTokenClassification(model.config)):
        with pytest.raises(ModelError, match="language model") as caught:
            Engine.create(headless.eval(), num_blocks=64)
        assert type(headless).__name__ in str(caught.value)


def test_a_head_and_an_embedding_of_different_sizes_are_refused() -> None:
    model: Any = tiny_model("llama")
    model.lm_head = torch.nn.Linear(64, VOCAB + 8, bias=False)
    with pytest.raises(ModelError, match="136 classes, and its input embedding has 128"):
        Engine.create(model, num_blocks=64)


def saved(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any] | None = None, **config: Any) -> Path:
    """A tiny checkpoint in `folder`, its tensors edited, then its config.json."""
    tiny_model("llama").save_pretrained(folder)
    if edit is not None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | config))
    return folder


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "lacks weights: model.layers.1.mlp.up_proj.weight."),
        (lambda t: t.pop("lm_head.weight"), "lacks weights: lm_head.weight."),
        (lambda t: [t.pop(n) for n in list(t) if "layers.2" in n], "and 8 more. They would be random"),
        (
            lambda t: t.update({"model.layers.1.mlp.up_proj.weight": torch.ones(3, 64)}),
            "model.layers.1.mlp.up_proj.weight has shape [3, 64] in the checkpoint and [96, 64]",
        ),
    ],
)
def test_checkpoints_that_are_not_whole_are_refused(
    tmp_path: Path, edit: Callable[[dict[str, torch.Tensor]], Any], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = str(saved(tmp_path, edit))
    capfd.readouterr()
    with pytest.raises(ModelError) as caught:
        load_model(folder)
    assert message in str(caught.value)
    assert capfd.readouterr().err == ""


def test_weights_that_have_no_place_are_in_the_warnings(tmp_path: Path) -> None:
    folder = saved(tmp_path, lambda t: t.update({"model.layers.7.x": torch.ones(2), "vision.y": torch.ones(3)}))
    with Engine.create(str(folder), num_blocks=64) as engine:
        assert "has no place for are left out: model.layers.7.x and 1 more" in warnings(engine)
        assert generate(engine) == expected(tiny_model("llama"))


@pytest.mark.parametrize(
    ("stored", "dtype", "said"),
    [("float32", "bfloat16", "rounded"), ("bfloat16", "float16", "above 65504 overflow"), ("bfloat16", "float32", None)],
)
def test_a_dtype_that_holds_less_than_the_checkpoint_is_in_the_warnings(
    tmp_path: Path, stored: str, dtype: str, said: str | None
) -> None:
    tiny_model("llama").to(getattr(torch, stored)).save_pretrained(tmp_path)
    (warning,) = load_model(ModelConfig("path", path=str(tmp_path), dtype=dtype)).warnings or (None,)  # type: ignore[arg-type]
    assert warning is None if said is None else said in str(warning)


def test_a_head_of_its_own_where_the_configuration_ties_it_is_in_the_warnings(tmp_path: Path) -> None:
    with Engine.create(str(saved(tmp_path, tie_word_embeddings=True)), num_blocks=64) as engine:
        assert "has a head of its own, which is used" in warnings(engine)
        assert generate(engine) == expected(tiny_model("llama"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"repetition_penalty": 1.05}, "ask for repetition_penalty=1.05, which"),
        ({"suppress_tokens": [3, 4], "forced_eos_token_id": 2}, "forced_eos_token_id=2, suppress_tokens=[3, 4], which"),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size=3"),
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.8}, "sampling (temperature=0.7, top_p=0.8)"),
        ({"stop_strings": ["###"]}, "stop_strings=['###']"),
        ({"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_beams": 1, "temperature": 0.7}, None),
    ],
)
def test_generation_settings_that_are_not_followed_are_in_the_warnings(settings: dict[str, Any], said: str | None) -> None:
    model = tiny_model("llama")
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    with Engine.create(model, num_blocks=64) as engine:
        assert warnings(engine) == "" if said is None else said in warnings(engine)


def test_end_tokens_that_do_not_work_as_they_look_are_in_the_warnings() -> None:
    def said(eos: Any, tokenizer: Any = None) -> str:
        model = tiny_model("llama", vocab_size=300)
        model.generation_config.eos_token_id = model.config.eos_token_id = eos
        with Engine.create(model, tokenizer, num_blocks=64) as engine:
            return warnings(engine)

    assert said([2, 5]) == ""
    assert "no end token is known" in said(None)
    assert "end tokens [999] are outside the model's vocabulary of 300" in said([2, 999])
    tokenizer = byte_tokenizer()
    assert tokenizer.eos_token_id == 256
    assert "'<eos>' (id 256) does not end a text" in said([2, 5], tokenizer)
    assert "does not end" not in said([2, 256], tokenizer)


def test_every_end_token_of_several_ends_a_text() -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    tokens = expected(model)
    for at in (2, 5):
        model.generation_config.eos_token_id = [VOCAB - 1, tokens[at]]
        with Engine.create(model, num_blocks=64) as engine:
            (output,) = engine.generate([PROMPT], SamplingParams(max_tokens=8))
            assert output.finish_reason == "stop"
            assert len(output.token_ids) <= tokens.index(tokens[at]) + 1


def test_tokenizers_that_lack_tokens_or_are_of_another_model_are_in_the_warnings() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = tokenizer.pad_token = None
    with Engine.create(tiny_model("llama", vocab_size=257), tokenizer, num_blocks=64) as engine:
        said = warnings(engine)
        assert "no bos token (prompts begin without one) and no eos token" in said
        assert "Is it" not in said
        assert engine.generate("Hello", GREEDY)[0].error is None
    for size, known in (
        (VOCAB, "257 tokens and the model 128: text that contains the others is refused"),
        (1000, "model 1000. Is"),
    ):
        with Engine.create(tiny_model("llama", vocab_size=size), byte_tokenizer(), num_blocks=64) as engine:
            assert known in warnings(engine)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer.json": "{bad"},
        {"tokenizer.json": "{bad", "tokenizer_config.json": '{"tokenizer_class": "LlamaTokenizer"}'},
        {"tokenizer_config.json": '{"tokenizer_class": "LlamaTokenizer"}'},
        {"tokenizer.model": "xx", "tokenizer_config.json": '{"tokenizer_class": "LlamaTokenizer"}'},
        {"vocab.json": "[]", "merges.txt": "x", "tokenizer_config.json": '{"tokenizer_class": "GPT2Tokenizer"}'},
    ],
    ids=lambda files: "+".join(files),
)
def test_a_tokenizer_that_is_there_and_cannot_be_read_is_refused_with_the_reason(tmp_path: Path, files: dict[str, str]) -> None:
    saved(tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match="cannot be used") as caught:
        Engine.create(str(tmp_path), num_blocks=64)
    assert all(name in str(caught.value) for name in files)
    assert "\n" not in str(caught.value)
    with Engine.create(str(tmp_path), byte_tokenizer(), num_blocks=64) as engine:
        assert engine.tokenizer is not None
    for name in files:
        (tmp_path / name).unlink()
    with Engine.create(str(tmp_path), num_blocks=64) as engine:
        assert "no tokenizer" in (engine.generate("Hello")[0].error or "")


@pytest.mark.parametrize("device", ["mps", "meta", "xla", "cuda:99", "gpu", ""])
def test_devices_that_are_not_served_are_one_line(device: str) -> None:
    with pytest.raises(ModelError, match="device") as caught:
        load_model(ModelConfig("llama3-8b-tiny", device=device))
    assert "\n" not in str(caught.value)
    assert "cpu" in str(caught.value) or "cuda:0" in str(caught.value)


def test_a_hub_that_does_not_answer_is_noticed_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that hangs stands in for a name server that is silent; no retry follows."""
    import huggingface_hub

    released = threading.Event()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "TIMEOUT_S", 0.2)

    class Session:
        def head(self, *args: Any, **kwargs: Any) -> None:
            released.wait(60)

    monkeypatch.setattr(huggingface_hub, "get_session", Session)
    try:
        assert "does not answer within" in (hub.unreachable() or "")
        with pytest.raises(ModelError, match="'nobody/nothing' is not in the local cache and the hub cannot be reached"):
            load_model("nobody/nothing")
        with pytest.raises(ModelError, match="the hub cannot be reached"):
            dimensions(ModelConfig("nobody/nothing"))
    finally:
        released.set()


def test_a_hub_that_refuses_the_connection_is_unreachable_and_one_that_answers_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "http://127.0.0.1:9 cannot be reached" in (hub.unreachable() or "")
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: type("Session", (), {"head": lambda self, *a, **k: None})())
    assert hub.unreachable() is None
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert hub.unreachable() == "HF_HUB_OFFLINE is set"
