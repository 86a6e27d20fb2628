"""The benchmarks' models: Llamas with random weights, made once per dtype. Speed does not depend on
them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 32_000
CONTEXT = 1024
SEED = 20
NEXT_TO_NOTHING = 1e-3

CONFIG: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "174m": {},
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
}
"""What models of other sizes have otherwise. They are drawn in float32: the largest takes 30 GB of
memory to make."""


def make_sized(folder: Path, dtype: str, size: str) -> Path:
    """The folder of a model of this size, made if it is not there."""
    path = folder / f"llama-{size}-{dtype}"
    if (path / "config.json").exists():
        return path
    changes = SIZES[size]
    heads = changes.get("num_attention_heads", CONFIG["num_attention_heads"])
    return _save(_drawn(**changes, num_key_value_heads=min(8, heads // 2)), path, dtype)


def make(folder: Path, dtype: str, context: int = CONTEXT) -> Path:
    """The model's folder, made if it is not there. Weights are drawn once in fp32, then stored in
    `dtype`; they are the same for every `context`, in tokens."""
    path = folder / (
        f"llama-174m-{dtype}" if context == CONTEXT else f"llama-174m-{dtype}-{context}"
    )
    if (path / "config.json").exists():
        return path
    return _save(_drawn(max_position_embeddings=context), path, dtype)


def make_copier(folder: Path, dtype: str) -> Path:
    """The same model with weights such that token t + 1 follows token t: it copies a text that
    counts, at the cost of any other. Its layers add next to nothing, and its output layer is the
    embedding, moved by one row."""
    path = folder / f"llama-174m-copier-{dtype}"
    if (path / "config.json").exists():
        return path
    model = _drawn(tie_word_embeddings=False)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= NEXT_TO_NOTHING
            layer.mlp.down_proj.weight *= NEXT_TO_NOTHING
        model.lm_head.weight.copy_(model.model.embed_tokens.weight.roll(1, 0))
    return _save(model, path, dtype)


def _drawn(**changes: Any) -> Any:
    torch.manual_seed(SEED)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**CONFIG | changes))


def _save(model: Any, path: Path, dtype: str) -> Path:
    model.to(getattr(torch, dtype)).save_pretrained(path)
    _tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<1>", "eos_token": "<2>"})
    )
    return path


def _tokenizer() -> Tokenizer:
    """One word per id: prompts are sent as ids, and every output has a text."""
    tokenizer = Tokenizer(
        models.WordLevel({f"<{number}>": number for number in range(VOCABULARY)}, unk_token="<0>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    return tokenizer
