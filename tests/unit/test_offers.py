"""Tickets that wait for a claim: none is lost and none overtakes, whatever Postgres answers."""

from __future__ import annotations

from typing import cast

import pytest

from services.stage.worker.offers import CLAIM_BATCH, Offers
from services.stage.worker.ticket import Ticket


def tickets(num: int) -> list[Ticket]:
    """Told apart by identity: offers never look inside."""
    return [cast(Ticket, object()) for _ in range(num)]


@pytest.fixture
def offers() -> Offers:
    return Offers()


def test_given_many_tickets_when_taken_then_they_come_in_batches_in_their_order(offers: Offers) -> None:
    all_of_them = tickets(CLAIM_BATCH + 1)
    for ticket in all_of_them:
        offers.put(ticket)

    assert [offers.take(), offers.take(), offers.take()] == [all_of_them[:-1], all_of_them[-1:], []]
    assert not offers


def test_given_postgres_away_when_a_batch_is_put_back_then_it_comes_first_again(offers: Offers) -> None:
    first, second, late = tickets(3)
    offers.put(first)
    offers.put(second)
    taken = offers.take()
    offers.put(late)

    offers.put_back(taken)

    assert offers.take() == [first, second, late]


def test_given_a_ticket_held_back_when_asked_again_then_it_is_there_and_not_before(offers: Offers) -> None:
    (held,) = tickets(1)
    offers.hold_back(held)
    assert not offers

    offers.again()

    assert offers.take() == [held]
    offers.again()
    assert not offers
