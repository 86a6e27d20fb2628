"""GGUF files as checkpoints: their tensors, tokenizer and config as a model's folder has them."""
