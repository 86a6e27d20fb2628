"""What README and docs/examples show, run as written: a real gateway and relay, and a head that
echoes prompts.

Only the addresses are put in: documents name those of a stack on its usual ports.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from uuid import UUID

import httpx
import psycopg
import pytest_asyncio

from shardline.client import AsyncClient
from shardline.contract.job import JobState
from tests.integration.gateway.running_gateway import running_gateway
from tests.integration.relay.relay_stack import relay_stack
from tests.repository import REPOSITORY
from tests.tiny_head import tiny_head

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
FOLDER = REPOSITORY / "docs/examples"
GO_PACKAGES = Path("/usr/share/gocode")
"""Where Debian's golang-github-lib-pq-dev is."""
RUNTIMES = {
    ".py": [sys.executable],
    ".mjs": [path] if (path := shutil.which("node")) else None,
    ".go": [path, "run"]
    if (path := shutil.which("go")) and (GO_PACKAGES / "src/github.com/lib/pq").exists()
    else None,
}
FOREIGN = {"dagster_asset.py": "dagster"}
"""Programs of runtimes that Shardline's own tests do not install."""
EXAMPLES = sorted(
    one
    for one in FOLDER.iterdir()
    if RUNTIMES.get(one.suffix) and (one.name not in FOREIGN or find_spec(FOREIGN[one.name]))
)
JOB_ID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Addresses of everything that a producer meets."""

    database_url: str
    redis_url: str
    gateway: httpx.AsyncClient
    client: AsyncClient

    @property
    def api_key(self) -> str:
        """The gateway's client has one."""
        return str(self.gateway.headers["Authorization"].removeprefix("Bearer "))

    def addressed(self, text: str) -> str:
        """The text with this stack's addresses."""
        usual = {
            "postgresql://shardline@localhost/shardline": self.database_url,
            "redis://localhost:6379/0": self.redis_url,
            "http://localhost:8000": str(self.gateway.base_url).rstrip("/"),
            "$SHARDLINE_API_KEY": self.api_key,
        }
        for address, own in usual.items():
            text = text.replace(address, own)
        return text

    async def python(self, *arguments: str) -> str:
        """What a program of a producer prints."""
        return await self.run(sys.executable, *arguments)

    async def run(self, *command: str) -> str:
        """What it prints in any language. It has Shardline's library and nothing of its
        services."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY / "shared"),
            "GO111MODULE": "off",
            "GOPATH": str(GO_PACKAGES),
            "SHARDLINE_DATABASE_URL": self.database_url,
            "SHARDLINE_REDIS_URL": self.redis_url,
            "SHARDLINE_API_KEY": self.api_key,
        }
        process = await asyncio.to_thread(
            partial(subprocess.run, timeout=2 * PATIENCE_S, capture_output=True, text=True),
            command,
            env=environment,
        )
        assert process.returncode == 0, f"{command}\n{process.stderr}\n{self._jobs()}"
        return process.stdout

    async def until_succeeded(self, job_id: str) -> None:
        """A job that a relay may not have stored yet."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not await self.client.get_many([UUID(job_id)]):
                    await asyncio.to_thread(self._wait_for_any_end)
                job = await self.client.wait(UUID(job_id))
        except TimeoutError as error:
            raise AssertionError(f"{job_id} has no end\n{self._jobs()}") from error
        assert job.state is JobState.SUCCEEDED, self._jobs()

    def _jobs(self) -> str:
        """All rows, for who reads why a test failed."""
        with psycopg.connect(self.database_url) as connection:
            rows = connection.execute("SELECT row_to_json(jobs)::text FROM jobs").fetchall()
        return "\n".join(row for (row,) in rows)

    def _wait_for_any_end(self) -> None:
        with psycopg.connect(self.database_url, autocommit=True) as connection:
            connection.execute("LISTEN shardline_done")
            for _ in connection.notifies(timeout=0.2, stop_after=1):
                return


@pytest_asyncio.fixture
async def stack(database_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[Stack]:
    with (
        tiny_head(database_url, redis_url) as head,
        head.serving(),
        relay_stack(database_url, redis_url, tmp_path) as servers,
    ):
        servers.start_relay()
        async with (
            running_gateway(database_url, redis_url) as gateway,
            AsyncClient(database_url=database_url, redis_url=redis_url) as client,
        ):
            yield Stack(
                database_url=database_url, redis_url=redis_url, gateway=gateway, client=client
            )


def blocks(language: str) -> list[str]:
    """README's code in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


async def test_the_jobs_of_each_example_succeed(stack: Stack) -> None:
    own = [one for one in EXAMPLES if one.suffix == ".py" and one.name not in FOREIGN]
    assert len(own) == 9
    for example in EXAMPLES:
        gateway = stack.addressed("http://localhost:8000")
        printed = await stack.run(*(RUNTIMES[example.suffix] or ()), str(example), gateway)
        found = JOB_ID.findall(printed)
        assert found, f"{example.name} names no job: {printed}"
        for job_id in found:
            await stack.until_succeeded(job_id)


async def test_a_table_is_classified_once_by_sql_alone(stack: Stack) -> None:
    program = (FOLDER / "classify_table.sql").read_text(encoding="utf-8")
    async with await psycopg.AsyncConnection.connect(
        stack.database_url, autocommit=True
    ) as connection:
        await connection.execute(program)
        jobs = await (await connection.execute("SELECT id FROM jobs")).fetchall()
        for (job_id,) in jobs:
            await stack.until_succeeded(str(job_id))
        await connection.execute(program)
        query = "SELECT review, state, choice FROM example_late_reviews ORDER BY id LIMIT 2"
        answers = await (await connection.execute(query)).fetchall()
        (num_jobs,) = await (await connection.execute("SELECT count(*) FROM jobs")).fetchone() or (
            0,
        )
    assert answers == [
        ("It came a week late.", "succeeded", "true"),
        ("Just what I needed.", "succeeded", "true"),
    ]
    assert num_jobs == 4, "the second run asks for the rows that it inserted"


async def test_the_python_of_the_readme_runs_as_written(stack: Stack) -> None:
    programs = blocks("python")
    assert len(programs) == 3
    for program in programs:
        printed = await stack.python("-c", stack.addressed(program))
        for job_id in JOB_ID.findall(printed):
            await stack.until_succeeded(job_id)
    assert [job.state for job in await stack.client.list()] == [JobState.SUCCEEDED] * len(programs)


async def test_the_sql_of_the_readme_runs_as_written(stack: Stack) -> None:
    (block,) = blocks("sql")
    insert, read = block.strip().splitlines()
    async with await psycopg.AsyncConnection.connect(
        stack.database_url, autocommit=True
    ) as connection:
        row = await (await connection.execute(insert)).fetchone()
        assert row is not None
        await stack.until_succeeded(str(row[0]))
        assert await (await connection.execute(read)).fetchone() == (
            "succeeded",
            "sort: 31, 4, 15 =",
        )


async def test_the_http_request_of_the_readme_is_answered(stack: Stack) -> None:
    (command,) = [block for block in blocks("sh") if block.startswith("curl")]
    words = shlex.split(stack.addressed(command))
    options = [(word, words[place + 1]) for place, word in enumerate(words) if word in {"-H", "-d"}]
    (url,) = [word for word in words if word.startswith("http")]
    (content,) = [value for option, value in options if option == "-d"]
    headers = dict(value.split(": ") for option, value in options if option == "-H")
    async with httpx.AsyncClient() as anybody:
        answer = await anybody.post(url, content=content, headers=headers, timeout=60)
    assert (answer.status_code, answer.json()["choices"][0]["text"]) == (
        200,
        "date: 3 March 2021 =",
    )


async def test_the_commands_of_the_readme_run_as_written(stack: Stack) -> None:
    (block,) = [block for block in blocks("sh") if block.startswith("shardline")]
    printed = [
        await stack.python("-m", "shardline.cli", *shlex.split(line)[1:])
        for line in block.splitlines()
    ]
    assert printed[0] == "date: 3 March 2021 =\n"
    assert printed[2].startswith("job "), "nothing is dead"
    assert "tiny" in printed[-1]
