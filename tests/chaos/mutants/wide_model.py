"""A random model with the demo model's tokenizer whose wide rows show what a narrow one hides: in
bf16, a single row times a wide matrix has other bits than the same row among others. `python -m
tests.chaos.mutants.wide_model FOLDER`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.chaos.stack.clerk_model import VOCAB_SIZE, with_tokenizer
from tests.models import save_model

WIDTH = 2816
HIDDEN = 128
"""A single row of a multiple of 64 is run as it is."""
NUM_LAYERS = 2


def save(folder: Path) -> None:
    """The same weights every time."""
    made = save_model(
        folder.with_suffix(".made"),
        dtype=torch.bfloat16,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_hidden_layers=NUM_LAYERS,
        vocab_size=VOCAB_SIZE,
    )
    with_tokenizer(made, folder)


if __name__ == "__main__":
    save(Path(sys.argv[1]))
