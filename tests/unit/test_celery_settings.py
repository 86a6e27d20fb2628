"""Celery's configuration in services and commands, whatever the environment holds for others."""

from __future__ import annotations

import pytest
from celery import Celery

from shardline.base.config import Settings
from shardline.contract.queues import OVERRIDES, celery_settings


@pytest.mark.parametrize("name", OVERRIDES)
def test_what_a_team_sets_for_its_own_celery_is_not_ours(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "redis://127.0.0.1:1/7")
    app = Celery(set_as_current=False)
    app.conf.update(celery_settings(Settings(redis_url="redis://127.0.0.1:1/3")))
    addresses = (app.conf.broker_url, app.conf.broker_read_url, app.conf.broker_write_url)
    assert addresses == ("redis://127.0.0.1:1/3",) * 3
    assert app.conf.result_backend == "disabled://"
