"""Layers → stages: an even split, or one by hand such as `0-5,6-7`. Knows no device; placement is
another matter."""

from __future__ import annotations

import re
from itertools import pairwise

from shardline.base.errors import Invalid
from shardline.contract.fleet.joined_layers import JoinedLayers

FIELD = "SHARDLINE_SPLIT"
EVEN = "even"
"""The value that asks for an even split."""


def even_split(num_layers: int, num_stages: int) -> list[range]:
    """Contiguous, as equal as can be. Earlier stages get the surplus: the tail also computes the
    logits."""
    if not 1 <= num_stages <= num_layers:
        raise Invalid(
            "SHARDLINE_STAGES",
            f"{num_stages} stages cannot share {num_layers} layers",
            f"Use 1 to {num_layers} stages",
        )
    size, surplus = divmod(num_layers, num_stages)
    bounds = [0]
    for place in range(num_stages):
        bounds.append(bounds[-1] + size + (1 if place < surplus else 0))
    return [range(a, b) for a, b in pairwise(bounds)]


def parse_range(text: str, field: str = FIELD) -> range:
    """`0-5` (inclusive, as people count) or `7` as a half-open range. Raises Invalid, naming
    `field`."""
    match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise Invalid(field, f"{text!r} is no range of layers", "Write for example 0-5")
    return range(int(match[1]), int(match[2] or match[1]) + 1)


def split_of(
    text: str | None, num_layers: int, num_stages: int, joined: JoinedLayers | None = None
) -> list[range]:
    """The split that SHARDLINE_SPLIT asks for: even, if it asks for that or nothing, or by hand;
    `joined` layers stay in one stage. Raises Invalid."""
    if text and text != EVEN:
        stages = parse_split(text, num_layers)
        if joined is not None:
            joined.check(stages, FIELD)
        return stages
    stages = even_split(num_layers, num_stages)
    first = num_layers if joined is None else joined.layers.start
    if joined is None or stages[-1].start <= first:
        return stages
    if num_stages > first + 1:
        raise Invalid(
            "SHARDLINE_STAGES",
            f"{num_stages} stages cannot share the layers: {joined.problem}",
            f"Use 1 to {first + 1} stages" if first else "Use 1 stage",
        )
    return [*even_split(first, num_stages - 1), range(first, num_layers)]


def parse_split(text: str, num_layers: int) -> list[range]:
    """`0-5,6-7` as half-open ranges that cover all layers in order. Raises Invalid."""
    stages = [parse_range(part) for part in text.split(",")]
    expected = 0
    for stage in stages:
        if stage.start != expected:
            raise Invalid(
                FIELD,
                f"layer {expected} must come next, not {stage.start}",
                "Give contiguous ranges in order",
            )
        expected = stage.stop
    if expected != num_layers:
        raise Invalid(
            FIELD,
            f"it ends at layer {expected - 1}, the model has 0-{num_layers - 1}",
            "Cover every layer once",
        )
    return stages
