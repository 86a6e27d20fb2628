"""Fleets on a real Postgres: who is here, which layers the plan gives, and plans of several
coordinators at once."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine

from shardline.store import fleets
from shardline.store.fleets import PeerAddress, WorkerOffer
from tests.integration.rows import LONG_S, MODEL, change, claim, end, submit, success

SPLIT = ((0, 3), (3, 8))


def join(engine: Engine, *names: str, lease_s: float = LONG_S, model: str = MODEL) -> None:
    with engine.begin() as connection:
        for name in names:
            fleets.join(connection, name, {model: offer(name)}, lease_s=lease_s)


PEER = PeerAddress(machine="m", address="tcp://m")


def offer(name: str) -> WorkerOffer:
    return WorkerOffer(shapes={"layers": 8}, profile={"name": name})


def beat(engine: Engine, worker: str, lease_s: float = LONG_S) -> tuple[str, int, int] | None:
    with engine.begin() as connection:
        given = fleets.beat(connection, worker, lease_s)
    return None if given is None else (given.model, *given.layers)


def members(engine: Engine, model: str = MODEL) -> list[str]:
    with engine.begin() as connection:
        return [member.worker for member in fleets.workers_of(connection, model)]


def store(engine: Engine, version: int, **stages: int) -> bool:
    with engine.begin() as connection:
        return fleets.store_plan(
            connection, MODEL, version=version, split=SPLIT, stages=stages, tokens_per_s=12.5
        )


def test_workers_are_here_from_joining_until_they_leave_or_their_lease_ends(engine: Engine) -> None:
    join(engine, "b", "a")
    join(engine, "late", lease_s=-1)
    join(engine, "other", model="another")
    assert members(engine) == ["a", "b"]
    with engine.begin() as connection:
        assert fleets.fleets(connection) == sorted([MODEL, "another"])
        (first, _) = fleets.workers_of(connection, MODEL)
        assert (first.shapes, first.profile) == ({"layers": 8}, {"name": "a"})
        fleets.leave(connection, "a")
    assert members(engine) == ["b"]
    beat(engine, "late")
    assert members(engine) == ["b", "late"], "one whose beats were late is here again"


def test_a_beat_answers_with_the_layers_of_the_worker(engine: Engine) -> None:
    join(engine, "a", "b", "spare")
    assert beat(engine, "a") is None
    assert store(engine, 0, a=0, b=1)
    assert [beat(engine, worker) for worker in ("a", "b", "spare")] == [
        (MODEL, 0, 3),
        (MODEL, 3, 8),
        None,
    ]
    with pytest.raises(LookupError, match="stranger"):
        beat(engine, "stranger")


def test_of_coordinators_that_plan_at_once_one_succeeds(engine: Engine) -> None:
    assert [store(engine, 0, a=0, b=1), store(engine, 0, a=1, b=0)] == [True, False]
    assert [store(engine, 1, a=1, b=0), store(engine, 1, a=0, b=1)] == [True, False]
    with engine.begin() as connection:
        found = fleets.plan_of(connection, MODEL)
        assert (found.version, found.split, dict(found.stages)) == (2, SPLIT, {"a": 1, "b": 0})
        assert fleets.plan_of(connection, "another").version == 0


def test_one_that_starts_again_has_been_here_and_one_that_was_gone_has_not(engine: Engine) -> None:
    join(engine, "a", "b")
    with engine.begin() as connection:
        before = {each.worker: each.here_s for each in fleets.workers_of(connection, MODEL)}
    beat(engine, "b", lease_s=-1)
    join(engine, "a", "b")
    with engine.begin() as connection:
        after = {each.worker: each.here_s for each in fleets.workers_of(connection, MODEL)}
    assert after["a"] > before["a"]
    assert after["b"] < after["a"]


def test_a_worker_finds_one_that_answers_on_each_machine(engine: Engine) -> None:
    places = {"a": "x", "b": "x", "c": "y", "gone": "z"}
    with engine.begin() as connection:
        for name, machine in places.items():
            peer = PeerAddress(machine=machine, address=f"tcp://{name}")
            lease_s = -1 if name == "gone" else LONG_S
            fleets.announce(connection, name, [MODEL], lease_s=lease_s, peer=peer)
    join(engine, "c")
    with engine.begin() as connection:
        found = {each.machine: each.address for each in fleets.peers(connection, "a")}
        assert found == {"x": "tcp://b", "y": "tcp://c"}
        again = PeerAddress(machine="y", address="tcp://new")
        fleets.announce(connection, "c", [MODEL], lease_s=LONG_S, peer=again)
        assert again in fleets.peers(connection, "a"), "one that starts again answers elsewhere"


def test_a_device_that_drifts_changes_its_profile_for_that_model(engine: Engine) -> None:
    with engine.begin() as connection:
        fleets.join(
            connection, "a", {MODEL: offer("own"), "another": offer("further")}, lease_s=LONG_S
        )
        for model in (MODEL, "another", "unknown"):
            fleets.refresh(connection, "a", model, {"name": f"slower {model}"})
        profiles = [
            fleets.workers_of(connection, model)[0].profile["name"] for model in (MODEL, "another")
        ]
        assert profiles == [f"slower {MODEL}", "slower another"]
        assert fleets.fleets(connection) == sorted([MODEL, "another"])


def test_an_announced_worker_is_coming_until_it_joins_or_its_lease_ends(engine: Engine) -> None:
    def announce(*names: str, lease_s: float = LONG_S) -> None:
        with engine.begin() as connection:
            for name in names:
                fleets.announce(connection, name, [MODEL, "another"], lease_s=lease_s, peer=PEER)

    def coming() -> set[str]:
        with engine.begin() as connection:
            return set(fleets.coming(connection))

    announce("failed", lease_s=-1)
    assert coming() == set()
    announce("a", "failed")
    assert (coming(), members(engine)) == ({MODEL, "another"}, [])
    with engine.begin() as connection:
        assert fleets.fleets(connection) == []
    join(engine, "a", "failed")
    assert (coming(), members(engine)) == (set(), ["a", "failed"])
    announce("a")
    assert (coming(), members(engine)) == (set(), ["a", "failed"]), (
        "one that starts again keeps its offer"
    )
    join(engine, "failed", lease_s=-1)
    announce("failed")
    assert (coming(), members(engine)) == ({MODEL, "another"}, ["a"]), (
        "what was gone has no offer any more"
    )


def test_a_worker_may_serve_several_models_and_is_given_one(engine: Engine) -> None:
    with engine.begin() as connection:
        fleets.join(
            connection, "a", {MODEL: offer("own"), "another": offer("further")}, lease_s=LONG_S
        )
        fleets.join(connection, "b", {"another": offer("b")}, lease_s=LONG_S)
        assert fleets.fleets(connection) == sorted([MODEL, "another"])
        profiles = [each.profile["name"] for each in fleets.workers_of(connection, "another")]
        assert profiles == ["further", "b"]
        assert [each.profile["name"] for each in fleets.workers_of(connection, MODEL)] == ["own"]
        assert fleets.store_plan(
            connection,
            "another",
            version=0,
            split=SPLIT,
            stages={"a": 1, "b": 0},
            tokens_per_s=None,
        )
    assert beat(engine, "a") == ("another", 3, 8)


def test_a_model_is_wanted_while_a_job_of_it_runs_or_could(engine: Engine) -> None:
    def wanted() -> set[str]:
        with engine.begin() as connection:
            return fleets.wanted(connection, [MODEL, "another"])

    (job,) = submit(engine)
    change(engine, "UPDATE jobs SET not_before = now() + interval '1 hour'")
    assert wanted() == set(), "a job of later needs nobody now"
    change(engine, "UPDATE jobs SET not_before = now()")
    assert wanted() == {MODEL}
    change(engine, "UPDATE jobs SET sent_at = now() WHERE id = :job", job=job)
    assert wanted() == {MODEL}
    (claimed,) = claim(engine, [job])
    assert wanted() == {MODEL}
    end(engine, success(claimed))
    assert wanted() == set()
