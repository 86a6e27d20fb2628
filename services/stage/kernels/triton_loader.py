"""Decides where kernels in Triton serve, and loads them. Knows no kernel and no tensor.

Only `TritonKernels.load` imports triton and the kernels: a stage on the CPU does not.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import torch

from services.stage.kernels.build import KernelSettings

DEVICES = frozenset({"cuda", "xpu"})
"""Types of device for which triton compiles; ROCm's is `cuda` too."""


@dataclass(frozen=True, slots=True)
class TritonKernels:
    """A module of kernels, to be launched by their names: `kernels.module.attend[grid](...)`."""

    module: Any
    version: str
    """Changes whenever the bits of a row may change: of triton, of the kernels and of their
    launches."""
    is_interpreted: bool

    @classmethod
    def load(cls, name: str, launcher: str) -> Self:
        """Imports the module `name`; the source file `launcher` launches its kernels."""
        module = import_module(name)
        triton = import_module("triton")
        source = hashlib.sha256(
            Path(launcher).read_bytes() + Path(module.__file__ or "").read_bytes()
        ).hexdigest()
        return cls(
            module,
            f"triton-{triton.__version__}-{source[:16]}",
            bool(triton.knobs.runtime.interpret),
        )


def unserved(device: torch.device) -> str | None:
    """Returns why kernels in Triton do not run on a device; None: they do."""
    if KernelSettings().kernel == "off":
        return "SHARDLINE_KERNEL=off"
    if device.type not in DEVICES:
        return f"triton does not serve {device.type}"
    return None if find_spec("triton") is not None else "triton is not installed"
