"""What users should know about a model and its tokenizer before they trust an engine's answers: sentences for records.

Takes: a transformers model, its tokenizer, which ids end a text. Gives: warnings. What cannot be served is refused elsewhere.
Does not know about: engines, settings of a run other than whether it is deterministic.
"""

import logging
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

# Settings of generate() that change which tokens come out, and the values at which they change nothing.
_NOT_FOLLOWED: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({},),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0.0,),
    "dola_layers": (),
    "diversity_penalty": (0.0,),
    "exponential_decay_length_penalty": (),
    "constraints": ([],),
    "force_words_ids": ([],),
    "guidance_scale": (1.0,),
    "watermarking_config": (),
    "token_healing": (False,),
    "max_time": (),
}
_NOT_FOLLOWED_IN_SAMPLING: dict[str, tuple[Any, ...]] = {
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (),
}
_PER_REQUEST = {"temperature": (), "top_k": (), "top_p": (1.0,), "min_p": (0.0,)}  # of SamplingParams, by the same names
_FEWER = 0.95  # a tokenizer with a smaller share of the model's vocabulary is hardly its own; padding to 64 or 128 is usual


def concerns(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase | None",
    end_ids: Collection[int],
    vocab_size: int,
    deterministic: bool,
) -> list[str]:
    """Each is logged, once per process. end_ids: ids that end a text. vocab_size: of the model."""
    found = [
        *_generation_settings(model),
        *_ends(tokenizer, end_ids, vocab_size),
        *(_tokenizer(tokenizer, vocab_size) if tokenizer is not None else ()),
        *_head(model),
    ]
    if deterministic and (experts := _experts(model)):
        found.append(
            f"deterministic mode does not hold to the bit for this model's mixture of experts ({experts}): how many rows an "
            "expert multiplies depends on the batch, and the last bits of a product on how many rows it has"
        )
    for text in found:
        say_once(text)
    return found


@lru_cache
def say_once(text: str) -> None:
    log.warning(text)


def _generation_settings(model: "PreTrainedModel") -> Iterator[str]:
    """What generate() would take from the checkpoint, and an engine does not."""
    settings = getattr(model, "generation_config", None)
    if settings is None:
        return
    sampling = bool(getattr(settings, "do_sample", None))
    ignored = _set(settings, _NOT_FOLLOWED | (_NOT_FOLLOWED_IN_SAMPLING if sampling else {}))
    if ignored:
        yield (
            f"the checkpoint's generation settings ask for {', '.join(ignored)}, which this engine does not do: generate() of "
            "transformers gives other tokens"
        )
    if sampling:
        yield (
            "the checkpoint's generation settings ask for sampling "
            f"({', '.join(_set(settings, _PER_REQUEST)) or 'at temperature 1'}); here each request says so in its "
            "SamplingParams, and is greedy otherwise"
        )
    if getattr(settings, "stop_strings", None):
        yield (
            f"the checkpoint's generation settings name stop_strings={settings.stop_strings!r}, which end a text here only if a "
            "request passes them as SamplingParams.stop"
        )


def _set(settings: Any, neutral: dict[str, tuple[Any, ...]]) -> list[str]:
    """Those that are set and would change something, as name=value."""
    found = []
    for name, values in neutral.items():
        value = getattr(settings, name, None)
        if value is not None and value not in values:
            shown = repr(value)
            found.append(f"{name}={shown if len(shown) <= 40 else f'{shown[:36]} ...'}")
    return found


def _ends(tokenizer: "PreTrainedTokenizerBase | None", end_ids: Collection[int], vocab_size: int) -> Iterator[str]:
    outside = sorted(i for i in end_ids if not 0 <= i < vocab_size)
    if not end_ids:
        yield "no end token is known for this model: only max_tokens, stop and stop_token_ids end a text"
    elif outside:
        yield f"end tokens {outside} are outside the model's vocabulary of {vocab_size}: they never come"
    own = getattr(tokenizer, "eos_token_id", None)
    if end_ids and own is not None and own not in end_ids:
        yield (
            f"the tokenizer's end token {tokenizer.eos_token!r} (id {own}) does not end a text, as the checkpoint's generation "  # type: ignore[union-attr]
            f"settings name {', '.join(map(str, sorted(end_ids)))} instead; pass it in stop_token_ids if it should"
        )


def _tokenizer(tokenizer: "PreTrainedTokenizerBase", vocab_size: int) -> Iterator[str]:
    missing = [role for role in ("bos", "eos", "pad") if getattr(tokenizer, f"{role}_token", None) is None]
    effects = {
        "bos": "prompts begin without one",
        "eos": "only ids that the model's settings name end a text",
        "pad": "none is needed here",
    }
    if missing:
        yield f"the tokenizer has no {' and no '.join(f'{role} token ({effects[role]})' for role in missing)}"
    if not hasattr(tokenizer, "__len__"):  # somebody's own, which only encodes and decodes
        return
    size = len(tokenizer)
    if size > vocab_size:
        yield (
            f"the tokenizer has {size} tokens and the model {vocab_size}: text that contains the others is refused. Is it the "
            "tokenizer of this model?"
        )
    elif size < _FEWER * vocab_size:
        yield f"the tokenizer has {size} tokens and the model {vocab_size}. Is it the tokenizer of this model?"


def _head(model: "PreTrainedModel") -> Iterator[str]:
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    if tied and hasattr(head, "weight") and head.weight.data_ptr() != embedding.weight.data_ptr():
        yield "the configuration ties the output head to the input embedding; the model has a head of its own, which is used"


def _experts(model: "PreTrainedModel") -> str | None:
    """The class of the first mixture-of-experts module."""
    kinds = (type(m).__name__ for m in model.modules())
    return next((kind for kind in kinds if "expert" in kind.lower() or "moe" in kind.lower()), None)
