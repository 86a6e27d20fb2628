"""Sampling at the tail: logits to tokens, a sequence by itself. Knows no scheduler and no hop."""
