"""The CPU kernels as Python calls them: loads the library for this processor and declares its functions.

Owns the C ABI's mirror; `build` makes the library. Knows no model.
"""

from __future__ import annotations

import ctypes
import os
import platform
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any

import structlog
import torch

from services.stage.kernels.build import MARCH, KernelSettings, build

_log = structlog.get_logger(__name__)

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The sources' `Dtype`."""
_TILES = {"amx_tile", "amx_bf16", "amx_int8"}
"""The processor's flags that the variant for AMX needs."""


class _Strides(ctypes.Structure):
    _fields_ = (("attention_head", c_int64), ("row", c_int64))


class AttentionCall(ctypes.Structure):
    """attention.cpp's `Call`, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("query", "key", "value", "out", "keys", "values")),
        *((name, c_void_p) for name in ("sequence", "position", "table", "sinks")),
        *((name, _Strides) for name in ("query_strides", "key_strides", "value_strides")),
        *((name, c_int32) for name in ("num_rows", "num_sequences", "table_width", "num_blocks")),
        *((name, c_int32) for name in ("num_heads", "num_kv_heads", "dim", "value_dim")),
        *((name, c_int32) for name in ("window", "dtype", "num_threads")),
        *((name, c_float) for name in ("scale", "softcap")),
    )


class ProductKind(IntEnum):
    """products.cpp's `Kind`: how weights are stored."""

    BFLOAT16 = 0
    INT8 = 1


class ProductLevel(IntEnum):
    """products.cpp's `Level`: the instructions that products use. bfloat16 needs AMX."""

    PORTABLE = 0
    VNNI = 1
    AMX = 2


class ProductCall(ctypes.Structure):
    """products.cpp's `ProductCall`, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "weights", "out", "bias", "scales", "column_sums")),
        *((name, c_int64) for name in ("num_rows", "num_inputs", "num_outputs", "x_stride", "out_stride")),
        *((name, c_int32) for name in ("kind", "level", "num_threads")),
    )


def _typed(function: Any, *types: Any) -> Any:
    function.argtypes, function.restype = types, c_int32
    return function


class Kernel:
    """One loaded variant. OpenMP comes from torch's own runtime: the library links none."""

    __slots__ = ("attend", "isa", "multiply", "pack_weights", "path", "product_level", "rms_norm", "rotate", "silu_mul")

    def __init__(self, path: Path, isa: str) -> None:
        library = ctypes.CDLL(str(path))
        sizes = (library.shardline_call_bytes(), library.shardline_product_call_bytes())
        if sizes != (ctypes.sizeof(AttentionCall), ctypes.sizeof(ProductCall)):
            raise OSError(f"{path} expects another call layout: delete it and build again")
        self.attend = _typed(library.shardline_attend, POINTER(AttentionCall))
        self.rms_norm = _typed(library.shardline_rms_norm, *[c_void_p] * 3, *[c_int64] * 2, c_float, *[c_int32] * 3)
        self.silu_mul = _typed(library.shardline_silu_mul, *[c_void_p] * 3, *[c_int64] * 4, *[c_int32] * 2)
        self.rotate = _typed(library.shardline_rotate, *[c_void_p] * 4, *[c_int64] * 4, *[c_int32] * 2)
        self.pack_weights = _typed(library.shardline_pack_weights, *[c_void_p] * 2, *[c_int64] * 2)
        self.multiply = _typed(library.shardline_multiply, POINTER(ProductCall))
        self.product_level = ProductLevel(library.shardline_product_level())
        self.isa = isa
        self.path = path


def supported_isas() -> list[str]:
    """Returns the variants that this processor, torch and oneDNN as they are limited here run, the widest first."""
    if platform.machine() not in {"x86_64", "AMD64"}:
        return []
    capability = torch.backends.cpu.get_cpu_capability().lower()
    widest = "amx" if capability == "avx512" and _offers_amx() else capability
    return list(MARCH)[list(MARCH).index(widest) :] if widest in MARCH else []


def _offers_amx() -> bool:
    """Whether processor and system have tiles of bfloat16, and nobody keeps oneDNN from them."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "DEFAULT")).upper()
    is_allowed = limit in {"DEFAULT", "ALL"} or "AMX" in limit
    return is_allowed and _processor_flags() >= _TILES and _may_use_tiles()


def _processor_flags() -> set[str]:
    """What Linux says of the first core; torch's own list of capabilities is younger than the torch that we serve."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def _may_use_tiles() -> bool:
    """Asks Linux, which keeps the tiles' state from a process that does not."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def load() -> Kernel | None:
    """Loads the kernel for this processor, built first if necessary; without one, logs the reason and returns None."""
    settings = KernelSettings()
    isas = supported_isas()
    if settings.kernel == "off" or not isas:
        reason = "SHARDLINE_KERNEL=off" if settings.kernel == "off" else "needs x86-64 with AVX2"
        _log.warning("attention falls back to SDPA: rows are not exact", reason=reason)
        return None
    try:
        return Kernel(build(isas[0], settings.kernel_dir), isas[0])
    except OSError as error:
        _log.warning("attention falls back to SDPA: rows are not exact", reason=str(error))
        return None
