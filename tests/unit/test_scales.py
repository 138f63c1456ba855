"""A scale file is loaded, or loading fails with the layer and the cause."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qkv.errors import ScaleError
from qkv.layout import LayerShape
from qkv.scales import ScaleFile, StaticTensor

LAYERS = [LayerShape(index=i, H=2, Hq=4, Dk=8, Dv=6, scaling=1.0) for i in (0, 3)]
SCALES = [
    StaticTensor("k", "scale", ("H", "D"), ("channel_absmax",), torch.clone, positive=True),
    StaticTensor("v", "scale", ("H",), ("head_absmax",), torch.clone, positive=True),
]
TABLE = StaticTensor("v", "table", (4,), ("histogram",), torch.clone)


def good() -> ScaleFile:
    tensors = {f"layers.{la.index}.k_scale": torch.rand(la.H, la.Dk) + 0.1 for la in LAYERS}
    tensors |= {f"layers.{la.index}.v_scale": torch.rand(la.H) + 0.1 for la in LAYERS}
    return ScaleFile(
        tensors, {"quantizer": "q", "quantizer_fields": {"bits": 8}, "model": "m", "model_fingerprint": "abc", "tokens": 5}
    )


def test_save_and_load_keep_everything(tmp_path: Path) -> None:
    scales = good()
    scales.save(tmp_path / "new folder" / "s.safetensors")
    back = ScaleFile.load(tmp_path / "new folder" / "s.safetensors")
    assert back.metadata == scales.metadata | {"format_version": 1}
    assert back.tensors.keys() == scales.tensors.keys()
    assert all(torch.equal(back.tensors[n], t) for n, t in scales.tensors.items())
    assert back.fingerprint() == scales.fingerprint()
    back.validate(LAYERS, "q", "abc", SCALES)
    assert back.warnings == []
    assert [p.name for p in (tmp_path / "new folder").iterdir()] == ["s.safetensors"]


def change(name: str, value: torch.Tensor | None) -> Callable[[ScaleFile], None]:
    def apply(scales: ScaleFile) -> None:
        if value is None:
            del scales.tensors[name]
        else:
            scales.tensors[name] = value

    return apply


def spoil(value: float) -> Callable[[ScaleFile], None]:
    def apply(scales: ScaleFile) -> None:
        scales.tensors["layers.3.k_scale"][1, 2] = value

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change("layers.3.k_scale", None), r"layer 3: k_scale is missing"),
        (change("layers.0.v_scale", None), r"layer 0: v_scale is missing"),
        (spoil(float("nan")), r"layer 3: k_scale holds nan \(1 of 16 values\); it must be finite and positive"),
        (spoil(float("inf")), r"layer 3: k_scale holds inf"),
        (spoil(0.0), r"layer 3: k_scale holds 0\.0"),
        (spoil(-1.0), r"layer 3: k_scale holds -1\.0"),
        (
            change("layers.3.k_scale", torch.ones(2, 9)),
            r"layer 3: k_scale has shape \[2, 9\], .* need \[2, 8\]",
        ),
        (change("layers.3.k_scale", torch.ones(4, 8)), r"layer 3: k_scale has shape \[4, 8\]"),
        (change("layers.1.k_scale", torch.ones(2, 8)), r"layer 1 is not an attention layer of this model"),
        (change("layers.0.q_scale", torch.ones(2)), r"layer 0: .* reads no q_scale; it reads k_scale, v_scale"),
        (change("layers.3.k_zero", torch.ones(2, 8)), r"layer 3: .* reads no k_zero"),
        (change("weights.0", torch.ones(2)), r"unknown tensor 'weights\.0'"),
        (lambda s: s.tensors.clear(), "holds no tensors"),
        (
            lambda s: s.metadata.update(model_fingerprint="xyz", model="other"),
            r"another model: .*'other'.*xyz.*abc",
        ),
        (lambda s: s.metadata.pop("model_fingerprint"), "another model"),
        (lambda s: s.metadata.update(quantizer="fp8"), "made for quantizer 'fp8', not 'q'"),
    ],
)
def test_bad_scales_raise_naming_layer_and_cause(damage: Callable[[ScaleFile], None], message: str) -> None:
    scales = good()
    damage(scales)
    with pytest.raises(ScaleError, match=message) as error:
        scales.validate(LAYERS, "q", "abc", SCALES)
    assert "\n" not in str(error.value)


def test_tensors_that_are_no_scales_may_be_negative_but_not_nan_and_have_the_declared_shape() -> None:
    scales, declared = good(), [*SCALES, TABLE]
    for la in LAYERS:
        scales.tensors[f"layers.{la.index}.v_table"] = torch.linspace(-2, 1, 4)
    scales.validate(LAYERS, "q", "abc", declared)
    assert scales.tensor(LAYERS[1], TABLE).tolist() == [-2, -1, 0, 1]
    scales.tensors["layers.0.v_table"][0] = torch.nan
    with pytest.raises(ScaleError, match="layer 0: v_table holds nan"):
        scales.validate(LAYERS, "q", "abc", declared)
    scales.tensors["layers.0.v_table"] = torch.ones(8)
    with pytest.raises(ScaleError, match=r"layer 0: v_table has shape \[8\], .* need \[4\]"):
        scales.validate(LAYERS, "q", "abc", declared)
    del scales.tensors["layers.0.v_table"]
    with pytest.raises(ScaleError, match="layer 0: v_table is missing"):
        scales.validate(LAYERS, "q", "abc", declared)


def test_scales_of_exactly_one_everywhere_are_a_warning() -> None:
    scales = good()
    for t in scales.tensors.values():
        t.fill_(1.0)
    scales.validate(LAYERS, "q", "abc", SCALES)
    assert "1.0" in scales.warnings[0]


@pytest.mark.parametrize("content", [None, b"", b"not a scale file", b'\x10\x00\x00\x00\x00\x00\x00\x00{"a": 1} garbage'])
def test_a_file_that_is_none_is_one_clear_line(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "broken.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ScaleError, match=r"broken\.safetensors") as error:
        ScaleFile.load(path)
    assert "\n" not in str(error.value)


def test_truncated_directory_and_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    good().save(path)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ScaleError, match="not a readable scale file"):
        ScaleFile.load(path)
    with pytest.raises(ScaleError, match="not a readable scale file"):
        ScaleFile.load(tmp_path)
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(ScaleError, match="format version None"):
        ScaleFile.load(path)


def test_unwritable_target_is_a_scale_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ScaleError, match="cannot write"):
        good().save(tmp_path / "file" / "s.safetensors")


def test_fingerprint_covers_tensors_and_identity_but_not_provenance() -> None:
    scales = good()
    first = scales.fingerprint()
    scales.metadata["date"] = "later"
    assert scales.fingerprint() == first
    scales.metadata["quantizer_fields"] = {"bits": 4}
    second = scales.fingerprint()
    scales.tensors["layers.0.v_scale"][0] += 1e-3
    assert len({first, second, scales.fingerprint()}) == 3
