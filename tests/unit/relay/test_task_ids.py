"""Ids of Celery's tasks as ids of jobs: those that others can name take no other's job."""

from __future__ import annotations

import json
from uuid import UUID, uuid4

import pytest
from celery import Celery
from celery.app.task import Context

from services.relay.celery.celery_request import former_id_of, job_id_of, task_of
from shardline.base.errors import Invalid
from shardline.contract.ids import check_given_id, derived_id, former_id

FIELDS = ("callbacks", "errbacks", "chain")


def test_nobody_can_choose_the_id_of_a_task_that_follows_another() -> None:
    links = {field: [{"task": "mine", "args": [], "kwargs": {}, "options": {}}] for field in FIELDS}
    request = Context(id="order-17", **links)
    kept = json.loads(task_of(Celery(set_as_current=False), request).request)
    ids = [UUID(kept[field][0]["options"]["task_id"]) for field in FIELDS]
    assert len(set(ids)) == len(FIELDS)
    for each in ids:
        with pytest.raises(Invalid, match="version 8"):
            check_given_id(each)


def test_a_task_id_that_callers_may_choose_is_the_jobs() -> None:
    own, derived = uuid4(), derived_id("order-17")
    assert job_id_of(str(own)) == own
    assert job_id_of(str(derived)) == derived_id(str(derived))
    assert job_id_of("order-17") == derived


def test_the_release_before_took_any_uuid_as_it_was() -> None:
    own, derived = uuid4(), derived_id("order-17")
    assert former_id_of(str(own)) is None
    assert former_id_of(str(derived)) == derived
    assert former_id_of("order-17") == former_id("order-17")


def test_an_id_that_is_no_text_has_a_job() -> None:
    assert job_id_of("\ud800").version == 8
    assert former_id_of("\ud800") is None
