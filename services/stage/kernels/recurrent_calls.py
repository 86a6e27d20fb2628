"""The calls of recurrent.cpp as Python makes them. Owns the C ABI's mirror; knows no model."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from enum import IntEnum


class StateRows(ctypes.Structure):
    """calls.h's `StateRows`, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("begins", "slots", "is_new")),
        *((name, c_int32) for name in ("num_sequences", "num_threads")),
    )


class ConvolutionCall(ctypes.Structure):
    """calls.h's `ConvolutionCall`, field by field."""

    _fields_ = (
        ("rows", StateRows),
        *((name, c_void_p) for name in ("x", "before", "after", "out", "state")),
        *((name, c_void_p) for name in ("weight", "bias")),
        *((name, c_int64) for name in ("num_channels", "x_stride")),
        *((name, c_int32) for name in ("width", "activates", "dtype")),
    )


class ScanCall(ctypes.Structure):
    """calls.h's `ScanCall`, field by field."""

    _fields_ = (
        ("rows", StateRows),
        *((name, c_void_p) for name in ("x", "b", "c", "dt", "out", "state")),
        *((name, c_void_p) for name in ("decay", "skip", "dt_bias")),
        *((name, c_int64) for name in ("x_stride", "dt_stride")),
        *((name, c_int32) for name in ("num_heads", "dim", "num_groups", "num_states", "dtype")),
        *((name, c_float) for name in ("least_dt", "most_dt")),
    )


class DeltaCall(ctypes.Structure):
    """calls.h's `DeltaCall`, field by field."""

    _fields_ = (
        ("rows", StateRows),
        *((name, c_void_p) for name in ("query", "key", "value", "a", "b", "out", "state")),
        *((name, c_void_p) for name in ("decay", "dt_bias")),
        *((name, c_int64) for name in ("x_stride", "a_stride")),
        *((name, c_int32) for name in ("num_key_heads", "num_heads", "key_dim", "value_dim")),
        ("dtype", c_int32),
        ("most_learned", c_float),
    )


class GateOrder(IntEnum):
    """calls.h's `GateOrder`: where a gate is multiplied."""

    GATE_FIRST = 0
    NORM_FIRST = 1
    GATE_ALONE = 2


class GateCall(ctypes.Structure):
    """calls.h's `GateCall`, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "weight", "gate", "out")),
        *((name, c_int64) for name in ("num_rows", "num_groups", "dim", "gate_stride")),
        ("weight_stride", c_int64),
        *((name, c_int32) for name in ("order", "dtype", "num_threads")),
        ("eps", c_float),
    )


CALLS = {
    "convolution": ConvolutionCall,
    "scan": ScanCall,
    "delta": DeltaCall,
    "gate": GateCall,
}
"""By their names in the library."""
