"""The stage's Celery app and its worker. The only file that starts Celery; the pool finds its stage
on the app."""

from __future__ import annotations

from typing import Any, Never

from celery import Celery
from celery.apps.worker import Worker
from celery.signals import worker_ready

import services.stage.celery.remote_control  # noqa: F401 (registers the remote-control commands)
from services.stage.celery.bootsteps import SeatLimit
from services.stage.runtime import Stage
from services.stage.settings import StageSettings
from shardline.contract.queues import GENERATE_TASK, celery_settings, stage_queue
from shardline_server.broker import ExpiringControl

POOL = "services.stage.celery.pool:EnginePool"


def make_app(settings: StageSettings) -> Celery:
    """Returns a Celery app that knows the one task. Its body never runs: the pool's engine does the
    work."""
    app = Celery("shardline.stage", set_as_current=True, control=ExpiringControl)
    shared = celery_settings(settings)
    app.conf.update(
        shared,
        # Relays send again what a dead worker had taken, so Redis need not note who has what: four
        # commands less for each job.
        broker_transport_options={**shared["broker_transport_options"], "ack_emulation": False},
        worker_pool=POOL,
        worker_enable_prefetch_count_reduction=False,
        worker_soft_shutdown_timeout=0,
        # Celery stores in the thread that serves the queue, and an error there ends the worker.
        result_backend="disabled://",
    )

    app.steps["consumer"].add(SeatLimit)

    @app.task(name=GENERATE_TASK)
    def generate(job_id: str) -> Never:
        raise AssertionError(f"the pool runs {job_id}, not this body")

    return app


def serve(app: Celery, stage: Stage, settings: StageSettings) -> None:
    """Runs Celery's worker in this thread until it is asked to stop; warm shutdown drains."""
    app.shardline = stage

    def on_ready(sender: Any, **_: Any) -> None:
        if stage.subscription is not None:
            stage.subscription.attach(sender)

    worker_ready.connect(on_ready, weak=False)
    # Not through Celery's command line, which imports a shell, a web server and 200 modules more.
    Worker(
        app=app,
        hostname=stage.worker,
        concurrency=settings.seats,
        queues=stage_queue(stage.worker.partition("@")[0]),
        loglevel=settings.log_level,
        without_gossip=True,
        without_mingle=True,
    ).start()
