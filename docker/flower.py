"""Flower in a container: never without a password, settings from Shardline's own. Knows no job."""

from __future__ import annotations

import os
import sys

from celery import Celery
from pydantic import Field, SecretStr

from shardline.config import Settings
from shardline.queues import celery_settings


class FlowerSettings(Settings):
    """`flower_auth` is `user:password`; Compose gives it as a secret file."""

    flower_auth: SecretStr = Field(description="user:password of Flower's page and API")
    flower_port: int = Field(5555, description="port to listen on")


def main() -> None:
    """Runs Flower in this process."""
    settings = FlowerSettings()
    # By the environment, not the command line: a process list must not show it.
    os.environ["FLOWER_BASIC_AUTH"] = settings.flower_auth.get_secret_value()
    app = Celery("shardline.flower")
    app.conf.update(celery_settings(settings))
    app.start(["flower", f"--port={settings.flower_port}", "--address=0.0.0.0", "--max_tasks=10000"])


if __name__ == "__main__":
    sys.exit(main())
