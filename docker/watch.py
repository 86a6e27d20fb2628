"""Flower in a container: never without a password, connected by Shardline's own settings. Knows no
job.

Not named after what it runs: Python would find this file in place of the package.
"""

from __future__ import annotations

import os

from celery import Celery
from pydantic import Field, SecretStr

from shardline.base.config import Settings
from shardline.contract.queues import celery_settings


class FlowerSettings(Settings):
    """Flower's own options come from its FLOWER_* variables."""

    flower_auth: SecretStr = Field(
        description="user:password of Flower's page and API", min_length=3
    )


def main() -> None:
    """Runs Flower until SIGTERM."""
    settings = FlowerSettings()
    # Through the environment: a command line could be read in the list of processes.
    os.environ["FLOWER_BASIC_AUTH"] = settings.flower_auth.get_secret_value()
    app = Celery("shardline.flower")
    app.conf.update(celery_settings(settings))
    app.start(["flower"])


if __name__ == "__main__":
    main()
