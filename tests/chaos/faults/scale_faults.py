"""More of everything beside the supervised stack, as `docker compose up --scale` does, and less
again, under load.

A copy is one more gateway, relay and pipeline with the environment of those that run: only names,
ports and locks are its own, as in another container. Jobs must move to it by themselves. Drained,
it ends in time and leaves no lease.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from uuid import uuid4

import httpx
import psutil

from services.standalone.plan import ServiceProcess
from services.standalone.ports import LOOPBACK, free_port
from tests.chaos.faults.fault import Broken, Fault, Simple
from tests.chaos.faults.postgres_faults import session
from tests.chaos.load.doors import by_http
from tests.chaos.load.journal import Asked
from tests.chaos.stack.local_target import LocalTarget
from tests.polling import within

NUM_JOBS = 3
"""Asked for at each copy's own door."""

PATIENCE_S = 180.0
STARTS = 5
"""Copies start and end beside a stack under load, on the same cores: so many times what its own
start took."""

READY = (
    "SELECT count(*) FROM pipelines WHERE id = %s AND ready_at IS NOT NULL AND lease_until > now()"
)
TAKEN = "SELECT count(*) FROM attempts WHERE pipeline = %s"
LEFT = """
SELECT (SELECT count(*) FROM jobs WHERE pipeline = %(pipeline)s AND state = 'running')
    + (SELECT count(*) FROM pipelines WHERE id = %(pipeline)s AND lease_until > now())
    + (SELECT count(*) FROM attempts WHERE pipeline = %(pipeline)s AND outcome IS NULL)
"""
"""What only an expired lease would end."""


class Copy:
    """One gateway, one relay and one pipeline more."""

    def __init__(self, target: LocalTarget, rng: random.Random) -> None:
        name = uuid4().hex[:6]
        self._target = target
        self._patience_s = max(PATIENCE_S, STARTS * target.start_s)
        self._rng = rng
        self._port = free_port()
        self.pipeline = f"copy-{name}"
        own = {
            "SHARDLINE_HTTP_PORT": str(self._port),
            "SHARDLINE_PIPELINE": self.pipeline,
            "SHARDLINE_LOCK_DIR": str(target.stack.home.folder / f"locks-{name}"),
        }
        stages = [f"stage-{place}" for place in range(target.num_stages)]
        self.gateway, self.relay, self.head, *self.others = (
            _another(target, rng, each, f"{each}-{name}", own)
            for each in ("gateway", "relay", *stages)
        )

    @property
    def services(self) -> list[ServiceProcess]:
        """In the order in which they are best stopped."""
        return [self.gateway, self.head, *self.others, self.relay]

    def start(self) -> None:
        """All at once."""
        for service in self.services:
            service.start()

    def serve(self) -> None:
        """Its pipeline has formed by itself, took jobs over, and its door answers."""
        self._must(
            within(self._patience_s, lambda: self._count(READY) == 1),
            "formed no pipeline",
            self._patience_s,
        )
        self._must(
            within(self._patience_s, lambda: self._count(TAKEN) > 0),
            "took no job",
            self._patience_s,
        )
        for _ in range(NUM_JOBS):
            asked = Asked(
                id=uuid4(), number=self._target.workload.draw(self._rng), door="copy", promised=True
            )
            self._must(
                within(self._patience_s, partial(self._ask, asked)),
                "did not answer at its door",
                self._patience_s,
            )
            self._target.journal.ask(asked)

    def drain(self, services: list[list[ServiceProcess]]) -> None:
        """SIGTERM to group after group. Each ends by itself, and none leaves a lease."""
        patience_s = 4 / 3 * self._target.times.drain_s + self._patience_s
        for group in services:
            for service in group:
                service.ask_to_end()
            for service in group:
                gone = within(patience_s, partial(_has_ended, service))
                self._must(gone, f"did not end: {service.name}", patience_s)
                self._must(
                    service.how_it_ended() == "exit status 0",
                    f"{service.name}: {service.how_it_ended()}",
                )
        with session(self._target) as connection:
            num_left = connection.execute(LEFT, {"pipeline": self.pipeline}).fetchall()[0][0]
        self._must(num_left == 0, f"left {num_left} leases to expire")

    def kill(self) -> None:
        """SIGKILL to whatever still runs, all at once."""
        for service in self.services:
            with suppress(ProcessLookupError):
                service.kill()

    def _ask(self, asked: Asked) -> bool:
        """One job at its own door; a repeat under the same id is harmless."""
        try:
            fields = {**self._target.workload.requests[asked.number], **asked.dress.fields}
            return (
                by_http({**self._target.urls, "gateway": f"http://{LOOPBACK}:{self._port}"})(
                    asked.id, fields
                ).job_id
                is not None
            )
        except httpx.HTTPError:
            return False

    def _count(self, query: str) -> int:
        with session(self._target) as connection:
            return int(connection.execute(query, (self.pipeline,)).fetchall()[0][0])

    def _must(self, holds: bool, what: str, patience_s: float | None = None) -> None:
        if not holds:
            within_s = f" within {patience_s:.0f} s" if patience_s else ""
            raise Broken(f"{self.pipeline} {what}{within_s}")


@contextmanager
def copies(target: LocalTarget, rng: random.Random, num: int) -> Iterator[list[Copy]]:
    """So many more, serving."""
    made = [Copy(target, rng) for _ in range(num)]
    try:
        for copy in made:
            copy.start()
        for copy in made:
            copy.serve()
        yield made
    finally:
        for copy in made:
            copy.kill()


def up_and_down(target: LocalTarget, rng: random.Random) -> None:
    """One more; down to one in the order that loses least; two more; down again, all at once."""
    with copies(target, rng, 1) as (one,):
        one.drain([[one.gateway], [one.head], [*one.others, one.relay]])
    with copies(target, rng, 2) as (two, three):
        two.drain([two.services])
        three.drain([three.services])


def up_and_dead(target: LocalTarget, rng: random.Random) -> None:
    """One more, which is killed: the others take over what it had when its leases run out."""
    with copies(target, rng, 1):
        pass


def _has_ended(service: ServiceProcess) -> bool:
    return not service.is_running()


def _another(
    target: LocalTarget, rng: random.Random, name: str, own_name: str, own: dict[str, str]
) -> ServiceProcess:
    """With the same environment, and settings of its own over it."""
    _, pid = target.pick(rng, name)
    module = "services.stage" if name.startswith("stage") else f"services.{name}"
    environment = {**psutil.Process(pid).environ(), **own}
    return ServiceProcess(
        own_name, target.stack.home.folder, argv=[sys.executable, "-m", module], env=environment
    )


# No kills: those are drawn between all others, and these take a minute.
FAULTS: tuple[Fault, ...] = (
    Simple(kind="scale 2 to 1 to 3", inject=up_and_down),
    Simple(kind="scale to 2 and kill it", inject=up_and_dead),
)
