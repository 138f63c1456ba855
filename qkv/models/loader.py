"""Where a model comes from: a name, a path, a hub id, or an object.

Takes: ModelConfig. Gives: LoadedModel: a transformers model in eval mode, its tokenizer, and its identity.
Does not know about: the cache, attention.
"""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from qkv.config import ModelConfig
from qkv.errors import ModelError
from qkv.models.checkpoint import narrowing, quietly, read_model
from qkv.models.fingerprint import fingerprint
from qkv.models.gguf import PACKAGES, load_gguf, package_files
from qkv.models.hub import unreachable
from qkv.models.shapes import RANDOM_SHAPES, build_random
from qkv.validate import suggest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece", "tekken")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to serve. `source` says where the weights came from, in words; it goes into records, as do the warnings."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase | None"
    name: str
    source: str
    fingerprint: str
    warnings: tuple[str, ...] = ()  # what is odd about the checkpoint


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


def load_model(config: "ModelConfig | str", tokenizer: Any = None) -> LoadedModel:
    """Load what `config` names (a plain string is ModelConfig(name=...)), in its dtype and on its device, with the given
    tokenizer or else its own.

    Raises ModelError, one line for people, whenever the model cannot be found, read or fitted.
    """
    config = ModelConfig(name=config) if isinstance(config, str) else config
    place = resolve(config)
    if place.kind == "shape":
        raise ModelError("model=shape has dimensions but no weights: use it with experiment=plan or runner=simulated")
    dtype: torch.dtype = getattr(torch, config.dtype)
    device = _device(config.device, dtype)
    name, own = place.value, None
    warnings: tuple[str, ...] = ()
    if place.kind == "random":
        model = build_random(place.value, dtype, device, config.seed)
        source = f"random weights, seed {config.seed}"
    elif place.kind == "package":
        files = package_files(place.value)
        model, own = load_gguf(files, dtype)
        source = f"package {PACKAGES[place.value].distributions[0]}, {files[0].name.split('.gguf')[0]}.gguf"
    elif place.kind == "gguf":
        model, own = load_gguf([Path(place.value)], dtype)
        name, source = Path(place.value).stem, f"file {place.value}"
    else:
        model, own, warnings = _from_pretrained(place, dtype, with_tokenizer=tokenizer is None)
        name = Path(place.value).resolve().name if place.kind == "path" else place.value
        source = f"{'folder' if place.kind == 'path' else 'hub'} {place.value}"
    try:
        model = model.to(device).eval()  # type: ignore[arg-type]
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{name} does not fit on {device}: {str(error).splitlines()[0]}") from error
    return replace(wrap_model(model, own if tokenizer is None else tokenizer), name=name, source=source, warnings=warnings)


def wrap_model(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None" = None) -> LoadedModel:
    """A transformers model object as LoadedModel, left as it is (forwards run it in eval mode). Raises ModelError."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"model must be a name, a path, a hub id or a transformers PreTrainedModel, not {type(model).__name__}; of a wrapper "
            "(PEFT, DDP, torch.compile) give the model inside"
        )
    return LoadedModel(model, tokenizer, type(model).__name__, "object", fingerprint(model))


def _local(path: str) -> Place:
    expanded = Path(path).expanduser()
    if not expanded.exists():
        raise ModelError(f"model path '{path}' does not exist (looked in {Path.cwd()})")
    if expanded.is_dir():
        if not (expanded / "config.json").is_file():
            raise ModelError(
                f"model folder '{path}' has no config.json; give a folder written by save_pretrained, or a .gguf file"
            )
        return Place("path", str(expanded))
    return Place("gguf", str(expanded))


def _device(name: str, dtype: torch.dtype) -> torch.device:
    """Raises ModelError for a device that is not there, that nothing here runs on, or that cannot compute in `dtype`."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"device '{name}' is not a device; use cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"device '{name}' is not served; use cpu, cuda or cuda:N (AMD's GPUs are cuda to torch, too)")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ModelError(f"device '{name}' was asked for, but torch {torch.__version__} sees no GPU; use device=cpu")
        if (device.index or 0) >= torch.cuda.device_count():
            raise ModelError(f"device '{name}' was asked for, but torch sees {torch.cuda.device_count()} GPUs, from cuda:0 on")
        if dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise ModelError(f"{torch.cuda.get_device_name(device)} cannot compute in bfloat16; use dtype=float16 or float32")
    return device


def _from_pretrained(
    place: Place, dtype: torch.dtype, with_tokenizer: bool
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase | None, tuple[str, ...]]":
    from transformers import PreTrainedConfig

    where: dict[str, Any] = {
        "pretrained_model_name_or_path": place.value,
        "local_files_only": place.kind == "path" or unreachable() is not None,
    }
    try:
        with quietly():
            config, _ = PreTrainedConfig.get_config_dict(**where)
        model, warnings = read_model(place.value, dtype, **where)
    except ModelError:
        raise
    except Exception as error:  # hub, safetensors and config errors share no base class
        raise ModelError(why(place, error)) from error
    stored = config.get("dtype") or config.get("torch_dtype") or config.get("text_config", {}).get("dtype")
    return model, _tokenizer(place, where) if with_tokenizer else None, (*warnings, *narrowing(stored, dtype))


def _tokenizer(place: Place, where: dict[str, Any]) -> "PreTrainedTokenizerBase | None":
    """None if there is none: the model serves token ids. Raises ModelError if there is one that cannot be used: to go on
    without would be to read text in another way."""
    from transformers import AutoTokenizer
    from transformers.utils import cached_file

    try:
        with quietly():
            tokenizer = AutoTokenizer.from_pretrained(**where, trust_remote_code=False)
        if len(tokenizer) > len(tokenizer.all_special_ids):
            return tokenizer
        problem = "it has no vocabulary"  # some families get such a tokenizer, which turns any text into nothing
    except Exception as error:  # whatever a file can do to a parser
        problem = _first_line(error)
    folder = Path(cached_file(place.value, "config.json", local_files_only=True) or "").parent
    files = sorted(f.name for f in folder.iterdir() if f.name.startswith(_TOKENIZER_FILES) or f.name.endswith(".tiktoken"))
    if files:
        raise ModelError(
            f"the tokenizer of model '{place.value}' ({', '.join(files)}) cannot be used: {problem}. Repair it, remove its files "
            "to serve token ids only, or pass tokenizer= to Engine.create"
        )
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def why(place: Place, error: Exception, what: str = "load") -> str:
    """One line for people out of a hub or file error. what: was to be done with the model."""
    chain = [error]
    while chain[-1].__cause__ or chain[-1].__context__:
        chain.append(chain[-1].__cause__ or chain[-1].__context__)  # type: ignore[arg-type]
    kinds = {type(e).__name__ for e in chain}
    first = _first_line(error)
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
    return f"cannot {what} model '{place.value}': {first}"
