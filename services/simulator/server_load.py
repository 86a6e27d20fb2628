"""What a fleet asks of its Postgres and Redis if all of it is one stack: derived from the product's own intervals.

Upper bounds where the product batches: claims, ends and inserts that come together are one transaction each.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from shardline.config import Times
from shardline.keys import REGISTRY_TTL_S
from shardline.store.fleets import LEASES

NUM_RELAYS = 2
BEATS_IN_LEASE = 10
"""Of a worker in its fleet, as services/stage/membership.py has it."""
RENEWALS_IN_TTL = 5
"""Of a stage's card, as services/stage/pipeline/registry.py has it."""
CARD_COMMANDS = 3
"""SET, SADD, EXPIRE."""
JOB_COMMANDS = 9
"""Of Celery, for a message: LPUSH, BRPOP, two to note it as unacknowledged, two to take that back, three events."""
CELERY_BEAT_S = 2.0
"""Between two events with which a Celery worker says that it lives."""
BRPOP_S = 1.0
"""A Celery worker asks its queues again after so long."""
HEAD_CONNECTIONS, WORKER_CONNECTIONS = 3, 1
"""To Postgres, as docs/operating.md counts them: a head's, and one more of each worker of a fleet."""
PLACE_BYTES = 28
"""Of one worker in the plan of its fleet: its name and the place of its stage."""


class ServerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of work of one server."""

    server: str
    what: str
    amount: float
    unit: str


class FleetRates(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet at work."""

    stages: float
    """Spares too."""
    heads: float
    running: float
    """Jobs."""
    jobs_per_s: float
    tokens_per_s: float
    worker_bytes: float
    """Of a worker's row: the profile of its device and the shapes of its model."""


def server_loads(fleet: FleetRates) -> list[ServerLoad]:
    """All kinds."""
    return [*_postgres(fleet), *_redis(fleet)]


def _postgres(fleet: FleetRates) -> Iterator[ServerLoad]:
    times = Times()
    worker_beats = fleet.stages * BEATS_IN_LEASE / (LEASES * times.lease_s)
    head_beats = fleet.heads / times.heartbeat_s
    per_s = {
        "transactions: heartbeats of heads (leases and tokens; the pipeline's own lease)": 2 * head_beats,
        "transactions: beats of workers": worker_beats,
        "transactions: jobs stored, claimed, ended": 3 * fleet.jobs_per_s,
        "rows written: jobs and attempts by heartbeats": 2 * fleet.running / times.heartbeat_s,
    }
    for what, amount in per_s.items():
        yield ServerLoad(server="postgres", what=what, amount=amount, unit="/s")
    connections = HEAD_CONNECTIONS * fleet.heads + WORKER_CONNECTIONS * fleet.stages
    yield ServerLoad(server="postgres", what="connections of stages", amount=connections, unit="")
    read = {
        "plan read by beats of workers": worker_beats * fleet.stages * PLACE_BYTES,
        f"workers read by {NUM_RELAYS} coordinators": NUM_RELAYS * fleet.stages * fleet.worker_bytes / times.poll_s,
    }
    for what, num_bytes in read.items():
        yield ServerLoad(server="postgres", what=what, amount=num_bytes / 1e6, unit="MB/s")


def _redis(fleet: FleetRates) -> Iterator[ServerLoad]:
    per_s = {
        "commands: cards": CARD_COMMANDS * fleet.stages * RENEWALS_IN_TTL / REGISTRY_TTL_S,
        "commands: Celery workers that wait and say that they live": fleet.stages * (1 / BRPOP_S + 1 / CELERY_BEAT_S),
        "commands: Celery messages": JOB_COMMANDS * fleet.jobs_per_s,
        "commands: stream entries": fleet.tokens_per_s,
    }
    for what, amount in per_s.items():
        yield ServerLoad(server="redis", what=what, amount=amount, unit="/s")
