"""What calibration finds: planted outliers in the report, drift's verdict, the cross-domain matrix, exchange of fp8 scales."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from calibration import drift, exchange, run
from calibration.fitting import histogram, search
from calibration.fitting.collect import FULL, Collector
from calibration.fitting.diagnose import diagnose
from calibration.fitting.gather import observed
from calibration.fitting.output import OutputErrors
from calibration.fitting.saturation import Saturation
from experiments import run as experiments_run
from experiments.measuring.divergence import Accuracy
from experiments.studies.drift import judge
from qkv.engine import Engine
from qkv.errors import ScaleError
from qkv.layout import SIDES, LayerShape
from qkv.models import load_model
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.scales import ScaleFile
from tests.engine.support import tokens
from tests.engine.tiny_models import tiny_model

TINY = ["model=llama3-8b-tiny", "data=pydoc", "logger=none", "sample.documents=8", "sample.held_back=4", "sample.tokens=48"]
LAYER, HEAD, CHANNEL = 1, 1, 7


def with_outlier(size: float) -> Any:
    """A tiny Qwen2 whose keys have one channel `size` times the others, as the biases of Qwen2 make them: in the RoPE pair that
    hardly turns, of one head. The query's part there is scaled down, so that attention does not only follow the outlier."""
    model = tiny_model("qwen2", max_position_embeddings=512, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    attention = model.model.layers[LAYER].self_attn
    with torch.no_grad():
        attention.k_proj.bias[HEAD * 16 + CHANNEL] = size
        for query_head in range(2):
            attention.q_proj.weight[(2 * HEAD + query_head) * 16 + CHANNEL] *= 0.02
            attention.q_proj.bias[(2 * HEAD + query_head) * 16 + CHANNEL] *= 0.02
    return model


def test_a_planted_outlier_channel_stands_out_and_per_token_keys_fail() -> None:
    documents = [tokens(seed, 60) for seed in range(4)]
    int8 = QUANTIZERS.build("int8")
    with Engine.create(with_outlier(100.0), num_blocks=32, enable_prefix_caching=False) as engine:
        stats = observed(engine, documents, 4).layers
        found = diagnose(engine, stats, int8, search.tensors(int8, stats, engine.layers, "absmax", 100.0), documents[:2])
    entry = found["layers"][LAYER]
    (outlier,) = entry["outliers"]
    assert (outlier["head"], outlier["channel"]) == (HEAD, CHANNEL)
    assert outlier["ratio"] > 30
    assert all(not e["outliers"] for e in found["layers"] if e["layer"] != LAYER)
    assert entry["output_error_int8_token_k"][HEAD] > 4 * entry["output_error_int8_channel_k"][HEAD]
    lines = " ".join(found["suggestions"]["lines"])
    assert f"the largest in layer {LAYER}, head {HEAD}, channel {CHANNEL}" in lines
    assert f"at worst layer {LAYER}, head {HEAD}" in lines
    assert "do not use per-token keys here" in lines
    json.dumps(found, allow_nan=False)


def test_without_outliers_the_report_says_so() -> None:
    int8, documents = QUANTIZERS.build("int8"), [tokens(0, 40)]
    with Engine.create(tiny_model("llama"), num_blocks=32, enable_prefix_caching=False) as engine:
        stats = observed(engine, documents, 4).layers
        found = diagnose(engine, stats, int8, search.tensors(int8, stats, engine.layers, "absmax", 100.0), documents)
    assert not any(e["outliers"] for e in found["layers"])
    assert "outlier" not in " ".join(found["suggestions"]["lines"])


def test_report_and_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "s.safetensors"
    assert run.main([*TINY, f"out={out}", f"hydra.run.dir={tmp_path / 'run'}", "quantizer=int4"]) == 0
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert report["accuracy"]["kl_divergence"] > 0
    assert report["accuracy"]["fraction_read_from_cache"] == 1.0
    assert report["memory"]["effective_bits_k"] == 4.0
    assert [e["layer"] for e in report["layers"]] == [0, 1, 2]
    page = (tmp_path / "run/report.html").read_text()
    assert page.count("data:image/png;base64,") == 4
    assert "src='http" not in page
    assert 'href="http' not in page
    record = json.loads((tmp_path / "run/record.json").read_text())
    assert record["rows"][0]["calibration"]["method"] == "absmax"
    check = ScaleFile.load(out).metadata["check"]
    assert check["kl_divergence"] == report["accuracy"]["kl_divergence"]
    assert set(check["saturation"]) == {"0", "1", "2"}
    shown = capsys.readouterr().out
    assert "tokens held back, read through the cache: KL" in shown
    assert "report.html" in shown


def test_no_held_back_documents_is_no_check_but_a_report(tmp_path: Path) -> None:
    arguments = [*TINY, f"out={tmp_path / 's.safetensors'}", f"hydra.run.dir={tmp_path / 'run'}", "sample.held_back=0"]
    assert run.main(arguments) == 0
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert "accuracy" not in report
    assert report["memory"]["effective_bits_k"] == 8.0


def accuracy(kl: list[float]) -> Accuracy:
    return Accuracy(tokens=[100] * len(kl), nll=[0.0] * len(kl), baseline_nll=[0.0] * len(kl), kl=kl)


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ([1.0, 1.1, 0.9], [1.0, 1.1, 0.9], "keep"),
        ([2.0, 2.2, 1.9], [1.0, 1.1, 0.9], "recalibrate"),
        ([1.1, 1.2, 1.0], [1.0, 1.1, 0.9], "keep"),  # surely worse, but by too little
        ([9.0, 0.1, 0.1], [1.0, 1.1, 0.9], "keep"),  # by much, but one document did it
        ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], "keep"),
    ],
)
def test_the_verdict_needs_a_difference_that_is_large_and_sure(old: list[float], new: list[float], verdict: str) -> None:
    found = judge(accuracy(old), accuracy(new), gain=1.25, sigmas=2.0)
    assert found["verdict"] == verdict
    assert "recalibrate when it is above 1.25 times and above 2 standard errors" in found["why"]


def test_drift_keeps_a_file_that_fits_and_drops_one_that_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "s.safetensors"
    assert run.main([*TINY, f"out={out}", f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    judged = [*TINY, "sample.held_back=6", f"hydra.run.dir={tmp_path / 'drift'}"]
    assert drift.main([*judged, f"scales={out}"]) == 0
    record = json.loads((tmp_path / "drift/record.json").read_text())
    assert record["rows"][0]["drift"]["verdict"] == "keep"
    scales = ScaleFile.load(out)
    scales.tensors = {name: t / 4 for name, t in scales.tensors.items()}  # a range that no longer holds what comes
    scales.save(out)
    capsys.readouterr()
    assert drift.main([*judged, f"scales={out}"]) == 0
    shown = capsys.readouterr().out
    assert "verdict: recalibrate" in shown
    row = json.loads((tmp_path / "drift/record.json").read_text())["rows"][0]
    assert min(e["reach"]["k"] for e in row["drift"]["layers"]) > 2
    assert min(e["saturation"]["k"] for e in row["drift"]["layers"]) > 0.05


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("truncated", "is not a readable scale file"),
        ("missing", "is not a file"),
        ("wrong model", "belongs to another model"),
        ("missing layer", "layer 2: k_scale is missing"),
        ("zero", r"layer 1: k_scale holds 0.0"),
        ("nan", r"layer 1: k_scale holds nan"),
    ],
)
def test_a_damaged_file_has_its_own_message(
    damage: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.safetensors"
    tensors = {f"layers.{i}.k_scale": torch.full((2, 16), 0.05) for i in range(3)}
    metadata = {
        "quantizer": "int8",
        "quantizer_fields": {},
        "model": "x",
        "model_fingerprint": load_model(TINY[0][6:]).fingerprint,
    }
    if damage == "wrong model":
        metadata["model_fingerprint"] = "0" * 32
    if damage == "missing layer":
        del tensors["layers.2.k_scale"]
    if damage in ("zero", "nan"):
        tensors["layers.1.k_scale"][0, 3] = float(damage) if damage == "nan" else 0.0
    ScaleFile(tensors, metadata).save(path)
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-9])
    if damage == "missing":
        path.unlink()
    assert drift.main([*TINY, f"scales={path}", f"hydra.run.dir={tmp_path / 'run'}"]) in (1, 2)
    err = capsys.readouterr().err
    assert message in err
    assert err.count("error:") == 1
    assert "Traceback" not in err


def test_calibration_matrix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "digits.jsonl").write_text("\n".join(json.dumps({"t": f"{i} {i * i} " * 9}) for i in range(30)))
    sources = f"sources=[pydoc,{{name: jsonl, path: {tmp_path / 'digits.jsonl'}}}]"
    arguments = ["experiment=calibration_matrix", *TINY, sources, "quantizer=int4", f"hydra.run.dir={tmp_path / 'run'}"]
    assert experiments_run.main(arguments) == 0
    record = json.loads((tmp_path / "run/record.json").read_text())
    assert [r["label"] for r in record["rows"]] == ["pydoc -> pydoc", "jsonl -> pydoc", "pydoc -> jsonl", "jsonl -> jsonl"]
    assert all(r["accuracy"]["kl_divergence"] > 0 for r in record["rows"])
    assert (tmp_path / "run/calibration_matrix.png").stat().st_size > 1000
    assert "worst row / diagonal" in capsys.readouterr().out


def fp8_scales() -> ScaleFile:
    tensors = {f"layers.{i}.{side}_scale": torch.rand(2) + 0.1 for i in (0, 1) for side in "kv"}
    fields = {"format": "e4m3"}
    return ScaleFile(tensors, {"quantizer": "fp8", "quantizer_fields": fields, "model": "m", "model_fingerprint": "f"})


LAYERS = [LayerShape(index=i, H=2, Hq=4, Dk=16, Dv=16, scaling=0.25) for i in (0, 1)]


def test_fp8_scales_survive_the_round_trip_through_vllms_names(tmp_path: Path) -> None:
    scales, path = fp8_scales(), tmp_path / "kv.safetensors"
    exported = exchange.export(scales, "head")
    assert set(exported) == {f"model.layers.{i}.self_attn.{side}_scale" for i in (0, 1) for side in "kv"}
    save_file(exported, path)
    back = exchange.import_scales(path, LAYERS, "m", "f")
    assert all(torch.equal(back.tensors[name], t) for name, t in scales.tensors.items())
    coarse = exchange.export(scales, "tensor")
    assert {tuple(t.shape) for t in coarse.values()} == {(1,)}
    assert coarse["model.layers.0.self_attn.k_scale"] == scales.tensors["layers.0.k_scale"].max()
    save_file(coarse, path)
    again = exchange.import_scales(path, LAYERS, "m", "f")
    assert all(torch.equal(t, scales.tensors[name].amax().expand(2)) for name, t in again.tensors.items())


@pytest.mark.parametrize("pattern", ["self_attn.attn.{}_scale", "self_attn.{}_proj.{}_scale", "self_attn.{}_proj.output_scale"])
def test_other_names_of_the_same_scales_are_read(pattern: str, tmp_path: Path) -> None:
    tensors = {f"model.layers.{i}.{pattern.format(s, s)}": torch.tensor([[[0.5]], [[0.25]]]) for i in (0, 1) for s in "kv"}
    save_file(tensors | {"model.layers.0.mlp.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    config = {"quantization_config": {"kv_cache_scheme": {"type": "float", "num_bits": 8}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    scales = exchange.import_scales(tmp_path, LAYERS, "m", "f")
    assert scales.tensors["layers.1.v_scale"].tolist() == [0.5, 0.25]
    assert scales.metadata["method"] == "imported"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.clear(), "holds no k or v scales"),
        (lambda t: t.pop("model.layers.1.self_attn.v_scale"), "layer 1: v_scale is missing"),
        (lambda t: t.update({"model.layers.0.self_attn.k_scale": torch.ones(3)}), "it must hold one scale, or one per kv head"),
        (lambda t: t.update({"model.layers.0.self_attn.k_scale": torch.zeros(1)}), "layer 0: k_scale holds 0.0"),
        (lambda t: t.update({"model.layers.9.self_attn.k_scale": torch.ones(1)}), "belongs to no attention layer"),
    ],
)
def test_a_checkpoint_without_usable_scales_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    tensors = exchange.export(fp8_scales(), "tensor")
    change(tensors)
    save_file(tensors, tmp_path / "kv.safetensors")
    with pytest.raises(ScaleError, match=message):
        exchange.import_scales(tmp_path / "kv.safetensors", LAYERS, "m", "f")


def test_what_cannot_be_exchanged_is_refused(tmp_path: Path) -> None:
    scales = fp8_scales()
    scales.metadata["quantizer"] = "int8"
    with pytest.raises(ScaleError, match="only fp8 scales"):
        exchange.export(scales, "head")
    config = {"quantization_config": {"kv_cache_scheme": {"type": "int", "num_bits": 8}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ScaleError, match="8-bit int codes"):
        exchange.import_scales(tmp_path, LAYERS, "m", "f")


def test_histograms_add_up_and_their_quantiles_are_close() -> None:
    x = torch.randn(4000, 2, 3) * torch.tensor([1e-3, 1.0, 3e4])
    whole = histogram.count(x)
    assert torch.equal(whole, histogram.count(x[:1500]) + histogram.count(x[1500:]))
    assert (whole.sum(-1) == 4000).all()
    for share in (0.001, 0.5, 0.99):
        exact = x.quantile(share, 0)
        spread = x.std(0)
        assert ((histogram.quantile(whole, share) - exact).abs() < 0.06 * exact.abs() + 0.02 * spread).all()
    assert histogram.count(torch.tensor([[0.0], [1e9], [-1e9], [float("inf")], [float("nan")]])).sum() == 5
    points, weights = histogram.points(whole)
    energy = (points[:, None, None] ** 2 * weights).sum(0)
    torch.testing.assert_close(energy, x.square().sum(0), rtol=0.02, atol=0)


def test_squared_error_without_sinks_would_wreck_them() -> None:
    """One sink token per document is 20 times as large as the others. The rule does not clip it, but clips other large values."""
    layer, int4 = LayerShape(index=0, H=1, Hq=1, Dk=8, Dv=8, scaling=1.0), QUANTIZERS.build("int4")
    x = torch.randn(5000, 1, 8)
    x[:1] = 20.0

    def largest_kept(sink_tokens: int) -> float:
        collector = Collector(FULL, sink_tokens)
        collector(0, x, x, x)
        fixed = search.bound(int4, search.tensors(int4, collector.stats, [layer], "mse", 100.0), [layer])
        return float(fixed.decode(fixed.encode(x[:1], "k", 0), "k", 0, torch.float32).amin())

    assert largest_kept(1) > 19
    assert largest_kept(0) < 18


def test_saturation_counts_what_falls_outside() -> None:
    layer, int8 = LayerShape(index=3, H=2, Hq=2, Dk=8, Dv=8, scaling=1.0), QUANTIZERS.build("int8")
    fixed = search.bound(int8, {"layers.3.k_scale": torch.full((2, 8), 1 / 127)}, [layer])
    seen = Saturation([layer], fixed)
    x = torch.full((4, 2, 8), 0.5)
    x[0, 0, 0], x[1, 1, 3] = 3.0, -1.002
    seen(3, x, x, x)
    fit = seen.fits[3]["k"]
    assert (fit.elements, fit.outside) == (64, 1)
    assert fit.reach == pytest.approx(3.0)
    assert "v" not in seen.fits[3]


def test_output_errors_are_those_of_attention() -> None:
    layer, int8 = LayerShape(index=0, H=2, Hq=4, Dk=8, Dv=8, scaling=0.5, window=5), QUANTIZERS.build("int8_token")
    int8.bind([layer], None, torch.float32, torch.device("cpu"))
    q, k, v = torch.randn(20, 4, 8), torch.randn(20, 2, 8), torch.randn(20, 2, 8)
    seen = OutputErrors([layer], [("kv", int8)])
    seen(0, q, k, v)

    def attention(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(20, 20, dtype=torch.bool).tril() & ~torch.ones(20, 20, dtype=torch.bool).tril(-5)
        k, v = (t.repeat_interleave(2, 1).transpose(0, 1) for t in (keys, values))
        return torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=mask, scale=0.5)

    stored = [int8.decode(int8.encode(x, side, 0), side, 0, torch.float32) for side, x in zip(SIDES, (k, v), strict=True)]
    error = (attention(*stored) - attention(k, v)).square().unflatten(0, (2, 2)).sum((1, 2, 3))
    torch.testing.assert_close(seen.errors[0][0], error.double(), rtol=1e-3, atol=0)
    assert seen.relative(0).shape == (1, 2)


@pytest.mark.parametrize("settings", [["method=output"], ["quantizer.tail_blocks=1"]], ids=["token", "block"])
def test_protected_calibrates_and_drifts_like_what_it_wraps(settings: list[str], tmp_path: Path) -> None:
    out, given = tmp_path / "s.safetensors", ["quantizer=protected", "quantizer.layers=[0]", *settings]
    assert run.main([*TINY, f"out={out}", f"hydra.run.dir={tmp_path / 'run'}", *given]) == 0
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert [bool(e["saturation"]) for e in report["layers"]] == [False, True, True], "layer 0 has no static scales"
    assert ("output_error" in report["layers"][0]) == (settings == ["method=output"])
    assert drift.main([*TINY, f"scales={out}", f"hydra.run.dir={tmp_path / 'drift'}"]) == 0
    assert json.loads((tmp_path / "drift/record.json").read_text())["rows"][0]["policy"]["quantizer"] == "protected"
