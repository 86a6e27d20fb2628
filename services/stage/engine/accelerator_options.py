"""What a stage on an accelerator does otherwise than by default, and which accelerator cannot.
Knows no weights.

A stage on cores takes no notice: stages of one stack share their settings.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

import structlog
import torch
from torch import nn

from services.stage.device.device import Device
from services.stage.engine.step_graphs import FIELD as GRAPHS_FIELD
from services.stage.kernels.triton_loader import unserved
from services.stage.model.cpu_parts import CpuPart
from services.stage.products.experts import is_experts
from services.stage.products.packing import UNPACKED, Packing, triton_packing
from shardline.base.errors import Invalid

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorOptions:
    """Holds the options of one stage."""

    cpu_parts: frozenset[CpuPart] = frozenset()
    """They stay in host memory."""
    products: Literal["auto", "torch", "triton"] = "auto"
    """What computes linear layers and RMSNorms; auto: triton where it serves."""
    cuda_graphs: bool | None = None
    """Steps are recorded once and replayed; None: where that can be."""

    def on(self, device: Device) -> AcceleratorOptions:
        """Returns the options that count there, `products` chosen: on cores none. Raises Invalid
        for what the accelerator cannot do."""
        if device.is_cpu:
            return AcceleratorOptions(products="torch", cuda_graphs=False)
        reason = unserved(device.torch_device)
        if self.products == "triton" and reason is not None:
            raise Invalid(
                "SHARDLINE_GPU_PRODUCTS",
                f"triton cannot compute on {device.name}: {reason}",
                "Use torch, or run this stage on CUDA, ROCm or XPU",
            )
        if self.cuda_graphs and (problem := self._refusal_of_graphs(device.torch_device)):
            raise Invalid(GRAPHS_FIELD, problem, "Set it to false")
        products = self.products
        if products == "auto":
            products = "triton" if reason is None else "torch"
        return replace(self, products=products)

    def check(self, model: nn.Module) -> None:
        """Raises Invalid for a model, its weights not read yet, that the options do not suit."""
        if self.cuda_graphs and (problem := _refusal_of_model(model)):
            raise Invalid(GRAPHS_FIELD, problem, "Set it to false for mixtures")

    def check_streamed(self, layers: Collection[int]) -> None:
        """Raises Invalid for streamed layers, by number, that the options do not suit."""
        if self.cuda_graphs and (problem := _refusal_of_streamed(layers)):
            raise Invalid(
                GRAPHS_FIELD, problem, "Set it to false, or SHARDLINE_STREAMED_LAYERS to 0"
            )

    def records_graphs(
        self, device: torch.device, model: nn.Module, streamed_layers: Collection[int]
    ) -> bool:
        """Whether steps of this model on this device are recorded; logs why not."""
        if self.cuda_graphs is False or device.type == "cpu":
            return False
        problem = (
            self._refusal_of_graphs(device)
            or _refusal_of_model(model)
            or _refusal_of_streamed(streamed_layers)
        )
        if problem:
            log.info("steps are not recorded as graphs", reason=problem)
        return not problem

    def packing(self) -> Packing:
        """Returns how the accelerator runs linear layers."""
        return triton_packing() if self.products == "triton" else UNPACKED

    def _refusal_of_graphs(self, device: torch.device) -> str:
        if device.type != "cuda":
            return f"{device} is no CUDA device"
        if self.cpu_parts:
            return "SHARDLINE_CPU_PARTS leaves parts on the CPU, which a graph cannot hold"
        reason = unserved(device)
        return "" if reason is None else f"only attention through triton can be recorded: {reason}"


def _refusal_of_model(model: nn.Module) -> str:
    if not any(is_experts(module) for module in model.modules()):
        return ""
    return (
        "which experts compute is known on the host only after a router has run: "
        "no graph can hold it"
    )


def _refusal_of_streamed(layers: Collection[int]) -> str:
    if not layers:
        return ""
    return (
        f"{len(layers)} layers are streamed: no graph can hold copies that begin in the step before"
    )
