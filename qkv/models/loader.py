"""Where a model comes from: a name, a path, a hub id, or an object.

Takes: ModelConfig. Gives: LoadedModel: a transformers model in eval mode, its tokenizer, and its identity.
Does not know about: the cache, attention.
"""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from qkv.config import ModelConfig
from qkv.errors import ModelError
from qkv.models.fingerprint import fingerprint
from qkv.models.gguf import PACKAGES, load_gguf, package_files
from qkv.models.hub import hub_answers
from qkv.models.shapes import RANDOM_SHAPES, build_random
from qkv.validate import suggest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to serve. `source` says where the weights came from, in words; it goes into records."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase | None"
    name: str
    source: str
    fingerprint: str


class Place(NamedTuple):
    """Where to load from: a packaged GGUF or random shape by name, a local folder or .gguf file, a hub id; or, for planning
    and simulation only, a shape given by its dimensions."""

    kind: Literal["package", "random", "path", "gguf", "hub", "shape"]
    value: str


def resolve(config: ModelConfig) -> Place:
    """Decide what `config` names, without loading anything.

    Raises ModelError for an unknown name (did you mean), a path that does not exist, a missing id or path, or no device.
    """
    name = config.name
    if not re.fullmatch(r"cpu|cuda(:\d{1,2})?", config.device):
        raise ModelError(f"model.device: '{config.device}' is not a device that an engine runs on; use cpu, cuda or cuda:N")
    if name == "hub":
        if not config.id:
            raise ModelError("model=hub needs an id, e.g. model.id=HuggingFaceTB/SmolLM2-135M-Instruct")
        return Place("hub", config.id)
    if name in ("path", "gguf"):
        if not config.path:
            raise ModelError(f"model={name} needs a path, e.g. model.path=./my-model" + (".gguf" if name == "gguf" else ""))
        return _local(config.path)
    if name == "shape":
        missing = [f"model.{key}=..." for key in ("layers", "kv_heads", "head_dim") if getattr(config, key) is None]
        if missing:
            raise ModelError(f"model=shape needs its dimensions: add {', '.join(missing)}")
        return Place("shape", name)
    if name in PACKAGES:
        return Place("package", name)
    if name in RANDOM_SHAPES:
        return Place("random", name)
    looks_local = name.endswith(".gguf") or name.startswith((".", "~", os.sep))
    if looks_local or Path(name).is_dir():
        return _local(name)
    if name.count("/") == 1 and all(name.split("/")):
        return Place("hub", name)
    known = [*PACKAGES, *RANDOM_SHAPES, "hub", "path", "gguf", "shape"]
    raise ModelError(f"unknown model '{name}'; {suggest(name, known)}, a hub id (owner/name), or a local folder or .gguf file")


def load_model(config: "ModelConfig | str") -> LoadedModel:
    """Load what `config` names (a plain string is ModelConfig(name=...)), in its dtype and on its device.

    Raises ModelError, one line for people, whenever the model cannot be found, read or fitted.
    """
    config = ModelConfig(name=config) if isinstance(config, str) else config
    place = resolve(config)
    if place.kind == "shape":
        raise ModelError("model=shape has dimensions but no weights: use it with experiment=plan or runner=simulated")
    dtype: torch.dtype = getattr(torch, config.dtype)
    device = _device(config.device)
    name = place.value
    tokenizer: PreTrainedTokenizerBase | None = None
    if place.kind == "random":
        model = build_random(place.value, dtype, device, config.seed)
        source = f"random weights, seed {config.seed}"
    elif place.kind == "package":
        files = package_files(place.value)
        model, tokenizer = load_gguf(files, dtype)
        source = f"package {PACKAGES[place.value].distributions[0]}, {files[0].name.split('.gguf')[0]}.gguf"
    elif place.kind == "gguf":
        model, tokenizer = load_gguf([Path(place.value)], dtype)
        name, source = Path(place.value).stem, f"file {place.value}"
    else:
        model, tokenizer = _from_pretrained(place, dtype)
        name = Path(place.value).resolve().name if place.kind == "path" else place.value
        source = f"{'folder' if place.kind == 'path' else 'hub'} {place.value}"
    try:
        model = model.to(device)  # type: ignore[arg-type]
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{name} does not fit on {device}: {str(error).splitlines()[0]}") from error
    return replace(wrap_model(model, tokenizer), name=name, source=source)


def wrap_model(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None" = None) -> LoadedModel:
    """A transformers model object as LoadedModel: put in eval mode, otherwise left as it is. Raises ModelError."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise ModelError(f"model must be a name, a path, a hub id or a transformers PreTrainedModel, not {type(model).__name__}")
    return LoadedModel(model.eval(), tokenizer, type(model).__name__, "object", fingerprint(model))


def _local(path: str) -> Place:
    expanded = Path(os.path.expanduser(path))
    if not expanded.exists():
        raise ModelError(f"model path '{path}' does not exist (looked in {Path.cwd()})")
    if expanded.is_dir():
        if not (expanded / "config.json").is_file():
            raise ModelError(
                f"model folder '{path}' has no config.json; give a folder written by save_pretrained, or a .gguf file"
            )
        return Place("path", str(expanded))
    return Place("gguf", str(expanded))


def _device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device '{name}' was asked for, but torch {torch.__version__} sees no GPU; use device=cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"device '{name}' was asked for, but torch sees {torch.cuda.device_count()} GPUs; the first is cuda:0")
    return device


def _from_pretrained(place: Place, dtype: torch.dtype) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase | None]":
    from transformers import AutoModelForCausalLM, AutoTokenizer

    local = place.kind == "path" or not hub_answers()
    try:
        # Code from a repository is never run: trust_remote_code stays off.
        model = AutoModelForCausalLM.from_pretrained(place.value, dtype=dtype, local_files_only=local, trust_remote_code=False)
    except Exception as error:  # hub, safetensors and config errors share no base class
        raise ModelError(_why(place, error)) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(place.value, local_files_only=local, trust_remote_code=False)
    except Exception:  # a model without tokenizer serves token ids; text prompts are refused by the engine
        return model, None
    # Where the files are missing, some families get an empty tokenizer that turns any text into nothing.
    return model, tokenizer if len(tokenizer) > len(tokenizer.all_special_ids) else None


def _why(place: Place, error: Exception) -> str:
    """One line for people out of a hub or file error."""
    chain = [error]
    while chain[-1].__cause__ or chain[-1].__context__:
        chain.append(chain[-1].__cause__ or chain[-1].__context__)  # type: ignore[arg-type]
    kinds = {type(e).__name__ for e in chain}
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if place.kind == "hub":
        if kinds & {"GatedRepoError"}:
            return (
                f"hub model '{place.value}' is gated: accept its terms at https://huggingface.co/{place.value} and set HF_TOKEN"
            )
        if kinds & {"RepositoryNotFoundError", "HFValidationError", "RevisionNotFoundError"}:
            return (
                f"hub model '{place.value}' does not exist, or is private (then set HF_TOKEN). {suggest(place.value, PACKAGES)}"
            )
        if kinds & {"ConnectError", "ConnectionError", "OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectTimeout"}:
            return (
                f"hub model '{place.value}' is not in the local cache and the hub cannot be reached (no network, or "
                "HF_HUB_OFFLINE is set). Give a local folder (model=path model.path=...) or a model that ships in a package: "
                + ", ".join(PACKAGES)
            )
    return f"cannot load model '{place.value}': {first}"
