"""The CPU kernels as Python calls them: loads the library for this processor and declares its
functions.

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
from services.stage.kernels.recurrent_calls import (
    CALLS,
    ConvolutionCall,
    DeltaCall,
    GateCall,
    ScanCall,
)

_log = structlog.get_logger(__name__)

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The sources' `Dtype`."""
_FLAGS = {
    "amx": {"amx_tile", "amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni"},
    "avx512_bf16": {"avx512_bf16", "avx512_vnni"},
    "avx512_vnni": {"avx512_vnni"},
}
"""The processor's flags that a variant needs in addition to AVX-512 as torch knows it."""
_LIMITS = {
    **dict.fromkeys(("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2"), "avx2"),
    "AVX512_CORE": "avx512",
    "AVX512_CORE_VNNI": "avx512_vnni",
    **dict.fromkeys(("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512"), "avx512_bf16"),
}
"""The widest variant under each of oneDNN's limits, ONEDNN_MAX_CPU_ISA; any other limit allows
tiles."""


class _Strides(ctypes.Structure):
    _fields_ = (("attention_head", c_int64), ("row", c_int64))


class AttentionCall(ctypes.Structure):
    """calls.h's `AttentionCall`, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("query", "key", "value", "out", "keys", "values")),
        *((name, c_void_p) for name in ("sequence", "position", "table", "sinks", "bias")),
        *((name, _Strides) for name in ("query_strides", "key_strides", "value_strides")),
        *((name, c_int32) for name in ("num_rows", "num_sequences", "table_width", "num_blocks")),
        *((name, c_int32) for name in ("num_heads", "num_kv_heads", "dim", "value_dim")),
        *(
            (name, c_int32)
            for name in ("window", "chunk", "dtype", "num_threads", "both_ways", "bias_reach")
        ),
        *((name, c_float) for name in ("scale", "softcap")),
    )


class Weights(IntEnum):
    """calls.h's `Weights`: how weights are stored."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3
    GROUPED_INT8 = 4


class GateActivation(IntEnum):
    """calls.h's `GateActivation`: what a gated MLP applies to its gate."""

    SILU = 0
    GELU = 1
    GELU_TANH = 2


class LowRankPart(ctypes.Structure):
    """calls.h's `LowRankPart`, field by field; its products by their addresses."""

    _fields_ = (("down", c_void_p), ("up", c_void_p), ("first_output", c_int64))


class AdapterRows(ctypes.Structure):
    """calls.h's `AdapterRows`, field by field."""

    _fields_ = (
        ("parts", POINTER(LowRankPart)),
        ("begins", POINTER(c_int32)),
        ("rows", c_void_p),
        ("num_rows", c_int64),
    )


class AdapterStep(ctypes.Structure):
    """calls.h's `AdapterStep`, field by field."""

    _fields_ = (("groups", POINTER(AdapterRows)), ("num_groups", c_int64))


class ProductCall(ctypes.Structure):
    """calls.h's `ProductCall`, field by field."""

    _fields_ = (
        *(
            (name, c_void_p)
            for name in (
                "x",
                "weights",
                "out",
                "bias",
                "scales",
                "column_sums",
                "x_rows",
                "out_rows",
                "x_order",
            )
        ),
        ("adapters", POINTER(AdapterStep)),
        *(
            (name, c_int64)
            for name in (
                *("num_rows", "num_inputs", "num_outputs", "first_int8"),
                *("x_stride", "out_stride"),
            )
        ),
        *((name, c_int32) for name in ("kind", "num_threads", "number", "has_zeros")),
    )


class Norm(ctypes.Structure):
    """calls.h's `Norm`, field by field. Without weights there is no norm."""

    _fields_ = (("weight", c_void_p), ("eps", c_float), ("rounds_first", c_int32))


class LayerNorm(ctypes.Structure):
    """calls.h's `LayerNorm`, field by field."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("eps", c_float))


class Turned(ctypes.Structure):
    """calls.h's `Turned`, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("cos", "sin")),
        *((name, c_int32) for name in ("dim", "dtype", "neighbors")),
    )


class Ranks(ctypes.Structure):
    """calls.h's `Ranks`, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("arrived", "buffers")),
        *((name, c_int64) for name in ("buffer_bytes", "num_meetings")),
        *((name, c_int32) for name in ("rank", "num_ranks")),
    )


class LayerCall(ctypes.Structure):
    """calls.h's `LayerCall`, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "mixed", "out")),
        ("turned", Turned),
        *((name, POINTER(ProductCall)) for name in ("qkv", "o", "gate_up", "down")),
        ("attention", POINTER(AttentionCall)),
        *((name, Norm) for name in ("before_attention", "query_norm", "key_norm")),
        *((name, Norm) for name in ("after_attention", "before_mlp", "after_mlp")),
        ("ranks", POINTER(Ranks)),
        *((name, c_int64) for name in ("first_attended", "first_o", "first_inner", "first_down")),
        *((name, c_int32) for name in ("norms_all_heads", "norms_turned", "activation")),
        ("residual_scale", c_float),
    )


class EncoderLayerCall(ctypes.Structure):
    """calls.h's `EncoderLayerCall`, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "out")),
        *((name, POINTER(ProductCall)) for name in ("qkv", "o", "up", "down")),
        ("attention", POINTER(AttentionCall)),
        *((name, LayerNorm) for name in ("after_attention", "after_mlp")),
        ("uses_tanh", c_int32),
    )


def _typed(function: Any, *types: Any) -> Any:
    function.argtypes = types
    function.restype = c_int32
    return function


class Kernel:
    """One loaded variant. OpenMP comes from torch's own runtime: the library links none."""

    __slots__ = (
        *(
            "apply_delta",
            "attend",
            "convolve",
            "fit_int4",
            "gate",
            "gate_mul",
            "gelu",
            "isa",
            "layer_norm",
            "meet",
            "multiply",
            "pack_weights",
            "path",
            "rms_norm",
            "rotate",
            "run_encoder_layer",
            "run_layer",
            "scan",
        ),
    )

    def __init__(self, path: Path, isa: str) -> None:
        library = ctypes.CDLL(str(path))
        calls = {
            "attention": AttentionCall,
            "product": ProductCall,
            "layer": LayerCall,
            "encoder_layer": EncoderLayerCall,
            "ranks": Ranks,
            **CALLS,
        }
        if any(
            getattr(library, f"shardline_{name}_call_bytes")() != ctypes.sizeof(call)
            for name, call in calls.items()
        ):
            raise OSError(f"{path} expects another call layout: delete it and build again")
        self.attend = _typed(library.shardline_attend, POINTER(AttentionCall))
        self.rms_norm = _typed(
            library.shardline_rms_norm,
            c_void_p,
            POINTER(Norm),
            c_void_p,
            *[c_int64] * 4,
            *[c_int32] * 2,
        )
        self.layer_norm = _typed(
            library.shardline_layer_norm,
            *[c_void_p] * 2,
            POINTER(LayerNorm),
            c_void_p,
            *[c_int64] * 2,
            *[c_int32] * 2,
        )
        self.gelu = _typed(library.shardline_gelu, *[c_void_p] * 2, *[c_int64] * 3, *[c_int32] * 3)
        self.run_layer = _typed(library.shardline_run_layer, POINTER(LayerCall))
        self.run_encoder_layer = _typed(
            library.shardline_run_encoder_layer, POINTER(EncoderLayerCall)
        )
        self.gate_mul = _typed(
            library.shardline_gate_mul, *[c_void_p] * 3, *[c_int64] * 4, *[c_int32] * 3
        )
        self.rotate = _typed(
            library.shardline_rotate,
            c_void_p,
            POINTER(Turned),
            c_void_p,
            *[c_int64] * 4,
            *[c_int32] * 2,
        )
        self.pack_weights = _typed(library.shardline_pack_weights, *[c_void_p] * 2, *[c_int64] * 2)
        self.fit_int4 = _typed(library.shardline_fit_int4, *[c_void_p] * 4, c_int64, c_int32)
        self.multiply = _typed(library.shardline_multiply, POINTER(ProductCall))
        self.meet = _typed(library.shardline_meet, POINTER(Ranks))
        self.convolve = _typed(library.shardline_convolve, POINTER(ConvolutionCall))
        self.scan = _typed(library.shardline_scan, POINTER(ScanCall))
        self.apply_delta = _typed(library.shardline_apply_delta, POINTER(DeltaCall))
        self.gate = _typed(library.shardline_gate, POINTER(GateCall))
        self.isa = isa
        self.path = path


def supported_isas() -> list[str]:
    """Returns the variants that this processor, torch and oneDNN as they are limited here run, the
    widest first."""
    if platform.machine() not in {"x86_64", "AMD64"}:
        return []
    capability = torch.backends.cpu.get_cpu_capability().lower()
    widest = capability if capability != "avx512" else _widest_avx512()
    return list(MARCH)[list(MARCH).index(widest) :] if widest in MARCH else []


def _widest_avx512() -> str:
    """Returns the variant for what the processor has in addition to AVX-512, as far as oneDNN's
    limit of this process goes."""
    limit = os.environ.get(
        "ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "DEFAULT")
    ).upper()
    flags = _processor_flags()
    allowed = _LIMITS.get(limit, "amx")
    isas = [
        isa for isa in list(MARCH)[list(MARCH).index(allowed) :] if flags >= _FLAGS.get(isa, set())
    ]
    return next(isa for isa in isas if isa != "amx" or _may_use_tiles())


def _processor_flags() -> set[str]:
    """Returns what Linux reports of the first core; torch's own list of capabilities is younger
    than the torch that we serve."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def _may_use_tiles() -> bool:
    """Asks Linux, which keeps the tiles' state from a process that does not."""
    arch_prctl = 158
    request_permission = 0x1023
    tile_data = 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def load() -> Kernel | None:
    """Loads the kernel for this processor, built first if necessary; without one, logs the reason
    and returns None."""
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
