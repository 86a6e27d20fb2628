"""A cell: the workers of one fleet, who leads and who follows, and what happens when some are lost,
return or join.

The plan is the product's (`plan_book`), and so are the times after which a loss is noticed, leases
end and layers move. How a pipeline forms is simpler than the product's assembly: any worker that is
free at a place is taken, at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from shardline.base.config import Times
from shardline.base.errors import Invalid
from shardline.store.fleets import COOL_DOWN_POLLS, LEASES
from shardline_costs import DeviceProfile, ModelCosts, Workload
from shardline_costs.prediction import Predictor, StageAssignment
from shardline_fleet.deployment.fleet_planner import Deployment
from shardline_fleet.simulator.agenda import Agenda
from shardline_fleet.simulator.plan_book import PlanBook
from shardline_fleet.simulator.simulated_head import HeadCalls, SimulatedHead
from shardline_fleet.simulator.simulated_job import SimulatedJob
from shardline_fleet.simulator.stage_chain import StageChain
from shardline_scheduler.kv_blocks import BLOCK_TOKENS, blocks_for
from shardline_scheduler.scheduler_config import SchedulerConfig

FORM_S = 0.075
"""From a free stage to tokens of a pipeline with it, without what its steps take:
docs/decisions/simulator.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What all cells of a simulation share."""

    agenda: Agenda
    model: ModelCosts
    plans: PlanBook
    calls: HeadCalls
    times: Times
    config: SchedulerConfig
    """Of each head; blocks and lanes are those of its pipeline."""
    lanes: int | None
    load_s: float


@dataclass(slots=True, eq=False)
class SimulatedWorker:
    """One device with its process."""

    name: str
    profile: DeviceProfile
    is_here: bool = True
    is_member: bool = True
    """The coordinator counts it: its lease runs."""
    is_loaded: bool = False
    life: int = 0
    """Counts losses and moves, so that what was noted for an earlier life is of the past."""
    place: int | None = None
    head: SimulatedHead | None = None
    """Its own, if its stage begins the model."""
    bound_to: SimulatedHead | None = None
    """Whom it follows."""
    forms_from_s: float = 0.0
    """A head that has not noticed its loss yet does not form its pipeline."""


class Cell:
    """Workers by name, and what the plan assigns to them."""

    def __init__(self, ground: Ground, kind: int, profiles: Mapping[str, DeviceProfile]) -> None:
        self._ground = ground
        self._kind = kind
        self.workers = {name: SimulatedWorker(name, profile) for name, profile in profiles.items()}
        self.deployment: Deployment | None = None
        self._made_s = 0.0
        self._slower_s = 0.0

    @property
    def heads(self) -> Iterator[SimulatedHead]:
        """Yields those that live."""
        return (worker.head for worker in self.workers.values() if worker.head is not None)

    def start(self) -> None:
        """Workers that are here get the first plan, and have loaded. Raises Invalid if they do not
        hold the model."""
        for worker in self.workers.values():
            worker.is_member = worker.is_here
        self._move(self._ground.plans.first(self._kind, self._members()), load_s=0.0)
        self._form(after_s=0.0)

    def lose(self, name: str, *, is_silent: bool, back_s: float | None) -> None:
        """A worker is gone. `is_silent`: its links do not close, so that its head waits for it."""
        worker = self.workers[name]
        agenda = self._ground.agenda
        times = self._ground.times
        if not worker.is_here:
            return
        head = worker.head
        leader = worker.bound_to
        worker.is_here = worker.is_loaded = False
        worker.head = worker.bound_to = None
        worker.life += 1
        agenda.after(LEASES * times.lease_s, partial(self._miss, worker, worker.life))
        if back_s is not None:
            agenda.after(back_s, partial(self._return, worker, worker.life))
        if head is not None:
            restart_s = back_s if back_s is not None and not is_silent else times.lease_s
            self._orphan(head, min(restart_s, times.lease_s - head.beat_age_s) + times.poll_s / 2)
            agenda.after(
                times.unbind_s if is_silent else times.heartbeat_s, partial(self._unbind, head)
            )
        elif leader is not None:
            self._bereave(leader, times.link_dead_s if is_silent else 0.0)

    def slow(self, slower_s: float) -> None:
        """Makes each frame of each pipeline take `slower_s` more from now on."""
        self._slower_s = slower_s
        for head in self.heads:
            if head.chain is not None:
                head.chain.slower_s = slower_s

    def join(self, name: str) -> None:
        """A worker comes that was away from the start."""
        self._return(self.workers[name], self.workers[name].life)

    # What the coordinator does.

    def _miss(self, worker: SimulatedWorker, life: int) -> None:
        if worker.life == life and not worker.is_here:
            worker.is_member = False
            self._look()

    def _look(self) -> None:
        now_s = self._ground.agenda.now_s
        members = self._members()
        cool_down_s = COOL_DOWN_POLLS * self._ground.times.poll_s
        may_improve = now_s - self._made_s > cool_down_s
        if not may_improve:
            self._ground.agenda.at(
                self._made_s + cool_down_s + self._ground.times.poll_s, self._look
            )
        if not members:
            return
        try:
            then = self._ground.plans.replan(
                self._kind, members, self.deployment, may_improve=may_improve
            )
        except Invalid:  # too few for the model: those that come back find their layers again
            return
        if then is not None:
            self._move(then, load_s=self._ground.load_s)

    def _move(self, then: Deployment, load_s: float) -> None:
        """Workers with changed layers give their jobs back and come again with the new ones."""
        now = self.deployment
        self.deployment = then
        self._made_s = self._ground.agenda.now_s
        for worker in self.workers.values():
            held = None if now is None or worker.place is None else now.split[worker.place]
            worker.place = then.stages.get(worker.name) if worker.is_member else None
            given = None if worker.place is None else then.split[worker.place]
            if given != held or (given is not None and worker.is_here and not worker.is_loaded):
                self._restart(worker, load_s)
        self._ground.agenda.after(0.0, self._form)

    def _restart(self, worker: SimulatedWorker, load_s: float) -> None:
        if not worker.is_here:  # it loads what the plan gives it when it returns
            return
        worker.life += 1
        worker.is_loaded = False
        head = worker.head
        leader = worker.bound_to
        worker.head = worker.bound_to = None
        if head is not None:
            self._requeue(head.give_back())
            head.die()
            self._unbind(head)
        elif leader is not None:
            leader.lose()
        if worker.place is None:
            return
        if load_s:
            self._ground.agenda.after(load_s, partial(self._loaded, worker, worker.life))
        else:
            self._loaded(worker, worker.life)

    def _members(self) -> dict[str, DeviceProfile]:
        return {worker.name: worker.profile for worker in self.workers.values() if worker.is_member}

    # What workers do.

    def _return(self, worker: SimulatedWorker, life: int) -> None:
        if worker.life != life:
            return
        worker.is_here = True
        if not worker.is_member:
            worker.is_member = True
            self._ground.agenda.after(self._ground.times.poll_s, self._look)
        if worker.place is not None:
            self._loaded(worker, life)

    def _loaded(self, worker: SimulatedWorker, life: int) -> None:
        if worker.life != life or worker.place is None or self.deployment is None:
            return
        worker.is_loaded = True
        if self.deployment.split[worker.place][0] == 0 and worker.head is None:
            ground = self._ground
            worker.head = SimulatedHead(
                ground.agenda, ground.config, ground.calls, ground.times.heartbeat_s
            )
        self._ground.agenda.after(0.0, self._form)

    def _form(self, after_s: float = FORM_S) -> None:
        """Each head without a pipeline looks for free stages."""
        now_s = self._ground.agenda.now_s
        for worker in self.workers.values():
            head = worker.head
            if (
                head is None
                or head.chain is not None
                or not worker.is_loaded
                or worker.forms_from_s > now_s
            ):
                continue
            route = self._route(worker)
            if route is not None:
                for follower in route[1:]:
                    follower.bound_to = head
                self._lead(head, route, after_s)

    def _lead(self, head: SimulatedHead, route: list[SimulatedWorker], after_s: float) -> None:
        ground = self._ground
        deployment = self.deployment
        assert deployment is not None
        stages = [
            StageAssignment((each.profile,), *deployment.split[each.place])
            for each in route
            if each.place is not None
        ]
        room = (
            Predictor(ground.model, replace(Workload(), concurrency=1)).predict(stages).kv_tokens
            // BLOCK_TOKENS
        )
        most = (ground.config.max_seats + len(stages)) * blocks_for(ground.config.max_len)
        usual = Workload(
            concurrency=ground.config.max_seats, token_budget=ground.config.token_budget
        )
        num_lanes = ground.lanes or Predictor(ground.model, usual).num_lanes(stages)
        head.lead(
            StageChain(ground.model, stages, self._slower_s), min(room, most), num_lanes, after_s
        )

    def _route(self, first: SimulatedWorker) -> list[SimulatedWorker] | None:
        """The head's own worker, then at each further place whom it has already, or a free one."""
        assert self.deployment is not None
        assert first.place is not None
        (places,) = [places for places in self.deployment.pipelines if first.place in places]
        route = [first]
        for place in places[1:]:
            able = [
                worker
                for worker in self.workers.values()
                if worker.place == place
                and worker.is_loaded
                and worker.bound_to in (None, first.head)
            ]
            if not able:
                return None
            route.append(min(able, key=lambda worker: worker.bound_to is None))
        return route

    def _bereave(self, head: SimulatedHead, noticed_s: float) -> None:
        """A head has lost a follower, which it notices after `noticed_s` seconds."""
        agenda = self._ground.agenda
        head.lose()
        for owner in (worker for worker in self.workers.values() if worker.head is head):
            owner.forms_from_s = agenda.now_s + noticed_s
        agenda.after(noticed_s, self._form)
        agenda.after(self._ground.times.recover_s, partial(self._give_up, head))

    def _unbind(self, head: SimulatedHead) -> None:
        """Followers leave a head that is gone."""
        for worker in self.workers.values():
            if worker.bound_to is head:
                worker.bound_to = None
        self._ground.agenda.after(0.0, self._form)

    def _orphan(self, head: SimulatedHead, after_s: float) -> None:
        """The head is dead: its jobs come back when their leases have ended."""
        self._ground.agenda.after(after_s, partial(self._requeue, head.die()))

    def _give_up(self, head: SimulatedHead) -> None:
        """It has been forming for longer than leases are kept."""
        since_s = head.lost_s
        if (
            since_s is not None
            and self._ground.agenda.now_s - since_s >= self._ground.times.recover_s
        ):
            self._requeue(head.give_back())

    def _requeue(self, jobs: list[SimulatedJob]) -> None:
        for job in jobs:
            self._ground.calls.given_back(job)
