"""Layers of a model that one stage must hold together, because they share what a split would cut.
Read from config.json alone; knows no device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardline.base.errors import Invalid

REMEDY = "Let one stage hold them all"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedLayers:
    """The last layers of a model, from one on, and why they stay together."""

    layers: range
    reason: str

    def check(self, stages: Iterable[range], field: str) -> None:
        """Raises Invalid, naming `field`, if one of these stages holds some of them and not all."""
        for stage in stages:
            if self.layers.start < stage.start or self.layers.start < stage.stop < self.layers.stop:
                raise Invalid(field, self.problem, REMEDY)

    @property
    def problem(self) -> str:
        """Returns the constraint as a sentence."""
        first, last = self.layers.start, self.layers.stop - 1
        return f"layers {first}-{last} must stay together, because {self.reason}"


def joined_layers(config: Mapping[str, Any]) -> JoinedLayers | None:
    """Returns the layers that a config, as JSON has it, joins; None if every layer can be split
    from the next."""
    text = config.get("text_config")
    scope: Mapping[str, Any] = {**config, **text} if isinstance(text, Mapping) else config
    num_layers = scope.get("num_hidden_layers")
    if not isinstance(num_layers, int):
        return None
    if scope.get("hidden_size_per_layer_input"):
        reason = (
            "the first stage looks up embeddings for each of them (hidden_size_per_layer_input)"
        )
        return JoinedLayers(layers=range(num_layers), reason=reason)
    num_shared = scope.get("num_kv_shared_layers") or 0
    if not num_shared:
        return None
    own = list(scope.get("layer_types") or ())[: num_layers - num_shared]
    last_of_kind = {kind: number for number, kind in enumerate(own)}
    first = min(last_of_kind.values(), default=0)
    reason = f"the last {num_shared} take keys and values of the others (num_kv_shared_layers)"
    return JoinedLayers(layers=range(first, num_layers), reason=reason)
