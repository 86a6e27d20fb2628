"""A real GGUF file of 4 bits in int4: its memory is the file's size, its logits those of the file's
floats."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer

from tests.benchmarks.perplexity import WINDOW, num_held_bytes, read
from tests.chain import load_chain
from tests.pinned import first_core
from tests.real_model import real_model
from tests.repository import REPOSITORY


def test_a_file_of_4_bits_takes_its_own_size_and_gives_the_logits_of_its_floats(
    tmp_path: Path,
) -> None:
    folder = real_model()
    path = folder / "model.gguf"
    text = (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids[:WINDOW]
    with first_core(tmp_path / "locks") as device:
        (floats,) = load_chain(path, 1, device, tmp_path / "floats")
        (stage,) = load_chain(path, 1, device, tmp_path / "own", dtype="int4")

        exact, found = (read(each, torch.tensor([ids])) for each in (floats, stage))

    assert stage.exact
    assert num_held_bytes(stage) < path.stat().st_size
    files = (tmp_path / "own").rglob("*.safetensors")
    assert sum(file.stat().st_blocks for file in files) * 512 < path.stat().st_size / 20
    kl = (exact.logprobs.exp() * (exact.logprobs - found.logprobs)).sum(-1).mean()
    assert kl < 0.02
    same = (exact.logprobs.argmax(-1) == found.logprobs.argmax(-1)).float().mean()
    assert same > 0.9
    assert abs(found.loss - exact.loss) < 0.05
