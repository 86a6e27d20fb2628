"""What a fleet's size costs its servers: processor time of Postgres, Redis, and of whoever asks
them.

python -m tests.benchmarks.fleet_servers [--rounds 10]

Postgres: a worker's beat, which reads its place in the plan. A coordinator's look at all workers,
in Postgres and in the relay. Redis: a forming head's look at all cards, in Redis and in the head;
stream entries. Processor time, so what else runs on the machine makes little difference.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import redis
from sqlalchemy import Connection, Engine

from services.relay.coordinator import FleetSnapshot
from services.stage.pipeline.registry import RedisRegistry
from shardline.contract.wire import Delta, StageCard
from shardline.store import fleets
from shardline.store.connection.database import connect
from shardline.store.connection.encoding import dump
from shardline.store.fleets import WorkerOffer
from shardline.streams import DeltaWriter
from shardline_fleet.simulator.fleet_file import read_fleet, read_model
from shardline_fleet.simulator.sampled_fleet import SampledFleet
from tests.benchmarks.capacity import FOLDER
from tests.benchmarks.scale import timed
from tests.benchmarks.scale_pieces import Piece
from tests.benchmarks.streams import servers

SIZES = (100, 1_000, 10_000)
MODEL = "llama"
LEASE_S = 3_600.0
NUM_STREAMS = 64
NUM_ENTRIES = 200
"""Of a head with all seats taken: entries of one step travel together."""


def main() -> None:
    """Prints one JSON line for each size, then one for stream entries."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    with (
        tempfile.TemporaryDirectory(prefix="shardline-fleet-") as folder,
        servers(Path(folder)) as (postgres, valkey),
    ):
        engine = connect(postgres.url())
        for size in SIZES:
            with engine.begin() as connection:
                fill(connection, size)
            with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.exec_driver_sql("VACUUM ANALYZE workers")
            figures = {**of_postgres(engine, rounds), **of_cards(valkey.url, size, rounds)}
            print(json.dumps({"workers": size, **figures}), flush=True)
        print(json.dumps(of_entries(valkey.url)))
        engine.dispose()


def fill(connection: Connection, size: int) -> None:
    """So many workers and their plan, instead of those that were there."""
    fleet = read_fleet(FOLDER / "growth.yaml")
    shapes = read_model(fleet, FOLDER)
    (kind,) = SampledFleet.of(fleet, shapes, FOLDER).kinds
    profile = next(iter(kind.profiles.values()))
    for number in range(size):
        fleets.leave(connection, name_of(number))
        fleets.join(
            connection,
            name_of(number),
            {MODEL: WorkerOffer(shapes=shapes, profile=profile)},
            lease_s=LEASE_S,
        )
    fleets.store_plan(
        connection,
        MODEL,
        version=fleets.plan_of(connection, MODEL).version,
        split=((0, 27), (27, 54), (54, 80)),
        stages={name_of(number): number % 3 for number in range(size)},
        tokens_per_s=1.0,
    )


def name_of(number: int) -> str:
    """As long as `pipeline.place@host` mostly is."""
    return f"llama-host-{number // 8:04d}.{number % 8}"


def of_postgres(engine: Engine, rounds: int) -> dict[str, float]:
    """Milliseconds of a beat and of a coordinator's look, and of the relay's own work with what it
    saw."""
    beat = Piece(name="beat", work=lambda connection: fleets.beat(connection, name_of(0), LEASE_S))
    look = Piece(name="look", work=FleetSnapshot.of)
    relay_s = []
    for _ in range(max(1, rounds // 5)):
        with engine.connect() as connection:
            began_s = time.thread_time()
            sight = FleetSnapshot.of(connection)
            for worker in sight.workers[MODEL].values():
                dump(worker.profile)
            relay_s.append(time.thread_time() - began_s)
    return {
        "beat_ms": round(statistics.median(timed(engine, beat)[1] for _ in range(rounds)), 2),
        "look_ms": round(statistics.median(timed(engine, look)[1] for _ in range(rounds)), 1),
        "look_in_relay_ms": round(statistics.median(relay_s) * 1e3, 1),
    }


def of_cards(url: str, size: int, rounds: int) -> dict[str, float]:
    """Milliseconds of one look at the cards, how many were seen, and of one card put up."""
    registry = RedisRegistry(url)
    card = StageCard(
        incarnation=str(uuid4()),
        worker=name_of(0),
        model=MODEL,
        fingerprint="f" * 64,
        dtype="bfloat16",
        first_layer=0,
        last_layer=27,
        num_layers=80,
        control="tcp://host-0000:7600",
        device="cuda:0",
        weights_dtype="bfloat16",
        machine="host-0000",
    )
    cards = [msgspec.structs.replace(card, incarnation=str(uuid4())) for _ in range(size)]

    def put_up() -> None:
        for each in cards:
            registry.announce(each)

    announced_s, _ = spent(url, put_up)
    seen: list[int] = []
    looks = [spent(url, lambda: seen.append(len(registry.cards(MODEL)))) for _ in range(rounds)]
    for each in cards:
        registry.withdraw(each.incarnation)
    registry.close()
    return {
        "card_ms": round(announced_s / size * 1e3, 3),
        "cards_seen": statistics.median(seen),
        "cards_in_redis_ms": round(statistics.median(each[0] for each in looks) * 1e3, 1),
        "cards_in_head_ms": round(statistics.median(each[1] for each in looks) * 1e3, 1),
    }


def of_entries(url: str) -> dict[str, float]:
    """Microseconds of Redis and of the head for one token's entry."""
    writer = DeltaWriter(url)
    jobs = [uuid4() for _ in range(NUM_STREAMS)]

    def write() -> None:
        for start in range(NUM_ENTRIES):
            writer.write(
                [(job, Delta(fence=1, start=start, ids=(start,), text=" word")) for job in jobs]
            )

    in_redis_s, in_head_s = spent(url, write)
    num = NUM_STREAMS * NUM_ENTRIES
    return {
        "entry_in_redis_us": round(in_redis_s / num * 1e6, 2),
        "entry_in_head_us": round(in_head_s / num * 1e6, 2),
    }


def spent(url: str, work: Callable[[], object]) -> tuple[float, float]:
    """Processor seconds of Redis, and of this thread."""
    client: Any = redis.Redis.from_url(url)

    def server_s() -> float:
        info = client.info("cpu")
        return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])

    before_s = server_s()
    began_s = time.thread_time()
    work()
    ended_s = time.thread_time()
    in_server_s = server_s() - before_s
    client.close()
    return in_server_s, ended_s - began_s


if __name__ == "__main__":
    main()
