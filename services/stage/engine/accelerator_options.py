"""What a stage on an accelerator does otherwise than by default, and which accelerator cannot. Knows no weights.

A stage on cores takes no notice: stages of one stack share their settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from services.stage.device.device import Device
from services.stage.kernels.triton_loader import unserved
from services.stage.model.cpu_parts import CpuPart
from services.stage.model.packing import UNPACKED, Packing, triton_packing
from shardline.errors import Invalid


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorOptions:
    """Of one stage."""

    cpu_parts: frozenset[CpuPart] = frozenset()
    """They stay in host memory."""
    products: Literal["torch", "triton"] = "torch"
    """What computes linear layers and RMSNorms."""

    def on(self, device: Device) -> AcceleratorOptions:
        """Returns the options that count there: on cores none. Raises Invalid for what the accelerator cannot do."""
        if device.is_cpu:
            return AcceleratorOptions()
        if self.products == "triton" and (reason := unserved(device.torch_device)) is not None:
            problem = f"triton cannot compute on {device.name}: {reason}"
            raise Invalid("SHARDLINE_GPU_PRODUCTS", problem, "Use torch, or run this stage on CUDA, ROCm or XPU")
        return self

    def packing(self) -> Packing:
        """Returns how the accelerator runs linear layers."""
        return triton_packing() if self.products == "triton" else UNPACKED
