"""`python -m services.relay`: one relay, until SIGTERM."""

from __future__ import annotations

import logging
import os

from services.relay.app import app
from services.relay.settings import RelaySettings
from shardline.base.log import configure
from shardline.contract.queues import INTAKE_QUEUE
from shardline_server.host.threads import die_with_any_thread

PROMPT_LOGGERS = ("celery.worker.strategy", "celery.app.trace")
"""Loggers that write every task's arguments: prompts must not be logged."""


def main() -> None:
    """Run Celery's worker with the options of a relay."""
    settings = RelaySettings()
    configure(service="relay", level=settings.log_level, form=settings.log_format)
    die_with_any_thread()
    for name in PROMPT_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    app.worker_main(
        [
            "worker",
            f"--hostname=relay-{os.getpid()}@%h",
            f"--queues={INTAKE_QUEUE}",
            f"--loglevel={settings.log_level}",
            "--without-gossip",
            "--without-mingle",
        ]
    )


if __name__ == "__main__":
    main()
