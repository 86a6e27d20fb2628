"""Makes one vector or score of a text's hidden states, text by text, so that none depends on its
neighbors. Knows no scheduler.

Letters of shapes: T packed rows, N rows of one text, H the hidden size, D the size of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from services.stage.attention.paged_kv import Span
from services.stage.model.encoders.encoder_class import is_masked_lm
from services.stage.model.encoders.encoder_files import EncoderFiles
from services.stage.model.shard import Shard
from services.stage.model.text_part import text_config
from shardline.contract.encoders.encoder import EncoderTask

Pool = Callable[[Tensor], Tensor]
"""Takes a text's hidden states, float32 [N, H]; returns its vector [H]."""


def _weighted_mean(states: Tensor) -> Tensor:
    """Later rows count more."""
    weights = torch.arange(1, len(states) + 1, dtype=states.dtype, device=states.device)
    return (states * weights[:, None]).sum(0) / weights.sum()


POOLS: Mapping[str, Pool] = MappingProxyType(
    {
        "cls": lambda states: states[0],
        "max": lambda states: states.amax(0),
        "mean": lambda states: states.sum(0) / len(states),
        "mean_sqrt_len_tokens": lambda states: states.sum(0) / len(states) ** 0.5,
        "weightedmean": _weighted_mean,
        "lasttoken": lambda states: states[-1],
    }
)
"""By the names in sentence-transformers' files."""


class Pooling:
    """What follows the layers of the last shard of a model that pools."""

    def __init__(self, shard: Shard) -> None:
        files = shard.info.encoder
        assert files is not None, "the model pools"
        self._files: EncoderFiles = files
        self._shard = shard
        self._dense = [each.load(shard.device) for each in files.dense]
        if not is_masked_lm(shard.info.config):
            # A decoder's head takes the last token that is no padding: there is none.
            text_config(shard.model.config).pad_token_id = None

    def vectors(
        self, states: Tensor, spans: Sequence[Span], dimensions: Sequence[int | None]
    ) -> Iterator[bytes]:
        """Yields each text's vector as a tail's answer has it, float32 in little-endian order;
        nothing for one that is not finite. A score is a vector of one number. `states` [T, H] are
        those behind the last layer; each vector is cut to its number in `dimensions`, None:
        not at all."""
        begin = 0
        scores = self._files.encoder.task is EncoderTask.SCORE
        for span, num in zip(spans, dimensions, strict=True):
            text = states[begin : begin + span.length]
            begin += span.length
            vector = (self._score(text) if scores else self._vector(text, num)).float().cpu()
            numbers = vector.contiguous().numpy().astype("<f4", copy=False)
            yield numbers.tobytes() if vector.isfinite().all() else b""

    def _vector(self, text: Tensor, num: int | None) -> Tensor:
        text = text.float()
        parts = [POOLS[mode](text) for mode in self._files.modes]
        vector = parts[0] if len(parts) == 1 else torch.cat(parts)
        for dense in self._dense:
            vector = dense(vector)
        if num is not None:
            vector = vector[:num]
        return torch.nn.functional.normalize(vector, dim=0) if self._files.normalizes else vector

    def _score(self, text: Tensor) -> Tensor:
        """The model's own head, behind layers that are computed."""
        model: Any = self._shard.model
        base = self._shard.decoder
        pooler = getattr(base, "pooler", None)
        found = BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=text[None],
            pooler_output=None if pooler is None else pooler(text[None]),
        )
        usual = base.forward
        base.forward = lambda *_, **__: found
        try:
            logits: Tensor = model(inputs_embeds=text[None]).logits
        finally:
            base.forward = usual
        score = logits.reshape(1).float()
        return score.sigmoid() if self._files.is_share else score
