"""Messages of a tenant's own queue: what relays refuse, and what they keep of the others."""

from __future__ import annotations

from typing import Any

import pytest

from services.relay.celery.celery_request import EMBEDDED, check_of_tenant, headers_of_tenant
from shardline.contract.queues import SUBMIT_TASK

HEADERS = {"task": SUBMIT_TASK, "id": "order-17"}


def body(**links: Any) -> list[Any]:
    return [[], {"prompt": "one"}, {**dict.fromkeys(EMBEDDED), **links}]


@pytest.mark.parametrize("link", EMBEDDED)
def test_a_task_with_a_link_is_refused(link: str) -> None:
    check_of_tenant(HEADERS, body())
    with pytest.raises(ValueError, match="single tasks"):
        check_of_tenant(HEADERS, body(**{link: [{"task": "other"}]}))


def test_headers_that_stand_for_celerys_own_names_do_not_count() -> None:
    odd = {"update": 5, "errbacks": [{"task": "other"}], "timelimit": [1], "delivery_info": {}}
    assert headers_of_tenant(HEADERS | odd) == HEADERS


@pytest.mark.parametrize("task_id", ["\ud800", "a\0b", "x" * 257])
def test_an_id_that_no_result_has_is_refused(task_id: str) -> None:
    with pytest.raises(ValueError, match="256 characters"):
        check_of_tenant({**HEADERS, "id": task_id}, body())
