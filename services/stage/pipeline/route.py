"""Which stages can follow a head: a path through the layers. Pure: knows no Redis, no socket, no
clock."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Iterable, Mapping

from shardline.base.errors import Unavailable
from shardline.contract.wire import StageCard

MAX_NAMED = 8
"""Stages that a refusal lists."""


def choose_route(
    own: StageCard,
    cards: Iterable[StageCard],
    *,
    pipeline: str,
    refused: Mapping[str, str],
    prefer: Collection[str] = (),
) -> list[StageCard]:
    """Free stages that cover the layers behind `own`, in order; as few as can be, those in `prefer`
    first.

    `refused` tells by incarnation why a stage does not come into question. Raises Unavailable with
    what is missing.
    """
    others = [
        card for card in cards if card.model == own.model and card.incarnation != own.incarnation
    ]
    random.shuffle(others)
    others.sort(key=lambda card: card.incarnation not in prefer)
    problems = {card.incarnation: _problem(own, card, pipeline, refused) for card in others}
    usable = [card for card in others if problems[card.incarnation] is None]
    came_by = _spread(own.last_layer, usable)
    if own.num_layers == own.last_layer:
        return []
    if own.num_layers in came_by:
        return _walk_back(own, came_by)
    raise Unavailable(_missing(own, others, problems, reached=max([own.last_layer, *came_by])))


def _problem(
    own: StageCard, card: StageCard, pipeline: str, refused: Mapping[str, str]
) -> str | None:
    if card.incarnation in refused:
        return refused[card.incarnation]
    if card.fingerprint != own.fingerprint:
        return f"other weights: {card.fingerprint[:12]}, not {own.fingerprint[:12]}"
    if card.dtype != own.dtype:
        return f"dtype {card.dtype}, not {own.dtype}"
    if card.num_layers != own.num_layers:
        return f"a model of {card.num_layers} layers, not {own.num_layers}"
    if card.bound_to not in (None, pipeline):
        return f"bound to pipeline {card.bound_to}"
    return None


def _spread(start: int, usable: list[StageCard]) -> dict[int, StageCard]:
    """Breadth first: for each layer that can be reached, the card of a shard that ends before
    it."""
    came_by: dict[int, StageCard] = {}
    frontier = deque([start])
    while frontier:
        layer = frontier.popleft()
        for card in usable:
            if card.first_layer == layer < card.last_layer and card.last_layer not in came_by:
                came_by[card.last_layer] = card
                frontier.append(card.last_layer)
    return came_by


def _walk_back(own: StageCard, came_by: dict[int, StageCard]) -> list[StageCard]:
    route: list[StageCard] = []
    layer = own.num_layers
    while layer != own.last_layer:
        route.append(came_by[layer])
        layer = came_by[layer].first_layer
    return route[::-1]


def _missing(
    own: StageCard, others: list[StageCard], problems: Mapping[str, str | None], *, reached: int
) -> str:
    gap = f"no free stage of {own.model} goes on from layer {reached} (of {own.num_layers})"
    named = sorted(others, key=lambda card: (card.first_layer != reached, card.worker))[:MAX_NAMED]
    rest = f"; {len(others) - len(named)} more" if len(others) > len(named) else ""
    descriptions = [
        f"{card.worker} [{card.first_layer}, {card.last_layer}): "
        + (problems[card.incarnation] or "its layers do not fit here")
        for card in named
        if not (card.first_layer < reached and problems[card.incarnation] is None)
    ]
    return f"{gap}: {'; '.join(descriptions) or 'no other stage is registered'}{rest}"
