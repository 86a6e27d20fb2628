"""Which files make one GGUF model: one, the parts of a split one, or those of a folder."""

from __future__ import annotations

import re
from pathlib import Path

from shardline_gguf.gguf_header import GgufHeader, TensorPlace, read_header
from shardline_gguf.refusal import refuse

SUFFIX = ".gguf"
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
MAX_PARTS = 1024
PROJECTOR = "mmproj"
"""Begins the name of a file that holds the vision tower of a multimodal model."""
SPLIT_COUNT = "split.count"
SPLIT_TENSORS = "split.tensors.count"


def is_gguf(model: str | Path) -> bool:
    """Whether a setting names a GGUF file, which may be missing."""
    return Path(model).suffix == SUFFIX


def stem_of(path: Path) -> str:
    """Returns the file's name without its suffix and its number among parts."""
    part = PART.fullmatch(path.name)
    return part["stem"] if part else path.stem


def files_of(path: Path) -> list[Path]:
    """Returns the file, or all parts of the split model that it belongs to, in order. Raises
    Invalid if one is missing."""
    part = PART.fullmatch(path.name)
    if part is None:
        files = [path]
    else:
        count = int(part["count"])
        if not 1 <= count <= MAX_PARTS:
            refuse(f"{path} would be one of {count} parts, more than {MAX_PARTS}")
        files = [
            path.with_name(f"{part['stem']}-{number:05}-of-{count:05}{SUFFIX}")
            for number in range(1, count + 1)
        ]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        refuse(f"{path.parent} lacks {missing[0]}", "Give the path of a GGUF file, with all parts")
    return files


def model_in(folder: Path) -> Path | None:
    """Returns the GGUF model that a folder holds, by its first file; None where it holds none.
    Raises Invalid if it holds several."""
    found = sorted(
        path for path in folder.glob(f"*{SUFFIX}") if not path.name.startswith(PROJECTOR)
    )
    models = {stem_of(path): path for path in reversed(found)}
    if len(models) > 1:
        shown = ", ".join(path.name for path in found[:3])
        refuse(f"{folder} holds {len(models)} GGUF models: {shown}", "Give the path of one")
    return found[0] if found else None


def read_parts(path: Path) -> tuple[GgufHeader, dict[str, TensorPlace]]:
    """Reads the header of a model's first file, and the places of the tensors of all its files.
    Raises Invalid."""
    first, *others = [read_header(file) for file in files_of(path)]
    tensors = dict(first.tensors)
    for header in others:
        twice = tensors.keys() & header.tensors.keys()
        if twice:
            refuse(f"{header.path} has {min(twice)!r}, as a part before it")
        tensors |= header.tensors
    num_parts = first.metadata.get(SPLIT_COUNT, 1)
    if num_parts not in (0, 1 + len(others)):
        refuse(
            f"{first.path} is one of {num_parts} parts, not of {1 + len(others)}",
            "Give all parts by the names that llama.cpp gave them",
        )
    expected = first.metadata.get(SPLIT_TENSORS, len(tensors))
    if expected != len(tensors):
        refuse(f"the parts of {first.path} have {len(tensors)} tensors, not {expected}")
    return first, tensors
