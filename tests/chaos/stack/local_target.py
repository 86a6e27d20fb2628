"""The stack under test as a fault sees it, on servers that the harness runs itself. Knows no fault
and no invariant."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.standalone.servers import Postgres, Valkey
from services.standalone.state_dir import SUPERVISOR
from shardline.base.config import Times
from shardline.store import fleets
from shardline.store.connection.database import transaction
from shardline.store.fleets import FleetPlan
from shardline_fleet.deployment.fleet_planner import Deployment
from tests.chaos.load.requests import MODEL
from tests.chaos.load.target import Running, TargetRun
from tests.chaos.load.users import SCRIBE
from tests.chaos.network.hop_net import HopNet
from tests.chaos.network.proxy import Proxy
from tests.chaos.report.finding import Finding
from tests.chaos.shims.clock import Clock
from tests.chaos.shims.disk import Disk
from tests.chaos.stack import family
from tests.chaos.stack.fleet_worker import FleetWorker
from tests.polling import until
from tests.repository import REPOSITORY
from tests.stack import Stack, is_running

SECOND = f".{SCRIBE.name}"
"""Behind the names of the second stack's processes."""

LOGS_KEPT = REPOSITORY / ".local" / "chaos-logs"


@dataclass(kw_only=True)
class LocalTarget(TargetRun):
    """Faults strike in the main thread: servers that they restart are tied to it."""

    stack: Stack
    second: Stack | None
    """Of another model, with services of its own, on the same servers."""
    postgres: Postgres
    redis: Valkey
    redis_proxy: Proxy
    database_proxy: Proxy
    hop_net: HopNet
    clock: Clock
    disk: Disk
    model: Path
    """Of this stack alone: it may be damaged."""
    times: Times
    failpoints: Path
    kv_mib: Path
    """A file with the KV memory that a stage takes when it starts."""
    adapters: Path | None = None
    """The folder of the first stack's adapters."""
    num_started: int
    """Stages of a pipeline, or workers of the fleet."""
    is_fleet: bool = False
    """Its stages have no number: which worker is the head is for the plan to say."""
    unlike: list[FleetWorker] = field(default_factory=list)
    """Workers of the fleet with another dtype, which faults move but do not kill."""
    num_ranks: int = 1
    """Of each stage of the first stack."""

    @property
    def num_stages(self) -> int:
        """Of a pipeline, at present."""
        return len(_places(self.fleet_plan())) or 1 if self.is_fleet else self.num_started

    @property
    def num_more_stages(self) -> int:
        """Workers beside one pipeline, and the second stack, which has one pipeline of one
        stage."""
        return self.num_started - self.num_stages + (0 if self.second is None else 1)

    @property
    def urls(self) -> Mapping[str, str]:
        """Where producers reach the stack."""
        return self.stack.urls

    @property
    def database_url(self) -> str:
        """For the harness itself: past every proxy."""
        return self.postgres.url()

    @property
    def redis_url(self) -> str:
        """For the harness itself: past every proxy."""
        return self.redis.url

    def pids(self) -> dict[str, int]:
        """Of up.json, those that live."""
        pids: dict[str, int] = dict(self.stack.look()["processes"])
        if self.second is not None:
            others: Mapping[str, int] = self.second.look()["processes"]
            pids |= {f"{name}{SECOND}": pid for name, pid in others.items()}
        return {name: pid for name, pid in pids.items() if is_running(pid)}

    def running(self) -> dict[str, Running]:
        """Likewise, with their memory."""
        return family.running(self.pids())

    def end(self) -> list[Finding]:
        """Stop it. Returns the processes that live on (I5)."""
        stacks = [self.stack] if self.second is None else [self.second, self.stack]
        relatives = family.family(
            self.pids().values(), {one for stack in stacks for one in stack.seen}
        )
        for worker in self.unlike:
            relatives |= worker.relatives()
            worker.end()
        for stack in stacks:
            stack.end()
        return [
            finding for stack in stacks for finding in family.orphans(stack.home.folder, relatives)
        ]

    def logs(self) -> list[Path]:
        """Of the servers, the stacks and their supervisors."""
        stacks = [self.stack] if self.second is None else [self.second, self.stack]
        own = [log for stack in stacks for log in (stack.home.folder / "logs").iterdir()]
        return [self.postgres.log, self.redis.log, *(stack.output for stack in stacks), *own]

    def pick(self, rng: random.Random, prefix: str) -> tuple[str, int]:
        """A living process of the first stack by the beginning of its name; waits for one that is
        being restarted."""
        return rng.choice(sorted(until(lambda: self._matching(prefix)).items()))

    def pick_any(self, rng: random.Random, prefix: str) -> tuple[str, int]:
        """Of either stack."""
        found = until(lambda: self._matching(prefix))
        return rng.choice(sorted((found | self._matching(prefix, SECOND)).items()))

    def fleet_plan(self) -> FleetPlan:
        """Of the first stack's model."""
        with transaction(self.database_url) as connection:
            return fleets.plan_of(connection, MODEL)

    def _prefixes(self, prefix: str) -> tuple[str, ...]:
        """Of a fleet, `stage-1` means the workers whose place is 1, or the last if there are fewer
        stages."""
        kind, _, place = prefix.partition("-")
        if not self.is_fleet or kind != "stage":
            return (prefix,)
        plan = self.fleet_plan()
        if not place or not plan.version:
            return ("worker-",)
        places = _places(plan)
        wanted = places[min(int(place), len(places) - 1)]
        names = [
            worker.partition("@")[0].rpartition(".")[2]
            for worker, its in plan.stages.items()
            if its == wanted
        ]
        return tuple(name for name in names if name.startswith("worker-"))

    def _matching(self, prefix: str, suffix: str = "") -> dict[str, int]:
        prefixes = self._prefixes(prefix) if not suffix else (prefix,)
        return {
            name: pid
            for name, pid in self.pids().items()
            if name.startswith(prefixes)
            and name.endswith(SECOND) == bool(suffix)
            and not name.startswith(SUPERVISOR)
        }


def _places(plan: FleetPlan) -> Sequence[int]:
    """In the plan, of the stages of its longest pipeline."""
    return max(Deployment(split=plan.split, stages=plan.stages).pipelines, key=len, default=())
