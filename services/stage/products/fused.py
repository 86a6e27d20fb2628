"""Elementwise parts of a model, each in one pass over memory instead of one per torch operation.

A fused part replaces a module or function of transformers only where it gives the same values on
trial rows. Knows no model by name: what it does not recognize stays as it is.

Letters of shapes: T packed rows, H query heads, Hk KV heads, D the size of an attention head or of
a normalized row. Tensors are float32, bfloat16 or float16.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from ctypes import byref
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from services.stage.kernels.kernel import DTYPES, Kernel, Norm
from services.stage.products.trial import agree, child_names, replace_children, trial_rows

_ROTARY = "apply_rotary_pos_emb"

MakeNorm = Callable[[Tensor, float, bool], nn.Module]
"""Makes an RMSNorm, a module from x [..., D] to the same shape and dtype, of a weight [D] with its
offset, its epsilon, and whether x / rms(x) is rounded before it is weighted."""


class ElementwiseParts(Protocol):
    """Computes parts of a model, each in one pass, on one device."""

    device: torch.device

    def norm(self, weight: Tensor, eps: float, rounds_first: bool) -> nn.Module:
        """Makes an RMSNorm of a weight [D] of any float dtype, as MakeNorm."""

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """Returns silu(gate) * up, dense: all [T, N] of one dtype, rows any distance apart."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates the halves of x [1, H, T, D], the heads of a token adjacent in memory, by dense
        cos and sin [1, T, D], all of one dtype; returns [1, H, T, D]."""


class NativeParts:
    """The parts on cores, through the CPU kernels."""

    def __init__(self, kernel: Kernel) -> None:
        self.device = torch.device("cpu")
        self._kernel = kernel

    def norm(self, weight: Tensor, eps: float, rounds_first: bool) -> nn.Module:
        """Makes an RMSNorm of a weight [D] of any float dtype."""
        return FusedRmsNorm(self._kernel, weight, eps, rounds_first)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """Returns silu(gate) * up, dense: all [T, N] of one dtype."""
        out = gate.new_empty(gate.shape)
        pointers = (gate.data_ptr(), up.data_ptr(), out.data_ptr())
        strides = (gate.stride(0), up.stride(0))
        self._kernel.silu_mul(
            *pointers, *gate.shape, *strides, DTYPES[gate.dtype], torch.get_num_threads()
        )
        return out

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates x [1, H, T, D] by tables of its dtype; returns a view of memory [1, T, H, D]."""
        _, num_heads, num_rows, dim = x.shape
        out = x.new_empty(1, num_rows, num_heads, dim)
        pointers = (x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr())
        sizes = (num_rows, num_heads, dim, x.stride(2))
        self._kernel.rotate(*pointers, *sizes, DTYPES[x.dtype], torch.get_num_threads())
        return out.transpose(1, 2)


def fuse(model: nn.Module, parts: ElementwiseParts) -> int:
    """Replaces the parts of a model that it recognizes; returns how many. Call it when no weight
    will move any more."""
    num_fused = fuse_norms(model, parts.norm)
    num_fused += replace_children(model, partial(_fused_mlp, parts))
    return num_fused + sum(_fuse_rotary(module, parts) for module in list(model.modules()))


def fuse_norms(model: nn.Module, make: MakeNorm) -> int:
    """Replaces the RMSNorms of a model that it recognizes by those that `make` makes; returns how
    many."""
    return replace_children(model, partial(_fused_norm, make))


class FusedRmsNorm(nn.Module):
    """RMSNorm in one pass: x / rms(x) * weight over the last dimension."""

    def __init__(self, kernel: Kernel, weight: Tensor, eps: float, rounds_first: bool) -> None:
        super().__init__()
        self._kernel = kernel
        self.register_buffer("scale", weight.detach().float().contiguous())
        self.norm = Norm(self.scale.data_ptr(), eps, rounds_first)
        """As the kernel reads it."""

    scale: Tensor
    """float32 [D] in every model: the norm's weight, its offset included."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes x [..., D] of any of the three dtypes; returns the same shape and dtype.

        With `rounds_first`, x / rms(x) is rounded to x's dtype before it is weighted.
        """
        x = x.contiguous()
        out = torch.empty_like(x)
        dim = x.shape[-1]
        sizes = (x.numel() // dim, 1, dim, dim)
        dtype = DTYPES[x.dtype]
        threads = torch.get_num_threads()
        self._kernel.rms_norm(
            x.data_ptr(), byref(self.norm), out.data_ptr(), *sizes, dtype, threads
        )
        return out


class FusedMlp(nn.Module):
    """A gated MLP, down(silu(gate(x)) * up(x)), with the elementwise part in one pass."""

    def __init__(self, parts: ElementwiseParts, mlp: Any) -> None:
        super().__init__()
        self._parts = parts
        self.gate_proj = mlp.gate_proj
        self.up_proj = mlp.up_proj
        self.down_proj = mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [..., K] to [..., K], K the hidden size, in the dtype of the weights."""
        gate = self.gate_proj(x)
        up = self.up_proj(x)
        rows = (each.reshape(-1, each.shape[-1]) for each in (gate, up))
        return self.down_proj(self._parts.silu_mul(*rows).reshape(gate.shape))


class Rotary:
    """Replaces a modeling file's `apply_rotary_pos_emb`, and calls it for inputs that the kernel
    cannot read."""

    def __init__(
        self, parts: ElementwiseParts, original: Callable[..., tuple[Tensor, Tensor]]
    ) -> None:
        self._parts = parts
        self._original = original

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Rotates query [1, H, T, D] and key [1, Hk, T, D] by cos and sin [1, T, D], all of one
        dtype.

        Returns both in the same shapes and dtype. Inputs of any other form go to the modeling
        file's own function.
        """
        if (
            args
            or kwargs
            or not (self._is_readable(q, cos, sin) and self._is_readable(k, cos, sin))
        ):
            return self._original(q, k, cos, sin, *args, **kwargs)
        cos = cos.contiguous()
        sin = sin.contiguous()
        return self._parts.rotate(q, cos, sin), self._parts.rotate(k, cos, sin)

    @staticmethod
    def _is_readable(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
        """Whether one token's attention heads are adjacent in memory, rotated whole, and nothing
        needs converting."""
        shape = (1, x.shape[-2], x.shape[-1])
        return (
            x.dim() == 4
            and x.shape[0] == 1
            and x.shape[-1] % 2 == 0
            and x[0, :, 0].is_contiguous()
            and cos.shape == sin.shape == shape
            and cos.dtype == sin.dtype == x.dtype
        )


def _fused_norm(make: MakeNorm, module: nn.Module) -> nn.Module | None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if (
        not type(module).__name__.endswith("RMSNorm")
        or not isinstance(weight, Tensor)
        or not isinstance(eps, float)
    ):
        return None
    if (
        weight.dim() != 1
        or weight.dtype not in DTYPES
        or len(inspect.signature(module.forward).parameters) != 1
    ):
        return None
    x = trial_rows(weight.shape[0], dtype=weight.dtype).to(weight.device)
    expected = module(x)
    kinds = [
        make(weight.float() + offset, eps, rounds_first)
        for offset in (0.0, 1.0)
        for rounds_first in (True, False)
    ]
    best = max(kinds, key=lambda kind: int((kind(x) == expected).sum()))
    if not hasattr(best, "weight"):
        best.weight = weight.new_empty(0)  # some models ask a norm's weight for its dtype
    return best if agree(best(x), expected) else None


def _fused_mlp(parts: ElementwiseParts, module: Any) -> FusedMlp | None:
    if child_names(module) != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return None
    width = getattr(module.gate_proj, "in_features", None)
    dtype = module.down_proj.weight.dtype
    if not isinstance(width, int) or dtype not in DTYPES:
        return None
    fused = FusedMlp(parts, module)
    x = trial_rows(width, dtype=dtype).to(parts.device)
    return fused if agree(fused(x), module(x)) else None


def _fuse_rotary(module: nn.Module, parts: ElementwiseParts) -> int:
    """Gives this one module a copy of its forward that finds `Rotary` under the name
    `apply_rotary_pos_emb`; returns 1, or 0 if nothing was replaced.

    transformers' attention calls that function by its global name: there is no child module to
    replace and no hook. Rebinding the name in the modeling file would change every model of that
    type in the process, also those that failed the trial, for as long as the process runs. A
    subclass would have to repeat the forward of each modeling file. So the forward's own code
    object runs with a copy of its globals in which this one name differs. A name that is rebound in
    the modeling file after this call is not seen.
    """
    # Some wrap it, to rename arguments that are not used here.
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, FunctionType) or _ROTARY not in forward.__code__.co_names:
        return 0
    original = forward.__globals__[_ROTARY]
    rotary = Rotary(parts, original)
    if not _rotates_halves(original, rotary, parts.device):
        return 0
    names = forward.__globals__ | {_ROTARY: rotary}
    fused = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    fused.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(fused, module)
    return 1


def _rotates_halves(original: Callable[..., Any], rotary: Rotary, device: torch.device) -> bool:
    """Whether a modeling file's function does what the kernel does: some rotate neighboring
    elements, or a part."""
    if tuple(inspect.signature(original).parameters)[:4] != ("q", "k", "cos", "sin"):
        return False
    q, k = (trial_rows(4, num_heads, 32).to(device).transpose(1, 2) for num_heads in (4, 2))
    cos, sin = (trial_rows(4, 1, 32).to(device)[:, :, 0] for _ in range(2))
    try:
        pairs = zip(rotary(q, k, cos, sin), original(q, k, cos, sin), strict=True)
    except (RuntimeError, TypeError, ValueError):
        return False
    return all(agree(ours, theirs) for ours, theirs in pairs)
