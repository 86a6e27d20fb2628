"""Stages of two ranks: the death of any process of a stage is that of the stage, and its jobs end
as if undisturbed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import psutil
import pytest
import torch

from shardline.client import Client
from tests.polling import until
from tests.ranks import other_ranks
from tests.stack import ForkedStack, Stack

NUM_NEW = 128
NICE = 1
OF_OTHERS = dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY"), "http://127.0.0.1:9") | {
    "CELERY_BROKER_URL": "redis://127.0.0.1:9"
}
"""What an environment may hold that is no business of the stack."""
PARAMS: dict[str, Any] = {"max_tokens": NUM_NEW, "temperature": 0.8, "ignore_eos": True}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = {"DEVICES": "cpu:0-1 cpu:0-1", "TP": "2", "TIME_SCALE": "0.5", "NICE": str(NICE)}
    stack = ForkedStack(
        tmp_path_factory.mktemp("stack"),
        **{f"SHARDLINE_{name}": value for name, value in settings.items()},
        **OF_OTHERS,
    )
    stack.start()
    yield stack
    stack.end()
    assert stack.left() == []


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[Client]:
    with Client(database_url=stack.urls["database"], redis_url=stack.urls["redis"]) as client:
        yield client


def submit(client: Client) -> list[UUID]:
    """Prompts of several lengths; the same seeds each time."""
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(5, 90, (length,), generator=generator).tolist() for length in (3, 20, 70)
    ]
    return [
        client.submit("clerk", prompt, seed=seed, **PARAMS) for seed, prompt in enumerate(prompts)
    ]


def outcomes(client: Client, ids: list[UUID]) -> list[tuple[tuple[int, ...], bool]]:
    """The tokens of each job, and whether they are exact."""
    results = [job.result for job in client.wait(ids, 120)]
    return [(result.token_ids, result.exact) for result in results if result is not None]


@pytest.fixture(scope="module")
def undisturbed(client: Client) -> list[tuple[tuple[int, ...], bool]]:
    found = outcomes(client, submit(client))
    assert all(exact for _, exact in found)
    return found


def first(stage: psutil.Process) -> psutil.Process:
    return stage


def other(stage: psutil.Process) -> psutil.Process:
    (rank,) = other_ranks(stage)
    return rank


def test_ranks_are_forks_of_their_stage_and_hold_none_of_its_locks(stack: Stack) -> None:
    stage = psutil.Process(stack.look()["processes"]["stage-0"])
    rank = other(stage)
    assert rank.cmdline() == stage.cmdline(), "it imported everything again"
    assert [file.path for file in stage.open_files() if file.path.endswith(".lock")] != []
    assert [file.path for file in rank.open_files() if file.path.endswith(".lock")] == []
    assert rank.net_connections() == []


def test_threads_that_compute_stand_back_and_others_do_not(stack: Stack, client: Client) -> None:
    client.wait(submit(client), 120)
    stage = psutil.Process(stack.look()["processes"]["stage-0"])
    (rank,) = other_ranks(stage)
    engine, *others = sorted((nice(thread.id) for thread in stage.threads()), reverse=True)
    assert (engine, nice(rank.pid)) == (NICE, NICE)
    assert set(others) == {0}


def nice(thread: int) -> int:
    """Its nice value."""
    return os.getpriority(os.PRIO_PROCESS, thread)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("victim", [first, other])
def test_a_stage_whose_process_is_killed_starts_again_and_no_job_notices(
    stack: Stack,
    client: Client,
    undisturbed: list[tuple[tuple[int, ...], bool]],
    victim: Callable[[psutil.Process], psutil.Process],
    place: int,
) -> None:
    # Given jobs that run
    stage = psutil.Process(stack.look()["processes"][f"stage-{place}"])
    processes = [stage, *other_ranks(stage)]
    ids = submit(client)
    next(iter(client.stream(ids[-1])))

    # When one process of a stage is killed
    os.kill(victim(stage).pid, signal.SIGKILL)
    assert client.get(ids[-1]).result is None, "the kill came too late"

    # Then all of them end, others take their place, and every job has the tokens that it would have
    # had
    until(
        lambda: (
            not any(
                each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes
            )
        ),
        timeout_s=30,
    )
    assert outcomes(client, ids) == undisturbed
