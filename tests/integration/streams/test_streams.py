"""The streams against a real Valkey: what the writer leaves, what readers make of it, what an
outage costs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from uuid import uuid4

import msgspec
import pytest
import redis

from services.standalone.servers import Valkey
from shardline.contract.job import TokenLogprob
from shardline.contract.keys import STREAM_ENDED_TTL_S, STREAM_MAX_BYTES, STREAM_TTL_S, job_stream
from shardline.contract.wire import Delta
from shardline.streams import DeltaBuffer, DeltaReader, DeltaWriter, SyncDeltaReader
from shardline.streams.reader import MAX_KEYS_PER_READ

JOB = uuid4()
OTHER = uuid4()


def delta(start: int) -> Delta:
    return Delta(fence=1, start=start, ids=(start,), text="ä")


@pytest.fixture
def writer(redis_url: str) -> Iterator[DeltaWriter]:
    writer = DeltaWriter(redis_url)
    yield writer
    writer.close()


@pytest.fixture
def server(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as server:
        yield server


def test_each_job_has_a_stream_of_its_own_that_expires(
    writer: DeltaWriter, server: redis.Redis
) -> None:
    writer.write([(JOB, delta(0)), (OTHER, delta(0)), (JOB, delta(1))])
    writer.write([])
    assert (server.xlen(job_stream(JOB)), server.xlen(job_stream(OTHER))) == (2, 1)
    assert 0 < int(str(server.ttl(job_stream(JOB)))) <= STREAM_TTL_S


def test_a_stream_recreated_after_its_loss_expires_too(
    writer: DeltaWriter, server: redis.Redis
) -> None:
    writer.write([(JOB, delta(0))])
    server.flushall()

    writer.write([(JOB, delta(1)), (OTHER, delta(0)), (JOB, delta(2))])

    assert server.xlen(job_stream(JOB)) == 2
    assert 0 < int(str(server.ttl(job_stream(JOB)))) <= STREAM_TTL_S


@pytest.mark.parametrize("num_logprobs", [0, 20])
def test_the_stream_of_an_endless_job_stays_bounded(
    writer: DeltaWriter, server: redis.Redis, num_logprobs: int
) -> None:
    top = TokenLogprob(1, -1.5, tuple((number, -2.5) for number in range(num_logprobs)))
    told = Delta(fence=1, start=0, ids=(0,), text="some", logprobs=(top,))
    for first in range(0, 12_000, 2_000):
        writer.write(
            [(JOB, msgspec.structs.replace(told, start=first + place)) for place in range(2_000)]
        )
    held_bytes = server.memory_usage(job_stream(JOB), samples=0) or 0
    assert STREAM_MAX_BYTES / 4 < held_bytes < 1.5 * STREAM_MAX_BYTES


def test_the_stream_of_an_ended_job_expires_soon(writer: DeltaWriter, server: redis.Redis) -> None:
    writer.write([(JOB, delta(0)), (OTHER, delta(0))])
    writer.write([(JOB, Delta(fence=1, start=1, state="succeeded")), (OTHER, delta(1))])
    assert 0 < int(str(server.ttl(job_stream(JOB)))) <= STREAM_ENDED_TTL_S
    assert int(str(server.ttl(job_stream(OTHER)))) > STREAM_ENDED_TTL_S


def test_writing_without_redis_logs_one_error_and_blocks_nothing() -> None:
    writer = DeltaWriter("redis://127.0.0.1:1/0")
    with pytest.raises(redis.ConnectionError):
        writer.write([(JOB, delta(0))])
    writer.write([(JOB, delta(1)), (JOB, delta(2))])
    assert writer.num_dropped == 3


def test_every_delta_is_read_and_foreign_entries_are_passed_over(
    writer: DeltaWriter, server: redis.Redis
) -> None:
    writer.write([(JOB, delta(0))])
    server.xadd(job_stream(JOB), {"d": b"{"})
    server.xadd(job_stream(JOB), {"x": b"1"})
    writer.write([(JOB, delta(1))])
    reader = SyncDeltaReader(server, JOB)
    assert reader.read(0.01) == [delta(0), delta(1)]
    assert reader.read(0.01) == []
    writer.write([(JOB, delta(2))])
    assert reader.read(1.0) == [delta(2)]


def test_a_stream_is_read_from_its_beginning_after_an_outage(
    writer: DeltaWriter, redis_server: Valkey
) -> None:
    connection = SyncDeltaReader.connect(redis_server.url)
    reader = SyncDeltaReader(connection, JOB)
    writer.write([(JOB, delta(0))])
    assert reader.read(0.01) == [delta(0)]
    redis_server.kill()
    assert (reader.read(0.01), reader.is_away) == ([], True)
    redis_server.restart()
    writer.write([(JOB, delta(1))])
    assert (reader.read(1.0), reader.is_away) == ([delta(1)], False)
    connection.close()


@pytest.mark.parametrize("num_readers", [50, 2 * MAX_KEYS_PER_READ + 1])
async def test_one_connection_serves_many_readers(
    writer: DeltaWriter, redis_url: str, server: redis.Redis, num_readers: int
) -> None:
    reader = DeltaReader(redis_url)
    jobs = [uuid4() for _ in range(num_readers)]
    buffers = [DeltaBuffer() for _ in jobs]
    with ExitStack() as watching:
        for job, buffer in zip(jobs, buffers, strict=True):
            watching.enter_context(reader.watch(job, buffer))
        writer.write([(job, delta(0)) for job in jobs])
        found = [await buffer.wait(30) for buffer in buffers]
        num_connections = sum(client["cmd"] == "xread" for client in server.client_list())
    await reader.close()
    assert found == [[delta(0)]] * num_readers
    assert num_connections == 1
