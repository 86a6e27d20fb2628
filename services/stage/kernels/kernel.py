"""The CPU kernels: builds attention.cpp and elementwise.cpp into one library, loads the variant for this processor.

Knows no tensor and no model. `python -m services.stage.kernels.kernel` builds every variant; a library that was built
before is used without a compiler. The file's name holds a hash of source and flags, so an old build is never loaded.
Its bits do not hang on the compiler: fused multiply-adds are spelled out and contraction is off.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, Literal

import structlog
import torch
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

_log = structlog.get_logger(__name__)

_HEADER = Path(__file__).with_name("lanes.h")
_SOURCES = tuple(_HEADER.with_name(name) for name in ("attention.cpp", "elementwise.cpp"))
_MARCH = {"avx512": "x86-64-v4", "avx2": "x86-64-v3"}
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The sources' `Dtype`."""
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-Wno-maybe-uninitialized")


class KernelSettings(BaseSettings):
    """Where the kernel lies, and whether it is wanted."""

    model_config = SettingsConfigDict(env_prefix="SHARDLINE_", frozen=True, extra="ignore")

    kernel: Literal["auto", "off"] = Field("auto", description="off: all through torch, exact=false")
    kernel_dir: Path = Field(Path(__file__).parents[3] / ".build", description="folder of the built kernel libraries")


class _Strides(ctypes.Structure):
    _fields_ = (("head", c_int64), ("row", c_int64))


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


def _typed(function: Any, *types: Any) -> Any:
    function.argtypes, function.restype = types, c_int32
    return function


class Kernel:
    """One loaded variant. OpenMP comes from torch's own runtime: the library links none."""

    __slots__ = ("attend", "isa", "path", "rms_norm", "rotate", "silu_mul")

    def __init__(self, path: Path, isa: str) -> None:
        library = ctypes.CDLL(str(path))
        if library.shardline_call_bytes() != ctypes.sizeof(AttentionCall):
            raise OSError(f"{path} expects another call layout: delete it and build again")
        self.attend = _typed(library.shardline_attend, POINTER(AttentionCall))
        self.rms_norm = _typed(library.shardline_rms_norm, *[c_void_p] * 3, *[c_int64] * 2, c_float, *[c_int32] * 3)
        self.silu_mul = _typed(library.shardline_silu_mul, *[c_void_p] * 3, *[c_int64] * 4, *[c_int32] * 2)
        self.rotate = _typed(library.shardline_rotate, *[c_void_p] * 4, *[c_int64] * 4, *[c_int32] * 2)
        self.isa = isa
        self.path = path


def supported_isa() -> str | None:
    """The widest variant that this processor (and torch on it) runs."""
    if platform.machine() not in {"x86_64", "AMD64"}:
        return None
    capability = torch.backends.cpu.get_cpu_capability().lower()
    return capability if capability in _MARCH else None


def library_path(isa: str, folder: Path) -> Path:
    """Where the library of this source and these flags lies once built."""
    flags = " ".join((*_FLAGS, _MARCH[isa]))
    sources = b"".join(file.read_bytes() for file in (*_SOURCES, _HEADER))
    digest = hashlib.sha256(sources + flags.encode()).hexdigest()[:16]
    return folder / f"kernel-{isa}-{digest}.so"


def build(isa: str, folder: Path) -> Path:
    """Compiles one variant unless it is there. Several processes may call this at once: one builds, the others wait."""
    path = library_path(isa, folder)
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "kernel.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile(isa, path)
    return path


def _compile(isa: str, path: Path) -> None:
    compiler = shlex.split(os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or "")
    if not compiler:
        raise OSError("no C++ compiler: install g++, or put a built library into SHARDLINE_KERNEL_DIR")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        linked, objects = Path(folder, path.name), [str(Path(folder, source.stem)) + ".o" for source in _SOURCES]
        for source, compiled in zip(_SOURCES, objects, strict=True):
            _run(*compiler, *_FLAGS, f"-march={_MARCH[isa]}", "-c", str(source), "-o", compiled)
        # Linked without -fopenmp: the symbols must resolve to the OpenMP runtime that torch loaded.
        _run(*compiler, "-shared", "-Wl,-z,now", *objects, "-o", str(linked))
        linked.replace(path)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)} failed: {done.stderr.strip()[-2000:]}")


def load() -> Kernel | None:
    """The kernel for this processor, built first if need be; None, with the reason in the log, where there is none."""
    settings = KernelSettings()
    isa = supported_isa()
    if settings.kernel == "off" or isa is None:
        reason = "SHARDLINE_KERNEL=off" if settings.kernel == "off" else "needs x86-64 with AVX2"
        _log.warning("attention falls back to SDPA: rows are not exact", reason=reason)
        return None
    try:
        return Kernel(build(isa, settings.kernel_dir), isa)
    except OSError as error:
        _log.warning("attention falls back to SDPA: rows are not exact", reason=str(error))
        return None


def main() -> None:
    """Builds every variant, so that an image runs on any x86-64 processor."""
    folder = KernelSettings().kernel_dir
    for isa in _MARCH:
        sys.stdout.write(f"{build(isa, folder)}\n")


if __name__ == "__main__":
    main()
