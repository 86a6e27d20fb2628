"""Owns clerk's shape and how it goes to disk: a plain Llama, saved in bfloat16. Knows no task."""

from pathlib import Path
from typing import Final

from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from services.standalone.demo.clerk.tokenizer import CONTEXT

FOLDER: Final = Path(__file__).parent / "model"


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """About three million parameters, drawn from torch's global seed."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def save_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Everything that AutoModelForCausalLM and AutoTokenizer read; `model` itself is rounded to
    bfloat16."""
    model.generation_config = GenerationConfig(
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
