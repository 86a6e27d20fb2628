"""A gateway under attack, as a process with few files and little memory: the others are served
meanwhile."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import UUID

import httpx
import pytest
from sqlalchemy import text

from services.standalone.ports import free_port
from shardline.contract.api_key import bearer
from shardline.contract.ids import new_id
from shardline.store.inserts import INSERT_PLAINLY
from tests.attacks import ATTACKS, Target, attacked
from tests.integration.gateway.running_gateway import PROMPT, make_key
from tests.repository import REPOSITORY
from tests.tiny_head import TinyHead

FILES = 600
MEMORY_MIB = 1024
"""Of the gateway, under attack too."""

NUM_ASKED = 20
BODY = {"model": "clerk", "prompt": PROMPT, "delay_s": 3600}
SETTINGS = {
    "HTTP_MAX_IN_FLIGHT": "64",
    "HTTP_MAX_FOLLOWERS": "64",
    "HTTP_HEAD_TIMEOUT_S": "2",
    "LOG_LEVEL": "error",
}


def large_job(head: TinyHead) -> UUID:
    job_id = new_id()
    row = {"id": job_id, "model": "clerk", "prompt": "a" * (7 << 20), "params": "{}"}
    with head.database.begin() as connection:
        connection.execute(INSERT_PLAINLY, row)
        # It waits for nobody: the tiny head must not prepare it.
        connection.execute(text("UPDATE jobs SET state = 'cancelled', finished_at = now()"))
    return job_id


@asynccontextmanager
async def gateway_process(
    database_url: str, redis_url: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """As operators run it, where few files may be open."""
    port = free_port()
    settings = {
        **SETTINGS,
        "DATABASE_URL": database_url,
        "REDIS_URL": redis_url,
        "HTTP_PORT": str(port),
    }
    environment = os.environ | {f"SHARDLINE_{name}": value for name, value in settings.items()}
    environment["PYTHONPATH"] = f"{REPOSITORY}:{REPOSITORY / 'shared'}"
    limited = ("sh", "-c", f'ulimit -n {FILES}; exec "$@"', "sh")
    process = await asyncio.create_subprocess_exec(
        *limited, sys.executable, "-m", "services.gateway", env=environment, cwd=REPOSITORY
    )
    try:
        yield process, port
    finally:
        process.kill()
        await process.wait()


def peak_mib(process: asyncio.subprocess.Process) -> int:
    """The most resident memory that it had."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmHWM"))


async def until_it_hurts(http: httpx.AsyncClient) -> None:
    """The attacker has connected."""
    async with asyncio.timeout(60):
        while "shardline_http_connections 1.0" in (await http.get("/metrics")).text:
            pass


@pytest.mark.parametrize("name", ATTACKS)
async def test_others_are_served_during_an_attack(
    name: str, database_url: str, redis_url: str, head: TinyHead
) -> None:
    async with gateway_process(database_url, redis_url) as (process, port):
        address = f"http://127.0.0.1:{port}"
        retries = httpx.AsyncHTTPTransport(retries=10)
        headers = bearer(make_key(database_url, tenant="other"))
        async with httpx.AsyncClient(
            base_url=address, transport=retries, headers=headers, timeout=60
        ) as http:
            assert (await http.post("/v1/jobs", json=BODY)).status_code == 202
        target = Target(port=port, key=make_key(database_url), large_job=large_job(head))
        # A new connection for each, as one that comes during the attack has.
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=address, headers=headers, timeout=60, limits=limits
        ) as http:
            with attacked(name, target) as attack:
                await until_it_hurts(http)
                for _ in range(NUM_ASKED):
                    assert (await http.get("/health")).status_code == 200
                    assert (await http.post("/v1/jobs", json=BODY)).status_code == 202
                assert attack.is_alive(), "the attack ended before those who were to be served"
            assert (await http.get("/ready")).status_code == 200
        assert peak_mib(process) < MEMORY_MIB
