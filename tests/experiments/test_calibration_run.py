"""The calibration command: a scale file that an engine takes; killed, resumed, merged; damaged files."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from calibration import merge, run
from calibration.fitting import search
from calibration.fitting.gather import gather
from calibration.fitting.statistics import Statistics, statistics_path
from qkv.engine import Engine
from qkv.errors import ScaleError
from qkv.models import load_model
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.scales import ScaleFile
from tests.engine.support import tokens
from tests.engine.tiny_models import tiny_model

ROOT = Path(__file__).parents[2]
TINY = ["model=llama3-8b-tiny", "data=pydoc", "sample.documents=12", "sample.held_back=2", "sample.tokens=48", "logger=none"]


def calibrated(folder: Path, *arguments: str, name: str = "s") -> ScaleFile:
    out = folder / f"{name}.safetensors"
    assert run.main([*TINY, f"out={out}", f"hydra.run.dir={folder / 'run'}", *arguments]) == 0
    return ScaleFile.load(out)


@pytest.mark.parametrize(
    ("quantizer", "method"),
    [("int8", "absmax"), ("int8", "output"), ("int4", "percentile"), ("int4", "mse"), ("fp8", "mse"), ("fp8", "output")],
)
def test_an_engine_runs_on_the_scale_file(quantizer: str, method: str, tmp_path: Path) -> None:
    scales = calibrated(tmp_path, f"quantizer={quantizer}", f"method={method}")
    metadata = scales.metadata
    assert (metadata["quantizer"], metadata["method"], metadata["model"]) == (quantizer, method, "llama3-8b-tiny")
    assert metadata["documents"] == 12
    assert 12 * 20 < metadata["tokens"] <= 12 * 48
    assert metadata["coverage"] == {"layers": 3, "of": 3}
    assert {"format_version", "model_fingerprint", "quantizer_fields", "data_fingerprint", "versions", "date"} <= set(metadata)
    with Engine.create(model=load_model("llama3-8b-tiny"), quantizer=quantizer, scales=scales, num_blocks=16) as engine:
        (score,) = engine.score([[5, 6, 7, 8, 9]])
    assert score.logprobs.isfinite().all()
    assert not list(tmp_path.glob("*checkpoint*"))
    assert not list(tmp_path.glob("*.part"))


def test_narrower_methods_have_smaller_scales(tmp_path: Path) -> None:
    full, cut = (calibrated(tmp_path, "quantizer=int4", *a, name=a[0][-3:]) for a in (["method=absmax"], ["method=mse"]))
    scales = {name: scale for name, scale in full.tensors.items() if name.endswith("scale")}
    assert scales
    for name, scale in scales.items():
        assert (cut.tensors[name] <= scale * 1.0001).all()
        assert (cut.tensors[name] < scale * 0.99).any()


def test_shards_merge_to_exactly_what_one_run_gives(tmp_path: Path) -> None:
    """Statistics of both halves of the documents are merged and compared with those of the whole."""
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)][:20]
    for name, some in {"a": texts[:9], "b": texts[9:], "all": texts}.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in some), encoding="utf-8")
        arguments = ["data=jsonl", f"data.path={tmp_path / name}.jsonl", "sample.held_back=0", f"sample.documents={len(some)}"]
        calibrated(tmp_path, *arguments, "method=mse", "quantizer=int4", name=name)
    a, b, both = (tmp_path / f"{name}.safetensors" for name in ("a", "b", "both"))
    assert merge.main([str(a), str(b), "--out", str(both)]) == 0
    merged, whole = ScaleFile.load(both), ScaleFile.load(tmp_path / "all.safetensors")
    assert merged.tensors.keys() == whole.tensors.keys()
    assert all(torch.equal(merged.tensors[name], t) for name, t in whole.tensors.items())
    assert merged.metadata["documents"] == 20
    added, direct = Statistics.load(statistics_path(both)), Statistics.load(tmp_path / "all.stats.safetensors")
    for i, stats in direct.layers.items():
        assert all(torch.equal(added.layers[i][name], t) for name, t in stats.items())
    reverse, _ = merge.merge([b, a])
    assert reverse.fingerprint() == merged.fingerprint()
    assert reverse.metadata["data_fingerprint"] == merged.metadata["data_fingerprint"]


def test_files_that_do_not_merge_say_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calibrated(tmp_path, name="a")
    calibrated(tmp_path, "sink_tokens=2", name="b")
    calibrated(tmp_path, "method=output", name="c")
    a, b, c = (str(tmp_path / f"{name}.safetensors") for name in "abc")

    def refused(*files: str) -> str:
        assert merge.main([*files, "--out", str(tmp_path / "out.safetensors")]) == 1
        return capsys.readouterr().err

    assert "sink_tokens is 4 in one and 2 in the other" in refused(a, b)
    assert "would count twice" in refused(a, a)
    assert "method=output" in refused(c, a)
    assert "does not exist" in refused(str(tmp_path / "none.safetensors"), a)
    statistics_path(b).unlink()
    assert "has no statistics beside it" in refused(a, b)
    shutil.copy(a, statistics_path(b))
    assert "holds scales, not statistics" in refused(a, b)
    assert not (tmp_path / "out.safetensors").exists()


def start(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "calibration.run", *TINY, "checkpoint_every=1", "sample.documents=60", *arguments]
    command += [f"out={folder / 's.safetensors'}", f"hydra.run.dir={folder / 'run'}", "sample.held_back=0"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def documents_done(checkpoint: Path) -> int:
    return int(Statistics.load(checkpoint).metadata["done"]) if checkpoint.exists() else 0


def test_a_killed_calibration_resumes_and_gives_the_same_file(tmp_path: Path) -> None:
    """SIGKILL in the middle; at every moment the checkpoint is whole, and a good scale file stays as it was."""
    good, checkpoint = tmp_path / "s.safetensors", tmp_path / "s.checkpoint.safetensors"
    before = calibrated(tmp_path).fingerprint()
    process = start(tmp_path)
    try:
        deadline = time.monotonic() + 120
        while documents_done(checkpoint) < 3:  # reads it over and over while it is being replaced
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert ScaleFile.load(good).fingerprint() == before
    assert documents_done(checkpoint) >= 3
    resumed = start(tmp_path)
    _, err = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, err
    assert "resumed after" in err
    assert not checkpoint.exists()
    whole = calibrated(tmp_path, "sample.documents=60", "sample.held_back=0", name="whole")
    assert ScaleFile.load(good).fingerprint() == whole.fingerprint()


@pytest.mark.parametrize("spoil", ["half", "other settings", "no number"])
def test_a_checkpoint_that_cannot_be_continued_is_replaced(
    spoil: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = calibrated(tmp_path).fingerprint()
    checkpoint = tmp_path / "s.checkpoint.safetensors"
    statistics = Statistics.load(tmp_path / "s.stats.safetensors")
    statistics.metadata |= {"done": "three" if spoil == "no number" else 3}
    if spoil == "other settings":
        statistics.metadata["sink_tokens"] = 7
    statistics.save(checkpoint)
    if spoil == "half":
        checkpoint.write_bytes(checkpoint.read_bytes()[:-100])
    assert calibrated(tmp_path).fingerprint() == reference
    assert "starting anew" in capsys.readouterr().err
    assert not checkpoint.exists()


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str, code: int = 2) -> str:
    assert run.main([*TINY, f"hydra.run.dir={folder}", f"out={folder / 's.safetensors'}", *arguments]) == code
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["method=best"], "'best' is not allowed; Allowed: absmax, mse, output, percentile"),
        (["metod=mse"], "unknown key 'metod'; did you mean 'method'?"),
        (["percentile=10"], "percentile=10.0 is not allowed; it must be above 50 and at most 100"),
        (["sample.documents=0"], "documents=0 is not allowed"),
        (["sample.tokns=5"], "unknown key 'sample.tokns'; did you mean 'tokens'?"),
        (["quantizer=int8_token"], "int8_token has no static scales to calibrate; those that have: fp8"),
        (["data=jsonl"], "data.path is needed"),
        (["out=scales.bin"], "ends in .safetensors"),
    ],
)
def test_a_mistake_is_one_message(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert expected in refused(capsys, tmp_path, *arguments)


def test_a_folder_that_cannot_be_written_is_noticed_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot write scale file" in refused(capsys, tmp_path, f"out={tmp_path / 'file' / 's.safetensors'}", code=1)


def test_nothing_usable_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": null}\nbroken\n', encoding="utf-8")
    err = refused(capsys, tmp_path, "data=jsonl", f"data.path={tmp_path / 'a.jsonl'}")
    assert "no usable text is left; 0 of 3 rows used; skipped: 2 empty or null, 1 not JSON" in err


def test_statistics_are_not_mistaken_for_scales(tmp_path: Path) -> None:
    calibrated(tmp_path)
    with pytest.raises(ScaleError, match="quantizer 'None'"):
        ScaleFile.load(tmp_path / "s.stats.safetensors").validate([], "int8", "", [])


def test_help_shows_methods_and_examples(capsys: pytest.CaptureFixture[Any]) -> None:
    with pytest.raises(SystemExit):
        run.main(["--help"])
    out = capsys.readouterr().out
    assert "method=METHOD" in out
    assert "dialogues" in out
    assert "$" not in out


def test_the_readmes_command_reads_a_folder_of_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "documents").mkdir()
    for i in range(3):
        (tmp_path / "documents" / f"{i}.md").write_text(f"# Note {i}\n\n" + "Some words about it. " * (5 + i), encoding="utf-8")
    (tmp_path / "documents" / "empty.txt").write_text("")
    scales = calibrated(tmp_path, "data=text", f"data.path={tmp_path / 'documents'}", "sample.documents=2", "sample.held_back=1")
    assert scales.metadata["documents"] == 2
    assert "3 of 4 rows used; skipped: 1 empty or null" in capsys.readouterr().out


def test_values_of_1e5_are_calibrated_and_those_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    """One model has keys large enough to overflow float16, another has broken weights."""
    model = tiny_model("qwen2")
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.bias[3] = 1e5
    with Engine.create(model, num_blocks=16) as engine:
        statistics = gather(engine, [tokens(1, 40)], 4, tmp_path / "c.safetensors", 4)
        shapes = engine.layers
    for spec in ("int8", "int4", "fp8"):
        quantizer = QUANTIZERS.build(spec)
        for method in ("absmax", "percentile", "mse"):
            scales = search.tensors(quantizer, statistics.layers, shapes, method, 99.0)
            fixed = search.bound(quantizer, scales, shapes)
            k = torch.zeros(2, 2, 16)
            k[0, 0, 3] = 1e5
            assert fixed.decode(fixed.encode(k, "k", 0), "k", 0, torch.float32).isfinite().all()
    with torch.no_grad():
        model.model.layers[2].self_attn.v_proj.weight[0, 0] = torch.nan
    with Engine.create(model, num_blocks=16) as engine, pytest.raises(ScaleError, match=r"layer 2: .*not finite"):
        gather(engine, [tokens(1, 40)], 4, tmp_path / "d.safetensors", 4)
