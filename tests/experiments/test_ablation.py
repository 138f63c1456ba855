"""The ablation at toy size, and its error measures where the answer is known."""

import json
from pathlib import Path

import pytest
import torch

from experiments import run
from experiments.studies.ablation import Grid, errors
from qkv.layout import LayerShape
from qkv.policies.quantizer.base import QUANTIZERS

SHAPE = LayerShape(index=0, H=2, Hq=4, Dk=16, Dv=16, scaling=0.25)


def test_every_finding_has_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["documents=2", "tokens_per_document=96", "short_tokens=24", "block_size=8", "window_blocks=2"]
    sizes += ["calibration_documents=2", "calibration.name=pydoc", "error_documents=1"]
    arguments = ["experiment=ablation", "model=llama3-8b-tiny", "attention=reference", *sizes, f"hydra.run.dir={tmp_path}"]
    assert run.main(arguments) == 0
    record = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    rows = {row["label"]: row["ablation"] for row in record["rows"]}
    named = ["K error", "score error", "V error", "best axes", "worse axis", "static K scales", "sinks", "raw window", "reads"]
    assert list(rows) == named
    for label, row in rows.items():
        assert set(row) == {"finding", "source", "published", "published_unit", "unit", "ours", "agrees"}, label
        assert all(value > -1e-6 for value in row["ours"].values()), label
    assert rows["raw window"]["ours"]["24 tokens"] == pytest.approx(100.0, abs=1e-3)
    assert rows["raw window"]["ours"]["96 tokens"] < 100.0
    assert abs(rows["reads"]["ours"]["raw"]) < 1e-6
    assert rows["reads"]["ours"]["cache"] > 0.001
    assert rows["reads"]["agrees"]
    assert len(set(rows["best axes"]["ours"].values())) == 4
    assert (tmp_path / "ablation.png").stat().st_size > 1000
    assert "agrees" in capsys.readouterr().out
    assert "grid" not in QUANTIZERS.names()


def test_the_raw_window_must_hold_the_short_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["experiment=ablation", "model=llama3-8b-tiny", "short_tokens=500", f"hydra.run.dir={tmp_path}"]
    assert run.main(arguments) == 2
    assert "short_tokens" in capsys.readouterr().err


def test_one_loud_channel_of_k_spoils_every_row_but_only_its_own_column() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(64, 4, 16, generator=generator)
    k, v = torch.randn(64, 2, 16, generator=generator), torch.randn(64, 2, 16, generator=generator)
    k[..., 3] = 100 + k[..., 3]
    found = errors(q, k, v, SHAPE, 4, 16)
    assert found["scores channel"] < 0.5 * found["scores token"]
    assert found["output channel"] < 0.1  # V has no loud channel


def test_more_bits_mean_smaller_errors() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(40, H, 16, generator=generator) for H in (4, 2, 2))
    two, four = errors(q, k, v, SHAPE, 2, 16), errors(q, k, v, SHAPE, 4, 16)
    assert set(two) == {f"{what} {axis}" for what in ("k", "scores", "output") for axis in ("token", "channel")}
    assert all(four[key] < 0.5 * two[key] for key in two)
    assert Grid("token", "channel").k == "token"
