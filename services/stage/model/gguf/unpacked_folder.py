"""A GGUF model as the folder of a transformers model: config and tokenizer from its header, written
once into the cache, with links to its files. No weight is read.

All that reads a model's folder so reads a GGUF file: fingerprints, copies for other workers, the
planner, the row that doors read.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from services.stage.model.gguf.gguf_tokenizer import tokenizer_config, tokenizer_of
from shardline_gguf import (
    FORMAT,
    SUFFIX,
    config_of,
    eos_ids,
    files_of,
    model_in,
    read_parts,
)

FOLDER = "gguf"
CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def gguf_of(model: Path) -> Path | None:
    """Returns the GGUF file that a setting means: itself, or the one in a folder that is not made
    of safetensors; None for another model. Raises Invalid for several in a folder."""
    if model.suffix == SUFFIX and not model.is_dir():
        return model
    if not model.is_dir() or is_unpacked(model):
        return None
    return None if any((model / name).is_file() for name in WEIGHTS) else model_in(model)


def is_unpacked(folder: Path) -> bool:
    """Whether `unpack` has written this folder, here or on the host that it was copied from."""
    config = folder / CONFIG
    if not config.is_file():
        return False
    with suppress(ValueError, OSError):
        content = json.loads(config.read_text(encoding="utf-8"))
        return isinstance(content, dict) and "gguf_format" in content
    return False


def unpack(path: Path, cache_folder: Path) -> Path:
    """Returns the folder of a GGUF model, by one of its files. Raises Invalid if it cannot be
    read."""
    files = [file.resolve() for file in files_of(path)]
    folder = cache_folder / FOLDER / _key(files)
    if folder.is_dir():
        return folder
    header, tensors = read_parts(path)
    config = config_of(header, tensors)
    tokenizer = tokenizer_of(header)
    texts = {
        CONFIG: _json(config),
        "generation_config.json": _json({"eos_token_id": list(eos_ids(header))}),
        "tokenizer_config.json": _json(tokenizer_config(header)),
    }
    if tokenizer is not None:
        texts["tokenizer.json"] = tokenizer.to_str()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        draft = Path(made) / folder.name
        draft.mkdir()
        for name, text in texts.items():
            (draft / name).write_text(text, encoding="utf-8")
        for file, name in zip(files, _names(len(files)), strict=True):
            (draft / name).symlink_to(file)
        with suppress(OSError):  # Another process of this host was faster.
            draft.rename(folder)
    return folder


def _names(num_files: int) -> list[str]:
    """Returns names of links: the same for the same model under any name."""
    if num_files == 1:
        return [f"model{SUFFIX}"]
    return [f"model-{number + 1:05}-of-{num_files:05}{SUFFIX}" for number in range(num_files)]


def _key(files: list[Path]) -> str:
    status = [(str(file), file.stat()) for file in files]
    stamps = [(name, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for name, each in status]
    return hashlib.sha256(_json({"format": FORMAT, "files": stamps}).encode()).hexdigest()[:32]


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
