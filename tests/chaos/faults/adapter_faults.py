"""Adapters that come, change and go while the stack serves: copies of the load's own, under names
of their own.

A copy has the fingerprint of its original. So the judge knows the tokens of its jobs: those of the
original's requests.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID, uuid4

from shardline.client import Client
from shardline.contract.job import Job, JobState
from shardline.store import models
from shardline.store.connection.database import transaction
from tests.chaos.faults.fault import Broken, Fault, NotInjected, Simple, hold
from tests.chaos.load.journal import Asked
from tests.chaos.load.requests import MODEL
from tests.chaos.stack.local_target import LocalTarget
from tests.polling import within

DOOR = "adapter"
WEIGHTS = "adapter_model.safetensors"
NOTICE_S = 60.0
"""A head that has just started reads all of them first."""
END_S = 180.0
"""Of a job that is first in its line, on cores that others use too."""
LOOKS = 3
"""In so many polls a thread that looks for adapters has looked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Original:
    """One of the load's adapters, with the longest request of the set that asks for it."""

    folder: Path
    number: int


def come_and_go(target: LocalTarget, rng: random.Random) -> None:
    """Its weights are cut short, as while they are copied: no door knows it. Then it serves. Then
    it is gone."""
    original = rng.choice(_originals(target))
    with _named(target) as folder:
        whole = _copy(target, original).rename(folder) / WEIGHTS
        weights = whole.read_bytes()
        whole.write_bytes(weights[: rng.randrange(len(weights))])
        hold(LOOKS * target.times.poll_s)
        if _known(target, folder.name) is not None:
            raise Broken(f"doors know the adapter {folder.name}, whose weights are cut short")
        whole.write_bytes(weights)
        _wait_until_known(target, folder.name, original)
        _judge(target, _ended(target, _submit(target, original, folder.name)), original)
    if not within(NOTICE_S, lambda: _known(target, folder.name) is None):
        raise Broken(f"doors still know the adapter {folder.name}, which is gone")
    job = _ended(target, _submit(target, original, folder.name))
    if job.state is not JobState.FAILED or "no model named" not in _problem(job):
        raise Broken(
            f"job {job.id} asked for an adapter that is gone, and ended {job.state}: {job.error}"
        )


def change(target: LocalTarget, rng: random.Random) -> None:
    """A job that runs keeps what it began with, or, if its place was taken, fails by name. The next
    has the new one."""
    before, after = rng.sample(_originals(target), 2)
    with _named(target) as folder:
        _copy(target, before).rename(folder)
        _wait_until_known(target, folder.name, before)
        first = _submit(target, before, folder.name)
        if not within(END_S, lambda: _get(target, first).state is not JobState.QUEUED):
            raise NotInjected(f"job {first} has not begun within {END_S:.0f} s")
        draft = _copy(target, after)
        folder.rename(draft.with_name("old"))
        draft.rename(folder)
        shutil.rmtree(draft.with_name("old"))
        _wait_until_known(target, folder.name, after)
        second = _submit(target, after, folder.name)
        if (job := _ended(target, first)).state is JobState.SUCCEEDED:
            _judge(target, job, before)
        elif f"adapter {folder.name!r}" not in _problem(job):
            raise Broken(f"job {job.id} lost its adapter and ended {job.state}: {job.error}")
        _judge(target, _ended(target, second), after)


def _originals(target: LocalTarget) -> list[Original]:
    """Of the first stack's model."""
    assert target.adapters is not None
    requests = target.workload.requests
    longest = dict[str, int]()
    for number in sorted(
        range(len(requests)), key=lambda number: requests[number].get("max_tokens", 0)
    ):
        model, _, name = requests[number]["model"].partition(":")
        if model == MODEL and name:
            longest[name] = number
    return [
        Original(folder=target.adapters / name, number=number)
        for name, number in sorted(longest.items())
    ]


@contextmanager
def _named(target: LocalTarget) -> Iterator[Path]:
    """A folder that is not there yet; it is gone in the end."""
    assert target.adapters is not None
    folder = target.adapters / f"passing-{uuid4().hex[:6]}"
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _copy(target: LocalTarget, original: Original) -> Path:
    """Where no stage looks: what is renamed comes whole."""
    assert target.adapters is not None
    return Path(
        shutil.copytree(original.folder, target.adapters.with_name(f"draft-{uuid4().hex[:6]}"))
    )


def _known(target: LocalTarget, name: str) -> str | None:
    """The fingerprint by which doors know it."""
    with transaction(target.database_url) as connection:
        return models.adapters(connection)[MODEL].get(name)


def _wait_until_known(target: LocalTarget, name: str, original: Original) -> None:
    expected = _known(target, original.folder.name)
    if not within(NOTICE_S, lambda: _known(target, name) == expected):
        raise Broken(f"doors do not know the adapter {name} within {NOTICE_S:.0f} s")


def _submit(target: LocalTarget, original: Original, name: str) -> UUID:
    """The original's request, for the copy, first in its line."""
    fields = {
        **target.workload.requests[original.number],
        "model": f"{MODEL}:{name}",
        "priority": 0,
    }
    with Client(database_url=target.database_url, redis_url=target.redis_url) as client:
        return client.submit(**fields)


def _get(target: LocalTarget, job_id: UUID) -> Job:
    with Client(database_url=target.database_url, redis_url=target.redis_url) as client:
        return client.get(job_id)


def _ended(target: LocalTarget, job_id: UUID) -> Job:
    if not within(END_S, lambda: _get(target, job_id).state.terminal):
        raise Broken(f"job {job_id} has not ended within {END_S:.0f} s")
    return _get(target, job_id)


def _judge(target: LocalTarget, job: Job, original: Original) -> None:
    """It must have succeeded. The judge compares it with the original's request, unless a head that
    died has left it to one with other files, which it says."""
    if job.result is None:
        raise Broken(f"job {job.id} of an adapter that is there ended {job.state}: {job.error}")
    if job.result.exact:
        target.journal.ask(Asked(id=job.id, number=original.number, door=DOOR, promised=True))


def _problem(job: Job) -> str:
    return str((job.error or {}).get("problem", ""))


def _lacks(target: LocalTarget) -> str | None:
    return (
        None
        if target.adapters is not None and len(_originals(target)) > 1
        else "it needs two adapters: ADAPTERS="
    )


FAULTS: tuple[Fault, ...] = tuple(
    Simple(kind=kind, inject=inject, why_not=_lacks)
    for kind, inject in (("adapter: comes and goes", come_and_go), ("adapter: changes", change))
)
