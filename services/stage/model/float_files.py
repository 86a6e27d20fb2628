"""The float weights of a checkpoint as files, where its own are quantized, in GGUF, or of another
dtype and too many to convert in memory: written once, layer by layer, so that it loads as others.

They lie in the cache folder under the checkpoint's fingerprint. Memory never holds more than one
layer; a later start, or another stage of this host, finds what is written.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import structlog
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from services.stage.model.config_files import QUANTIZATION_NAMES, quantization_of
from services.stage.model.encoders.encoder_class import is_encoder, mark
from services.stage.model.gguf.gguf_tensors import GgufTensors
from services.stage.model.model_info import ModelInfo
from services.stage.model.quantization import (
    Floats,
    Parts,
    Quantization,
    ScaledQuantization,
)
from services.stage.model.refusal import refuse
from services.stage.model.text_part import other_parts
from services.stage.model.weights import (
    COPY_AGAIN,
    INDEX,
    LENGTH_BYTES,
    check_file,
    fingerprint,
    refuse_8_bits,
    weight_files,
)
from services.stage.products.stored import StoredWeight
from shardline.base.errors import Invalid
from shardline_gguf import is_gguf

log = structlog.get_logger(__name__)

FOLDER = "floats"
REST = "rest"
"""What belongs to no layer."""
LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
FUSED_SCALE = "_scale_inv"
"""Behind the name of experts in one tensor, which has no `.weight`."""
CONFIG = "config.json"
STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""As safetensors names dtypes."""
ROOM = 1.1
"""A file is begun only if the disk has room for this many times its size."""


def with_floats(
    info: ModelInfo,
    layers: range,
    dtype: torch.dtype,
    cache_folder: Path,
    *,
    converts: bool = False,
    stored: Mapping[str, StoredWeight] = MappingProxyType({}),
) -> ModelInfo:
    """Returns the model itself, or one with a folder of float weights of these layers: if its own
    are quantized or in GGUF, or, with `converts`, of another dtype, which the loader would convert
    in memory, all at once. Weights that are `stored`, by their names in the model, are left out:
    zeros that take no disk and, unread, no memory.

    Raises Invalid if the checkpoint is broken, quantized in an unknown way, or the disk has no
    room.
    """
    files = weight_files(info.path)
    if is_gguf(files[0]):
        folder = _folder(info, dtype, cache_folder, "-rest" if stored else "")
        return _GgufWriter(info, files, dtype, folder, stored).write(layers)
    quantization = quantization_of(info.config)
    if quantization is None:
        refuse_8_bits(files, other_parts(info.config))
    if quantization is None and converts and not _has_dtype(info.path, dtype):
        quantization = Floats()
    if quantization is None:
        return info
    kind = quantization.reading + ("-rest" if stored else "")
    folder = _folder(info, dtype, cache_folder, kind)
    return _PackedWriter(info, quantization, dtype, folder, stored).write(layers)


def _folder(info: ModelInfo, dtype: torch.dtype, cache_folder: Path, kind: str = "") -> Path:
    weights = fingerprint(info.path, cache_folder)[:32]
    return cache_folder / FOLDER / f"{weights}-{str(dtype).removeprefix('torch.')}{kind}"


class _Writer(ABC):
    def __init__(self, info: ModelInfo, dtype: torch.dtype, folder: Path) -> None:
        self._info = info
        self._dtype = dtype
        self._folder = folder

    @abstractmethod
    def names(self) -> Mapping[str, Iterable[str]]:
        """The tensors of each part."""

    @abstractmethod
    def floats(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Returns these tensors [...]: weights in the dtype, all else as it is. Those on no device
        are left out."""

    def write(self, layers: range) -> ModelInfo:
        """Writes what is missing; returns a model with a folder of links to the files of these
        layers."""
        parts = [REST, *(f"layer-{number}" for number in layers)]
        names = self.names()
        own = self._folder / f"{layers.start}-{layers.stop}"
        own.mkdir(parents=True, exist_ok=True)
        for part in parts:
            if not self._file(part).is_file():
                self._write(part, names[part])
        index = {
            weight: self._file(part).name for part in parts for weight in _weights(self._file(part))
        }
        for part in parts:
            _link(own / self._file(part).name, self._file(part))
        _replace(own / INDEX, {"metadata": {}, "weight_map": index})
        config = json.loads((self._info.path / CONFIG).read_text(encoding="utf-8"))
        for scope in [config, *config.values()]:
            if isinstance(scope, dict):
                for name in QUANTIZATION_NAMES:
                    scope.pop(name, None)
        _replace(own / CONFIG, config)
        written = type(self._info.config).from_dict(config)
        if is_encoder(self._info.config):
            mark(written)
        return replace(self._info, path=own, config=written)

    def _file(self, part: str) -> Path:
        return self._folder / f"{part}.safetensors"

    def _write(self, part: str, names: Iterable[str]) -> None:
        file = self._file(part)
        try:
            floats = self.floats(names)
        except (SafetensorError, KeyError, RuntimeError, ValueError, IndexError) as error:
            refuse(f"{part} of {self._info.path} cannot be unpacked: {error}", COPY_AGAIN, error)
        size_bytes = sum(each.nbytes for each in floats.values() if not each.is_meta)
        free_bytes = shutil.disk_usage(self._folder).free
        if size_bytes * ROOM > free_bytes:
            problem = f"{file} needs {size_bytes >> 20:,} MiB, the disk has {free_bytes >> 20:,}"
            raise Invalid(
                "SHARDLINE_CACHE_DIR", problem, "Free some, or name a folder of another disk"
            )
        with tempfile.TemporaryDirectory(dir=self._folder) as draft:
            _save(floats, Path(draft) / file.name)
            (Path(draft) / file.name).replace(file)
        log.info("float weights written", file=str(file), mib=size_bytes >> 20)


class _GgufWriter(_Writer):
    def __init__(
        self,
        info: ModelInfo,
        files: list[Path],
        dtype: torch.dtype,
        folder: Path,
        stored: Mapping[str, StoredWeight],
    ) -> None:
        super().__init__(info, dtype, folder)
        self._tensors = GgufTensors(files, info.config)
        self._stored = stored

    def names(self) -> Mapping[str, Iterable[str]]:
        return {
            REST if layer is None else f"layer-{layer}": names
            for layer, names in self._tensors.by_layer().items()
        }

    def floats(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Returns the weights [...] that these tensors mean, in the dtype. Those on no device are
        left out."""
        weights: dict[str, Tensor] = {}
        for name in names:
            target = self._tensors.target(name)
            if target in self._stored:
                shape = self._stored[target].shape
                weights[target] = torch.empty(shape, dtype=self._dtype, device="meta")
            else:
                weights |= self._tensors.weights(name, self._dtype)
        return weights


class _PackedWriter(_Writer):
    def __init__(
        self,
        info: ModelInfo,
        quantization: Quantization,
        dtype: torch.dtype,
        folder: Path,
        stored: Mapping[str, StoredWeight],
    ) -> None:
        super().__init__(info, dtype, folder)
        self._quantization = quantization
        self._stored = stored
        self._files: dict[str, Path] = {}

    def names(self) -> Mapping[str, Iterable[str]]:
        names: dict[str, list[str]] = defaultdict(list)
        others = other_parts(self._info.config)
        for file in weight_files(self._info.path):
            check_file(file)
            for name in (each for each in _weights(file) if others.isdisjoint(each.split("."))):
                found = LAYER.search(name)
                self._files[name] = file
                names[f"layer-{found[1]}" if found else REST].append(name)
        return names

    def floats(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Returns these tensors [...], unpacked: weights in the dtype, all else as it is. Those on
        no device are left out."""
        targets = {name: self._stored_target(name) for name in names}
        files = {name: self._files[name] for name, target in targets.items() if target is None}
        holes = {
            target: torch.empty(self._stored[target].shape, dtype=self._dtype, device="meta")
            for target in targets.values()
            if target is not None
        }
        with ExitStack() as stack:
            opened = {
                path: stack.enter_context(safe_open(path, framework="pt"))
                for path in set(files.values())
            }
            return holes | self._unpacked(
                {name: opened[path].get_tensor(name) for name, path in files.items()}
            )

    def _stored_target(self, name: str) -> str | None:
        """The stored weight that a tensor is a part of."""
        layer, _, part = name.rpartition(self._quantization.joint)
        target = f"{layer}{self._quantization.suffix}"
        return target if target in self._stored and part in self._quantization.parts else None

    def _unpacked(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        quantization = self._quantization
        floats: dict[str, Tensor] = {}
        used: set[str] = set()
        for name in tensors:
            layer, joint, part = name.rpartition(quantization.joint)
            if part == quantization.parts[0]:
                names = {each: f"{layer}{joint}{each}" for each in quantization.parts}
                parts = {each: tensors[its] for each, its in names.items() if its in tensors}
                used |= {names[each] for each in parts}
                floats[f"{layer}{quantization.suffix}"] = self._weight(layer, parts)
        for name in tensors.keys() - used:
            scale = f"{name}{FUSED_SCALE}"
            if isinstance(quantization, ScaledQuantization) and scale in tensors:
                parts = {"weight": tensors[name], "weight_scale_inv": tensors[scale]}
                used |= {name, scale}
                floats[name] = self._weight(name, parts)
        return floats | {name: tensor for name, tensor in tensors.items() if name not in used}

    def _weight(self, layer: str, parts: Parts) -> Tensor:
        try:
            return self._quantization.weight(parts).to(self._dtype).contiguous()
        except ValueError as error:
            raise ValueError(f"{layer}: {error}") from error


def _has_dtype(folder: Path, dtype: torch.dtype) -> bool:
    """Whether all weights of more than one dimension are stored so."""
    tensors = [
        tensor for file in weight_files(folder) for tensor in check_file(file).tensors.values()
    ]
    return all(
        tensor["dtype"] == STORED.get(dtype) for tensor in tensors if len(tensor["shape"]) > 1
    )


def _save(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Writes tensors as safetensors does; those on no device, all of one dtype with the others, are
    a hole at the file's end."""
    with_values = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
    save_file(with_values, file, metadata={"format": "pt"})
    if len(with_values) == len(tensors):
        return
    with file.open("rb") as written:
        header = json.loads(written.read(int.from_bytes(written.read(LENGTH_BYTES), "little")))
        content = written.read()
    end = len(content)
    for name, tensor in tensors.items():
        if tensor.is_meta:
            offsets = [end, end + tensor.nbytes]
            shape = list(tensor.shape)
            header[name] = {"dtype": STORED[tensor.dtype], "shape": shape, "data_offsets": offsets}
            end = offsets[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    with file.open("wb") as rewritten:
        rewritten.write(len(text).to_bytes(LENGTH_BYTES, "little") + text + content)
        rewritten.truncate(LENGTH_BYTES + len(text) + end)


def _weights(file: Path) -> Iterable[str]:
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


def _replace(file: Path, content: object) -> None:
    """Writes JSON at once: another stage of this host, or another rank, may read the same file."""
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as draft:
        json.dump(content, draft)
    Path(draft.name).replace(file)


def _link(link: Path, file: Path) -> None:
    if not link.is_symlink():
        try:
            link.symlink_to(file.resolve())
        except FileExistsError:  # another stage of this host was faster
            return
