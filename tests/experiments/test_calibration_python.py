"""calibration.calibrate: texts to a scale file without a command line, and the same scales that the command finds."""

from pathlib import Path

import pytest
import torch

from calibration import calibrate
from experiments import run
from qkv.engine import Engine
from qkv.errors import ConfigError
from qkv.scales import ScaleFile
from qkv.types import SamplingParams

TEXTS = [f"Account {n} was opened in {1900 + n} and holds {n * 7} euros." for n in range(30)]


@pytest.fixture(scope="module")
def scales() -> ScaleFile:
    return calibrate("llama3-8b-tiny", TEXTS, quantizer="int8", tokens=64)


def test_an_engine_takes_what_it_returns(scales: ScaleFile) -> None:
    with Engine.create(model="llama3-8b-tiny", quantizer="int8", scales=scales, num_blocks=16) as engine:
        (output,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(output.token_ids) == 4
    assert scales.metadata["documents"] == 30


def test_it_finds_the_scales_of_the_command(scales: ScaleFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for n, text in enumerate(TEXTS):
        (tmp_path / f"{n}.txt").write_text(text)
    command = ["experiment=calibrate", "model=llama3-8b-tiny", "data=text", f"data.path={tmp_path}", "quantizer=int8"]
    command += ["sample.tokens=64", "sample.held_back=0", "logger=none", "out=s.safetensors", f"hydra.run.dir={tmp_path / 'run'}"]
    assert run.main(command) == 0
    file = ScaleFile.load("s.safetensors")
    assert file.tensors.keys() == scales.tensors.keys()
    assert all(torch.equal(file.tensors[name], scales.tensors[name]) for name in file.tensors)
    assert {k for k in file.metadata if k not in scales.metadata} <= {"format_version", "check"}


@pytest.mark.parametrize("method", ["percentile", "mse", "output"])
def test_every_method_gives_scales_within_absmax(method: str, scales: ScaleFile) -> None:
    file = calibrate("llama3-8b-tiny", TEXTS[:8], method=method, tokens=64)  # type: ignore[arg-type]
    assert file.metadata["method"] == method
    whole = calibrate("llama3-8b-tiny", TEXTS[:8], tokens=64)
    assert all(bool((file.tensors[n] <= whole.tensors[n]).all()) for n in file.tensors)


def test_one_string_is_refused_and_so_is_a_quantizer_without_scales() -> None:
    with pytest.raises(ConfigError, match="give a list of documents"):
        calibrate("llama3-8b-tiny", TEXTS[0])
    with pytest.raises(ConfigError, match="int8_token has no static scales"):
        calibrate("llama3-8b-tiny", TEXTS, quantizer="int8_token")
