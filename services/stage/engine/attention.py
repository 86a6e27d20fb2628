"""The engine's attention, as transformers calls it. Owns the choice of backend; knows no scheduler and no model.

Packed rows, paged KV: `bind` the stage's KV once, `use` a batch before each forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from services.stage.engine import sdpa
from services.stage.engine.kernel import Kernel
from services.stage.engine.kv_cache import BLOCK_TOKENS
from services.stage.engine.paged import Batch, HeadShape, PagedKv, Rule, Span
from shardline.errors import Invalid

__all__ = ["BLOCK_TOKENS", "Attention", "Batch", "HeadShape", "PagedKv", "Span"]

_FROM_MODULE = -1
"""No `sliding_window` was passed: some models (Qwen2-MoE) keep it on the module and rely on their mask."""


class Attention:
    """One per engine. Pass `name` as `attn_implementation`: transformers builds no mask for a name it does not know."""

    __slots__ = ("_batch", "_kernel", "_kv", "exact", "kind", "name")

    def __init__(self, kernel: Kernel | None) -> None:
        self._kernel = kernel
        self._kv: PagedKv | None = None
        self._batch: Batch | None = None
        self.name = f"shardline-{id(self):x}"
        self.exact = kernel is not None
        self.kind = "sdpa" if kernel is None else f"kernel-{kernel.isa}"
        AttentionInterface.register(self.name, self.attend)

    def bind(self, kv: PagedKv) -> None:
        """From now on rows are written to and read from `kv`."""
        self._kv = kv

    def use(self, batch: Batch) -> None:
        """The next forward's rows."""
        self._batch = batch

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = _FROM_MODULE,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """transformers' attention function: query [1, H, T, D], key and value [1, Hk, T, D] -> [1, T, H, D]."""
        kv, batch = self._kv, self._batch
        assert kv is not None, "bind(kv) comes before the first forward"
        assert batch is not None, "use(batch) comes before each forward"
        if attention_mask is not None or kwargs.get("position_bias") is not None or kwargs.get("is_causal") is False:
            raise _unsupported(module)
        rule = Rule(
            scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            window=getattr(module, "sliding_window", None) if sliding_window == _FROM_MODULE else sliding_window,
            softcap=softcap,
            sinks=s_aux,
        )
        attend = sdpa.attend if self._kernel is None else self._kernel.attend
        packed = (query[0], key[0].to(kv.dtype), value[0].to(kv.dtype))
        return attend(kv, int(module.layer_idx), batch, *packed, rule)[None], None


def _unsupported(module: nn.Module) -> Invalid:
    return Invalid(
        "model",
        f"{type(module).__name__} asks for attention that is not plainly causal (a mask, a position bias, both ways)",
        "Use a causal language model without them",
    )
