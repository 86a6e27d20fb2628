"""Celery's configuration in services and commands, whatever the environment holds for others."""

from __future__ import annotations

import pytest
from celery import Celery

from shardline.base.config import Settings
from shardline.contract.queues import celery_settings


@pytest.mark.parametrize("kind", ["BROKER", "BROKER_READ", "BROKER_WRITE"])
def test_what_a_team_sets_for_its_own_celery_is_not_ours(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for name in (f"CELERY_{kind}_URL", "CELERY_RESULT_BACKEND"):
        monkeypatch.setenv(name, "redis://127.0.0.1:1/7")
    app = Celery(set_as_current=False)
    app.conf.update(celery_settings(Settings(redis_url="redis://127.0.0.1:1/3")))
    addresses = (app.conf.broker_url, app.conf.broker_read_url, app.conf.broker_write_url)
    assert addresses == ("redis://127.0.0.1:1/3",) * 3
    assert app.conf.result_backend == "disabled://"
