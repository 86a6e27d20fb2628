"""Two heads with one pipeline's name, on a real Postgres with real control links: the second one
waits and says why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import OperationalError

from services.stage.hop.sockets import Sockets
from services.stage.pipeline.epochs import Epochs
from shardline.base.errors import Conflict, Unavailable
from shardline.store import pipelines
from shardline.store.connection.database import connect
from tests.integration.rows import LONG_S
from tests.links import Pipes, open_pipes

NAME = "shared"
TAKE_EPOCH = pipelines.take_epoch


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    with open_pipes(Sockets(bind="tcp://127.0.0.1")) as pipes:
        yield pipes


def taken_unheard(connection: Connection, pipeline: str, **values: Any) -> int:
    """The COMMIT succeeds, its answer does not come."""
    assert TAKE_EPOCH(connection, pipeline, **values) == 2
    connection.commit()
    raise OperationalError("COMMIT", {}, psycopg.OperationalError("the connection is lost"))


def epochs_of(engine: Engine, head: str, *, lease_s: float = LONG_S) -> Epochs:
    return Epochs(engine, NAME, model="m", fingerprint="w", head=head, lease_s=lease_s)


def test_a_second_head_of_one_name_waits_until_the_first_has_gone(
    engine: Engine, pipes: Pipes
) -> None:
    pipes.stage(8, 12)
    pipes.stage(8, 12)
    first_epochs = epochs_of(engine, "first@here")
    first = pipes.head(8, next_epoch=first_epochs.take)
    assert first.ready().epoch == 1

    second = pipes.head(8, next_epoch=epochs_of(engine, "second@there").take)

    reason = pipes.reason(second, "held by")
    assert "pipeline 'shared' is held by the head first@here" in reason
    assert "give each its own SHARDLINE_PIPELINE" in reason
    assert first.losses.empty()
    first.close()
    first_epochs.release()
    assert second.ready().epoch == 2


def test_a_killed_head_goes_on_at_once_when_it_starts_again(engine: Engine) -> None:
    killed = epochs_of(engine, "head@here")
    assert [killed.take(), killed.take()] == [1, 2]

    assert epochs_of(engine, "head@here").take() == 3

    with pytest.raises(Conflict, match="held by the head head@here"):
        # It was alive after all: a twin takes the name once, at its start, and not for ever.
        killed.take()


def test_a_head_does_not_wait_for_its_own_lease_after_a_lost_answer(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    epochs = epochs_of(engine, "head@here")
    assert epochs.take() == 1
    with monkeypatch.context() as patch:
        patch.setattr(pipelines, "take_epoch", taken_unheard)
        with pytest.raises(Unavailable):
            epochs.take()

    assert epochs.take() == 3


def test_an_epoch_wanted_without_postgres_says_so_and_may_be_given_up() -> None:
    away = connect("postgresql://nobody@127.0.0.1:1/none")
    epochs = epochs_of(away, "head@here")
    with pytest.raises(Unavailable, match="Postgres unreachable"):
        epochs.take()
    epochs.release()
    away.dispose()
