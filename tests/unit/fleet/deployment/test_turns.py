"""Turns of several models on one fleet: nobody starves, nobody thrashes, workers move only where
they are needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardline_fleet.deployment.turns import (
    IDLE_TURN_S,
    LOADS_IN_TURN,
    PATIENCE_S,
    TURN_S,
    Turn,
    Turns,
)

ALL = ("a", "b", "c")
LONG_S = 1e6
SERVED = Turn(is_wanted=True, since_s=LONG_S, served_s=LONG_S)
WANTED = Turn(is_wanted=True, since_s=5.0)


def turns(models: dict[str, Turn], workers: int = 2, least: int = 2, **other: Any) -> Turns:
    """Workers w0, w1, …, which all may serve all models; a model fits on `least` of them."""
    offers = {f"w{number}": tuple(models) for number in range(workers)}
    made = Turns(models=models, offers=offers, fits=lambda _, found: len(found) >= least)
    return replace(made, **other)


def test_the_first_workers_serve_the_first_model_that_has_jobs() -> None:
    assert turns({"a": Turn(), "b": Turn(is_wanted=True)}).assign({}) == {"w0": "b", "w1": "b"}
    assert turns({"a": Turn(), "b": Turn()}).assign({}) == {"w0": "a", "w1": "a"}


def test_nobody_moves_while_no_model_with_jobs_lacks_workers() -> None:
    now = {"w0": "a", "w1": "a"}
    assert turns({"a": Turn(since_s=LONG_S), "b": Turn()}).assign(now) == now
    served = {"a": SERVED, "b": SERVED}
    assert turns(served, least=1).assign({"w0": "a", "w1": "b"}) == {"w0": "a", "w1": "b"}


@pytest.mark.parametrize(
    ("turn", "is_over"),
    [
        (Turn(since_s=IDLE_TURN_S), True),
        (Turn(since_s=IDLE_TURN_S - 1), False),
        (Turn(is_wanted=True, since_s=TURN_S + 2, served_s=TURN_S), True),
        (Turn(is_wanted=True, since_s=TURN_S + 2, served_s=TURN_S - 1), False),
        (Turn(is_wanted=True, since_s=TURN_S + 30, served_s=TURN_S), False),
        (Turn(is_wanted=True, since_s=30 + LOADS_IN_TURN * 30, served_s=LOADS_IN_TURN * 30), True),
        (Turn(is_wanted=True, since_s=TURN_S, served_s=None), False),
        (Turn(is_wanted=True, since_s=PATIENCE_S, served_s=None), True),
    ],
)
def test_a_turn_is_over_after_its_time_and_that_of_five_loads(turn: Turn, is_over: bool) -> None:
    assert turn.is_over(1.0) is is_over
    then = turns({"a": turn, "b": WANTED}).assign({"w0": "a", "w1": "a"})
    assert set(then.values()) == ({"b"} if is_over else {"a"})


def test_of_models_that_wait_the_one_without_a_turn_for_longest_is_next() -> None:
    models = {
        "a": SERVED,
        "b": Turn(is_wanted=True, since_s=10.0),
        "c": Turn(is_wanted=True, since_s=20.0),
    }
    assert set(turns(models).assign({"w0": "a", "w1": "a"}).values()) == {"c"}


def test_models_without_jobs_give_first_and_only_what_is_needed() -> None:
    models = {"a": SERVED, "b": Turn(since_s=LONG_S, served_s=LONG_S), "c": WANTED}
    now = {"w0": "a", "w1": "b", "w2": "b"}
    assert turns(models, workers=3, least=1).assign(now) == {"w0": "a", "w1": "c", "w2": "b"}


def test_a_model_that_cannot_go_on_with_the_rest_gives_all() -> None:
    now = {"w0": "a", "w1": "a", "w2": "a"}
    assert set(turns({"a": SERVED, "b": WANTED}, workers=3).assign(now).values()) == {"b"}
    now |= {"w3": "a"}
    then = turns({"a": SERVED, "b": WANTED}, workers=4).assign(now)
    assert sorted(then.values()) == ["a", "a", "b", "b"]


def test_nobody_gives_workers_to_a_model_that_they_do_not_hold() -> None:
    now = {"w0": "a", "w1": "a"}
    made = turns(
        {"a": SERVED, "b": WANTED}, fits=lambda model, found: model == "a" and len(found) > 1
    )
    assert made.assign(now) == now


def test_workers_stay_with_what_they_may_serve() -> None:
    offers = {"w0": ("a",), "w1": ("a", "b"), "w2": ("b",)}
    then = turns({"a": SERVED, "b": WANTED}, least=1, offers=offers).assign({"w0": "a", "w1": "a"})
    assert then == {"w0": "a", "w1": "a", "w2": "b"}


def test_every_model_with_jobs_gets_its_turn_and_keeps_it() -> None:
    """Three models on workers that hold one: a round of turns takes as long as all of them."""
    since = dict.fromkeys(ALL, LONG_S)
    served = dict.fromkeys(ALL, 0.0)
    now = {"w0": "a", "w1": "a"}
    since["a"], order = 0.0, ["a"]
    for _ in range(10 * round(TURN_S)):
        here = order[-1]
        models = {
            name: Turn(
                is_wanted=True, since_s=since[name], served_s=since[name] if name == here else None
            )
            for name in ALL
        }
        then = turns(models).assign(now)
        (next_one,) = set(then.values())
        if next_one != here:
            order.append(next_one)
            since[here] = since[next_one] = 0.0
        now = then
        since = {name: seconds + 1.0 for name, seconds in since.items()}
        served[order[-1]] += 1.0
    assert order[:6] == ["a", "b", "c", "a", "b", "c"]
    assert min(served.values()) > 2 * TURN_S
