"""What a fleet asks of its servers if all of it is one stack, and what each of them can do.

How often is asked follows from the product's own intervals; what it costs was measured in processor
time by `python -m tests.benchmarks.fleet_servers` and `tests.benchmarks.scale`: docs/capacity.md.
Upper bounds where the product batches: claims, ends and inserts that come together are one
transaction each.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from shardline.base.config import Times
from shardline.contract.keys import (
    LOOKS_PER_HEARTBEAT,
    MAX_CARDS,
    REGISTRY_RENEWALS,
    REGISTRY_TTL_S,
)
from shardline.store.fleets import BEATS_IN_LEASE, LEASES

HEAD_CONNECTIONS = 3
WORKER_CONNECTIONS = 1
"""To Postgres, as docs/operating/install.md counts them: a head's in use, and one of each worker of
a fleet."""
MAX_CONNECTIONS = 100
"""Postgres's default."""
LOST_SHARE = 0.1
"""Of the stages, at once."""

HEARTBEAT_S = 6.3e-3 / 64
"""Of Postgres, for one job's lease and tokens."""
JOB_S = (7.3e-3 + 8.8e-3) / 256 + (3.6e-3 + 9.6e-3) / 64
"""Of Postgres, to store, stamp, claim and end one job."""
BEAT_S = 2.5e-4
BEAT_WORKER_S = 2.5e-8
"""Of Postgres, for a worker's beat, and more for each worker in its plan."""
LOOK_S = 7.6e-5
LOOK_RELAY_S = 9.6e-4
"""For each worker that a coordinator looks at: of Postgres, and of its relay's Python."""
ENTRY_S = 2.8e-6
CARD_S = 2e-5
CARD_SEEN_S = 3.2e-6
"""Of Redis: a token's entry in its stream, a card put up, a card seen in a look."""
NUM_RELAYS = 2


class ServerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a server does, or has."""

    server: str
    what: str
    amount: float
    unit: str
    limit: float | None = None
    """What there can be; None: more is a matter of hardware."""

    @property
    def breaks(self) -> bool:
        """Whether it is asked for more than there can be."""
        return self.limit is not None and self.amount > self.limit


class FleetRates(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet at work."""

    stages: float
    """Spares too."""
    heads: float
    running: float
    """Jobs."""
    jobs_per_s: float
    tokens_per_s: float


def server_loads(fleet: FleetRates) -> list[ServerLoad]:
    """All of them."""
    return [*_postgres(fleet), *_relay(fleet), *_redis(fleet)]


def _postgres(fleet: FleetRates) -> Iterator[ServerLoad]:
    times = Times()
    beats = fleet.stages * BEATS_IN_LEASE / (LEASES * times.lease_s)
    connections = HEAD_CONNECTIONS * fleet.heads + WORKER_CONNECTIONS * fleet.stages
    yield ServerLoad(
        server="Postgres",
        what="connections of stages",
        amount=connections,
        unit="",
        limit=MAX_CONNECTIONS,
    )
    transactions = 2 * fleet.heads / times.heartbeat_s + beats + 3 * fleet.jobs_per_s
    yield ServerLoad(server="Postgres", what="transactions", amount=transactions, unit="/s")
    rows = 2 * fleet.running / times.heartbeat_s
    yield ServerLoad(server="Postgres", what="rows that heartbeats write", amount=rows, unit="/s")
    cores = {
        "heartbeats": fleet.running * HEARTBEAT_S / times.heartbeat_s,
        "jobs stored, sent, claimed, ended": fleet.jobs_per_s * JOB_S,
        "beats of workers": beats * (BEAT_S + BEAT_WORKER_S * fleet.stages),
        "looks of coordinators": NUM_RELAYS * fleet.stages * LOOK_S / times.poll_s,
    }
    for what, amount in cores.items():
        yield ServerLoad(server="Postgres", what=f"processor: {what}", amount=amount, unit="cores")


def _relay(fleet: FleetRates) -> Iterator[ServerLoad]:
    """Python computes on one core."""
    amount = fleet.stages * LOOK_RELAY_S / Times().poll_s
    yield ServerLoad(
        server="relay", what="a coordinator's looks", amount=amount, unit="cores", limit=1.0
    )


def _redis(fleet: FleetRates) -> Iterator[ServerLoad]:
    """Its commands run one after the other."""
    cards_per_s = fleet.stages * REGISTRY_RENEWALS / REGISTRY_TTL_S
    amount = fleet.tokens_per_s * ENTRY_S + cards_per_s * CARD_S
    yield ServerLoad(
        server="Redis", what="stream entries and cards", amount=amount, unit="cores", limit=1.0
    )
    yield ServerLoad(
        server="Redis",
        what="cards, of which a look sees",
        amount=fleet.stages,
        unit="",
        limit=MAX_CARDS,
    )
    stages_of_each = fleet.stages / max(1.0, fleet.heads)
    forming = fleet.heads * (1 - (1 - LOST_SHARE) ** stages_of_each)
    looks_per_s = LOOKS_PER_HEARTBEAT / Times().heartbeat_s
    looks = forming * looks_per_s * min(fleet.stages, MAX_CARDS) * CARD_SEEN_S
    yield ServerLoad(
        server="Redis", what="looks after a tenth was lost", amount=looks, unit="cores", limit=1.0
    )
