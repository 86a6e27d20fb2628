"""Pipelines and models on a real Postgres: epochs, readiness, registration."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine

from shardline.store import models, pipelines
from tests.integration.rows import LONG_S, MODEL, model_row


def take(engine: Engine, pipeline: str, lease_s: float = LONG_S, held: int = 0) -> int | None:
    """The head `h2` takes an epoch."""
    head = {"model": MODEL, "fingerprint": "w", "head": "h2"}
    with engine.begin() as connection:
        return pipelines.take_epoch(connection, pipeline, **head, lease_s=lease_s, held=held)


def test_each_epoch_is_higher_and_fences_off_the_old_head(engine: Engine) -> None:
    assert [take(engine, "p", held=1), take(engine, "p", held=2), take(engine, "q")] == [2, 3, 1]
    with engine.begin() as connection:
        assert not pipelines.renew(connection, "p", 1, LONG_S)
        assert not pipelines.ready(connection, "p", 2, seats=4, stages=[], exact=True, kv_tokens=64)
        assert not pipelines.unready(connection, "p", 2)
        assert not pipelines.release(connection, "p", 2)
        assert pipelines.renew(connection, "p", 3, LONG_S)


@pytest.mark.parametrize("held", [0, 2])
def test_a_second_head_gets_no_epoch_while_the_first_lives(engine: Engine, held: int) -> None:
    assert take(engine, "p", held=held) is None
    with engine.begin() as connection:
        assert pipelines.holder(connection, "p") == "h"
        assert pipelines.renew(connection, "p", 1, LONG_S), "the holder must not have noticed"
        pipelines.release(connection, "p", 1)
    assert take(engine, "p", held=held) == 2
    with engine.begin() as connection:
        assert (pipelines.holder(connection, "p"), pipelines.holder(connection, "q")) == (
            "h2",
            None,
        )


def test_a_pipeline_changes_hands_after_a_lease_of_silence(engine: Engine) -> None:
    with engine.begin() as connection:
        pipelines.renew(connection, "p", 1, -1)
    assert take(engine, "p") == 2


def test_doors_see_a_pipeline_from_ready_until_it_is_not(engine: Engine) -> None:
    with engine.begin() as connection:
        assert pipelines.ready(
            connection, "p", 1, seats=8, stages=[{"worker": "h"}], exact=True, kv_tokens=64
        )
        (live,) = pipelines.live_pipelines(connection, MODEL)
        assert (live.id, live.ready, live.seats, live.exact, live.stages) == (
            "p",
            True,
            8,
            True,
            ({"worker": "h"},),
        )
        assert pipelines.live_pipelines(connection, "another") == []
        assert (
            pipelines.num_ready(connection, MODEL),
            pipelines.num_ready(connection, "another"),
        ) == (1, 0)
        pipelines.unready(connection, "p", 1)
        assert [live.ready for live in pipelines.live_pipelines(connection)] == [False]
        assert pipelines.num_ready(connection, MODEL) == 0
        pipelines.ready(connection, "p", 1, seats=8, stages=[], exact=True, kv_tokens=64)
    take(engine, "p", held=1)
    with engine.begin() as connection:
        assert [live.ready for live in pipelines.live_pipelines(connection)] == [False]


def test_a_pipeline_does_not_live_without_its_head(engine: Engine) -> None:
    take(engine, "silent", lease_s=-1)
    with engine.begin() as connection:
        pipelines.release(connection, "p", 1)
    with engine.begin() as connection:
        assert pipelines.live_pipelines(connection) == []


def test_the_newest_row_of_a_model_counts(engine: Engine) -> None:
    with engine.begin() as connection:
        models.register_model(
            connection, {**model_row(MODEL), "context_length": 64, "chat_template": "t"}
        )
        row = models.get_model(connection, MODEL)
        assert row is not None
        assert (row["context_length"], row["chat_template"]) == (64, "t")
        assert models.get_model(connection, "n") is None
        models.register_model(connection, model_row("n"))
        assert [row["name"] for row in models.get_models(connection)] == [MODEL, "n"]
        choices = models.model_choices(connection)
        assert [(each.name, each.has_chat_template) for each in choices] == [
            (MODEL, True),
            ("n", False),
        ]


def test_the_longest_pipeline_is_among_those_that_live_or_lately_did(engine: Engine) -> None:
    with engine.begin() as connection:
        assert pipelines.longest(connection) == {MODEL: 4096}
        pipelines.ready(connection, "p", 1, seats=8, stages=[], exact=True, kv_tokens=640)
        pipelines.release(connection, "p", 1)
    for name, kv_tokens, lease_s in (
        ("larger", 1280, -60.0),
        ("gone", 9999, -2 * pipelines.LATELY_S),
    ):
        take(engine, name, lease_s=lease_s)
        with engine.begin() as connection:
            pipelines.ready(
                connection, name, 1, seats=8, stages=[], exact=True, kv_tokens=kv_tokens
            )

    with engine.begin() as connection:
        assert pipelines.longest(connection) == {MODEL: 1280}
