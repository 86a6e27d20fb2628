"""A random model of the demo model's size and tokenizer, with layers that keep recurrent states
between those of attention, for `make chaos MODEL=FOLDER`. `python -m
tests.chaos.stack.hybrid_model FOLDER`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.chaos.stack.clerk_model import VOCAB_SIZE, with_tokenizer
from tests.models import save_model

LAYERS = ["linear_attention", "full_attention", "full_attention"] * 3
"""Attention's KV is scarce as the demo model's is."""


def save(folder: Path) -> None:
    """The same weights every time."""
    made = save_model(
        folder.with_suffix(".made"),
        "granitemoehybrid",
        hidden_size=192,
        shared_intermediate_size=512,
        num_attention_heads=6,
        num_key_value_heads=3,
        num_hidden_layers=len(LAYERS),
        layer_types=LAYERS,
        mamba_n_heads=8,
        mamba_d_head=48,
        vocab_size=VOCAB_SIZE,
    )
    with_tokenizer(made, folder)


if __name__ == "__main__":
    save(Path(sys.argv[1]))
