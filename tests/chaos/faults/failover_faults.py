"""A primary that dies, comes back as a standby of the server that took its place, and takes its
place back in the end.

Services reach Postgres under one name, as behind a load balancer. It is late: first it leads to a
standby, then new connections go to the primary and the old ones stay at the standby, which answers
and takes no write. Both servers commit together, so no failover loses what was acknowledged.
"""

from __future__ import annotations

import random
import shutil
from uuid import uuid4

from tests.chaos.faults.fault import Fault, Simple, hold
from tests.chaos.stack.local_target import LocalTarget
from tests.postgres_pair import PostgresPair


def fail_over_and_back(target: LocalTarget, rng: random.Random) -> None:
    """Two failovers, with a standby under the services' connections in between."""
    first = target.postgres
    home = target.postgres.home / f"failover-{uuid4().hex[:6]}"
    pair = PostgresPair(home, first)
    try:
        pair.start()
        _change_places(pair)
        pair.rejoin()
        hold(1.5 * target.times.lease_s)
        target.database_proxy.lead_to(pair.primary.socket)
        hold(1.5 * target.times.lease_s)
        _change_places(pair)
    finally:
        target.postgres = pair.primary
        target.database_proxy.lead_to(pair.primary.socket)
        if pair.primary is first:
            pair.standby.abandon()
            shutil.rmtree(home)


def _change_places(pair: PostgresPair) -> None:
    """SIGKILL to the primary; the standby has all that it acknowledged."""
    pair.commit_together()
    pair.primary.kill()
    pair.promote()


FAULTS: tuple[Fault, ...] = (
    Simple(kind="failover and back", inject=fail_over_and_back, is_kill=True),
)
