"""What one hostile caller costs the others: a gateway of its own, one attack after the other, an
innocent client.

python -m tests.benchmarks.attacks [--seconds 10] [--attack "half heads"] [--source DIR]

For each attack: median and p99 in ms of the innocent's `POST /v1/jobs` on new connections, of
another tenant, before and during it, the slowest `/health`, how many requests failed, and the most
memory that the gateway had.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from services.standalone.ports import free_port
from shardline.contract.ids import new_id
from shardline.store import api_keys
from shardline.store.api_keys import Grant
from shardline.store.inserts import INSERT_PLAINLY
from tests.attacks import ATTACKS, Target, attacked
from tests.benchmarks.streams import servers
from tests.repository import REPOSITORY
from tests.tiny_head import TinyHead

FILES = 700
"""The gateway's hard limit, so that few connections use its files up; the settings fit it."""

MAX_BYTES = 8 << 30
"""Of the gateway's memory, which it must not take from the machine."""

SETTINGS = {"HTTP_MAX_IN_FLIGHT": "256", "HTTP_MAX_FOLLOWERS": "64", "LOG_LEVEL": "error"}
LARGE_BYTES = 7 << 20
BODY = {"model": "clerk", "prompt": "sum: 1 + 2 =", "delay_s": 3600}


def main() -> None:
    """Prints one JSON line for each attack."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--attack", choices=list(ATTACKS), action="append")
    parser.add_argument(
        "--source", type=Path, default=REPOSITORY, help="a checkout whose gateway is attacked"
    )
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="shardline-attacks-") as folder,
        servers(Path(folder)) as (postgres, valkey),
    ):
        head = TinyHead(postgres.url(), valkey.url)
        head.ready()
        large_job = new_id()
        with head.database.begin() as connection:
            key = api_keys.create(connection, Grant(name="hostile"))
            innocent = api_keys.create(connection, Grant(name="innocent", tenant="other"))
            row = {"id": large_job, "model": "clerk", "prompt": "a" * LARGE_BYTES, "params": "{}"}
            connection.execute(INSERT_PLAINLY, row)
        for name in options.attack or ATTACKS:
            with gateway(options.source, postgres.url(), valkey.url) as (pid, port):
                target = Target(port=port, key=key, large_job=large_job)
                alone = asyncio.run(ask(port, innocent, options.seconds / 2))
                with attacked(name, target) as attack:
                    attack.join(2.0)
                    during = asyncio.run(ask(port, innocent, options.seconds))
                print(
                    json.dumps(
                        {
                            "attack": name,
                            "alone": alone,
                            "during": during,
                            "peak_mib": peak_mib(pid),
                        }
                    ),
                    flush=True,
                )
        head.close()


@contextmanager
def gateway(source: Path, database_url: str, redis_url: str) -> Iterator[tuple[int, int]]:
    """Process and port of a gateway of a checkout, which has few files and not all memory."""
    port = free_port()
    settings = {
        **SETTINGS,
        "DATABASE_URL": database_url,
        "REDIS_URL": redis_url,
        "HTTP_PORT": str(port),
    }
    environment = os.environ | {f"SHARDLINE_{name}": value for name, value in settings.items()}
    environment["PYTHONPATH"] = f"{source}:{source / 'shared'}"
    limits = f'ulimit -n {FILES}; ulimit -v {MAX_BYTES >> 10}; exec "$@"'
    command = ["sh", "-c", limits, "sh", sys.executable, "-m", "services.gateway"]
    with subprocess.Popen(command, env=environment, cwd=source) as process:
        try:
            _until_it_answers(port)
            yield process.pid, port
        finally:
            process.kill()


@retry(
    wait=wait_fixed(0.1),
    stop=stop_after_delay(60),
    retry=retry_if_exception_type(httpx.ConnectError),
)
def _until_it_answers(port: int) -> None:
    httpx.get(f"http://127.0.0.1:{port}/health")


async def ask(port: int, key: str, seconds: float) -> dict[str, float]:
    """Milliseconds of an innocent's requests, one after the other, each on a connection of its
    own."""
    body = json.dumps(BODY).encode()
    lines = (
        "Host: localhost",
        f"Authorization: Bearer {key}",
        "Content-Type: application/json",
        "Connection: close",
    )
    job = (
        "\r\n".join(
            ["POST /v1/jobs HTTP/1.1", *lines, f"Content-Length: {len(body)}", "", ""]
        ).encode()
        + body
    )
    health = "\r\n".join(["GET /health HTTP/1.1", *lines, "", ""]).encode()
    took: dict[bytes, list[float]] = {job: [], health: []}
    num_failed = 0
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        for request, times in took.items():
            began_s = time.monotonic()
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(request)
                num_failed += b" 20" not in await reader.readline()
                writer.close()
            except OSError:
                num_failed += 1
            times.append(1_000 * (time.monotonic() - began_s))
    return {
        "p50_ms": round(statistics.median(took[job]), 1),
        "p99_ms": round(sorted(took[job])[int(0.99 * len(took[job]))], 1),
        "health_max_ms": round(max(took[health]), 1),
        "requests": len(took[job]) + len(took[health]),
        "failed": num_failed,
    }


def peak_mib(pid: int) -> int:
    """The most resident memory that a process had; 0 once it has gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) >> 10 for line in lines if line.startswith("VmHWM")), 0)


if __name__ == "__main__":
    main()
