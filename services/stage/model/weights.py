"""Owns the files of a model: which hold its weights, whether they are complete, and the fingerprint
of all that decides tokens.

Knows no torch: nothing is loaded. Checksums are cached by path, size and times of change.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.stage.model.refusal import refuse
from services.stage.products.cache import recall, store
from shardline.base.errors import Invalid, Unavailable
from shardline_gguf import SUFFIX as GGUF
from shardline_gguf import is_gguf, read_header

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DENSE = "*_Dense"
"""The folders of modules with separate weights, in ONE_FILE."""
MORE_TEMPLATES = "additional_chat_templates/*.jinja"
DECIDING = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "*vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    MORE_TEMPLATES,
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "*_Pooling/config.json",
    f"{DENSE}/config.json",
)
"""Files next to the weights that turn messages and text into ids, and ids into tokens; of encoders,
hidden states into vectors."""

HEADER_MAX_BYTES = 100_000_000
LENGTH_BYTES = 8
SHA256_CHARS = 64
DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
}
DTYPE_BITS |= {"F64": 64, "I64": 64, "U64": 64, "F8_E4M3": 8, "F8_E5M2": 8}
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""Errors raised by malformed JSON, and by JSON of an unexpected form."""
UNEXPLAINED = frozenset({"I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"})
"""Dtypes of 8 bits: a number is a weight only together with a scale."""
COPY_AGAIN = "Copy the model again, with all its files"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """A file of weights, in safetensors or GGUF, that has the length of its header."""

    path: Path
    size_bytes: int
    header_sha256: str
    tensors: dict[str, Any]
    """The header: dtype, shape and place of each tensor."""


def weight_files(folder: Path) -> list[Path]:
    """Returns the files that hold the weights, sorted by name: in safetensors, else in GGUF. Raises
    Invalid if one is missing."""
    if (folder / ONE_FILE).is_file():
        return [folder / ONE_FILE]
    index = folder / INDEX
    if not index.is_file():
        if parts := sorted(folder.glob(f"model*{GGUF}")):
            return parts
        others = sorted(file.name for file in folder.glob("*.bin"))
        found = f"only {others[0]}" if others else "no weights"
        refuse(
            f"{folder} has {found}, no {ONE_FILE}",
            "Save the model with save_pretrained (safetensors)",
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [
            name for name in names if Path(name).name != name or not (folder / name).is_file()
        ]
    except MALFORMED as error:
        refuse(f"{index} is not a safetensors index: {error!r}", COPY_AGAIN, error)
    if missing or not names:
        refuse(f"{folder} lacks {', '.join(missing) or 'weights'}", COPY_AGAIN)
    return [folder / name for name in names]


def check_file(path: Path) -> WeightFile:
    """Checks a weight file by its header alone. Raises Invalid if it is cut short, too long or
    not in the format of its name."""
    if is_gguf(path):
        return _check_gguf(path)
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if not 2 <= header_bytes <= min(HEADER_MAX_BYTES, size_bytes - LENGTH_BYTES):
            problem = f"its header would have {header_bytes:,} of its {size_bytes:,} bytes"
            refuse(f"{path} is not a safetensors file: {problem}", COPY_AGAIN)
        header = file.read(header_bytes)
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        end = max((_end_of(name, tensor) for name, tensor in tensors.items()), default=0)
    except MALFORMED as error:
        refuse(f"{path} has a broken safetensors header: {error}", COPY_AGAIN, error)
    expected_bytes = LENGTH_BYTES + header_bytes + end
    if size_bytes != expected_bytes:
        what = "cut short" if size_bytes < expected_bytes else "too long"
        refuse(
            f"{path} is {what}: {size_bytes:,} bytes, its header says {expected_bytes:,}",
            COPY_AGAIN,
        )
    sha256 = hashlib.sha256(header).hexdigest()
    return WeightFile(path=path, size_bytes=size_bytes, header_sha256=sha256, tensors=tensors)


def refuse_8_bits(files: list[Path], others: Set[str]) -> None:
    """Raises Invalid for a tensor in 8 bits: no scale is read where no config declares quantized
    weights. Names with a part of `others` are not read at all."""
    for file in files:
        for name, tensor in check_file(file).tensors.items():
            dtype, is_matrix = tensor["dtype"], len(tensor["shape"]) > 1
            if dtype in UNEXPLAINED and is_matrix and others.isdisjoint(name.split(".")):
                refuse(
                    f"{file} has {name} as {dtype}, which no quantization_config explains",
                    "Convert it to floats, or add its quantization_config to config.json",
                )


def _check_gguf(path: Path) -> WeightFile:
    header = read_header(path)
    tensors = {
        name: {"dtype": place.block.name, "shape": list(place.shape)}
        for name, place in header.tensors.items()
    }
    return WeightFile(
        path=path,
        size_bytes=header.size_bytes,
        header_sha256=header.sha256,
        tensors=tensors,
    )


def header_of(path: Path) -> dict[str, Any]:
    """Returns dtype, shape and place of each tensor; nothing of a damaged file, which is refused
    once it is loaded."""
    try:
        return check_file(path).tensors
    except Invalid:
        return {}


def fingerprint(folder: Path, cache_folder: Path) -> str:
    """Returns the sha256 over config, tokenizer and weights. The stages of one pipeline must agree
    on it."""
    digest = hashlib.sha256()
    for path in _deciding_files(folder):
        name = str(path.relative_to(folder))
        digest.update(_line(name, hashlib.sha256(path.read_bytes()).hexdigest()))
    for path in _all_weights(folder):
        file = check_file(path)
        name = str(path.relative_to(folder))
        digest.update(
            _line(name, file.size_bytes, file.header_sha256, cached_sha256(path, cache_folder))
        )
    return digest.hexdigest()


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """A context for loading a model and taking its fingerprint: raises Unavailable if a file was
    written meanwhile."""
    before = _stamps(folder)
    yield
    if _stamps(folder) != before:
        raise Unavailable(f"{folder} was written while it was read: the next start reads it again")


def _end_of(name: str, tensor: Any) -> int:
    """Returns where the tensor's bytes end. Raises ValueError if their number does not match its
    shape and dtype."""
    begin, end = tensor["data_offsets"]
    if not 0 <= begin <= end:
        raise ValueError(f"{name} lies at {begin} to {end}")
    if (
        tensor["dtype"] in DTYPE_BITS
        and (end - begin) * 8 != math.prod(tensor["shape"]) * DTYPE_BITS[tensor["dtype"]]
    ):
        raise ValueError(
            f"{name} has {end - begin} bytes for the shape {tensor['shape']} of {tensor['dtype']}"
        )
    return int(end)


def _deciding_files(folder: Path) -> Iterator[Path]:
    yield from sorted(
        {path for pattern in DECIDING for path in folder.glob(pattern) if path.is_file()}
    )


def _all_weights(folder: Path) -> list[Path]:
    return [*weight_files(folder), *sorted(folder.glob(f"{DENSE}/{ONE_FILE}"))]


def stamp_of(path: Path) -> tuple[int, int, int]:
    """Returns size and times of a file. Copying tools may keep the time of modification, but not
    the time of change."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _stamps(folder: Path) -> dict[str, tuple[int, int, int]]:
    files = (*_deciding_files(folder), *_all_weights(folder))
    return {str(path.relative_to(folder)): stamp_of(path) for path in files}


def _line(*parts: object) -> bytes:
    return (json.dumps(parts) + "\n").encode()


def cached_sha256(path: Path, cache_folder: Path) -> str:
    """Returns the sha256 of a file, cached: reading gigabytes at every start would double the time
    to ready."""
    key = hashlib.sha256(_line(str(path.resolve()), *stamp_of(path))).hexdigest()
    value = recall(cache_folder, f"{key}.sha256")
    if value is not None and len(value) == SHA256_CHARS:
        return value
    with path.open("rb") as file:
        value = hashlib.file_digest(file, "sha256").hexdigest()
    store(cache_folder, f"{key}.sha256", value)
    return value
