"""Shared by tests of lm-eval on the engine: a tiny model with a tokenizer of bytes, and small tasks that need no network."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from experiments.lm.text import byte_tokenizer

EOS = 256
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, with a chat template."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    return tokenizer


def tiny(seed: int = 0) -> LlamaForCausalLM:
    """Random weights, with bytes as its vocabulary and 256 positions. Wide output logits, so that answers differ clearly."""
    import torch

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=EOS + 1,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=EOS,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
    return model


def save_tiny(folder: Path) -> Path:
    """The tiny model as a folder that model=path reads."""
    tiny().save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


QUESTIONS = [
    {"q": "The capital of France is", "choices": ["Paris", "Rome", "a banana", "Paris, of course"], "a": 0},
    {"q": "This scale of temperature is named after the astronomer", "choices": ["Celsius", "Newton", "Fahrenheit"], "a": 0},
    {"q": "Two plus two is", "choices": ["3", "4", "5", "6"], "a": 1},
    {"q": "The opposite of hot is", "choices": ["cold", "warm", "tall"], "a": 0},
    {"q": "A week has seven", "choices": ["days", "hours"], "a": 0},
    {"q": "The largest planet of the solar system is", "choices": ["Mars", "Jupiter", "Venus"], "a": 1},
]

COMMON: dict[str, Any] = {"dataset_path": "json", "test_split": "test", "metadata": {"version": 1.0}}
TASKS: dict[str, dict[str, Any]] = {
    "toy_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "Answer the question with one of the words that are offered.\nQuestion: {{q}}\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "a",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "toy_letter": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}\n{% for c in choices %}{{'ABCD'[loop.index0]}}. {{c}}\n{% endfor %}Answer:",
        "doc_to_choice": "{{['A', 'B', 'C', 'D'][:choices | length]}}",
        "doc_to_target": "a",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "toy_text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{q}} {{choices[a]}}. {{choices | join(', ')}}. " * 4,
        "metric_list": [{"metric": "word_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False}],
    },
    "toy_generation": {
        "output_type": "generate_until",
        "doc_to_text": "Question: {{q}}\nAnswer:",
        "doc_to_target": " {{choices[a]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}


def write_tasks(folder: Path) -> Path:
    """The tasks as YAML files that lm-eval's include_path reads."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS), encoding="utf-8")
    for name, task in TASKS.items():
        values = COMMON | {"task": name, "dataset_kwargs": {"data_files": {"test": str(data)}}} | task
        (folder / f"{name}.yaml").write_text(json.dumps(values), encoding="utf-8")  # JSON is YAML
    return folder


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))
