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


def test_given_tickets_when_taken_then_they_come_in_their_order_and_once(offers: ClaimQueue) -> None:
    arrived = tickets(3)
    for ticket in arrived:
        offers.put(ticket)
    assert offers

    assert [offers.take(), offers.take()] == [arrived, []]
    assert not offers


def test_given_tickets_put_back_when_another_arrives_then_they_come_first(offers: ClaimQueue) -> None:
    first, second, late = tickets(3)
    offers.put(first)
    offers.put(second)
    offers.put_back(offers.take())
    assert not offers, "nothing has changed"

    offers.put(late)

    assert offers
    assert offers.take() == [first, second, late]


def test_given_a_ticket_put_back_when_asked_again_then_it_is_there_and_not_before(offers: ClaimQueue) -> None:
    offers.again()
    assert not offers
    held = tickets(1)
    offers.put_back(held)
    assert offers, "something had changed before it was put back"

    assert offers.take() == held
    offers.put_back(held)
    assert not offers
