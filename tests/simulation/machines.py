"""Processes that run the product's own heads, later stages and relays. Knows how they are made, not
what happens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import msgspec
import zmq
from celery.app.amqp import Queues
from kombu.exceptions import OperationalError as BrokerError
from prometheus_client import CollectorRegistry
from redis.exceptions import RedisError
from sqlalchemy.exc import DBAPIError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from services.relay.celery.celery_results import CeleryResults
from services.relay.loop import LoopContext
from services.relay.outbox import Outbox
from services.relay.sweeper import Sweeper
from services.stage.celery.delivery import Delivery
from services.stage.follower import Follower
from services.stage.head import Head, end_leases_of_predecessor
from services.stage.jobs.delta_publisher import DeltaSink
from services.stage.pipeline.registry import Registry
from services.stage.runtime import LoadedStage, capacity_of, pipeline_of
from shardline.base.config import Times
from shardline.base.errors import Unavailable
from shardline.contract.job import MAX_CRASHES
from shardline.contract.retry_policy import MAX_ATTEMPTS
from shardline.contract.wire import Capacity, StageCard
from shardline_scheduler.offload import OffloadTerms
from shardline_scheduler.step_plan import StepPlan
from shardline_server.metrics import RelayMetrics
from tests.simulation.loom import Event, Loom, Process, current, elapse, now_s
from tests.simulation.servers import Cards, Postgres, Redis, Streams
from tests.simulation.toy import EOS, MAX_LEN, NUM_LAYERS, VOCAB_SIZE, Toy
from tests.simulation.wires import Network, Sockets

TIMES = Times(
    lease_s=4.0,
    heartbeat_s=1.0,
    poll_s=1.0,
    resend_s=4.0,
    drain_s=3.0,
    link_dead_s=1.5,
    stall_s=4.0,
    unbind_s=2.5,
    recover_s=8.0,
    exact_wait_s=6.0,
)
"""In the proportions of the defaults, shorter where that only saves heartbeats."""

SEATS = 4
HUB_POLL_MS = 250
TOKENIZER = Tokenizer(
    WordLevel({f"<{number}>": number for number in range(VOCAB_SIZE)}, unk_token="<0>")
).to_str()
METRICS = RelayMetrics(CollectorRegistry())
SERVER_ERRORS = (DBAPIError, RedisError, BrokerError)


@dataclass(frozen=True, slots=True)
class Model:
    """What heads ask of `ModelInfo`."""

    context_length: int = MAX_LEN
    vocab_size: int = VOCAB_SIZE
    eos_ids: tuple[int, ...] = (EOS,)
    revision: str | None = None
    encoder: None = None

    def row(self, *, name: str, fingerprint: str, **_settings: object) -> Mapping[str, Any]:
        """The row of `models`."""
        return {
            "name": name,
            "revision": self.revision,
            "fingerprint": fingerprint,
            "context_length": self.context_length,
            "vocab_size": self.vocab_size,
            "eos_token_ids": list(self.eos_ids),
            "tokenizer": TOKENIZER,
            "chat_template": None,
            "special_tokens": {},
        }


@dataclass(eq=False, slots=True)
class Site:
    """What all processes share."""

    loom: Loom
    network: Network
    postgres: Postgres
    redis: Redis
    exact: bool
    num_blocks: int
    num_lanes: int | None
    step_s: float
    """Of each stage, about."""
    num_slots: int
    """Of a head; later stages have more."""
    num_incarnations: int = 0
    unfenced: list[str] = field(default_factory=list)
    """Steps that a head began for a claim whose lease was over."""


@dataclass(frozen=True, slots=True)
class SimulatedBackends:
    """The `Backends` of one process."""

    site: Site
    process: Process

    def open_database(self, application_name: str) -> Any:  # noqa: ARG002 (Backends')
        """The one Postgres."""
        return self.site.postgres

    def open_registry(self) -> Registry:
        """Cards in the one Redis."""
        return Cards(self.site.redis)

    def open_delta_sink(self) -> DeltaSink:
        """Streams in it."""
        return Streams(self.site.redis)

    def result_store(self) -> None:
        """Celery's results are not simulated."""

    def exit(self, reason: str) -> None:  # noqa: ARG002 (Backends')
        """A machine starts again by itself."""
        self.process.kill()


@dataclass(frozen=True, slots=True)
class Consumer:
    """Celery's, as a head's subscription sees it between two connections: the choice of queues is
    kept."""

    queues: Queues = field(default_factory=Queues)
    task_consumer: None = None

    @property
    def app(self) -> Any:
        """Where Celery keeps the queues."""
        return SimpleNamespace(amqp=self)

    @property
    def takes_jobs(self) -> bool:
        """The head has subscribed."""
        return bool(self.queues.consume_from)


class Machine:
    """One process, started again after each death as a supervisor does."""

    def __init__(self, site: Site, name: str, restart_s: float) -> None:
        self.site = site
        self.name = name
        self.restart_s = restart_s
        self.may_restart = True
        self.process = Process(site.loom, name)
        self.start()

    def start(self) -> None:
        """A new incarnation."""
        self.process = Process(self.site.loom, self.name)
        self.process.on_death.append(self._come_back)
        self.process.spawn(self.run, "main")

    def run(self) -> None:
        """The main thread."""
        raise NotImplementedError

    def _come_back(self) -> None:
        if self.may_restart:
            self.site.loom.after(self.restart_s, self.start)


class StageMachine(Machine):
    """Parts that heads and later stages share."""

    def __init__(
        self, site: Site, name: str, layers: range, *, restart_s: float, is_deadly: bool
    ) -> None:
        self.layers = layers
        self.is_deadly = is_deadly
        """A poisoned prompt kills it."""
        self.toy: Toy | None = None
        super().__init__(site, name, restart_s)

    def load(self) -> LoadedStage:
        """The shard, in no time."""
        site = self.site
        site.num_incarnations += 1
        self.toy = Toy(
            loom=site.loom,
            layers=self.layers,
            num_blocks=site.num_blocks,
            token_budget=64,
            max_open=2 * SEATS,
            exact=site.exact,
            step_s=site.step_s,
            salt=site.num_incarnations,
            on_step=self.on_step,
            on_poison=self.process.kill if self.is_deadly else None,
            offload=OffloadTerms(num_slots=site.num_slots + self.layers.start),
        )
        return LoadedStage(
            settings=cast(Any, _settings(self.name, site)),
            info=cast(Any, Model()),
            layers=self.layers,
            device=cast(Any, SimpleNamespace(name="cpu:0", release=lambda: None)),
            executor=cast(Any, self.toy),
            card=self._card(capacity_of(cast(Any, self.toy), power=None)),
            sockets=Sockets(site.network, self.process, dead_s=TIMES.link_dead_s),
            worker=self.name,
        )

    def on_step(self, plan: StepPlan) -> None:
        """Before a step is computed."""

    def _card(self, capacity: Capacity) -> StageCard:
        return StageCard(
            incarnation=f"{self.name} {self.site.num_incarnations}",
            worker=self.name,
            model="m",
            fingerprint="w",
            dtype="float32",
            first_layer=self.layers.start,
            last_layer=self.layers.stop,
            num_layers=NUM_LAYERS,
            control="",
            device="cpu:0",
            weights_dtype="float32",
            machine=self.name,
            capacity=capacity,
        )


class LaterMachine(StageMachine):
    """A middle or tail."""

    later: Follower | None = None

    def run(self) -> None:
        """Starts its threads."""
        self.later = Follower(self.load(), SimulatedBackends(self.site, self.process))
        self.later.start()


class HeadMachine(StageMachine):
    """A head with Celery's part: it takes messages while it has seats, and settles deliveries."""

    head: Head | None = None
    num_deliveries = 0
    is_draining = False

    def run(self) -> None:
        """Celery's thread."""
        self.is_draining = False
        self.num_deliveries = 0
        loaded = self.load()
        consumer = Consumer()
        backends = SimulatedBackends(self.site, self.process)
        head = self.head = Head(loaded, backends)
        name = pipeline_of(loaded.settings, loaded.worker, loaded.device)
        try:
            end_leases_of_predecessor(
                backends.open_database("starts"), worker=loaded.worker, pipeline=name
            )
            head.start()
        except Unavailable:
            self.process.kill()
        head.subscription.attach(consumer)
        poller = loaded.sockets.poller()
        poller.register(head.hub.fd, zmq.POLLIN)
        deliveries: dict[int, Delivery] = {}
        number = 0
        while True:
            head.hub.take()
            self.num_deliveries = len(deliveries)
            has_room = consumer.takes_jobs and not self.is_draining and len(deliveries) < SEATS
            job_id = self._message() if has_room else None
            if job_id is None:
                poller.poll(HUB_POLL_MS)
                continue
            number += 1
            deliveries[number] = Delivery(
                number=number,
                job_id=job_id,
                hub=head.hub,
                on_accepted=lambda *_: None,
                on_ended=lambda _: None,
                forget=lambda number: deliveries.pop(number, None) is not None,
            )
            head.delivery_handler.offer(deliveries[number])

    def drain(self) -> None:
        """SIGTERM: finish what can be finished, give back the rest, go."""
        self.process.spawn(self._drain, "drain")

    def _drain(self) -> None:
        head = self.head
        if head is None or self.is_draining:
            return
        self.is_draining = True
        head.delivery_handler.close()
        until_s = now_s() + TIMES.drain_s
        while self.num_deliveries and now_s() < until_s:
            elapse(0.1)
        head.delivery_handler.give_back()
        elapse(TIMES.drain_s / 3)
        head.stop()
        self.process.kill()

    def _message(self) -> str | None:
        try:
            return self.site.redis.take()
        except RedisError:
            return None

    def on_step(self, plan: StepPlan) -> None:
        """No step may begin for a claim whose lease is over."""
        head = self.head
        if head is None:
            return
        granted_s = self.site.postgres.tables.granted_s
        step, sequences = head._scheduler._flights[-1]
        assert step == msgspec.structs.replace(plan, idle_us=0)
        for sequence in sequences:
            job_id, fence = sequence.request.key
            until_s = granted_s[UUID(job_id), fence]
            if now_s() > until_s:
                self.site.unfenced.append(
                    f"{self.name}: {job_id} at fence {fence}, {now_s() - until_s:.2f} s late"
                )


class RelayMachine(Machine):
    """A relay's outbox and sweeper."""

    def run(self) -> None:
        """Two loops; what fails is tried again."""
        site = self.site
        context = LoopContext(
            database=cast(Any, site.postgres), times=TIMES, metrics=cast(Any, METRICS)
        )
        outbox = Outbox(context, publisher=cast(Any, site.redis), redis=cast(Any, site.redis))
        sweeper = Sweeper(context, results=CeleryResults(context, backend_app=None))
        self.process.spawn(lambda: self._loop(sweeper.turn, Event()), "sweeper")
        self._loop(outbox.turn, self._doorbell())

    def _doorbell(self) -> Event:
        """NOTIFY wakes the outbox, most times."""
        bell = Event()
        process = current().process
        bells = self.site.postgres.tables.on_bell
        bells.append(bell.set)
        process.on_death.append(lambda: bells.remove(bell.set))
        return bell

    def _loop(self, turn: Callable[[], float], bell: Event) -> None:
        while True:
            try:
                pause_s = turn()
            except SERVER_ERRORS:
                pause_s = self.site.loom.rng.uniform(0.1, 1.0)
            bell.wait(max(0.02, pause_s))
            bell.clear()


def _settings(name: str, site: Site) -> SimpleNamespace:
    return SimpleNamespace(
        times=TIMES,
        name="m",
        pipeline=name,
        is_planned=False,
        seats=SEATS,
        interactive_seats=0,
        token_budget=64,
        lanes=site.num_lanes,
        prefix_cache=True,
        chat_template=None,
        reply_family=None,
        prompt_lookup=16,
        adapters_dir=None,
        dtype="float32",
        hop_activations="same",
        max_crashes=MAX_CRASHES,
        max_attempts=MAX_ATTEMPTS,
    )
