"""Reading a checkpoint through transformers, and judging what came out: is it whole, is it what was saved?

Takes: where it is, as transformers names it. Gives: the model, with what its user should know; or a ModelError.
Does not know about: where places come from, tokenizers.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from qkv.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def read_model(name: str, dtype: torch.dtype, **where: Any) -> "tuple[PreTrainedModel, tuple[str, ...]]":
    """The model at `where` (arguments of from_pretrained) and warnings about it. name: as its user knows it, for messages.

    Raises ModelError if weights are missing or of other shapes: transformers would draw them at random. Raises whatever
    transformers raises if it cannot be read. Code from a repository is never run: trust_remote_code stays off.
    """
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    with quietly():
        model, info = load(**where, dtype=dtype, trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True)
    mismatched = sorted(info["mismatched_keys"])
    if mismatched:
        key, found, expected = mismatched[0]
        raise ModelError(
            f"model '{name}' does not fit its configuration: {key}{_more(mismatched)} has shape {[*found]} in the checkpoint and "
            f"{[*expected]} by the configuration"
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"model '{name}' lacks weights: {missing[0]}{_more(missing)}. They would be random. Is the checkpoint complete, and "
            "that of a causal language model?"
        )
    unexpected = sorted(info["unexpected_keys"])
    warnings = []
    if unexpected:
        warnings.append(
            f"weights of the checkpoint that {type(model).__name__} has no place for are left out: "
            f"{unexpected[0]}{_more(unexpected)}"
        )
    return model, tuple(warnings)


def narrowing(stored: str | None, dtype: torch.dtype) -> tuple[str, ...]:
    """A warning if the checkpoint's dtype, as its configuration names it, holds more than the one that is asked for."""
    kind = getattr(torch, (stored or "").removeprefix("torch."), None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        return ()
    had, has = torch.finfo(kind), torch.finfo(dtype)
    if had.max > has.max and had.eps >= has.eps:
        loss = f"values above {has.max:.0f} overflow"
    elif had.eps < has.eps:
        loss = "weights are rounded"
    else:
        return ()
    return (f"the checkpoint is {stored} and is run in {str(dtype).removeprefix('torch.')}: {loss}",)


def _more(names: list[Any]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


@contextmanager
def quietly() -> Iterator[None]:
    """No reports of transformers, whose content comes as errors and warnings of ours; its progress bars for terminals only."""
    from transformers.utils import logging as hf_logging

    verbosity, shown = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(max(verbosity, hf_logging.ERROR))
    if not sys.stderr.isatty():
        hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if shown:
            hf_logging.enable_progress_bar()
