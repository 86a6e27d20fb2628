"""Deliveries that wait for a claim: none is lost, and nobody is asked twice for nothing."""

from __future__ import annotations

from typing import cast

import pytest

from services.stage.celery.delivery import Delivery
from services.stage.jobs.claim_queue import ClaimQueue


def make_deliveries(num: int) -> list[Delivery]:
    """Told apart by identity: the queue never looks inside."""
    return [cast(Delivery, object()) for _ in range(num)]


@pytest.fixture
def claim_queue() -> ClaimQueue:
    return ClaimQueue()


def test_deliveries_are_taken_in_their_order_and_once(claim_queue: ClaimQueue) -> None:
    arrived = make_deliveries(3)
    for delivery in arrived:
        claim_queue.put(delivery)
    assert claim_queue

    assert [claim_queue.take(), claim_queue.take()] == [arrived, []]
    assert not claim_queue


def test_deliveries_put_back_come_before_new_ones(claim_queue: ClaimQueue) -> None:
    first, second, late = make_deliveries(3)
    claim_queue.put(first)
    claim_queue.put(second)
    claim_queue.put_back(claim_queue.take())
    assert not claim_queue, "nothing has changed"

    claim_queue.put(late)

    assert claim_queue
    assert claim_queue.take() == [first, second, late]


def test_a_delivery_put_back_is_offered_again_only_after_a_change(claim_queue: ClaimQueue) -> None:
    claim_queue.again()
    assert not claim_queue
    held = make_deliveries(1)
    claim_queue.put_back(held)
    assert claim_queue, "something had changed before it was put back"

    assert claim_queue.take() == held
    claim_queue.put_back(held)
    assert not claim_queue
