"""Each experiment at toy size on random weights: its record, its table, its files."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import run
from qkv.models import load_model
from qkv.scales import ScaleFile

TINY = ["model=llama3-8b-tiny", "data=pydoc", "cache.memory_bytes=4MiB"]
SMALL = ["workload.num_requests=3", "workload.prompt_tokens=40", "workload.output_tokens=6", "documents=2"]
SMALL += ["tokens_per_document=96", "calibration_documents=2"]


def run_it(folder: Path, *arguments: str) -> dict[str, Any]:
    assert run.main([*arguments, f"hydra.run.dir={folder}"]) == 0
    record: dict[str, Any] = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    return record


def test_compare_fills_every_part_of_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = run_it(tmp_path, "experiment=compare", *TINY, *SMALL, "quantizers=[int8,{name: fp8, format: e5m2},int8_token]")
    rows = {row["label"]: row for row in record["rows"]}
    assert list(rows) == ["none", "int8", "fp8(format=e5m2)", "int8_token"]
    assert record["model"] | {"fingerprint": ""} == {
        "name": "llama3-8b-tiny",
        "source": "random weights, seed 0",
        "fingerprint": "",
        "layers": 3,
        "kv_heads": 2,
        "query_heads": 8,
        "head_dim": 16,
        "dtype": "float32",
        "parameters": record["model"]["parameters"],
    }
    assert set(record["attention"]) == {"backend", "reads", "reason", "forward"}
    for label, row in rows.items():
        assert {"policy", "memory", "speed", "cache", "accuracy"} <= set(row), label
        assert row["policy"]["prefix_caching"] is True
        memory, speed, accuracy = row["memory"], row["speed"], row["accuracy"]
        assert 0 < memory["pool_bytes"] <= 4 * 2**20
        assert memory["capacity_tokens"] * memory["kv_bytes_per_token"] <= memory["pool_bytes"]
        assert set(speed["ttft_s"]) == {"mean", "p50", "p95", "p99"}
        for rate in ("prefill_tokens_per_s", "decode_tokens_per_s", "output_tokens_per_s", "requests_per_s"):
            assert speed[rate] > 0
        assert accuracy["tokens_scored"] == 2 * 95
        assert accuracy["fraction_read_from_cache"] == 1.0
    none = rows["none"]["accuracy"]
    assert (none["kl_divergence"], none["top1_agreement"], none["perplexity_delta_pct"]) == (0.0, 1.0, 0.0)
    for label in ("int8", "fp8(format=e5m2)", "int8_token"):
        accuracy = rows[label]["accuracy"]
        assert 0 < accuracy["kl_divergence"] < 0.2
        assert 0.5 < accuracy["top1_agreement"] <= 1
        assert accuracy["kl_divergence_stderr"] > 0
        assert math.isclose(
            accuracy["perplexity"], none["perplexity"] * (1 + accuracy["perplexity_delta_pct"] / 100), rel_tol=1e-9
        )
        assert rows[label]["memory"]["capacity_tokens"] > 3 * rows["none"]["memory"]["capacity_tokens"]
    assert rows["fp8(format=e5m2)"]["accuracy"]["kl_divergence"] > rows["int8_token"]["accuracy"]["kl_divergence"]
    assert rows["int8"]["policy"]["scales"] == "calibrated in memory: 2 documents, 190 tokens of pydoc"
    assert "scales" not in rows["int8_token"]["policy"]
    assert "scale is 1.0" in rows["fp8(format=e5m2)"]["warnings"][0]
    out = capsys.readouterr().out
    assert "calibrated in memory: 2 documents, 190 tokens" in out
    assert "bfloat16" not in out
    assert (tmp_path / "compare.png").stat().st_size > 1000
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["label"] for line in lines] == list(rows)
    assert lines[0]["accuracy/top1_agreement"] == 1.0


def test_a_16_bit_comparison_says_what_that_means(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = run_it(tmp_path, "experiment=compare", *TINY, *SMALL, "quantizers=[none]", "model.dtype=bfloat16")
    assert record["model"]["dtype"] == "bfloat16"
    assert "bfloat16: weights and arithmetic have 16 bits" in capsys.readouterr().out


def test_a_scale_file_is_used_for_its_quantizer(tmp_path: Path) -> None:
    loaded = load_model("llama3-8b-tiny")
    tensors = {f"layers.{i}.k_scale": torch.full((2, 16), 0.05) for i in range(3)}
    path = tmp_path / "scales.safetensors"
    ScaleFile(tensors, {"quantizer": "int8", "model": loaded.name, "model_fingerprint": loaded.fingerprint}).save(path)
    record = run_it(tmp_path / "run", "experiment=compare", *TINY, *SMALL, "quantizers=[int8]", f"scales={path}")
    assert record["rows"][1]["policy"]["scales"] == str(path)


def test_contiguous_allocation_compares_too(tmp_path: Path) -> None:
    arguments = [*TINY, *SMALL, "quantizers=[none]", "allocator=contiguous", "allocator.max_len=128"]
    record = run_it(tmp_path, "experiment=compare", *arguments)
    assert record["rows"][0]["policy"]["allocator"] == "contiguous"


def test_too_little_text_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "short.txt"
    file.write_text("A few words.", encoding="utf-8")
    arguments = ["experiment=compare", *TINY[:1], "data=text", f"data.path={file}", f"hydra.run.dir={tmp_path / 'run'}"]
    assert run.main(arguments) == 2
    assert "windows of 1024 tokens need 16,384 tokens, it has 14" in capsys.readouterr().err


def test_compare_refuses_documents_longer_than_the_model_before_it_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["experiment=compare", *TINY, *SMALL, "tokens_per_document=9000", f"hydra.run.dir={tmp_path}"]
    assert run.main(arguments) == 2
    assert "tokens_per_document=9000 is above the 2048 positions" in capsys.readouterr().err
    assert not (tmp_path / "record.json").exists()


def test_generate_prints_text_and_records_every_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["quantizer=int8_token", 'prompts=["first prompt","second"]', "sampling.max_tokens=5", "sampling.ignore_eos=true"]
    record = run_it(tmp_path, "experiment=generate", *TINY, *arguments, "sampling.logprobs=1")
    (row,) = record["rows"]
    assert [o["prompt"] for o in row["outputs"]] == ["first prompt", "second"]
    for output in row["outputs"]:
        assert len(output["token_ids"]) == len(output["logprobs"]) == 5
        assert output["finish_reason"] == "length"
    assert row["policy"]["quantizer"] == "int8_token"
    out = capsys.readouterr().out
    assert "first prompt" in out
    assert out.splitlines()[-1].startswith("record: ")


def test_generate_calibrates_where_the_quantizer_needs_it(tmp_path: Path) -> None:
    record = run_it(tmp_path, "experiment=generate", *TINY, "quantizer=int8", "prompts=[hello]", "sampling.max_tokens=2")
    assert record["rows"][0]["policy"]["scales"].startswith("calibrated in memory")


def test_one_refused_prompt_leaves_the_others_alone(tmp_path: Path) -> None:
    prompts = f"prompts=[short,{'long' * 50}]"
    limit = ["scheduler.max_model_len=64", "sampling.max_tokens=2"]
    record = run_it(tmp_path, "experiment=generate", *TINY, "quantizer=none", prompts, *limit)
    first, second = record["rows"][0]["outputs"]
    assert first["finish_reason"] in ("length", "stop")
    assert second["finish_reason"] == "error"
    assert second["error"]


def test_planning_costs_the_same_at_any_context_length(tmp_path: Path) -> None:
    """Counts blocks, not seconds: at both lengths, exactly the requests whose block is full get a new one."""
    arguments = ["batch_sizes=[32]", "context_lengths=[64,1024]", "steps=32", "shared_prefix_tokens=32"]
    record = run_it(tmp_path, "experiment=bench_scheduler", *arguments)
    short, long = (row["scheduler"] for row in record["rows"])
    assert short["blocks_allocated_per_step"] == long["blocks_allocated_per_step"] == 32 / 16
    assert set(long["plan_ms"]) == {"mean", "p50", "p95", "p99"}
    assert record["rows"][1]["cache"]["hit_rate"] > 0


def test_attention_kernels_are_timed_beside_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "shapes=[4/2/32]",
        "seqs=[2]",
        "contexts=[50]",
        "chunk=8",
        "formats=[bf16,int8]",
        "repeats=2",
        "ops=[decode,extend,append]",
    ]
    record = run_it(tmp_path, "experiment=bench_attention", *arguments)
    kernels = [row["kernel"] for row in record["rows"]]
    assert [(k["op"], k["format"]) for k in kernels] == [
        (op, fmt) for op in ("decode", "extend", "append") for fmt in ("bf16", "int8")
    ]
    for k in kernels:
        assert k["tokens_per_s"] == pytest.approx((16 if k["op"] == "append" else 100) / k["ms"] * 1e3)
        assert k["fraction_of_read_bandwidth"] > 0
        assert ("speedup_vs_sdpa" in k) == (k["op"] != "append")
    assert kernels[0]["gb_per_s"] * kernels[0]["ms"] == pytest.approx(100 * 2 * 2 * 32 * 2 / 1e6)
    assert "4/2/32" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["shapes=[9/2/64]", "formats=[int9]", "chunk=9000", "instruction_set=sse9"])
def test_attention_kernels_with_wrong_settings(wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["experiment=bench_attention", wrong, f"hydra.run.dir={tmp_path / 'run'}"]) == 2
    assert wrong.split("=")[1].strip("[]") in capsys.readouterr().err


def test_engine_speed_is_measured_in_turn_with_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["cases=[1x20,3x40]", "quantizers=[none,int8]", "output_tokens=4", "repeats=2", "baseline=transformers"]
    record = run_it(tmp_path, "experiment=bench_engine", *TINY, *arguments)
    assert [(r["case"]["requests"], r["case"]["prompt_tokens"], r["label"]) for r in record["rows"]] == [
        (requests, tokens, label) for requests, tokens in ((1, 20), (3, 40)) for label in ("none", "int8", "transformers")
    ]
    for row in record["rows"]:
        speed = row["speed"]
        assert speed["prefill_tokens_per_s"] > 0
        assert len(speed["runs_decode_tokens_per_s"]) == 2
        assert ("decode_speedup_vs_transformers" in speed) == (row["label"] != "transformers")
    assert record["rows"][4]["policy"]["scales"].startswith("calibrated in memory")
    assert record["rows"][4]["memory"]["capacity_tokens"] >= 3 * 44
    assert "3x40" in capsys.readouterr().out


def test_frontier_sorts_by_bits_names_the_best_per_budget_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = "[int8,{quantizer: int4, method: mse},{quantizer: {name: kivi, bits: 2}, block_size: 32},rotated]"
    small = [
        "documents=2",
        "tokens_per_document=80",
        "calibration_documents=2",
        "calibration={name: briefs}",
        f"settings={settings}",
    ]
    arguments = ["experiment=frontier", *TINY, *small]
    record = run_it(tmp_path / "a", *arguments)
    rows = {row["label"]: row for row in record["rows"]}
    assert list(rows) == ["int8", "int4 mse", "kivi(bits=2) block 32", "rotated"]
    assert rows["kivi(bits=2) block 32"]["policy"]["block_size"] == 32
    assert rows["int4 mse"]["policy"]["scales"] == "mse: 2 documents of briefs"
    assert all(row["accuracy"]["tokens_scored"] == 2 * 79 and row["accuracy"]["kl_divergence"] > 0 for row in rows.values())
    assert rows["int8"]["accuracy"]["kl_divergence"] < rows["rotated"]["accuracy"]["kl_divergence"]
    assert (tmp_path / "a" / "frontier.png").stat().st_size > 1000
    out = capsys.readouterr().out
    assert "up to 8.13 bits: int8" not in out, "D 16: V of int8 takes 9 bits, int8 8.5 on average"
    assert "up to" in out

    sums = json.loads((tmp_path / "a" / "sums.json").read_text())
    sums["done"] = 1
    for accuracy in (sums["none"], *sums["settings"].values()):
        for name in ("tokens", "nll", "baseline_nll", "kl"):
            accuracy[name] = accuracy[name][:1]
    (tmp_path / "a" / "sums.json").write_text(json.dumps(sums))
    again = run_it(tmp_path / "b", *arguments, f"resume={tmp_path / 'a'}")
    for row in again["rows"]:
        assert row["accuracy"]["kl_divergence"] == pytest.approx(rows[row["label"]]["accuracy"]["kl_divergence"], rel=1e-6)
    assert run.main([*arguments, "tokens_per_document=70", f"resume={tmp_path / 'a'}", f"hydra.run.dir={tmp_path / 'c'}"]) == 2


def test_generate_keeps_what_it_made_whatever_the_prompts_look_like(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["quantizer=none", 'prompts=["","ends like markup [/INST]"]', "sampling.max_tokens=3", "sampling.ignore_eos=true"]
    record = run_it(tmp_path, "experiment=generate", *TINY, *arguments)
    assert [o["finish_reason"] for o in record["rows"][0]["outputs"]] == ["error", "length"]
    out = capsys.readouterr().out
    assert "the prompt is empty" in out
    assert "[/INST]" in out


@pytest.mark.parametrize(
    "experiment", [["compare", "quantizers=[none,fp8]"], ["generate", "quantizer=int8_token", 'prompts=["a"]']]
)
def test_a_scale_file_that_nobody_would_use_is_an_error(
    experiment: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scales.safetensors"
    ScaleFile({"layers.0.k_scale": torch.ones(2, 16)}, {"quantizer": "int8"}).save(path)
    name, *rest = experiment
    assert run.main([f"experiment={name}", *rest, *TINY, f"scales={path}", f"hydra.run.dir={tmp_path / 'run'}"]) != 0
    assert "was made for quantizer 'int8', which is not among" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "forwards"), [([], ["fused", "transformers"]), (["model.dtype=float64"], ["transformers"])]
)
def test_a_step_without_attention_is_timed_fused_and_not(tmp_path: Path, overrides: list[str], forwards: list[str]) -> None:
    record = run_it(tmp_path, "experiment=bench_frame", *TINY, "tokens=[1,70]", "repeats=2", *overrides)
    assert [(row["frame"]["tokens"], row["frame"]["forward"]) for row in record["rows"]] == [
        (T, f) for T in (1, 70) for f in forwards
    ]
    assert all(row["frame"]["wall_ms"] >= row["frame"]["wall_ms_min"] > 0 for row in record["rows"])
