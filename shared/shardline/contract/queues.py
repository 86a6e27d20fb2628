"""Celery's names and settings, one truth for every service. Imports no Celery: producers may not
have it."""

from __future__ import annotations

import os
import re
from typing import Any
from zlib import crc32

from shardline.base.config import Settings, result_address
from shardline.base.redis_url import RedisAddress
from shardline.contract.job import PRIORITIES

INTAKE_QUEUE = "shardline.intake"
SUBMIT_TASK = "shardline.submit"
GENERATE_TASK = "shardline.generate"
TRACE_COMMAND = "shardline_trace"
"""Celery's remote control: a stage tells its last steps."""


def generate_queue(model: str) -> str:
    """The queue from which the heads of `model` take job ids."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "-", model)
    # `a/b` and `a-b` are two models: a checksum of the name keeps them apart.
    return (
        f"shardline.generate.{plain}"
        if plain == model
        else f"shardline.generate.{plain}.{crc32(model.encode()):08x}"
    )


def stage_queue(name: str) -> str:
    """The queue of a stage that is no head: nothing is ever sent there; it keeps the worker
    addressable."""
    return f"shardline.stage.{name}"


OVERRIDES = (
    "CELERY_BROKER_URL",
    "CELERY_BROKER_READ_URL",
    "CELERY_BROKER_WRITE_URL",
    "CELERY_RESULT_BACKEND",
)
"""Variables that Celery prefers to any configuration. A team sets them for its own applications."""


def celery_settings(settings: Settings) -> dict[str, Any]:
    """Celery configuration shared by relays, stages and Flower. JSON only; late acks bound what a
    worker lets in. What would override it leaves this process's environment."""
    for name in OVERRIDES:
        os.environ.pop(name, None)
    broker = RedisAddress.parse(settings.redis_url)
    return {
        "broker_url": broker.broker_url(),
        # Flower reads them here.
        "broker_use_ssl": False if broker.tls is None else dict(broker.tls),
        **_result_backend(settings.result_backend),
        "task_serializer": "json",
        "result_serializer": "json",
        "accept_content": ["json"],
        "task_default_queue": INTAKE_QUEUE,
        "task_create_missing_queues": True,
        "task_acks_late": True,
        "task_reject_on_worker_lost": False,
        "worker_prefetch_multiplier": 1,
        "worker_send_task_events": True,
        "task_send_sent_event": False,
        "worker_hijack_root_logger": False,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "broker_transport_options": {
            "priority_steps": list(PRIORITIES),
            "queue_order_strategy": "priority",
            # Much longer than any lease: relays send lost messages again, Redis's own redelivery
            # only tidies up.
            "visibility_timeout": 3600,
            "socket_connect_timeout": 5,
            "socket_keepalive": True,
            "health_check_interval": 10,
            **broker.transport_options(),
        },
    }


def _result_backend(url: str | None) -> dict[str, Any]:
    """Celery's own URL, whatever backend it names; a Redis is reached as the broker is."""
    address = None if url is None else result_address(url)
    if address is None:
        return {"result_backend": url or "disabled://"}
    tls = {} if address.tls is None else {"redis_backend_use_ssl": dict(address.tls)}
    options = {"result_backend_transport_options": address.transport_options()}
    return {"result_backend": address.celery_url(), **tls, **options}
