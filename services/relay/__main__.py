"""`python -m services.relay`: one relay, until SIGTERM."""

from __future__ import annotations

import os

from services.relay.app import make_app
from services.relay.settings import RelaySettings
from shardline.log import configure
from shardline.queues import INTAKE_QUEUE


def main() -> None:
    """Celery's worker in the form that a relay needs."""
    settings = RelaySettings()
    configure(service="relay", level=settings.log_level, form=settings.log_format)
    make_app(settings).worker_main(
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
