"""A tiny llama in a GGUF file, with a byte-level tokenizer of SmolLM's kind, so that tests of GGUF loading take milliseconds."""

from pathlib import Path

import gguf
import numpy as np

HIDDEN, LAYERS, HEADS, KV_HEADS, MLP = 64, 2, 4, 2, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def _bytes_as_unicode() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]


def write_tiny_gguf(path: Path, seed: int = 0, poison: bool = False) -> Path:
    """Write the model; weights are Q4_1 but for the norms, as in SmolLM2's file. poison: one norm weight is NaN."""
    merges = ["Ċ Ċ", "Ġ Ġ"]
    tokens = SPECIAL + _bytes_as_unicode() + [m.replace(" ", "") for m in merges]
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(1e4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)

    def matrix(name: str, rows: int, columns: int) -> None:
        x = rng.normal(0, 0.1, (rows, columns)).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q4_1
        writer.add_tensor(name, gguf.quants.quantize(x, kind), raw_dtype=kind)

    def norm(name: str) -> None:
        x = 1 + rng.normal(0, 0.1, HIDDEN).astype(np.float32)
        if poison:
            x[3] = np.nan
        writer.add_tensor(name, x.astype(np.float32))

    matrix("token_embd.weight", len(tokens), HIDDEN)
    norm("output_norm.weight")
    kv = HIDDEN // HEADS * KV_HEADS
    for i in range(LAYERS):
        norm(f"blk.{i}.attn_norm.weight")
        norm(f"blk.{i}.ffn_norm.weight")
        for name, rows, columns in (
            ("attn_q", HIDDEN, HIDDEN),
            ("attn_k", kv, HIDDEN),
            ("attn_v", kv, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN),
            ("ffn_gate", MLP, HIDDEN),
            ("ffn_up", MLP, HIDDEN),
            ("ffn_down", HIDDEN, MLP),
        ):
            matrix(f"blk.{i}.{name}.weight", rows, columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
