"""Tickets that wait for a claim: none is lost, and nobody is asked twice for nothing."""

from __future__ import annotations

from typing import cast

import pytest

from services.stage.celery.delivery import Delivery
from services.stage.jobs.claim_queue import ClaimQueue


def tickets(num: int) -> list[Delivery]:
    """Told apart by identity: offers never look inside."""
    return [cast(Delivery, object()) for _ in range(num)]


@pytest.fixture
def offers() -> ClaimQueue:
    return ClaimQueue()


def test_tickets_are_taken_in_their_order_and_once(offers: ClaimQueue) -> None:
    arrived = tickets(3)
    for ticket in arrived:
        offers.put(ticket)
    assert offers

    assert [offers.take(), offers.take()] == [arrived, []]
    assert not offers


def test_tickets_put_back_come_before_new_ones(offers: ClaimQueue) -> None:
    first, second, late = tickets(3)
    offers.put(first)
    offers.put(second)
    offers.put_back(offers.take())
    assert not offers, "nothing has changed"

    offers.put(late)

    assert offers
    assert offers.take() == [first, second, late]


def test_a_ticket_put_back_is_offered_again_only_after_a_change(offers: ClaimQueue) -> None:
    offers.again()
    assert not offers
    held = tickets(1)
    offers.put_back(held)
    assert offers, "something had changed before it was put back"

    assert offers.take() == held
    offers.put_back(held)
    assert not offers
