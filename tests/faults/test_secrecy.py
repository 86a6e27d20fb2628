"""A stack to which private things are sent through every door, most of them wrong: none of them
gets into a log."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from uuid import uuid4

import httpx
import psutil
import psycopg
import pytest
import redis
from celery import Celery

from shardline.base.config import Settings
from shardline.contract.api_key import bearer, new_key
from shardline.contract.keys import INTAKE, INTAKE_DEAD
from shardline.contract.queues import (
    GENERATE_TASK,
    INTAKE_QUEUE,
    SUBMIT_TASK,
    celery_settings,
    generate_queue,
)
from tests.api_keys import secret_of
from tests.chaos.judge.secrecy import passwords, told
from tests.poisoned_messages import SECRET, poisons
from tests.polling import until
from tests.stack import Stack

MODEL = "clerk"
TOKEN = "token-of-a-source-4711"
PASSWORD = "sesame-of-a-source-4712"
FOREIGN_KEY = new_key()
PRIVATE = {"model": MODEL, "prompt": SECRET}
UNREACHABLE = f"http://someone:{PASSWORD}@127.0.0.1:1/rates?securityToken={TOKEN}"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One whose sources of rates cannot be reached."""
    stack = Stack(
        tmp_path_factory.mktemp("secrecy") / "home",
        SHARDLINE_ENERGY_PRICE=UNREACHABLE,
        SHARDLINE_LOG_LEVEL="DEBUG",
    )
    stack.home.folder.mkdir(parents=True)
    stack.start()
    yield stack
    stack.end()


def test_nothing_private_gets_into_logs_or_command_lines(stack: Stack) -> None:
    urls = stack.urls
    by_http(urls["gateway"], urls["api_key"])
    by_sql(urls["database"])
    with redis.Redis.from_url(urls["redis"]) as server:
        by_redis(server)
        by_celery(urls["redis"])
        until(lambda: server.llen(INTAKE_QUEUE) == 0 and server.xlen(INTAKE) == 0)
        assert server.xlen(INTAKE_DEAD) > 0
    assert stack.complete().status_code == 200
    kill(stack, "relay", "gateway", "redis", "postgres")
    until(lambda: is_back(stack))
    lines = [" ".join(process.cmdline()) for process in processes(stack)]
    stack.process.terminate()
    stack.process.wait()

    secret_of_key = secret_of(urls["api_key"])
    secrets = {
        SECRET,
        TOKEN,
        PASSWORD,
        secret_of_key,
        secret_of(FOREIGN_KEY),
        *passwords(urls.values()),
    }
    logs = stack.home.folder / "logs"
    files = [*logs.iterdir(), stack.output]
    assert len(files) > 6
    assert told(files, secrets) == []
    assert not [line for line in lines if any(secret in line for secret in secrets)]
    assert stat.S_IMODE(logs.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in logs.iterdir()} == {0o600}


def by_http(url: str, key: str) -> None:
    """Good and bad requests, also with a key of somebody else."""
    headers = bearer(key)
    for path in ("/v1/completions", "/v1/jobs"):
        for body in (
            PRIVATE,
            {**PRIVATE, "top_p": 9},
            {**PRIVATE, SECRET: 1},
            {**PRIVATE, "model": "nobody"},
            {**PRIVATE, "priority": 77},
            {**PRIVATE, "metadata": {"a": "\0"}},
            {"model": MODEL, "messages": [{"role": SECRET, "content": SECRET}]},
            [SECRET],
        ):
            httpx.post(url + path, json=body, headers=headers, timeout=60)
        httpx.post(
            url + path, json=PRIVATE, headers={**headers, "traceparent": "0" * 300}, timeout=60
        )
        httpx.post(url + path, content=b"{" + SECRET.encode(), headers=headers, timeout=60)
        httpx.post(url + path, json=PRIVATE, headers=bearer(FOREIGN_KEY), timeout=60)
        httpx.post(f"{url}{path}?api_key={FOREIGN_KEY}", json=PRIVATE, headers=headers, timeout=60)


def by_sql(url: str) -> None:
    """Rows that constraints refuse, statements that are none, and rows that preparation refuses."""
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in (
            f"INSERT INTO jobs (model, prompt, priority) VALUES ('{MODEL}', '{SECRET}', 77)",
            (
                "INSERT INTO jobs (model, prompt, params)"
                f" VALUES ('{MODEL}', '{SECRET}', '{{{SECRET}')"
            ),
            f"INSERT INTO jobs (model, prompt) VALUES ('{MODEL}', '{SECRET}', 1)",
            f"INSERT INTO jobs (model, prompt) VALUES ('{MODEL}', '{SECRET}'",
        ):
            with pytest.raises(psycopg.Error):
                connection.execute(statement)
        connection.execute(
            "INSERT INTO jobs (model, prompt, params) VALUES (%s, %s, '{\"top_p\": 9}')",
            (MODEL, SECRET),
        )
        connection.execute("INSERT INTO jobs (model, prompt) VALUES ('nobody', %s)", (SECRET,))


def by_redis(server: redis.Redis) -> None:
    """Entries and messages that no row can be made of, at the door and in a head's queue."""
    for entry in (
        SECRET,
        f'{{"prompt": "{SECRET}"}}',
        f'{{"model": "{MODEL}", "prompt": "{SECRET}", "top_k": "a"}}',
    ):
        server.xadd(INTAKE, {"request": entry})
    for task, queue in ((SUBMIT_TASK, INTAKE_QUEUE), (GENERATE_TASK, generate_queue(MODEL))):
        for poison in poisons(task, queue).values():
            server.lpush(queue, poison)


def by_celery(url: str) -> None:
    """Requests that fail, and tasks that are none."""
    app = Celery("producer", set_as_current=False)
    app.conf.update(celery_settings(Settings(redis_url=url)))
    for task, arguments in (
        (SUBMIT_TASK, PRIVATE),
        (SUBMIT_TASK, {**PRIVATE, "top_p": 9}),
        (SUBMIT_TASK, {"prompt": SECRET}),
        ("shardline.sumbit", PRIVATE),
        (SUBMIT_TASK, {**PRIVATE, "metadata": {"__type__": "uuid", "__value__": SECRET}}),
    ):
        app.send_task(task, kwargs=arguments, task_id=str(uuid4()), queue=INTAKE_QUEUE)
    far = {"eta": "9999-12-31T23:59:59.999999+00:00"}
    app.send_task(SUBMIT_TASK, kwargs=PRIVATE, queue=INTAKE_QUEUE, headers=far)
    app.close()


def is_back(stack: Stack) -> bool:
    """Whether it completes again."""
    try:
        return stack.complete().status_code == 200
    except httpx.HTTPError:
        return False


def processes(stack: Stack) -> list[psutil.Process]:
    """All of the stack, with those that they have started."""
    supervisor = psutil.Process(stack.process.pid)
    return [supervisor, *supervisor.children(recursive=True)]


def kill(stack: Stack, *names: str) -> None:
    """SIGKILL: what the others then say of it goes to their logs."""
    for name, pid in stack.look()["processes"].items():
        if name.startswith(names):
            psutil.Process(pid).kill()
