"""The benchmark's model: a 174 M Llama with random weights, made once per dtype. Speed does not depend on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 32_000
SEED = 20

CONFIG: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make(folder: Path, dtype: str) -> Path:
    """The model's folder, made if it is not there. Weights are drawn once in fp32, then stored in `dtype`."""
    path = folder / f"llama-174m-{dtype}"
    if (path / "config.json").exists():
        return path
    torch.manual_seed(SEED)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**CONFIG)).to(getattr(torch, dtype))
    model.save_pretrained(path)
    _tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<1>", "eos_token": "<2>"}))
    return path


def _tokenizer() -> Tokenizer:
    """One word per id: prompts are sent as ids, and every output has a text."""
    tokenizer = Tokenizer(models.WordLevel({f"<{number}>": number for number in range(VOCABULARY)}, unk_token="<0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    return tokenizer
