"""Many event streams on one gateway: N readers follow N jobs, each in its own connection, fed
through a real Redis.

python -m tests.benchmarks.streams [--streams 2000] [--tokens 20] [--rate 2000]

A stand-in head writes the deltas, each with the time of its XADD as its text; a process of its own
reads, so that the delay is the service's. Every token must come to its reader once and in order,
and then the job's end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import redis
from sqlalchemy import text
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from services.standalone.ports import free_port
from services.standalone.servers import FAST, Postgres, Valkey
from shardline.client import Client
from shardline.contract.api_key import bearer
from shardline.contract.wire import Delta
from shardline.store import api_keys
from shardline.store.api_keys import Grant
from shardline.streams import DeltaWriter
from tests.conftest import migrate
from tests.tiny_head import Sequence as Running
from tests.tiny_head import TinyHead

BATCH = 64
"""Deltas that one step of a head writes together."""

MAX_WAIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """The gateway, from outside."""

    address: str
    key: str


@dataclass(slots=True, kw_only=True)
class Reader:
    """One stream, from its request to its end."""

    job_id: str
    num_wanted: int
    opened_s: float = 0.0
    num_tokens: int = 0
    num_events: int = 0
    delays_s: list[float] = field(default_factory=list)
    problem: str | None = "it never ended"


def main() -> None:
    """Prints one JSON line. Exits with 1 if a stream lost a token or never ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"streams": 2_000, "tokens": 20, "rate": 2_000}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="shardline-streams-") as folder,
        servers(Path(folder)) as (postgres, valkey),
    ):
        head = TinyHead(postgres.url(), valkey.url)
        head.ready()
        with head.database.begin() as connection:
            key = api_keys.create(connection, Grant(name="benchmark"))
        with gateway(postgres.url(), valkey.url) as (process, address):
            figures = measure(options, head, valkey, process, Door(address=address, key=key))
        head.close()
    print(json.dumps(figures))
    sys.exit(1 if figures["problems"] else 0)


@contextmanager
def servers(folder: Path) -> Iterator[tuple[Postgres, Valkey]]:
    """Of their own."""
    postgres = Postgres(folder, settings=FAST)
    valkey = Valkey(folder)
    try:
        postgres.start()
        valkey.start()
        migrate(postgres.url())
        yield postgres, valkey
    finally:
        valkey.kill()
        postgres.abandon()


@contextmanager
def gateway(database_url: str, redis_url: str) -> Iterator[tuple[psutil.Process, str]]:
    """One process, as operators start it."""
    port = free_port()
    settings = {
        "DATABASE_URL": database_url,
        "REDIS_URL": redis_url,
        "HTTP_PORT": str(port),
        "LOG_LEVEL": "warning",
    }
    environment = os.environ | {f"SHARDLINE_{name}": value for name, value in settings.items()}
    with subprocess.Popen([sys.executable, "-m", "services.gateway"], env=environment) as process:
        try:
            _until_it_answers(f"http://127.0.0.1:{port}")
            yield psutil.Process(process.pid), f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


@retry(
    wait=wait_fixed(0.1),
    stop=stop_after_delay(60),
    retry=retry_if_exception_type(httpx.ConnectError),
)
def _until_it_answers(address: str) -> None:
    httpx.get(f"{address}/health")


def measure(
    options: argparse.Namespace, head: TinyHead, valkey: Valkey, process: psutil.Process, door: Door
) -> dict[str, Any]:
    """All figures of one run."""
    with Client(database_url=str(head._url), redis_url=valkey.url) as client:
        requests = [
            {"model": "clerk", "prompt": [5] * (options.tokens + 1)} for _ in range(options.streams)
        ]
        ids = [str(job_id) for job_id in client.submit_many(requests)]
    sequences = head.claim_all()
    idle_bytes = process.memory_info().rss
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    reading = context.Process(target=read_all, args=(there, door, ids, options.tokens))
    reading.start()
    assert here.recv() == "all are open", "a reader failed"
    connections = count_connections(process, head, valkey)
    began_cpu_s = cpu_s(process)
    began_s = time.monotonic()
    write_all(sequences, valkey.url, options.tokens, options.rate)
    wrote_s = time.monotonic() - began_s
    full_bytes = process.memory_info().rss
    for sequence in sequences:
        sequence.num_said = options.tokens
        head.end(sequence)
    read: dict[str, Any] = here.recv()
    reading.join()
    return {
        "streams": options.streams,
        "written_per_s": round(options.streams * options.tokens / wrote_s),
        **read,
        "gateway_cpu_s": round(cpu_s(process) - began_cpu_s, 2),
        "gateway_mib": [round(num_bytes / 2**20, 1) for num_bytes in (idle_bytes, full_bytes)],
        "connections": connections,
    }


def write_all(sequences: Sequence[Running], redis_url: str, num_tokens: int, rate: int) -> None:
    """Token by token, in batches as steps of heads make them, at most so many a second."""
    writer = DeltaWriter(redis_url)
    never = threading.Event()
    began_s = time.monotonic()
    num_written = 0
    for place in range(num_tokens):
        for start in range(0, len(sequences), BATCH):
            some = sequences[start : start + BATCH]
            never.wait(max(0.0, began_s + num_written / rate - time.monotonic()))
            writer.write([(one.claimed.job_id, delta_of(one, place)) for one in some])
            num_written += len(some)
    assert writer.num_dropped == 0, "the writer was too slow for Redis"
    writer.close()


def delta_of(sequence: Running, place: int) -> Delta:
    """One token, whose text is the time."""
    ids = sequence.output_ids[place : place + 1]
    return Delta(
        fence=sequence.claimed.fence, start=place, ids=ids, text=f"{time.monotonic():.6f} "
    )


def cpu_s(process: psutil.Process) -> float:
    """Of user and system."""
    times = process.cpu_times()
    return float(times.user + times.system)


def count_connections(process: psutil.Process, head: TinyHead, valkey: Valkey) -> dict[str, int]:
    """Of the gateway, as the servers see them, and the files that it has open."""
    peers = [each.laddr for each in process.net_connections("tcp") if each.raddr]
    ours = {f"{peer.ip}:{peer.port}" for peer in peers}
    with redis.Redis.from_url(valkey.url) as server:
        num_redis = sum(one["addr"] in ours for one in server.client_list())
    head.database.dispose()
    with head.database.connect() as connection:
        query = text(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        num_postgres = int(connection.scalar(query) or 0)
    return {
        "readers": len(peers) - num_redis,
        "redis": num_redis,
        "postgres": num_postgres,
        "files": process.num_fds(),
    }


def read_all(pipe: Connection, door: Door, ids: Sequence[str], num_tokens: int) -> None:
    """The process of the readers."""
    asyncio.run(
        _read_all(pipe, door, [Reader(job_id=job_id, num_wanted=num_tokens) for job_id in ids])
    )


async def _read_all(pipe: Connection, door: Door, readers: Sequence[Reader]) -> None:
    began_s = time.monotonic()
    opening = asyncio.Barrier(len(readers) + 1)
    tasks = [asyncio.create_task(_read(reader, opening, door)) for reader in readers]
    async with asyncio.timeout(MAX_WAIT_S):
        await opening.wait()
    pipe.send("all are open")
    await asyncio.wait(tasks, timeout=MAX_WAIT_S)
    delays_ms = sorted(1_000 * delay_s for reader in readers for delay_s in reader.delays_s)
    opened_s = sorted(reader.opened_s - began_s for reader in readers)
    figures = {
        "open_s": {"p50": round(statistics.median(opened_s), 2), "all": round(opened_s[-1], 2)},
        "tokens": sum(reader.num_tokens for reader in readers),
        "events": sum(reader.num_events for reader in readers),
        "delay_ms": {
            "p50": round(statistics.median(delays_ms), 1),
            "p99": round(delays_ms[int(0.99 * (len(delays_ms) - 1))], 1),
            "worst": round(delays_ms[-1], 1),
        },
        "problems": Counter(reader.problem for reader in readers if reader.problem).most_common(5),
    }
    pipe.send(figures)


async def _read(reader: Reader, opening: asyncio.Barrier, door: Door) -> None:
    """HTTP by hand: 2,000 clients of a library would be slower than what they measure."""
    url = urlsplit(door.address)
    stream, writer = await asyncio.open_connection(url.hostname, url.port)
    (key,) = (f"{name}: {value}" for name, value in bearer(door.key).items())
    request = f"GET /v1/jobs/{reader.job_id}/events HTTP/1.1\r\nHost: {url.netloc}\r\n{key}\r\n\r\n"
    writer.write(request.encode())
    try:
        status = await stream.readline()
        # The first event says that the gateway is behind the request, not only its kernel.
        while (line := await stream.readline()) and not line.startswith((b"retry:", b'{"error"')):
            pass
        reader.opened_s = time.monotonic()
        await opening.wait()
        if b" 200 " in status:
            await _follow(reader, stream)
        else:
            reader.problem = status.decode().strip()
    finally:
        writer.close()


async def _follow(reader: Reader, stream: asyncio.StreamReader) -> None:
    async for line in stream:
        if line.startswith(b"event: end"):
            is_whole = reader.num_tokens == reader.num_wanted
            reader.problem = (
                None if is_whole else f"{reader.num_tokens} of {reader.num_wanted} tokens"
            )
            return
        if line.startswith(b'data: {"start"'):
            now_s = time.monotonic()
            delta = json.loads(line[6:])
            if delta["start"] != reader.num_tokens:
                reader.problem = f"token {delta['start']} came at {reader.num_tokens}"
                return
            reader.num_events += 1
            reader.num_tokens += len(delta["token_ids"])
            reader.delays_s += [now_s - float(sent) for sent in delta["text"].split()]


if __name__ == "__main__":
    main()
