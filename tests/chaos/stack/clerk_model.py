"""Random models that speak with the demo model's tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

from services.standalone.settings import CLERK

VOCAB_SIZE = 896
"""The tokenizer's."""


def with_tokenizer(made: Path, folder: Path) -> None:
    """Moves a saved model to a folder, with the demo model's tokenizer and template."""
    for path in (*CLERK.glob("*token*"), *CLERK.glob("chat_template*")):
        shutil.copy(path, made)
    made.rename(folder)
