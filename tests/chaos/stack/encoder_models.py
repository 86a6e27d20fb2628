"""Random encoders of the encoders' load: one that embeds, in which a long text takes a while, and
a small one that scores pairs. `python -m tests.chaos.stack.encoder_models embed|score FOLDER`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import transformers as tf

from tests.encoders import save_cross_encoder, save_modules, save_words
from tests.models import HEADS_ALIKE, save_drawn

LONGEST = 512
SIZES: dict[str, Any] = {
    **HEADS_ALIKE,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "max_position_embeddings": LONGEST,
}


def save(task: str, folder: Path) -> None:
    """The same weights every time."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if task == "score":
        save_cross_encoder(folder.parent, "bert").rename(folder)
        return
    save_drawn(folder, lambda: tf.AutoModel.from_config(tf.BertConfig(**SIZES)))
    save_modules(folder, longest=LONGEST)
    save_words(folder)


if __name__ == "__main__":
    save(sys.argv[1], Path(sys.argv[2]))
