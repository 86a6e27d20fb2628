"""The users' second model: random weights behind a byte-fallback tokenizer, as SentencePiece makes
them: half of what it says are bytes that are no character, or not yet. `python -m
tests.chaos.stack.second_model FOLDER`.
"""

from __future__ import annotations

import json
import string
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

from tests.chaos.load.users import SCRIBE
from tests.models import save_model

CONTEXT = 4 * SCRIBE.limit
NUM_LAYERS = 4
NUM_KV_HEADS = 2
HEAD_DIM = 32

SPECIAL = ("<unk>", "<s>", "</s>")
SPACE = "▁"
PIECES = ("th", "er", "in", "an", SPACE + "t", SPACE + "a", SPACE + "w")
LETTERS = SPACE + string.ascii_letters + string.digits + string.punctuation
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "[assistant]"
)


def tokenizer() -> Tokenizer:
    """Letters, a few pairs, and a token for each byte."""
    words = (*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS, *PIECES)
    model = BPE(
        vocab={word: number for number, word in enumerate(words)},
        merges=[(piece[0], piece[1]) for piece in PIECES],
        byte_fallback=True,
        unk_token="<unk>",
    )
    made = Tokenizer(model)
    made.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


def save(folder: Path) -> None:
    """The same weights every time."""
    made = save_model(
        folder.with_suffix(".made"),
        dtype=torch.float32,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=NUM_LAYERS,
        num_key_value_heads=NUM_KV_HEADS,
        vocab_size=SCRIBE.vocab_size,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
    )
    tokenizer().save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>"})
    )
    (made / "chat_template.jinja").write_text(TEMPLATE)
    made.rename(folder)


if __name__ == "__main__":
    save(Path(sys.argv[1]))
