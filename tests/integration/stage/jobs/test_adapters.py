"""Jobs with adapters on a head between a real Postgres and a real engine: loaded while it serves,
or refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine as Database

from services.stage.engine.executor import Executor
from shardline.base.config import Times
from shardline.contract.job import Job, JobState
from shardline.store import jobs
from tests.adapters import save_adapter
from tests.integration.rows import database_with_head, request
from tests.integration.stage.jobs.lone_head import LoneHead, open_lone_head, tiny_executor

TIMES = Times().scaled(0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def executor(folder: Path) -> Iterator[Executor]:
    """A tiny model that holds two adapters."""
    with tiny_executor(folder) as executor:
        yield executor


@pytest.fixture
def head(database_url: str, executor: Executor, redis_url: str) -> Iterator[LoneHead]:
    """Ready to take jobs."""
    with (
        database_with_head(database_url) as database,
        open_lone_head(database, executor, redis_url, TIMES) as head,
    ):
        yield head


def submit(database: Database, adapter: str | None, **fields: Any) -> UUID:
    """One prepared job."""
    wanted = request(max_tokens=8, ignore_eos=True, seed=5, logprobs=0, adapter=adapter, **fields)
    with database.begin() as connection:
        return jobs.insert_jobs(connection, [wanted], prepared=[((5, 6, 7), 8)])[0].job_id


def ended(head: LoneHead, job_ids: list[UUID]) -> list[Job]:
    """All offered together, as they are once the head has settled them."""
    for job_id in job_ids:
        head.offer(job_id)
    left = set(job_ids)
    while left:
        job_id, verdict = head.verdict()
        if verdict != "started":
            left.discard(job_id)
    with head.database.begin() as connection:
        return jobs.get_jobs(connection, job_ids)


def outcome(job: Job) -> object:
    assert job.result is not None, job.error
    return job.result.token_ids, job.result.logprobs


def test_adapters_of_several_tenants_serve_side_by_side_and_come_while_serving(
    head: LoneHead, folder: Path
) -> None:
    # Given a head that began without any adapter, and four that come then
    names = ["a", "b", "c", "d"]
    for seed, each in enumerate(names):
        save_adapter(folder / "llama", folder / "adapters" / each, seed=seed)

    # When two tenants' jobs run together, more adapters than it holds, and each job again alone
    asked = [*names, None, *names]
    crowd = ended(head, [submit(head.database, name) for name in asked])
    alone = [ended(head, [submit(head.database, name)])[0] for name in asked]

    # Then no bit differs, each adapter has tokens of its own, and results name it
    assert list(map(outcome, crowd)) == list(map(outcome, alone))
    assert len({job.result.token_ids for job in crowd if job.result}) == 5
    assert head.executor.num_adapters == 2
    for job, name in zip(crowd, asked, strict=True):
        assert job.result is not None
        assert job.result.exact
        fingerprint = name and head.executor.adapters.get(name).fingerprint
        expected = {"name": name, "fingerprint": fingerprint} if name else None
        assert job.result.provenance.get("adapter") == expected


def test_a_job_whose_adapter_cannot_serve_fails_alone_with_the_reason(
    head: LoneHead, folder: Path
) -> None:
    save_adapter(folder / "llama", folder / "adapters" / "weighted", seed=9, use_dora=True)

    jobs_ended = ended(head, [submit(head.database, name) for name in ("weighted", "gone", None)])

    assert [job.state for job in jobs_ended] == [
        JobState.FAILED,
        JobState.FAILED,
        JobState.SUCCEEDED,
    ]
    problems = [job.error["problem"] for job in jobs_ended if job.error is not None]
    assert problems[0].startswith("adapter 'weighted': use_dora is set, which is not supported")
    assert problems[1].startswith(
        "adapter 'gone': it needs adapter_config.json and adapter_model.safetensors"
    )
    assert [job.crashes for job in jobs_ended] == [0, 0, 0]
