"""A whole stack on one machine, from empty folder to ready and back to nothing. Knows no job and no
tensor."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

from services.standalone import processes
from services.standalone.cores import CoreClaims, usable_cores
from services.standalone.disk import DiskWatch
from services.standalone.measuring import Measuring
from services.standalone.placement import (
    StagePlacement,
    count_layers,
    is_gpu_unused,
    is_planned,
    is_preferred,
    layers_together,
    model_path,
    num_pipelines,
    on_all_cores,
    places,
    replaced,
)
from services.standalone.plan import (
    Addresses,
    StackPlan,
    make_plan,
    make_warm_parent,
    new_password,
    of_stage,
)
from services.standalone.ports import free_port, is_taken
from services.standalone.preload import preload
from services.standalone.process_group import ProcessGroup
from services.standalone.processes import Child, StartFailed, reap_orphans
from services.standalone.readiness import ReadinessCriteria, ReadinessWatcher
from services.standalone.servers import Postgres, Valkey, forget_postgres_defaults
from services.standalone.settings import REPOSITORY, StandaloneSettings
from services.standalone.signals import SignalInbox
from services.standalone.state_dir import SUPERVISOR, StackRecord, StateDir
from services.standalone.warm_parent import WarmParent
from shardline.base.errors import Invalid
from shardline.contract.api_key import parse_key
from shardline.store import api_keys
from shardline.store.api_keys import Grant
from shardline.store.connection.database import connect
from shardline_costs import DeviceProfile, ModelCosts, Workload
from shardline_fleet.planner import make_plans_that_fit

MAX_DEATHS_BEFORE_READY = 3
SAY_MISSING_EVERY_S = 15.0
DRAIN_MARGIN_S = 5.0
MEASURING_WAIT_S = 0.5
"""Between two looks at whether devices are measured; every signal ends the wait."""


class StopRequested(Exception):
    """A stop was requested before the stack was ready."""


class Supervisor:
    """Runs one stack in this process's main thread. `say` shows a line to the person who started
    it."""

    def __init__(self, settings: StandaloneSettings, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._say = say
        self._state_dir = StateDir(settings.home)
        self._stopped_last: list[Child] = []
        """The warm parent and our own servers, in the order in which they started."""
        self._plan: StackPlan | None = None
        self._stack_record = StackRecord(self._state_dir, say)

    def run(self) -> None:
        """Start, show where it is, keep it running until a stop is requested, stop. Raises when it
        cannot start."""
        if "database_url" not in self._settings.model_fields_set:
            forget_postgres_defaults()
        with ExitStack() as stack:
            stack.enter_context(self._state_dir.lock())
            self._inbox = stack.enter_context(SignalInbox())
            self._group = ProcessGroup(
                self._inbox,
                say=self._say,
                changed=self._record,
                time_scale=self._settings.time_scale,
            )
            if left := self._state_dir.end_leftovers():
                self._say(f"ended what an earlier supervisor left behind: {', '.join(left)}")
            addresses = self._reserve()
            stages = self._place(stack.enter_context(CoreClaims()))
            stack.callback(self._stop)
            try:
                if is_planned(self._settings, stages, count_layers(self._settings)):
                    stages = self._plan_stages(stages)
                self._start(addresses, stages)
                self._follow()
            except StopRequested:
                self._say("stopped before it was ready")

    def _reserve(self) -> Addresses:
        """Choose ports and a password; refuse a taken port before anything is started."""
        wanted = {
            "SHARDLINE_HTTP_PORT": self._settings.http_port,
            "SHARDLINE_FLOWER_PORT": self._settings.flower_port,
        }
        for variable, port in wanted.items():
            if port and is_taken(port):
                raise Invalid(
                    variable,
                    f"port {port} is taken by another program",
                    "Choose another port, or 0",
                )
        if self._settings.http_port and self._settings.http_port == self._settings.flower_port:
            raise Invalid(
                "SHARDLINE_FLOWER_PORT", "it is the gateway's port too", "Choose another port, or 0"
            )
        return Addresses(
            http_port=self._settings.http_port or free_port(),
            flower_port=self._settings.flower_port or free_port(),
            flower_password=new_password(),
            api_key=self._state_dir.api_key(),
            database=self._settings.database_url.get_secret_value(),
            redis=self._settings.redis_url,
        )

    def _place(self, claims: CoreClaims) -> list[StagePlacement]:
        cores = usable_cores()
        taken = claims.claim(cores)
        joined = layers_together(self._settings)
        stages = places(self._settings, count_layers(self._settings), cores, taken, joined)
        claims.keep(core for place in stages for core in place.cores)
        for place in stages:
            if place.shared:
                self._say(f"{place.name} shares {place.device} with another stage: they take turns")
        if is_gpu_unused(self._settings):
            self._say(
                "no stage uses this machine's GPU: "
                "SHARDLINE_DEVICES='cuda:0 cpu' would, see docs/devices.md"
            )
        return stages

    def _plan_stages(self, stages: list[StagePlacement]) -> list[StagePlacement]:
        """Gives each stage the layers that suit its device, by what it measures; even shares if
        that fails.

        If no setting tells how many stages there are, each device may as well hold the whole model,
        and so may one that has all their cores.
        """
        first = [place for place in stages if place.replica == 0]
        num_stages = len(first) if self._settings.is_placed else None
        try:
            model = ModelCosts.read(model_path(self._settings))
            profiles = self._measure(first)
            plan = make_plans_that_fit(model, profiles, Workload(), num_stages=num_stages).best
            placed = replaced(stages, plan, [profile.device for profile in profiles])
        except (StartFailed, Invalid) as error:
            self._say(f"no plan, so the split is even: {error}")
            return stages
        if num_stages is None:
            whole = [on_all_cores(first)]
            try:
                profiles_of_whole = self._measure(whole)
                plan_of_whole = make_plans_that_fit(model, profiles_of_whole, Workload()).best
            except (StartFailed, Invalid) as error:
                self._say(f"no plan for one stage on {whole[0].device}: {error}")
            else:
                if is_preferred(plan_of_whole, plan):
                    placed, plan, profiles = whole, plan_of_whole, profiles_of_whole
        self._say(
            f"planned {plan.split} on {', '.join(place.device for place in placed)}: "
            f"{plan.tokens_per_s:,.0f} tokens/s of many requests predicted"
        )
        if busy := [profile for profile in profiles if profile.was_busy]:
            share = max(profile.others_share for profile in busy)
            devices = ", ".join(profile.device for profile in busy)
            self._say(
                f"other programs had {share:.0%} of {devices} meanwhile, "
                "so that the plan may be wrong: the next start measures again"
            )
        return placed

    def _measure(self, stages: list[StagePlacement]) -> list[DeviceProfile]:
        """The devices of these stages, at the same time. Raises StartFailed."""
        self._say(
            f"measuring {', '.join(place.device for place in stages)}, once; "
            "SHARDLINE_SPLIT=even does without"
        )
        folder = self._state_dir.folder
        warm_parent = make_warm_parent(self._settings, folder, preload(self._settings), stages)
        own = [of_stage(self._settings, place, folder) for place in stages]
        measuring = Measuring([{**warm_parent.environment, **each} for each in own], folder)
        try:
            while not measuring.is_done:
                self._inbox.wait(MEASURING_WAIT_S)
                if self._inbox.num_stops:
                    raise StopRequested
            return measuring.profiles()
        finally:
            measuring.end()

    def _start(self, addresses: Addresses, stages: list[StagePlacement]) -> None:
        self._record({})
        # First of all: its imports take longest.
        warm_parent = make_warm_parent(
            self._settings, self._state_dir.folder, preload(self._settings), stages
        )
        self._stopped_last.append(warm_parent)
        self._group.start(warm_parent)
        addresses = self._start_servers(addresses)
        self._migrate(addresses)
        self._register_key(addresses)
        self._state_dir.make_hop_key()
        self._plan = make_plan(
            self._settings, addresses, stages, self._state_dir.folder, warm_parent
        )
        self._state_dir.publish_targets(self._plan.scrape_targets)
        for service in self._plan.doors:
            self._group.start(service)
        self._wait_until_warm(warm_parent)
        for service in self._plan.stages:
            self._group.start(service)
        self._wait_until_ready(addresses, num_pipelines(stages))
        self._stack_record.publish(
            {
                "urls": {
                    "gateway": addresses.gateway,
                    "flower": addresses.flower_with_credentials,
                    "database": addresses.database,
                    "redis": addresses.redis,
                },
                "api_key": addresses.api_key,
                "model": self._settings.name,
                "stages": 1 + max(place.place for place in stages),
                "replicas": num_pipelines(stages),
            }
        )
        self._greet(addresses, stages)

    def _start_servers(self, addresses: Addresses) -> Addresses:
        """Start servers of our own, unless the environment names others."""
        given = self._settings.model_fields_set
        database = addresses.database
        redis = addresses.redis
        if "database_url" not in given:
            postgres = Postgres(self._state_dir.folder)
            self._stopped_last.append(postgres)
            self._group.start(postgres)
            database = postgres.url()
        if "redis_url" not in given:
            valkey = Valkey(self._state_dir.folder)
            self._stopped_last.append(valkey)
            self._group.start(valkey)
            redis = valkey.url
        return Addresses(
            http_port=addresses.http_port,
            flower_port=addresses.flower_port,
            flower_password=addresses.flower_password,
            api_key=addresses.api_key,
            database=database,
            redis=redis,
        )

    def _migrate(self, addresses: Addresses) -> None:
        log = self._state_dir.folder / "logs" / "migrate.log"
        env = {**os.environ, "SHARDLINE_DATABASE_URL": addresses.database}
        argv = [sys.executable, "-m", "alembic", "upgrade", "head"]
        if processes.run(argv, log=log, env=env, cwd=REPOSITORY) != 0:
            raise StartFailed(f"the database could not be migrated:\n{processes.tail(log)}")

    def _register_key(self, addresses: Addresses) -> None:
        """Register the stack's API key in Postgres, which may be another one than the last time."""
        engine = connect(addresses.database)
        try:
            with engine.begin() as connection:
                name = f"make up {parse_key(addresses.api_key).key_id}"
                api_keys.register(connection, addresses.api_key, Grant(name=name))
        finally:
            engine.dispose()

    def _wait_until_warm(self, warm_parent: WarmParent) -> None:
        begun = time.monotonic()
        while not warm_parent.is_settled():
            self._group.watch(max_deaths=MAX_DEATHS_BEFORE_READY)
            if self._inbox.num_stops:
                raise StopRequested
            if time.monotonic() - begun > self._settings.start_s:
                raise StartFailed(
                    f"the warm parent is not ready after {self._settings.start_s:g} s"
                )
        if warm_parent.problem:
            self._say(
                "every stage imports for itself, because the warm parent cannot fork: "
                f"{warm_parent.problem}"
            )

    def _wait_until_ready(self, addresses: Addresses, num: int) -> None:
        criteria = ReadinessCriteria(
            addresses=addresses,
            model=self._settings.name,
            num_pipelines=num,
            canary_timeout_s=60.0,
        )
        watcher = ReadinessWatcher(criteria)
        begun = reported_at = time.monotonic()
        try:
            while not watcher.ready.is_set():
                self._group.watch(max_deaths=MAX_DEATHS_BEFORE_READY)
                now = time.monotonic()
                if self._inbox.num_stops:
                    raise StopRequested
                if now - begun > self._settings.start_s:
                    raise StartFailed(
                        f"not ready after {self._settings.start_s:g} s: {watcher.missing}"
                    )
                if now - reported_at > SAY_MISSING_EVERY_S:
                    reported_at = now
                    self._say(
                        f"still starting: {watcher.missing}. "
                        f"Logs: {self._state_dir.folder / 'logs'}"
                    )
        finally:
            watcher.stop()

    def _record(self, pids: dict[str, int]) -> None:
        self._stack_record.write({SUPERVISOR: os.getpid(), **pids})

    def _greet(self, addresses: Addresses, stages: list[StagePlacement]) -> None:
        for place in stages:
            self._say(f"  {place.name}: layers {place.layers_text} on {place.device}")
        self._say(f"ready: {self._settings.name} at {addresses.gateway}/v1")
        self._say(f"Flower: {addresses.flower}")
        self._say(f"API key, Flower's user and password: {self._state_dir.up_file}")
        self._say("Ctrl-C or `make down` stops it")

    def _follow(self) -> None:
        disk = DiskWatch(self._state_dir.folder, self._say)
        while not self._inbox.num_stops:
            self._group.watch()
            reap_orphans(self._group.pids.values())
            self._stack_record.catch_up()
            disk.look()

    def _stop(self) -> None:
        order: list[list[Child]] = self._plan.stop_order if self._plan else []
        drain_s = self._settings.times.drain_s
        if self._plan is not None:
            self._say(
                f"stopping: running jobs get {drain_s:g} s to finish; Ctrl-C again does not wait"
            )
        self._state_dir.up_file.unlink(missing_ok=True)
        self._group.stop(
            [*order, *([server] for server in reversed(self._stopped_last))],
            grace_s=drain_s + DRAIN_MARGIN_S,
        )
        self._state_dir.forget()
        self._say("stopped")
