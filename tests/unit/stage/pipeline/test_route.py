"""A route covers every layer once, in order, with stages that fit; it is found whenever there is
one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.stage.pipeline.route import MAX_NAMED, choose_route
from shardline.base.errors import Unavailable
from shardline.contract.wire import StageCard
from tests.links import NUM_LAYERS, make_card

PIPELINE = "ours"
SPANS = st.tuples(st.integers(0, NUM_LAYERS), st.integers(0, NUM_LAYERS))
BOUND_TO = st.sampled_from([None, PIPELINE, "another"])


def reachable(start: int, cards: list[StageCard]) -> set[int]:
    """By exhaustion."""
    found = {start}
    while True:
        grown = found | {card.last_layer for card in cards if card.first_layer in found}
        if grown == found:
            return found
        found = grown


@given(st.integers(1, NUM_LAYERS), st.lists(st.tuples(SPANS, BOUND_TO), max_size=12))
def test_a_route_is_found_exactly_when_there_is_one(
    own_layers: int, stages: list[tuple[tuple[int, int], str | None]]
) -> None:
    own = make_card(0, own_layers)
    cards = [make_card(a, b, bound_to=bound_to) for (a, b), bound_to in stages if a < b]
    free = [card for card in cards if card.bound_to != "another"]
    try:
        route = choose_route(own, cards, pipeline=PIPELINE, refused={})
    except Unavailable:
        assert NUM_LAYERS not in reachable(own_layers, free)
        return
    edges = [own_layers, *(card.last_layer for card in route)]
    assert [card.first_layer for card in route] == edges[:-1]
    assert edges[-1] == NUM_LAYERS
    assert all(card in free for card in route)


def test_the_shortest_route_is_taken() -> None:
    own = make_card(0, 4)
    whole = make_card(4, NUM_LAYERS)
    parts = [make_card(4, 8), make_card(8, NUM_LAYERS)]

    assert choose_route(own, [*parts, whole], pipeline=PIPELINE, refused={}) == [whole]


def test_stages_that_are_bound_already_are_kept() -> None:
    own = make_card(0, 4)
    candidates = [make_card(4, NUM_LAYERS) for _ in range(10)]
    kept = candidates[7]

    assert choose_route(
        own, candidates, pipeline=PIPELINE, refused={}, prefer={kept.incarnation}
    ) == [kept]


def test_a_stage_that_refused_is_not_chosen_again() -> None:
    own = make_card(0, 4)
    first = make_card(4, NUM_LAYERS)
    second = make_card(4, NUM_LAYERS)

    assert choose_route(
        own, [first, second], pipeline=PIPELINE, refused={first.incarnation: "busy"}
    ) == [second]


def test_what_is_missing_is_told_in_bounds() -> None:
    own = make_card(0, 4)
    cards = [make_card(4, 8, bound_to="another") for _ in range(MAX_NAMED + 5)]

    with pytest.raises(
        Unavailable, match=r"layer 4 \(of 12\).*bound to pipeline another.*; 5 more"
    ) as caught:
        choose_route(own, cards, pipeline=PIPELINE, refused={})

    assert str(caught.value).count("bound to") == MAX_NAMED
