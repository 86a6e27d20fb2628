"""More of everything beside the supervised stack, as `docker compose up --scale` does, and less
again, under load.

A copy is one more gateway, relay and pipeline, or worker of the fleet, with the environment of
those that run: only names, ports and locks are its own, as in another container. Jobs must move to
it by themselves. Drained, it ends in time and leaves no lease.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
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
from tests.chaos.load.requests import MODEL
from tests.chaos.stack.fleet_worker import FleetWorker
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
SELECT (SELECT count(*) FROM jobs WHERE pipeline LIKE %(pipeline)s AND state = 'running')
    + (SELECT count(*) FROM pipelines WHERE id LIKE %(pipeline)s AND lease_until > now())
    + (SELECT count(*) FROM attempts WHERE pipeline LIKE %(pipeline)s AND outcome IS NULL)
"""
"""What only an expired lease would end."""


class Copy:
    """One gateway and one relay more, and what computes."""

    def __init__(self, target: LocalTarget, rng: random.Random) -> None:
        name = uuid4().hex[:6]
        self._target = target
        self._patience_s = max(PATIENCE_S, STARTS * target.start_s)
        self._rng = rng
        self._port = free_port()
        self.name = f"copy-{name}"
        self.own = {
            "SHARDLINE_HTTP_PORT": str(self._port),
            "SHARDLINE_LOCK_DIR": str(target.stack.home.folder / f"locks-{name}"),
        }
        self.gateway = self.another("gateway", "services.gateway")
        self.relay = self.another("relay", "services.relay")

    def start(self) -> None:
        """All at once."""
        self.gateway.start()
        self.relay.start()

    def serve(self) -> None:
        """What computes has its place by itself, and the door answers."""
        self.must_join()
        for _ in range(NUM_JOBS):
            asked = Asked(
                id=uuid4(), number=self._target.workload.draw(self._rng), door="copy", promised=True
            )
            self.must_within(partial(self._ask, asked), "did not answer at its door")
            self._target.journal.ask(asked)

    def must_join(self) -> None:
        """Raises Broken if what computes gets no place or no work in time."""
        raise NotImplementedError

    def drain(self, *, at_once: bool) -> None:
        """SIGTERM, in the order that loses least or to all at once. Each ends by itself, and none
        leaves a lease."""
        raise NotImplementedError

    def kill(self) -> None:
        """SIGKILL to whatever still runs, all at once."""
        for service in (self.gateway, self.relay):
            with suppress(ProcessLookupError):
                service.kill()

    def another(self, name: str, module: str) -> ServiceProcess:
        """A service with the environment of one that runs, and settings of its own over it."""
        environment = {**self.environment_of(name), **self.own}
        return ServiceProcess(
            f"{name}-{self.name}",
            self._target.stack.home.folder,
            argv=[sys.executable, "-m", module],
            env=environment,
        )

    def environment_of(self, name: str) -> dict[str, str]:
        """That of a process that runs."""
        _, pid = self._target.pick(self._rng, name)
        return psutil.Process(pid).environ()

    @property
    def drain_s(self) -> float:
        """How long one may take to end."""
        return 4 / 3 * self._target.times.drain_s + self._patience_s

    def must_end(self, services: list[ServiceProcess]) -> None:
        """SIGTERM to all of them. Raises Broken if one does not end in good order."""
        for service in services:
            service.ask_to_end()
        self.must_have_ended(services)

    def must_have_ended(self, services: list[ServiceProcess]) -> None:
        """Raises Broken if one that was asked to does not end in good order."""
        for service in services:
            gone = within(self.drain_s, partial(_has_ended, service))
            self.must(gone, f"did not end: {service.name}", self.drain_s)
            ended = service.how_it_ended()
            self.must(ended == "exit status 0", f"{service.name}: {ended}")

    def must_leave_nothing(self, pipeline: str) -> None:
        """Raises Broken if a pipeline of this name (a pattern of LIKE) still has a lease."""
        with session(self._target) as connection:
            num_left = connection.execute(LEFT, {"pipeline": pipeline}).fetchall()[0][0]
        self.must(num_left == 0, f"left {num_left} leases to expire")

    def must_within(self, question: Callable[[], bool], what: str) -> None:
        """Raises Broken if there is no true answer in time."""
        self.must(within(self._patience_s, question), what, self._patience_s)

    def must(self, holds: bool, what: str, patience_s: float | None = None) -> None:
        """Raises Broken unless this holds."""
        if not holds:
            within_s = f" within {patience_s:.0f} s" if patience_s else ""
            raise Broken(f"{self.name} {what}{within_s}")

    def _ask(self, asked: Asked) -> bool:
        """One job at its own door; a repeat under the same id is harmless."""
        try:
            fields = self._target.workload.dressed(asked.number, asked.dress)
            return (
                by_http({**self._target.urls, "gateway": f"http://{LOOPBACK}:{self._port}"})(
                    asked.id, fields
                ).job_id
                is not None
            )
        except httpx.HTTPError:
            return False


class PipelineCopy(Copy):
    """One pipeline more."""

    def __init__(self, target: LocalTarget, rng: random.Random) -> None:
        super().__init__(target, rng)
        self.own |= {"SHARDLINE_PIPELINE": self.name}
        places = range(target.num_stages)
        self._stages = [self.another(f"stage-{place}", "services.stage") for place in places]

    def start(self) -> None:
        """All at once."""
        super().start()
        for stage in self._stages:
            stage.start()

    def must_join(self) -> None:
        """It forms by itself and takes jobs over."""
        self.must_within(lambda: self._count(READY) == 1, "formed no pipeline")
        self.must_within(lambda: self._count(TAKEN) > 0, "took no job")

    def drain(self, *, at_once: bool) -> None:
        """The gateway, the head, the others."""
        head, *others = self._stages
        if at_once:
            self.must_end([self.gateway, head, *others, self.relay])
        else:
            for group in ([self.gateway], [head], [*others, self.relay]):
                self.must_end(group)
        self.must_leave_nothing(self.name)

    def kill(self) -> None:
        """SIGKILL to whatever still runs."""
        super().kill()
        for stage in self._stages:
            with suppress(ProcessLookupError):
                stage.kill()

    def _count(self, query: str) -> int:
        with session(self._target) as connection:
            return int(connection.execute(query, (self.name,)).fetchall()[0][0])


class WorkerCopy(Copy):
    """One worker more, which the plan must give a place."""

    def __init__(self, target: LocalTarget, rng: random.Random) -> None:
        super().__init__(target, rng)
        self._worker = FleetWorker(
            self.name, target.stack.home.folder, self.environment_of("stage-")
        )

    def start(self) -> None:
        """All at once."""
        super().start()
        self._worker.start()

    def must_join(self) -> None:
        """A plan has it."""
        self.must_within(self._has_place, "got no place in the plan")

    def drain(self, *, at_once: bool) -> None:
        """The gateway, the worker, the relay."""
        if at_once:
            # Once: a second signal ends them at once.
            self.gateway.ask_to_end()
            self.relay.ask_to_end()
        else:
            self.must_end([self.gateway])
        ended = self._worker.drain(self.drain_s)
        self.must("SIGKILL" not in ended, "did not end", self.drain_s)
        if at_once:
            self.must_have_ended([self.gateway, self.relay])
        else:
            self.must_end([self.relay])
        self.must_leave_nothing(f"%.{self.name}@%")

    def kill(self) -> None:
        """SIGKILL to whatever still runs."""
        super().kill()
        self._worker.end()

    def _has_place(self) -> bool:
        name = f"{MODEL}.{self.name}@"
        return any(worker.startswith(name) for worker in self._target.fleet_plan().stages)


@contextmanager
def copies(target: LocalTarget, rng: random.Random, num: int) -> Iterator[list[Copy]]:
    """So many more, serving."""
    kind = WorkerCopy if target.is_fleet else PipelineCopy
    made: list[Copy] = [kind(target, rng) for _ in range(num)]
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
        one.drain(at_once=False)
    with copies(target, rng, 2) as more:
        for each in more:
            each.drain(at_once=True)


def up_and_dead(target: LocalTarget, rng: random.Random) -> None:
    """One more, which is killed: the others take over what it had when its leases run out."""
    with copies(target, rng, 1):
        pass


def _has_ended(service: ServiceProcess) -> bool:
    return not service.is_running()


# No kills: those are drawn between all others, and these take a minute.
FAULTS: tuple[Fault, ...] = (
    Simple(kind="scale 2 to 1 to 3", inject=up_and_down),
    Simple(kind="scale to 2 and kill it", inject=up_and_dead),
)
