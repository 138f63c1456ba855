"""Scale files of other programs: fp8 scales in the names that compressed-tensors writes and vLLM loads.

    python -m calibration.exchange export scales.safetensors --out kv_scales.safetensors --per head
    python -m calibration.exchange import checkpoint/ --model HuggingFaceTB/SmolLM2-135M-Instruct --out scales.safetensors

Takes: a scale file of quantizer fp8 (e4m3), or a checkpoint with k and v scales. Gives: the other.
In both, value = code * scale. Names: `model.layers.{i}.self_attn.k_scale` and `.v_scale`, of shape [1] (per tensor) or [kv heads]
(per head; vLLM's attn_head strategy). Read too: [H, 1, 1], as compressed-tensors stores heads, `.attn.k_scale`,
`.k_proj.k_scale` and the older `.k_proj.output_scale`. Integer schemes are refused: no quantizer here has one scale per layer.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from calibration.fitting.collect import quantizer_metadata
from qkv.errors import QkvError, ScaleError
from qkv.layout import LayerShape
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.scales import ScaleFile

Per = Literal["tensor", "head"]
_NAME = re.compile(
    r"(?:.*\.)?layers\.(\d+)\.self_attn\.(?:attn\.)?"
    r"(?:(?P<plain>[kv])_scale|(?P<proj>[kv])_proj\.(?:(?P=proj)_scale|output_scale))"
)


def export(scales: ScaleFile, per: Per) -> dict[str, torch.Tensor]:
    """float32 tensors by vLLM's names. per "tensor" takes the largest head's scale. Raises ScaleError for other quantizers."""
    name, fields = scales.metadata.get("quantizer"), scales.metadata.get("quantizer_fields") or {}
    if name != "fp8" or fields.get("format", "e4m3") != "e4m3":
        raise ScaleError(
            f"only fp8 scales (e4m3) can be exported, this file is for {name} {fields or ''}; calibrate quantizer=fp8"
        )
    out = {}
    for key, value in scales.tensors.items():
        scale = value.float().flatten()
        out[f"model.{key.replace('.k_', '.self_attn.k_').replace('.v_', '.self_attn.v_')}"] = (
            scale.amax().reshape(1) if per == "tensor" else scale.contiguous()
        )
    return out


def import_scales(path: str | Path, layers: Sequence[LayerShape], model: str, fingerprint: str) -> ScaleFile:
    """Scales of a checkpoint (a .safetensors file, or a folder of them with config.json) for quantizer fp8 on this model.

    Raises ScaleError: no scales, an integer scheme, a layer missing, a shape that is neither per tensor nor per head.
    """
    folder = Path(path)
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else [folder]
    _check_scheme(folder / "config.json")
    found: dict[str, torch.Tensor] = {}
    for file in files:
        found |= _read(file)
    if not found:
        raise ScaleError(f"'{path}' holds no k or v scales (names like model.layers.0.self_attn.k_scale)")
    heads = {layer.index: layer.H for layer in layers}
    tensors = {}
    for name, value in found.items():
        H = heads.get(int(name.split(".")[1]))
        if H is None:
            raise ScaleError(f"'{path}': {name} belongs to no attention layer of {model} ({len(layers)} layers)")
        if value.numel() not in (1, H):
            raise ScaleError(f"'{path}': {name} has shape {list(value.shape)}; it must hold one scale, or one per kv head ({H})")
        tensors[name] = value.float().flatten().expand(H).clone()
    metadata: dict[str, Any] = {"model": model, "model_fingerprint": fingerprint, "source": str(path)}
    metadata |= {"date": datetime.now(UTC).isoformat(timespec="seconds")}
    fp8 = QUANTIZERS.build("fp8")
    scales = ScaleFile(tensors, metadata | quantizer_metadata(fp8, "imported"))
    scales.validate(layers, fp8.name, fingerprint, fp8.static_tensors())
    return scales


def _check_scheme(config: Path) -> None:
    if config.is_file():
        scheme = (json.loads(config.read_text(encoding="utf-8")).get("quantization_config") or {}).get("kv_cache_scheme") or {}
        if scheme and (scheme.get("type"), scheme.get("num_bits")) != ("float", 8):
            raise ScaleError(
                f"'{config}': the cache has {scheme.get('num_bits')}-bit {scheme.get('type')} codes; only 8-bit float is imported"
            )


def _read(file: Path) -> dict[str, torch.Tensor]:
    """Of one file: {"layers.{i}.k_scale" | "layers.{i}.v_scale": tensor}."""
    try:
        with safe_open(str(file), framework="pt") as opened:
            names = {name: _NAME.fullmatch(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
            return {
                f"layers.{m[1]}.{m['plain'] or m['proj']}_scale": opened.get_tensor(name)
                for name, m in names.items()
                if m is not None
            }
    except (OSError, SafetensorError) as error:
        raise ScaleError(f"'{file}' is not a readable safetensors file: {' '.join(str(error).split())}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 a file cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m calibration.exchange", description="Scales in other programs' names.")
    actions = parser.add_subparsers(dest="action", required=True)
    out = actions.add_parser("export", help="to the names vLLM loads")
    out.add_argument("file")
    out.add_argument("--out", required=True)
    out.add_argument("--per", choices=("tensor", "head"), default="tensor", help="what one scale is for (default: tensor)")
    into = actions.add_parser("import", help="from a compressed-tensors or llm-compressor checkpoint")
    into.add_argument("file", help="folder or .safetensors file")
    into.add_argument("--model", required=True, help="the model the scales are for: a name, hub id or path")
    into.add_argument("--out", required=True)
    given = parser.parse_args(arguments)
    try:
        if given.action == "export":
            save_file(export(ScaleFile.load(given.file), given.per), given.out, {"format": "pt"})
        else:
            from qkv.attention.hf import HFAdapter
            from qkv.models import load_model

            loaded = load_model(given.model)
            adapter = HFAdapter(loaded.model)
            import_scales(given.file, adapter.layers, loaded.name, loaded.fingerprint).save(given.out)
            adapter.close()
    except (QkvError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
