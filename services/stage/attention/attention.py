"""The engine's attention, as transformers calls it. Owns the choice of backend; knows no scheduler
and no model.

Packed rows, paged KV: `bind` the stage's KV once, `use` a micro-batch before each forward. Shapes
are written with the letters of `paged_kv`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

from torch import Tensor, nn
from transformers import AttentionInterface

from services.stage.attention.kernel_backend import KernelBackend
from services.stage.attention.paged_kv import (
    AttentionParams,
    Backend,
    KvShape,
    MicroBatch,
    PackedQkv,
    PagedKv,
    Span,
)
from services.stage.attention.sdpa import SdpaBackend
from services.stage.attention.triton_backend import TritonBackend
from services.stage.kernels.kernel import AttentionCall, Kernel
from shardline.base.errors import Invalid, ProtocolError
from shardline_scheduler.kv_blocks import BLOCK_TOKENS

__all__ = ["BLOCK_TOKENS", "Attention", "KvShape", "MicroBatch", "PagedKv", "Span"]


Attended = tuple[Tensor, None]
"""The output of a layer, and the weights that transformers asks for and no caller needs."""


class KvWritten(Exception):
    """Ends a layer's forward as soon as its keys and values are written, when its output is not
    needed."""


class Attention:
    """The attention function of one engine.

    Pass `name` as `attn_implementation`: transformers builds no mask for a name that it does not
    know.
    """

    __slots__ = (
        *(
            "__weakref__",
            "_backend",
            "_position",
            "both_ways",
            "exact",
            "kind",
            "name",
            "only_writes",
        ),
        "version",
    )

    def __init__(self, kernel: Kernel | TritonBackend | None, *, both_ways: bool = False) -> None:
        """`both_ways`: rows attend to later ones of their sequence too, as in encoders, which needs
        all rows of a sequence in one micro-batch."""
        assert not (both_ways and isinstance(kernel, TritonBackend)), "its kernels look back only"
        self._backend: Backend
        self.both_ways = both_ways
        if isinstance(kernel, Kernel):
            self._backend = KernelBackend(kernel)
            self.kind = f"kernel-{kernel.isa}"
            self.version = kernel.path.stem
        elif kernel is not None:
            self._backend = kernel
            self.kind = "triton"
            self.version = kernel.version
        else:
            self._backend = SdpaBackend()
            self.kind = "sdpa"
            self.version = "sdpa"
        self.name = f"shardline-{id(self):x}"
        self.exact = kernel is not None
        """A name that changes whenever the bits of a row may change: part of the exactness
        fingerprint."""
        self.only_writes = False
        """While true, `attend` writes keys and values, computes nothing and raises KvWritten."""
        AttentionInterface.register(self.name, _weakly(self.attend))

    def bind(self, kv: PagedKv) -> None:
        """Makes `kv` the storage that rows are written to and read from."""
        self._backend.bind(kv)

    def call(self, layer: int) -> AttentionCall | None:
        """Returns what our kernel was asked last for a layer, if it is the backend: a part of a
        layer's whole call."""
        return self._backend.calls.get(layer) if isinstance(self._backend, KernelBackend) else None

    def refusal(self, status: int) -> ProtocolError:
        """Returns the error for a status of the kernel that is not 0."""
        assert isinstance(self._backend, KernelBackend)
        return self._backend.refusal(status)

    def use(self, micro_batch: MicroBatch) -> None:
        """Sets the rows of the next forward.

        Rows that point outside the KV raise ProtocolError, here or in `attend`, as the backend
        finds them.
        """
        self._position = micro_batch.position
        self._backend.use(micro_batch)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> Attended:
        """Attends to one layer, in the signature that transformers prescribes.

        Takes query [1, H, T, D], key [1, Hk, T, D] and value [1, Hk, T, Dv] in the model's dtype;
        returns the output [1, T, H, Dv] in the query's dtype. Padding rows are zeros.

        Raises Invalid for attention that is not plainly causal, ProtocolError for rows that point
        outside the KV, and KvWritten while `only_writes` is true.
        """
        if (
            attention_mask is not None
            or kwargs.get("position_bias") is not None
            or (kwargs.get("is_causal") is False and not self.both_ways)
        ):
            raise _unsupported(module)
        layer = module.layer_idx
        assert isinstance(layer, int), f"{type(module).__name__} has no layer index"
        params = _params(module, query.shape[-1], kwargs, both_ways=self.both_ways)
        if (temperature := vars(module).get("query_temperature")) is not None:
            query = temperature.scaled(query, self._position)
        qkv = PackedQkv(query=query, key=key, value=value)
        if self.only_writes:
            self._backend.write(layer, qkv, params)
            raise KvWritten
        return self._backend.attend(layer, qkv, params), None


def _weakly(method: Callable[..., Attended]) -> Callable[..., Attended]:
    """Returns the method without a reference to its object: transformers never drops what is
    registered, so it would keep all of the KV."""
    held = WeakMethod(method)

    def attend(*arguments: Any, **options: Any) -> Attended:
        method = held()
        assert method is not None, "the caller of a layer holds its attention"
        return method(*arguments, **options)

    return attend


def _params(
    module: nn.Module, head_dim: int, options: dict[str, Any], *, both_ways: bool
) -> AttentionParams:
    """Reads what the model asks for."""
    scaling = options.get("scaling")
    return AttentionParams(
        scale=head_dim**-0.5 if scaling is None else float(scaling),
        window=options.get("sliding_window", getattr(module, "sliding_window", None)),
        chunk=vars(module).get("attention_chunk"),
        both_ways=both_ways,
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
        distance_bias=options.get("distance_bias"),
    )


def _unsupported(module: nn.Module) -> Invalid:
    return Invalid(
        "model",
        f"{type(module).__name__} asks for attention that is not plainly causal "
        "(a mask, a position bias, both ways)",
        "Use a causal language model without them",
    )
