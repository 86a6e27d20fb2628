"""Elementwise parts of a model, each in one pass over memory instead of one per torch operation.

A fused part replaces a module or function of transformers only where it gives the same values on
trial rows. Knows no model by name: what it does not recognize stays as it is.

Letters of shapes: T packed rows, H query heads, Hk KV heads, D the size of an attention head or of
a normalized row, R the dimensions of a head that positions rotate. Tensors are float32, bfloat16 or
float16.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from ctypes import byref
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from services.stage.kernels.kernel import DTYPES, GateActivation, Kernel, Norm, Turned
from services.stage.products.fused_gelu import FusedGelu
from services.stage.products.trial import agree, child_names, replace_children, trial_rows

_ROTARY = "apply_rotary_pos_emb"
MLP_NAMES: tuple[dict[str, str], ...] = (
    {"gate": "gate_proj", "up": "up_proj", "down": "down_proj", "activation": "act_fn"},
    {"gate_up": "gate_up_proj", "down": "down_proj", "activation": "activation_fn"},
    {"gate_up": "input_linear", "down": "output_linear", "activation": "activation"},
    {"gate": "w1", "up": "w3", "down": "w2"},
)
"""What models call the parts of a gated MLP."""

MakeNorm = Callable[[Tensor, float, bool], nn.Module]
"""Makes an RMSNorm, a module from x [..., D] to the same shape and dtype, of a weight [D] with its
offset, its epsilon, and whether x / rms(x) is rounded before it is weighted."""


class ElementwiseParts(Protocol):
    """Computes parts of a model, each in one pass, on one device."""

    device: torch.device
    rotates_all: bool
    """Whether `rotate` takes any tables; else those that have the size and dtype of a head, and
    turn its halves."""

    def norm(self, weight: Tensor, eps: float, rounds_first: bool) -> nn.Module:
        """Makes an RMSNorm of a weight [D] of any float dtype, as MakeNorm."""

    def gate_mul(self, gate: Tensor, up: Tensor, activation: GateActivation) -> Tensor:
        """Returns activation(gate) * up, dense: all [T, N] of one dtype, rows any distance
        apart."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, *, neighbors: bool) -> Tensor:
        """Rotates the first R dimensions of x [1, H, T, D], the heads of a token adjacent in
        memory, by dense cos and sin [1, T, R], of x's dtype or float32: two halves, or neighbors.

        Returns [1, H, T, D] in x's dtype.
        """


class NativeParts:
    """The parts on cores, through the CPU kernels."""

    rotates_all = True

    def __init__(self, kernel: Kernel) -> None:
        self.device = torch.device("cpu")
        self._kernel = kernel

    def norm(self, weight: Tensor, eps: float, rounds_first: bool) -> nn.Module:
        """Makes an RMSNorm of a weight [D] of any float dtype."""
        return FusedRmsNorm(self._kernel, weight, eps, rounds_first)

    def gate_mul(self, gate: Tensor, up: Tensor, activation: GateActivation) -> Tensor:
        """Returns activation(gate) * up, dense: all [T, N] of one dtype."""
        out = gate.new_empty(gate.shape)
        pointers = (gate.data_ptr(), up.data_ptr(), out.data_ptr())
        strides = (gate.stride(0), up.stride(0))
        kind = (activation, DTYPES[gate.dtype])
        self._kernel.gate_mul(*pointers, *gate.shape, *strides, *kind, torch.get_num_threads())
        return out

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, *, neighbors: bool) -> Tensor:
        """Rotates x [1, H, T, D] by tables [1, T, R] of its dtype or float32; returns a view of
        memory [1, T, H, D]."""
        _, num_heads, num_rows, dim = x.shape
        out = x.new_empty(1, num_rows, num_heads, dim)
        turned = Turned(cos.data_ptr(), sin.data_ptr(), cos.shape[-1], DTYPES[cos.dtype], neighbors)
        sizes = (num_rows, num_heads, dim, x.stride(2))
        self._kernel.rotate(
            x.data_ptr(),
            byref(turned),
            out.data_ptr(),
            *sizes,
            DTYPES[x.dtype],
            torch.get_num_threads(),
        )
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
    """A gated MLP, down(activation(gate(x)) * up(x)), with the elementwise part in one pass. Gate
    and up are two products, or the halves of one."""

    def __init__(
        self,
        parts: ElementwiseParts,
        mlp: Any,
        names: Mapping[str, str],
        activation: GateActivation,
    ) -> None:
        """`names` are the model's, as in `MLP_NAMES`."""
        super().__init__()
        self._parts = parts
        self._names = names
        self.activation = activation
        for place in names.keys() - {"activation"}:
            self.add_module(names[place], mlp.get_submodule(names[place]))

    def product(self, place: str) -> Any:
        """Returns the product that stands for a place of `MLP_NAMES`, or None."""
        return self._modules.get(self._names.get(place, ""))

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [..., K] to [..., K], K the hidden size, in the dtype of the weights."""
        gate, up = self._gate_and_up(x)
        gates, ups = (each.reshape(-1, each.shape[-1]) for each in (gate, up))
        inner: Tensor = self._parts.gate_mul(gates, ups, self.activation)
        out: Tensor = self.product("down")(inner.reshape(gate.shape))
        return out

    def _gate_and_up(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if (both := self.product("gate_up")) is None:
            return self.product("gate")(x), self.product("up")(x)
        gate, up = both(x).chunk(2, dim=-1)
        return gate, up


class Rotary:
    """Replaces a modeling file's `apply_rotary_pos_emb`, and calls it for inputs that the kernel
    cannot read."""

    def __init__(
        self,
        parts: ElementwiseParts,
        original: Callable[..., tuple[Tensor, Tensor]],
        *,
        neighbors: bool,
    ) -> None:
        self._parts = parts
        self._original = original
        self.neighbors = neighbors

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Rotates query [1, H, T, D] and key [1, Hk, T, D] of one dtype by cos and sin [1, T, R] of
        that or float32.

        Returns both in their shapes and dtype. Inputs of any other form go to the modeling
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
        query = self._parts.rotate(q, cos, sin, neighbors=self.neighbors)
        return query, self._parts.rotate(k, cos, sin, neighbors=self.neighbors)

    def _is_readable(self, x: Tensor, cos: Tensor, sin: Tensor) -> bool:
        """Whether one token's attention heads are adjacent in memory, and nothing needs
        converting."""
        size = cos.shape[-1]
        is_plain = (size, cos.dtype) == (x.shape[-1], x.dtype)
        is_known = self._parts.rotates_all and size <= x.shape[-1]
        return (
            x.dim() == 4
            and x.shape[0] == 1
            and size % 2 == 0
            and (is_plain or (is_known and cos.dtype in (x.dtype, torch.float32)))
            and x[0, :, 0].is_contiguous()
            and cos.shape == sin.shape == (1, x.shape[-2], size)
            and cos.dtype == sin.dtype
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
    names = next((each for each in MLP_NAMES if child_names(module) == set(each.values())), None)
    if names is None:
        return None
    first = module.get_submodule(names.get("gate_up", names.get("gate")))
    width = getattr(first, "in_features", None)
    dtype = module.get_submodule(names["down"]).weight.dtype
    if not isinstance(width, int) or dtype not in DTYPES:
        return None
    activate = module.get_submodule(names["activation"]) if "activation" in names else None
    fused = FusedMlp(parts, module, names, _activation(activate))
    x = trial_rows(width, dtype=dtype).to(parts.device)
    return fused if agree(fused(x), module(x)) else None


def _activation(module: nn.Module | None) -> GateActivation:
    """What a gate's activation may be: a GELU is recognized before, since trial rows do not tell
    one from the other."""
    if not isinstance(module, FusedGelu):
        return GateActivation.SILU
    return GateActivation.GELU_TANH if module.uses_tanh else GateActivation.GELU


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
    rotary = _rotary(parts, forward.__globals__[_ROTARY])
    if rotary is None:
        return 0
    names = forward.__globals__ | {_ROTARY: rotary}
    fused = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    fused.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(fused, module)
    return 1


def _rotary(parts: ElementwiseParts, original: Callable[..., Any]) -> Rotary | None:
    """Returns what does the same as a modeling file's function, if it rotates halves or
    neighbors."""
    if tuple(inspect.signature(original).parameters)[:4] != ("q", "k", "cos", "sin"):
        return None
    kinds = (False, True) if parts.rotates_all else (False,)
    candidates = (Rotary(parts, original, neighbors=neighbors) for neighbors in kinds)
    return next((one for one in candidates if _does_the_same(one, original, parts.device)), None)


def _does_the_same(rotary: Rotary, original: Callable[..., Any], device: torch.device) -> bool:
    """Tries tables of a whole head, and of fewer dimensions where the function takes them."""
    q, k = (trial_rows(4, num_heads, 32).to(device).transpose(1, 2) for num_heads in (4, 2))
    for size in (16, 32):
        cos, sin = (trial_rows(4, 1, size).to(device)[:, :, 0] for _ in range(2))
        try:
            theirs = original(q, k, cos, sin)
        except (RuntimeError, TypeError, ValueError):
            if size < q.shape[-1]:
                continue
            return False
        if not all(map(agree, rotary(q, k, cos, sin), theirs)):
            return False
    return True
