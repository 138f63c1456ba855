"""Gives models that have no tokenizer one of bytes.

Takes: a loaded model. Gives: a model that reads and writes bytes, if it had no tokenizer. Does not know about: lm-eval.
"""

from dataclasses import replace

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qkv.models import LoadedModel


def with_tokenizer(loaded: LoadedModel) -> LoadedModel:
    """Models with random weights have no tokenizer and read the text's bytes, as everywhere in experiments: their scores mean
    nothing, but every task runs."""
    return loaded if loaded.tokenizer is not None else replace(loaded, tokenizer=byte_tokenizer())


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and <eos>: 257 ids. Inside, a printable character stands for each byte, as in GPT-2's vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate([*alphabet, "<eos>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
