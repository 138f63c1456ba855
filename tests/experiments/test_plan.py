"""The arithmetic of planning: figures that can be checked by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments import run

GIB = 2**30
SHAPE = ["model=shape", "model.head_dim=128", "model.kv_heads=8"]


def plan(folder: Path, *arguments: str) -> dict[str, Any]:
    assert run.main(["experiment=plan", "logger=none", *arguments, f"hydra.run.dir={folder}"]) == 0
    row: dict[str, dict[str, Any]] = json.loads((folder / "record.json").read_text(encoding="utf-8"))["rows"][0]
    return row["plan"]


def option(values: dict[str, Any], change: str) -> dict[str, Any]:
    found: dict[str, Any] = next(o for o in values["options"] if o["change"].startswith(change))
    return found


def test_a_7b_model_with_full_heads_in_16_bits(tmp_path: Path) -> None:
    values = plan(tmp_path / "a", "model=llama2-7b", "device=a100-80g")
    assert values["kv_bytes_per_token"] == 524_288
    assert values["kv_bytes"] == 32 * GIB
    assert plan(tmp_path / "b", "model=llama2-7b", "device=a100-80g", "plan.concurrency=1")["kv_bytes"] == GIB
    assert values["weight_bytes"] == 2 * 6_738_415_616


@pytest.mark.parametrize(
    ("layers", "concurrency", "context", "per_token", "gib"), [(32, 32, 4096, 131_072, 16), (36, 16, 8192, 147_456, 18)]
)
def test_grouped_heads(tmp_path: Path, layers: int, concurrency: int, context: int, per_token: int, gib: int) -> None:
    demand = [f"model.layers={layers}", f"plan.concurrency={concurrency}", f"plan.context={context}"]
    values = plan(tmp_path, *SHAPE, *demand, "plan.device_memory=80GiB")
    assert (values["kv_bytes_per_token"], values["kv_bytes"]) == (per_token, gib * GIB)
    half = option(values, "quantizer=int8_token")
    scales = concurrency * context * layers * 8 * 2 * 2  # one float16 for K and one for V, per layer and head
    assert half["kv_bytes"] == gib * GIB // 2 + scales
    assert "weight_bytes" not in values


def test_a_card_with_a_reserve_holds_whole_blocks(tmp_path: Path) -> None:
    card = ["plan.device_memory=80GiB", "plan.reserve=[14GiB,8GiB,2GiB]", "plan.tokens_per_request=500"]
    values = plan(tmp_path, "model=llama2-7b", *card, "allocator.block_size=16")
    assert (values["blocks"], values["tokens"], values["requests"], values["requests_upper"]) == (7_168, 114_688, 224, 229)
    assert values["null_block_bytes"] == values["block_bytes"] == 16 * 524_288


def test_what_does_not_fit_comes_with_what_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = plan(tmp_path, "model=llama2-7b", "device=l4", "plan.concurrency=16")
    assert not values["fits"]
    assert "DOES NOT FIT" in capsys.readouterr().out
    fewer, shorter = option(values, "plan.concurrency="), option(values, "plan.context=")
    assert fewer["fits"]
    assert shorter["fits"]
    assert fewer["kv_bytes"] <= values["kv_budget_bytes"]
    assert option(values, "a model with 8 KV heads")["fits"]
    for o in values["options"]:
        assert o["fits"] == (o["kv_bytes"] <= values["kv_budget_bytes"]), o


def test_the_reserve_may_not_take_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["experiment=plan", "model=llama2-7b", "plan.device_memory=8GiB", f"hydra.run.dir={tmp_path}"]) == 2
    assert "nothing is left for it" in capsys.readouterr().err


def test_a_models_own_dimensions_are_not_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["experiment=plan", "model=shape", "model.layers=2", f"hydra.run.dir={tmp_path / 'a'}"]) == 2
    assert "needed: add model." in capsys.readouterr().err
    assert run.main(["experiment=plan", "model=llama2-7b", "+model.layers=2", f"hydra.run.dir={tmp_path / 'b'}"]) == 2
    assert "layers=2 is not allowed" in capsys.readouterr().err


def test_a_configuration_of_a_saved_model_is_enough(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
    config |= {"hidden_size": 128, "intermediate_size": 64, "vocab_size": 100, "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    values = plan(tmp_path / "out", "model=path", f"model.path={tmp_path / 'model'}", "device=l4")
    assert values["kv_bytes_per_token"] == 2 * 2 * 4 * 2 * 16
    assert values["weight_bytes"] > 0
