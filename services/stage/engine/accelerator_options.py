"""What a stage on an accelerator does otherwise than by default, and which accelerator cannot.
Knows no weights.

A stage on cores takes no notice: stages of one stack share their settings.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from torch import nn

from services.stage.device.device import Device
from services.stage.engine.decode_graphs import FIELD as GRAPHS_FIELD
from services.stage.kernels.triton_loader import unserved
from services.stage.model.cpu_parts import CpuPart
from services.stage.products.experts import is_experts
from services.stage.products.packing import UNPACKED, Packing, triton_packing
from shardline.base.errors import Invalid


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorOptions:
    """Holds the options of one stage."""

    cpu_parts: frozenset[CpuPart] = frozenset()
    """They stay in host memory."""
    products: Literal["torch", "triton"] = "torch"
    """What computes linear layers and RMSNorms."""
    cuda_graphs: bool = False
    """Decode steps are recorded once and replayed."""

    def on(self, device: Device) -> AcceleratorOptions:
        """Returns the options that count there: on cores none. Raises Invalid for what the
        accelerator cannot do."""
        if device.is_cpu:
            return AcceleratorOptions()
        if (problem := self._refusal_of_products(device)) is not None:
            raise Invalid(
                "SHARDLINE_GPU_PRODUCTS",
                problem,
                "Use torch, or run this stage on CUDA, ROCm or XPU",
            )
        if (problem := self._refusal_of_graphs(device)) is not None:
            raise Invalid(GRAPHS_FIELD, problem, "Set it to false")
        return self

    def check(self, model: nn.Module) -> None:
        """Raises Invalid for a model, its weights not read yet, that the options do not suit."""
        if self.cuda_graphs and any(is_experts(module) for module in model.modules()):
            problem = (
                "which experts compute is known on the host only after a router has run: "
                "no graph can hold it"
            )
            raise Invalid(GRAPHS_FIELD, problem, "Set it to false for mixtures")

    def check_streamed(self, layers: Collection[int]) -> None:
        """Raises Invalid for streamed layers, by number, that the options do not suit."""
        if self.cuda_graphs and layers:
            problem = (
                f"{len(layers)} layers are streamed: "
                "no graph can hold copies that begin in the step before"
            )
            raise Invalid(
                GRAPHS_FIELD, problem, "Set it to false, or SHARDLINE_STREAMED_LAYERS to 0"
            )

    def packing(self) -> Packing:
        """Returns how the accelerator runs linear layers."""
        return triton_packing() if self.products == "triton" else UNPACKED

    def _refusal_of_products(self, device: Device) -> str | None:
        reason = unserved(device.torch_device) if self.products == "triton" else None
        return None if reason is None else f"triton cannot compute on {device.name}: {reason}"

    def _refusal_of_graphs(self, device: Device) -> str | None:
        if not self.cuda_graphs:
            return None
        if device.torch_device.type != "cuda":
            return f"{device.name} is no CUDA device"
        if self.cpu_parts:
            return "SHARDLINE_CPU_PARTS leaves parts on the CPU, which a graph cannot hold"
        reason = unserved(device.torch_device)
        return (
            None if reason is None else f"only attention through triton can be recorded: {reason}"
        )
