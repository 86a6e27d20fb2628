"""The relay: builds and connects its loops. Knows no Celery worker: `app` starts and stops it."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import partial

import structlog
from celery import Celery
from celery.app.task import Context
from prometheus_client import CollectorRegistry
from tenacity import (
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_when_event_set,
    wait_random_exponential,
)

from services.relay.canceller import Canceller
from services.relay.celery.celery_request import (
    bare_task_of,
    check_without_backend,
    document_of,
    expires_s_of,
    former_id_of,
    job_id_of,
    task_key,
    task_of,
    task_of_tenant,
)
from services.relay.celery.celery_results import CeleryResults
from services.relay.celery.task_ends import TaskEnds, make_ends_app
from services.relay.celery.task_finisher import TaskFinisher, TaskResults
from services.relay.coordinator import Coordinator
from services.relay.intake import Intake
from services.relay.loop import MAX_BACKOFF_S, POSTGRES_ERRORS, REDIS_ERRORS, Loop, LoopContext
from services.relay.notices.ended_stream import EndedStream
from services.relay.notices.webhook_keeper import WebhookKeeper
from services.relay.notices.webhook_sender import WebhookSender
from services.relay.notify_listener import NotifyListener
from services.relay.outbox import Outbox
from services.relay.preparation.preparer import Preparer
from services.relay.rejects import record_reject
from services.relay.retention import Retention
from services.relay.schedule_keeper import ScheduleKeeper
from services.relay.settings import RelaySettings
from services.relay.statistics.energy_rates import EnergyRates
from services.relay.statistics.growth import Growth
from services.relay.statistics.job_counts import JobCounts
from services.relay.submission import Submission, SubmissionResult, store_submissions
from services.relay.sweeper import Sweeper
from shardline.base.clock import monotonic_s
from shardline.base.errors import Invalid
from shardline.base.redis import redis_client
from shardline.contract.queues import SUBMIT_TASK
from shardline.contract.tables import (
    JOBS_CHANNEL,
    LEASES_CHANNEL,
    PREPARE,
    SEND,
    TASKS_CHANNEL,
    WEBHOOKS,
)
from shardline.contract.tenants.tenant_door import TenantDoor
from shardline.store.connection.database import connect
from shardline.store.statistics.costs import RateKind
from shardline.store.tenants.tenant_doors import is_locked_out
from shardline_server import metrics
from shardline_server.celery_results import keeps_results
from shardline_server.failpoints import Point, failpoint
from shardline_server.message_guard import RefusedMessage
from shardline_server.metrics import RelayMetrics
from shardline_server.store.celery_tasks import CeleryTask
from shardline_server.store.crashes import AttemptLimits
from shardline_server.tracing import Tracer

log = structlog.get_logger(__name__)

REDIS_TIMEOUT_S = 2.0
LOOPS = (
    *(Outbox, Preparer, Sweeper, Canceller, Coordinator, Intake, Retention),
    *(CeleryResults, TaskResults, TaskFinisher, JobCounts, EnergyRates, Growth),
    *(WebhookSender, WebhookKeeper, ScheduleKeeper),
)
"""Each may hold a connection of the pool."""

LISTENERS = (NotifyListener, EndedStream)
"""Each has a separate connection."""

REMEDY = (
    f"Send the task {SUBMIT_TASK} with a request as its keyword arguments, "
    "in JSON: see docs/doors.md"
)
"""For a message of the Celery door that is no request."""

JOIN_S = 10.0
"""For all loops together; one that hangs on a frozen server is left behind, and its transaction
rolled back."""


class HeldUp(Exception):
    """A transaction of a tenant holds up its own request, which must not hold up others."""


class Relay:
    """All loops of one relay, and the two things that its Celery worker asks of it."""

    def __init__(self, settings: RelaySettings) -> None:
        self._settings = settings
        self._registry = CollectorRegistry()
        self._metrics = RelayMetrics(self._registry)
        url = settings.database_url.get_secret_value()
        self._database = connect(
            url, application_name="shardline-relay", pool_size=settings.concurrency + len(LOOPS)
        )
        self._redis = redis_client(settings.redis_url, timeout_s=REDIS_TIMEOUT_S)
        self._closing = threading.Event()
        self._rests: dict[TenantDoor, float] = {}
        """When the Celery queue of a tenant that held up its requests is read again."""
        self._tracer = Tracer.from_environment("relay")
        context = LoopContext(
            database=self._database,
            times=settings.times,
            metrics=self._metrics,
            limits=AttemptLimits.of(settings),
            tracer=self._tracer,
        )
        self._spans = context.spans
        publisher = _publisher(settings)
        self._has_backend = settings.result_backend is not None
        self._ends_app = make_ends_app(settings)
        backend_app = self._ends_app if keeps_results(settings) else None
        self._results = CeleryResults(context, backend_app=backend_app)
        outbox = Outbox(context, publisher=publisher, redis=self._redis)
        preparer = Preparer(context, outbox=outbox, results=self._results)
        sweeper = Sweeper(context, results=self._results)
        blocking_s = settings.times.poll_s + REDIS_TIMEOUT_S
        blocking = redis_client(settings.redis_url, timeout_s=blocking_s)
        self._intake = Intake(context, redis=blocking, batch=settings.intake_batch)
        self._canceller = Canceller(context, results=self._results)
        ends = TaskEnds(self._ends_app, has_backend=self._has_backend)
        task_results = TaskResults(context, ends)
        finisher = TaskFinisher(context, ends, task_results)
        webhooks = WebhookSender(context, settings)
        listener = partial(NotifyListener, context, database_url=url)
        self._loops: tuple[Loop, ...] = (
            outbox,
            preparer,
            sweeper,
            JobCounts(context),
            Coordinator(context),
            self._canceller,
            self._results,
            task_results,
            finisher,
            self._intake,
            EnergyRates(context, _energy_rates(settings)),
            Growth(context, keeps_all=settings.retention_days == 0),
            _retention(context, settings),
            webhooks,
            *(WebhookKeeper(context, settings), ScheduleKeeper(context)),
            self._ended_stream(context),
            listener(channel=JOBS_CHANNEL, wakes=_wakes(outbox, preparer)),
            listener(channel=LEASES_CHANNEL, wakes={"": (sweeper,)}),
            listener(channel=TASKS_CHANNEL, wakes={"": (finisher,), WEBHOOKS: (webhooks,)}),
        )
        assert {type(loop) for loop in self._loops} == {*LOOPS, *LISTENERS}

    def start(self) -> None:
        """Start the metrics endpoint and all loops."""
        if self._settings.metrics_port is not None:
            metrics.serve(self._settings.metrics_port, self._registry)
        for loop in self._loops:
            loop.start()

    def close(self) -> None:
        """Make submissions that wait for Postgres give up, so that their messages are requeued."""
        self._closing.set()

    def stop(self) -> None:
        """Stop every loop after its turn. The next relay finds what was left undone."""
        self.close()
        for loop in self._loops:
            loop.stop()
        deadline_s = monotonic_s() + JOIN_S
        for loop in self._loops:
            loop.join(max(0.0, deadline_s - monotonic_s()))
        self._tracer.close()
        self._database.dispose()

    def submit(self, request: Context) -> SubmissionResult:
        """Store a request from the Celery door; it is committed when this returns. Raises
        RetryError when the relay closes while a server is unreachable, and HeldUp."""
        patient = Retrying(
            retry=retry_if_exception_type((*POSTGRES_ERRORS, *REDIS_ERRORS)),
            wait=wait_random_exponential(multiplier=0.1, max=MAX_BACKOFF_S),
            stop=stop_when_event_set(self._closing),
            sleep=sleep_using_event(self._closing),
        )
        return patient(self._submit, request)

    def refuse(self, message: RefusedMessage) -> None:
        """Keep a message of the Celery door that is no request, with its reason. Raises
        redis.RedisError."""
        reason = Invalid("message", message.problem, REMEDY).as_dict()
        record_reject(self._redis, entry=message.task_id, request=message.body, reason=reason)
        door = TenantDoor.of_queue(message.queue)
        task = (
            CeleryTask(task_id=task_key(message.task_id), request="{}")
            if door is None
            else task_of_tenant(door, message.task_id, ignore_result=False)
        )
        self._results.note_refused(task, reason)
        self._metrics.intake.labels(outcome="dead").inc()

    @property
    def poll_s(self) -> float:
        """Returns the seconds between two polls for changes without a notification."""
        return self._settings.times.poll_s

    @property
    def doors(self) -> Collection[TenantDoor]:
        """Returns those of tenants, as last read from Postgres, without those that rest; callable
        from any thread."""
        now_s = monotonic_s()
        return [door for door in self._intake.doors if self._rests.get(door, 0.0) <= now_s]

    def cancel(self, task_ids: Iterable[str], *, running: bool) -> int:
        """Cancel jobs soon, for Celery's revoke; returns how many ids were taken."""
        return self._canceller.cancel(task_ids, running=running)

    def _ended_stream(self, context: LoopContext) -> EndedStream:
        url = self._settings.database_url.get_secret_value()
        size = self._settings.ended_stream_max
        return EndedStream(context, database_url=url, redis=self._redis, max_entries=size)

    def _submit(self, request: Context) -> SubmissionResult:
        began_s = monotonic_s()
        submission = self._submission(request)
        try:
            (result,) = store_submissions(self._database, [submission])
        except POSTGRES_ERRORS as error:
            if submission.tenant is not None and is_locked_out(error):
                self._rest(TenantDoor(submission.tenant))
                raise HeldUp(submission.tenant) from error
            raise
        failpoint(Point.INTAKE_INSERTED, door="celery")
        if result.status == "rejected":
            document = json.dumps(submission.document, default=str)
            record_reject(
                self._redis, entry=str(request.id), request=document, reason=result.reason
            )
        self._metrics.intake.labels(outcome=result.metric_label).inc()
        if result.request is not None:
            self._spans.accepted([result.request], began_s)
        return result

    def _rest(self, door: TenantDoor) -> None:
        """Leave a queue alone for a while, as its stream: it does not take all threads a second
        each, again and again."""
        now_s = monotonic_s()
        resting = {other: until_s for other, until_s in self._rests.items() if until_s > now_s}
        self._rests = {**resting, door: now_s + self._settings.times.lease_s / 2}

    def _submission(self, request: Context) -> Submission:
        """What cannot be read is refused, with its reason, as a request that is invalid."""
        door = TenantDoor.of_queue((request.delivery_info or {}).get("routing_key"))
        submission = (
            self._submission_of_all(request)
            if door is None
            else self._submission_of_tenant(request, door)
        )
        # Tenants had no doors before.
        former = former_id_of(str(request.id)) if door is None else None
        return replace(submission, former_id=former)

    def _submission_of_all(self, request: Context) -> Submission:
        job_id = job_id_of(str(request.id))
        given = dict(request.kwargs or {})
        try:
            task = task_of(self._ends_app, request)
        except Invalid as error:
            return Submission(id=job_id, document=given, task=bare_task_of(request), refused=error)
        try:
            if not self._has_backend:
                check_without_backend(request)
            return Submission(id=job_id, document=document_of(request), task=task)
        except Invalid as error:
            return Submission(id=job_id, document=given, task=task, refused=error)

    @staticmethod
    def _submission_of_tenant(request: Context, door: TenantDoor) -> Submission:
        job_id = job_id_of(str(request.id), door)
        task = task_of_tenant(door, request.id, request.ignore_result)
        tenant = door.tenant
        try:
            task = replace(task, expires_s=expires_s_of(request))
            document = document_of(request)
        except Invalid as error:
            given = dict(request.kwargs or {})
            return Submission(id=job_id, document=given, task=task, refused=error, tenant=tenant)
        return Submission(id=job_id, document=document, task=task, tenant=tenant)


def _wakes(outbox: Outbox, preparer: Preparer) -> dict[str, tuple[Loop, ...]]:
    return {"": (outbox, preparer), SEND: (outbox,), PREPARE: (preparer,)}


def _energy_rates(settings: RelaySettings) -> dict[RateKind, str | None]:
    return {"price": settings.energy_price, "carbon": settings.energy_carbon}


def _retention(context: LoopContext, settings: RelaySettings) -> Retention:
    return Retention(
        context,
        days=settings.retention_days,
        is_default="retention_days" not in settings.model_fields_set,
        audit_days=settings.audit_days,
    )


def _publisher(settings: RelaySettings) -> Celery:
    """An app for sending only: its connections must not block for long, the worker's must."""
    app = Celery("shardline.outbox", set_as_current=False)
    app.conf.update(settings.celery())
    app.conf.broker_transport_options["socket_timeout"] = REDIS_TIMEOUT_S
    app.conf.broker_transport_options["socket_connect_timeout"] = REDIS_TIMEOUT_S
    app.conf.result_backend = "disabled://"
    return app
