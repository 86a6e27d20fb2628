"""Loops of the product with a bad item among good ones: the bad one ends alone, and the loop goes
on. `test_every_loop.py` lists them all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest
import redis
import zmq
from celery import Celery
from prometheus_client import CollectorRegistry
from sqlalchemy import Connection, Engine, text
from structlog.testing import capture_logs

from services.gateway import keyring
from services.gateway.client import GatewayClient
from services.gateway.insert_batcher import InsertBatcher
from services.gateway.keyring import Keyring
from services.relay.canceller import Canceller
from services.relay.celery.celery_results import CeleryResults
from services.relay.celery.task_ends import TaskEnds
from services.relay.celery.task_finisher import GIVE_UP_S, TaskFinisher, TaskResults
from services.relay.loop import LoopContext
from services.relay.outbox import Outbox
from services.relay.statistics.job_counts import JobCounts
from services.stage.adapters.adapter_watch import AdapterWatch
from services.stage.fleet.peer import measure_link
from services.stage.fleet.peer_server import OK, PeerServer, ReadFile
from services.stage.hop.sockets import Sockets
from services.stage.pipeline.registry import RedisRegistry
from shardline.base.config import Times
from shardline.base.errors import Conflict
from shardline.client.query_batcher import QueryBatcher
from shardline.contract.api_key import parse_key
from shardline.contract.job import JobState
from shardline.contract.keys import STAGES, job_stream, stage_entry
from shardline.contract.wire import Delta
from shardline.store.connection.database import connect, connect_async
from shardline.store.inserts import encode_request
from shardline.streams import DeltaBuffer, DeltaReader, DeltaWriter
from shardline_server.metrics import GatewayMetrics, RelayMetrics
from shardline_server.store import celery_tasks
from shardline_server.store.celery_tasks import CeleryTask, EndedTask
from tests.integration.gateway.running_gateway import make_key
from tests.integration.rows import MODEL, cell, change, request, submit
from tests.polling import until


def context(engine: Engine) -> LoopContext:
    return LoopContext(database=engine, times=Times(), metrics=RelayMetrics(CollectorRegistry()))


def test_a_workers_odd_row_does_not_end_the_census(engine: Engine) -> None:
    submit(engine)
    joined = "INSERT INTO workers (worker, model, profile, further, lease_until) VALUES "
    change(
        engine,
        f"{joined} ('a', 'm', '5', '5', now() + interval '1 hour'), "
        "('b', 'm', '{}', '{\"n\": 5}', now() + interval '1 hour')",
    )
    loop = JobCounts(context(engine))

    loop.turn()


def test_a_cancel_without_a_row_holds_up_no_other(engine: Engine) -> None:
    here = context(engine)
    loop = Canceller(here, results=CeleryResults(here, backend_app=None))
    (good,) = submit(engine)
    loop.cancel([str(uuid4()), str(good), "order-17"], running=False)

    loop.turn()

    assert cell(engine, "SELECT cancel_requested_at IS NOT NULL FROM jobs WHERE id = :id", id=good)


def test_a_job_that_cannot_be_sent_holds_up_no_other(engine: Engine, redis_url: str) -> None:
    """A message of Celery's is refused by whatever a newer Celery finds wrong with it."""
    sent: list[str] = []
    bad = ""

    class Refusing(Celery):
        def send_task(self, *_: object, task_id: str = "", **__: object) -> None:
            if task_id == bad:
                raise ValueError("no such priority")
            sent.append(task_id)

    app = Refusing(broker=redis_url, set_as_current=False)
    with redis.Redis.from_url(redis_url) as server:
        ids = [str(job_id) for job_id in submit(engine, 3)]
        bad = ids[1]
        with capture_logs() as logs:
            Outbox(context(engine), publisher=app, redis=server).turn()
    app.close()
    assert sorted(sent) == sorted({*ids} - {bad})
    assert [line["job_id"] for line in logs if line["log_level"] == "error"] == [bad]


async def test_a_refused_statement_ends_no_task_of_the_keyring(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyring, "USES_EVERY_S", 0.01)
    database = connect_async(database_url)
    owner = connect(database_url)
    ring = Keyring(database, fresh_s=60)
    key = parse_key(make_key(database_url)).key_id
    change(owner, "ALTER TABLE api_keys RENAME TO hidden")
    ring.note(key)
    with capture_logs() as logs:
        ring.start()
        await asyncio.to_thread(until, lambda: logs)
    change(owner, "ALTER TABLE hidden RENAME TO api_keys")
    used = "SELECT last_used_at IS NOT NULL FROM api_keys WHERE id = :id"
    await asyncio.to_thread(until, lambda: cell(owner, used, id=key))
    await ring.close()
    await database.dispose()
    owner.dispose()


async def test_a_request_that_conflicts_fails_its_caller_alone(
    engine: Engine, database_url: str
) -> None:
    client = GatewayClient(database_url=database_url)
    batcher = InsertBatcher(client, GatewayMetrics(CollectorRegistry()))
    (taken,) = submit(engine)
    requests = [request(), request(id=taken, prompt="another"), request()]
    encoded = [encode_request(one, ((5, 6), 8)) for one in requests]
    batcher.start()
    found = await asyncio.gather(
        *(batcher.insert(MODEL, one) for one in encoded), return_exceptions=True
    )
    assert [isinstance(one, Exception) for one in found] == [False, True, False]
    assert isinstance(found[1], Conflict)
    await batcher.insert(MODEL, encode_request(request(), ((5, 6), 8)))
    await batcher.close()
    await client.close()


async def test_a_question_that_fails_fails_its_caller_alone(database_url: str) -> None:
    database = connect_async(database_url)

    def answers(connection: Connection, asked: Sequence[int]) -> list[int]:
        return [connection.execute(text("SELECT 1")).scalar_one() // one for one in asked]

    together: QueryBatcher[int, int] = QueryBatcher(database, answers, max_batch=8, name="poisoned")
    found = await asyncio.gather(*(together.read(one) for one in (1, 0, 1)), return_exceptions=True)
    assert [found[0], type(found[1]), found[2]] == [1, ZeroDivisionError, 1]
    assert await together.read(1) == 1
    await together.close()
    await database.dispose()


async def test_a_key_that_is_no_stream_costs_no_other_its_deltas(redis_url: str) -> None:
    good = uuid4()
    bad = uuid4()
    reader = DeltaReader(redis_url)
    writer = DeltaWriter(redis_url)
    buffer = DeltaBuffer()
    with redis.Redis.from_url(redis_url) as server:
        server.set(job_stream(bad), "no stream")
        with reader.watch(bad, DeltaBuffer()), reader.watch(good, buffer):
            writer.write(
                [(job_id, Delta(fence=1, start=0, ids=(1,), text="a")) for job_id in (bad, good)]
            )
            writer.write(
                [(job_id, Delta(fence=1, start=1, ids=(2,), text="b")) for job_id in (bad, good)]
            )
            found: list[Delta] = []
            while len(found) < 2:
                found += await buffer.wait(1.0)
            assert not reader.is_away
    await reader.close()
    writer.close()
    assert [delta.text for delta in found] == ["a", "b"]
    assert writer.num_dropped == 0


def test_an_end_that_a_result_backend_refuses_costs_no_other_its_own(engine: Engine) -> None:
    told: list[str] = []

    class Refusing(Celery):
        class backend:  # noqa: N801 (Celery's name)
            @staticmethod
            def store_result(job_id: str, _value: object, _state: str) -> None:
                if job_id == str(bad):
                    raise ValueError("Exception information must include the exception type")
                told.append(job_id)

    bad, good = submit(engine, 2)
    app = Refusing("poisoned", set_as_current=False)
    loop = CeleryResults(context(engine), backend_app=app)
    loop.note({bad: JobState.CANCELLED, good: JobState.CANCELLED})

    loop.turn()

    assert told == [str(good)]


def test_a_task_with_a_result_that_nothing_can_store_holds_up_no_other(engine: Engine) -> None:
    told: list[str] = []

    class RefusingEnds(TaskEnds):
        def finish(self, ended: EndedTask) -> None:
            if ended.task_id == "bad":
                raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")
            told.append(ended.task_id)

    ends = RefusingEnds(Celery("poisoned", set_as_current=False), has_backend=True)
    loop = TaskResults(context(engine), ends)
    of_none: dict[str, Any] = dict.fromkeys(EndedTask.__dataclass_fields__)
    for name in ("bad", "good"):
        own = {"task_id": name, "state": JobState.FAILED, "age_s": 0.0, "num_failures": 0}
        loop.offer(EndedTask(**{**of_none, **own}))

    loop.turn()

    assert told == ["good"]


def test_a_task_that_cannot_be_read_is_put_off_alone_and_given_up_in_the_end(
    engine: Engine,
) -> None:
    (job_id,) = submit(engine)
    change(engine, "UPDATE jobs SET state = 'succeeded', finished_at = now()")
    with engine.begin() as connection:
        for name, request in (("first", "{}"), ("bad", "{"), ("last", "{}")):
            task = CeleryTask(task_id=name, request=request)
            celery_tasks.store(connection, task, job_id=job_id)
    # Its callbacks have been given up.
    change(engine, "UPDATE celery_tasks SET num_failures = 9")
    here = context(engine)
    ends = TaskEnds(Celery("poisoned", set_as_current=False), has_backend=False)
    loop = TaskFinisher(here, ends, TaskResults(here, ends))

    loop.turn()

    left = "SELECT array_agg(task_id) FROM celery_tasks WHERE settled_at IS NULL"
    assert cell(engine, left) == ["bad"]
    assert cell(engine, "SELECT num_failures FROM celery_tasks WHERE task_id = 'bad'") == 10
    change(engine, "UPDATE celery_tasks SET due_at = now() WHERE task_id = 'bad'")
    change(
        engine,
        "UPDATE jobs SET finished_at = now() - make_interval(secs => :s)",
        s=GIVE_UP_S + 1,
    )
    with capture_logs() as logs:
        loop.turn()
    assert cell(engine, left) is None
    assert logs[-1]["event"] == "a Celery task's end is given up"


def test_all_old_tasks_without_a_job_are_forgotten_however_many(engine: Engine) -> None:
    num = 2 * celery_tasks.MAX_BATCH + 1
    with engine.begin() as connection:
        celery_tasks.revoke(connection, [f"never came {number}" for number in range(num)])
    change(engine, "UPDATE celery_tasks SET created_at = now() - interval '2 days'")
    here = context(engine)
    ends = TaskEnds(Celery("poisoned", set_as_current=False), has_backend=False)
    loop = TaskFinisher(here, ends, TaskResults(here, ends))

    while loop.turn() == 0.0:
        pass

    assert cell(engine, "SELECT count(*) FROM celery_tasks") == 0


def test_a_refused_message_of_any_bytes_costs_no_other_its_reason(engine: Engine) -> None:
    loop = CeleryResults(context(engine), backend_app=Celery("poisoned", set_as_current=False))
    for name, problem in (("bad", "no task is named \x00 \ud800"), ("good", "it names no task")):
        loop.note_refused(
            CeleryTask(task_id=name, request="{}"), {"code": "invalid_request", "problem": problem}
        )

    loop.turn()

    assert cell(engine, "SELECT array_agg(task_id ORDER BY task_id) FROM celery_tasks") == [
        "bad",
        "good",
    ]


def test_a_card_that_is_none_hides_no_other(redis_url: str) -> None:
    registry = RedisRegistry(redis_url)
    with redis.Redis.from_url(redis_url) as server:
        for number, value in enumerate((b"", b"\xff", b"5", b"{}", b"[" * 10_000)):
            server.sadd(STAGES, f"bad-{number}")
            server.set(stage_entry(f"bad-{number}"), value)
        server.sadd(STAGES, b"\xff\xfe", "a list")
        server.lpush(stage_entry("a list"), "1")
    assert registry.cards() == []
    registry.close()


def test_a_broken_adapter_hides_no_other(tmp_path: Path) -> None:
    told: list[object] = []

    class Folder:
        def names(self) -> list[str]:
            return ["bad", "denied", "good"]

        def get(self, name: str) -> object:
            if name == "bad":
                raise RecursionError("nested too deep")
            if name == "denied":
                raise PermissionError(name)
            return msgspec.defstruct("Found", [("fingerprint", str, "f")])()

    folder: Any = Folder()
    with capture_logs() as logs:
        AdapterWatch(folder, every_s=1, tell=told.append).look()
    assert told == [{"good": "f"}]
    assert {line["adapter"] for line in logs} == {"bad", "denied"}


def test_no_question_of_a_peer_ends_its_server(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"1234")
    sockets = Sockets(bind="tcp://127.0.0.1")
    server = PeerServer(sockets, {MODEL: [file]})
    server.start()
    with zmq.Context() as own, own.socket(zmq.DEALER) as peer:
        peer.linger = 0
        peer.connect(server.address)
        good = msgspec.msgpack.encode(ReadFile(model=MODEL, name="weights", offset=0, length=4))
        far = msgspec.msgpack.encode(
            ReadFile(model=MODEL, name="weights", offset=2**64 - 1, length=4)
        )
        deep = b"\x82\xa4type\xa4echo\xa1x" + b"\x91" * 100_000
        for bad in (
            far,
            deep,
            b"",
            b"\xc1",
            b"\x91" * 100_000,
            msgspec.msgpack.encode({"model": []}),
        ):
            peer.send(bad)
            assert peer.recv_multipart()[0] != OK
            peer.send(good)
            assert peer.recv_multipart() == [OK, b"1234"]
    measure_link(sockets, server.address)
    server.stop()
