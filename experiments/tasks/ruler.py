"""RULER's synthetic tasks at chosen lengths, made by lm-eval's generators without a network.

Takes: lm-eval's metadata (a tokenizer's name or the model's, lengths, samples). Gives: lm-eval's own documents.
Four things differ from lm-eval's tasks of the same names. Other lengths than its six are allowed, and all are scored as one
number. There are 200 samples, not 500. Samples do not depend on what was generated before. A sentence splitter that these tasks
do not use is not downloaded.

Source: Hsieh et al., RULER (arXiv 2404.06654), as in lm_eval/tasks/ruler.
"""

import contextlib
import importlib
import os
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import numpy as np

from experiments.tasks.text import SAMPLES, SEED, setting, test_split
from qkv.errors import ConfigError, ModelError
from qkv.models import load_model

_LENGTHS = (1024,)
_LEAST = 768  # shorter documents cannot hold vt's worked example, or make lm-eval's generators search for ever


def niah_single_1(**metadata: Any) -> dict[str, datasets.Dataset]:
    """A number is hidden between repeated sentences."""
    return _needles("repeat", metadata)


def niah_multikey_2(**metadata: Any) -> dict[str, datasets.Dataset]:
    """A number is hidden between sentences that hide other numbers."""
    return _needles("needle", metadata)


def vt(**metadata: Any) -> dict[str, datasets.Dataset]:
    """The answer is all variables to which a chain of assignments gives the same value."""

    def rows(tokenizer: Any, length: int, samples: int) -> list[dict[str, Any]]:
        module = _module("vt_utils")
        example = module.sys_vartrack_w_noise_random(tokenizer=tokenizer, num_samples=1, max_seq_length=500, incremental=5)[0]
        return list(
            module.sys_vartrack_w_noise_random(
                tokenizer=tokenizer, num_samples=samples, max_seq_length=length, icl_example=example
            )
        )

    return _build(rows, metadata)


def cwe(**metadata: Any) -> dict[str, datasets.Dataset]:
    """The answer is the ten most common words of a list."""

    def rows(tokenizer: Any, length: int, samples: int) -> list[dict[str, Any]]:
        module = _module("cwe_utils")
        module.RNG.seed(SEED)
        return list(module.sys_word_pair_random(num_samples=samples, max_seq_length=length, tokenizer=tokenizer))

    return _build(rows, metadata)


def fwe(**metadata: Any) -> dict[str, datasets.Dataset]:
    """The answer is the three most frequent words of a coded text. The generator leaves no room for an answer, so it is asked for
    shorter documents."""

    def rows(tokenizer: Any, length: int, samples: int) -> list[dict[str, Any]]:
        module = _module("fwe_utils")
        return list(module.sys_kwext(tokenizer, length - module.CONFIG["tokens_to_generate"], num_samples=samples))

    return _build(rows, metadata)


def score(doc: Mapping[str, Any], results: list[str]) -> dict[str, float]:
    """The share of a document's answers that the text contains, as RULER scores it."""
    module = _module("common_utils")
    return {"score": float(module.string_match_all(module.postprocess_pred(results), [doc["outputs"]]))}


def _needles(haystack: str, metadata: Mapping[str, Any]) -> dict[str, datasets.Dataset]:
    def rows(tokenizer: Any, length: int, samples: int) -> list[dict[str, Any]]:
        module = _module("prepare_niah")
        return list(
            module.generate_samples(
                module.get_haystack(type_haystack=haystack),
                max_seq_length=length,
                template=_module("niah_utils").TEMPLATE,
                type_haystack=haystack,
                type_needle_k="words",
                type_needle_v="numbers",
                num_samples=samples,
                TOKENIZER=tokenizer,
            )
        )

    return _build(rows, metadata)


def _build(rows: Callable[[Any, int, int], list[dict[str, Any]]], metadata: Mapping[str, Any]) -> dict[str, datasets.Dataset]:
    lengths, samples = metadata.get("max_seq_lengths", _LENGTHS), setting(metadata, "samples", SAMPLES)
    if not isinstance(lengths, list | tuple) or not all(isinstance(n, int) and n >= _LEAST for n in lengths):
        raise ConfigError(f"metadata.max_seq_lengths: must be a list of whole numbers, at least {_LEAST}, got {lengths!r}")
    tokenizer = _tokenizer(metadata)
    with _quiet_and_seeded():
        return test_split([row for n in lengths for row in rows(tokenizer, n, samples)])


def _tokenizer(metadata: Mapping[str, Any]) -> Any:
    """The tokenizer of the model that is evaluated, found by lm-eval's model arguments. Raises ConfigError."""
    from transformers import AutoTokenizer

    name = next((metadata[key] for key in ("tokenizer", "pretrained", "model") if metadata.get(key)), None)
    if name is None:
        raise ConfigError('RULER tasks are as long as a tokenizer says: add --metadata \'{"tokenizer": "smollm2"}\'')
    if not isinstance(name, str):
        return name
    try:
        tokenizer = AutoTokenizer.from_pretrained(name) if Path(name).is_dir() else load_model(name).tokenizer
    except ModelError as error:
        raise ConfigError(f"metadata.tokenizer: {error}") from None
    if tokenizer is None:
        raise ConfigError(f"metadata.tokenizer: model '{name}' has random weights and no tokenizer; name another one")
    return tokenizer


def _module(name: str) -> Any:
    """One of lm-eval's RULER modules. Raises ConfigError with the command to install what it needs."""
    with mock.patch.dict(os.environ, {"LOCAL_RANK": "1"}):  # only rank 0 of lm-eval downloads
        try:
            return importlib.import_module(f"lm_eval.tasks.ruler.{name}")
        except ImportError as error:
            raise ConfigError(f"RULER tasks need more packages ({error}). Run: pip install 'lm-eval[ruler]'") from None


@contextlib.contextmanager
def _quiet_and_seeded() -> Iterator[None]:
    """Seed the global random generators, from which lm-eval's generators draw, and hide what they print."""
    state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(SEED)
    np.random.seed(SEED)
    try:
        with open(os.devnull, "w") as off, contextlib.redirect_stdout(off), contextlib.redirect_stderr(off):
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
