"""`python -m services.stage`: one stage in this process, configured by SHARDLINE_*
(docs/reference/settings.md)."""

# ruff: noqa: E402 (the collector must be off before the imports)
from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

# torch and transformers make objects that all stay: to look at them again and again takes an eighth
# of the time.
gc.disable()
# numpy computes nothing in a stage, and its threads would keep ranks from being forks.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from shardline_server.host.threads import spin_environment

SHARED = os.environ.get("SHARDLINE_DEVICE_SHARED", "").lower()
os.environ |= spin_environment(
    os.environ, are_cores_shared=SHARED in ("1", "on", "t", "true", "y", "yes")
)

import msgspec
import structlog
from sqlalchemy import Engine as Database
from sqlalchemy.exc import DBAPIError

from services.stage.app import make_app, serve
from services.stage.backends import Backends, ServerBackends
from services.stage.device import listing
from services.stage.fleet import profiling
from services.stage.fleet.links import Links
from services.stage.fleet.membership import Membership
from services.stage.fleet.peer_weights import with_folders
from services.stage.follower import Follower
from services.stage.head import Head, end_leases_of_predecessor
from services.stage.hop_sockets import hop_sockets
from services.stage.model.weights import fingerprint
from services.stage.runtime import PlacedStage, Stage, info_of, load, pipeline_of, place
from services.stage.settings import StageSettings
from shardline.base import log
from shardline.base.errors import Invalid, Unavailable
from shardline.base.type_info import prepare_loaded
from shardline.store.connection.database import unavailable
from shardline.store.fleets import WorkerOffer
from shardline.store.models import register_model
from shardline_costs import ModelCosts
from shardline_server import metrics
from shardline_server.host.threads import die_with_any_thread, run_in_fresh_thread
from shardline_server.refusals import REFUSED_STATUS, refusing

logger = structlog.get_logger(__name__)

COMMANDS = {"devices": listing.main, "profile": profiling.main}
"""Commands other than the stage itself."""


SWITCH_S = 0.0005
"""How long a thread may keep the interpreter while others wait, on an accelerator. The engine's
gives it up in every operator of torch, dozens of times in a step of 2 ms, and with Python's own
5 ms gets it back after a multiple of the step. On cores it gains nothing."""


def main() -> int:
    """Loads, serves until asked to stop, gives everything back. Returns the exit status."""
    gc.enable()
    with refusing():
        settings = StageSettings()
    log.configure(service="stage", level=settings.log_level, form=settings.log_format)
    die_with_any_thread()
    prepare_loaded()
    try:
        app = make_app(settings)
        backends = ServerBackends(settings)
        if settings.asks_peers:
            settings = copy_models(settings, backends)
        placed = place(settings)
        if not placed.device.is_cpu:
            sys.setswitchinterval(SWITCH_S)
        membership = None
        if settings.is_planned:
            membership, placed = join_fleet(placed, backends)
        else:
            placed = replace(
                placed, profile=profiling.recalled(settings, placed.device, placed.info.path)
            )
        is_head = placed.layers.start == 0
        if is_head:
            database = backends.open_database(application_name=f"shardline {placed.worker}")
            pipeline = pipeline_of(placed.settings, placed.worker, placed.device)
            end_leases_of_predecessor(database, worker=placed.worker, pipeline=pipeline)
            database.dispose()
        loaded = load(placed)
        stage = Head(loaded, backends) if is_head else Follower(loaded, backends)
        stage.start()
        if membership is not None:
            membership.when_moved(partial(make_room, stage))
            if loaded.drift is not None:
                retime = partial(profiling.retime, placed.settings, placed.device, placed.info.path)
                membership.watch(loaded.drift, retime)
    except Invalid as error:
        logger.critical("refused", field=error.field, problem=error.problem, remedy=error.remedy)
        return REFUSED_STATUS
    except Unavailable as error:
        logger.critical("cannot start", problem=str(error))
        return 1
    if settings.metrics_port is not None:
        metrics.serve(settings.metrics_port, stage.meter.registry)
    # What is loaded lives as long as the process: the collector need not look at it again in the
    # hot loop.
    gc.collect()
    gc.freeze()
    serve(app, stage, settings)
    stage.stop()
    if membership is not None:
        membership.leave()
    return 0


def join_fleet(placed: PlacedStage, backends: Backends) -> tuple[Membership, PlacedStage]:
    """Measures the device with each model, offers it, and waits for layers of one. Raises Invalid,
    Unavailable."""
    models = {
        each.name: replace(placed, settings=each, info=info_of(each))
        for each in placed.settings.every_model
    }
    database = backends.open_database(application_name=f"shardline {placed.worker} membership")
    links = Links(placed.settings, {name: each.info.path for name, each in models.items()})
    membership = Membership(
        database, placed.worker, placed.settings.times, tuple(models), links.own
    )
    membership.announce()
    profiles = {
        name: run_in_fresh_thread(
            partial(profiling.profile, each.settings, each.device, fresh=False, together=False)
        )
        for name, each in models.items()
    }
    measured = links.measure(membership.others())
    profiles = {
        name: msgspec.structs.replace(each, links=measured) for name, each in profiles.items()
    }
    if len(models) > 1:  # models that are served later take jobs as well
        register_models(database, models.values())
    membership.join_fleet(
        {
            name: WorkerOffer(shapes=ModelCosts.read(models[name].info.path), profile=each)
            for name, each in profiles.items()
        }
    )
    given = membership.wait_for_layers()
    return membership, replace(
        models[given.model], layers=range(*given.layers), profile=profiles[given.model]
    )


def copy_models(settings: StageSettings, backends: Backends) -> StageSettings:
    """Copies what this host lacks from other workers; returns settings with folders. Raises
    Invalid, Unavailable."""
    database = backends.open_database(application_name=f"shardline {settings.name} copy")
    sockets = hop_sockets(settings)
    try:
        return with_folders(settings, database, sockets)
    finally:
        sockets.close()
        database.dispose()


def register_models(database: Database, models: Iterable[PlacedStage]) -> None:
    """Registers models as their heads will. Raises Unavailable."""
    rows = [
        each.info.row(
            name=each.settings.name,
            fingerprint=fingerprint(each.info.path, each.settings.cache_dir),
            chat_template=each.settings.chat_template,
            reply_family=each.settings.reply_family,
        )
        for each in models
    ]
    try:
        with database.begin() as connection:
            for row in rows:
                register_model(connection, row)
    except DBAPIError as error:
        raise unavailable(error) from error


def make_room(stage: Stage) -> None:
    """Ends this process in good order, but soon: its supervisor starts it again, and it gets other
    layers."""
    stage.skips_drain = True
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    command = COMMANDS.get(sys.argv[1]) if len(sys.argv) > 1 else None
    sys.exit(command(sys.argv[2:]) if command else main())
