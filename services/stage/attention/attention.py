"""The engine's attention, as transformers calls it. Owns the choice of backend; knows no scheduler and no model.

Packed rows, paged KV: `bind` the stage's KV once, `use` a batch before each forward.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from services.stage.attention.kernel_backend import KernelBackend
from services.stage.attention.paged_kv import AttentionParams, Backend, HeadShape, MicroBatch, PackedQkv, PagedKv, Span
from services.stage.attention.sdpa import SdpaBackend
from services.stage.kernels.kernel import Kernel
from services.stage.scheduling.kv_blocks import BLOCK_TOKENS
from shardline.errors import Invalid

__all__ = ["BLOCK_TOKENS", "Attention", "HeadShape", "MicroBatch", "PagedKv", "Span"]


class KvWritten(Exception):
    """Raised out of a layer's forward once its keys and values are written, where nothing else of it is wanted."""


class Attention:
    """One per engine. Pass `name` as `attn_implementation`: transformers builds no mask for a name it does not know."""

    __slots__ = ("_backend", "exact", "kind", "name", "only_writes", "version")

    def __init__(self, kernel: Kernel | None) -> None:
        self._backend: Backend = SdpaBackend() if kernel is None else KernelBackend(kernel)
        self.name = f"shardline-{id(self):x}"
        self.exact = kernel is not None
        self.kind = "sdpa" if kernel is None else f"kernel-{kernel.isa}"
        self.version = "sdpa" if kernel is None else kernel.path.stem
        """Changes whenever row bits may: part of the exactness fingerprint."""
        self.only_writes = False
        """While true, a layer that attends writes its keys and values and ends in KvWritten."""
        AttentionInterface.register(self.name, self.attend)

    def bind(self, kv: PagedKv) -> None:
        """From now on rows are written to and read from `kv`."""
        self._backend.bind(kv)

    def use(self, batch: MicroBatch) -> None:
        """The next forward's rows. Here or in the forward: ProtocolError where they point outside the KV."""
        self._backend.use(batch)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """transformers' attention function: query [1, H, T, D], key and value [1, Hk, T, D] -> [1, T, H, D]."""
        if attention_mask is not None or kwargs.get("position_bias") is not None or kwargs.get("is_causal") is False:
            raise _unsupported(module)
        rows = PackedQkv(query=query, key=key, value=value)
        layer = module.layer_idx
        assert isinstance(layer, int), f"{type(module).__name__} has no layer index"
        rule = _rule(module, query.shape[-1], kwargs)
        if self.only_writes:
            self._backend.write(layer, rows, rule)
            raise KvWritten
        return self._backend.attend(layer, rows, rule), None


def _rule(module: nn.Module, head_dim: int, options: dict[str, Any]) -> AttentionParams:
    """What the model asks for. Qwen2-MoE passes no window: it keeps it on the module and relies on its mask."""
    scaling = options.get("scaling")
    window = options["sliding_window"] if "sliding_window" in options else getattr(module, "sliding_window", None)
    return AttentionParams(
        scale=head_dim**-0.5 if scaling is None else float(scaling),
        window=window,
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
    )


def _unsupported(module: nn.Module) -> Invalid:
    return Invalid(
        "model",
        f"{type(module).__name__} asks for attention that is not plainly causal (a mask, a position bias, both ways)",
        "Use a causal language model without them",
    )
