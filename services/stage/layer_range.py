"""Which layers this stage holds: named outright, by a split by hand, or by its place in an even
split."""

from __future__ import annotations

from services.stage.settings import StageSettings
from shardline.base.errors import Invalid
from shardline.contract.fleet.joined_layers import JoinedLayers
from shardline.contract.fleet.split import parse_range, split_of


def layers_of(
    settings: StageSettings, num_layers: int, joined: JoinedLayers | None = None
) -> range:
    """The shard's layers; none if a plan will name them. Raises Invalid, naming the setting, also
    where they would cut `joined` layers apart."""
    if settings.is_planned:
        return range(0)
    if settings.layers is not None:
        layers = parse_range(settings.layers, "SHARDLINE_LAYERS")
        if layers.stop > num_layers:
            raise Invalid(
                "SHARDLINE_LAYERS",
                f"it ends at layer {layers.stop - 1}, the model has 0-{num_layers - 1}",
                "Lower it",
            )
        if joined is not None:
            joined.check([layers], "SHARDLINE_LAYERS")
        return layers
    stages = split_of(settings.split, num_layers, settings.num_stages, joined)
    if settings.place >= len(stages):
        raise Invalid(
            "SHARDLINE_PLACE",
            f"{settings.place}, but there are {len(stages)} stages",
            "Count places from 0",
        )
    return stages[settings.place]
