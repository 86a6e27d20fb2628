"""Who may be claimed: within the seats, interactive jobs in seats of their own, and suspects soon but alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from services.stage.celery.delivery import Delivery
from services.stage.celery.hub_calls import HubCalls
from services.stage.jobs import quarantine
from services.stage.jobs.live_job import LiveJob
from services.stage.jobs.quarantine import ISOLATED_STEPS, Moment, Seats, claimable

SEATS = Seats(num_any=4, num_interactive=2)
MAILBOX = HubCalls()
NOW_S = 100.0
BEAT_S = 1.0


def ticket(name: str, priority: int = 5, waited_s: float = 0.0) -> Delivery:
    return Delivery(
        number=0,
        job_id=name,
        priority=priority,
        mailbox=MAILBOX,
        on_accepted=lambda *_: None,
        on_ended=lambda _: None,
        forget=lambda _: True,
        began_s=NOW_S - waited_s,
    )


class Live:
    """What a decision reads of a live job."""

    def __init__(self, *, is_unproven: bool = False, crashes: int = 0, began_step: int = 0) -> None:
        self.is_unproven = is_unproven
        self.began_step = began_step
        self.claimed = cast(Any, type("Claimed", (), {"crashes": crashes}))


def claimed(
    tickets: Sequence[Delivery],
    suspects: Sequence[str] = (),
    live: Sequence[Live] = (),
    *,
    num_steps: int = 0,
    is_moving: bool = True,
) -> list[str]:
    moment = Moment(
        live=cast(list[LiveJob], list(live)),
        now_s=NOW_S,
        heartbeat_s=BEAT_S,
        num_steps=num_steps,
        is_moving=is_moving,
    )
    return [one.job_id for one in claimable(tickets, suspects, SEATS, moment)]


def test_given_more_tickets_than_seats_when_claimed_then_batch_jobs_leave_the_reserve_to_interactive_ones() -> None:
    batch = [ticket(f"batch {number}", priority=5 + number) for number in range(9)]
    urgent = [ticket(f"urgent {number}", priority=3) for number in range(3)]

    assert claimed([*batch[:5], *urgent]) == ["urgent 0", "urgent 1", "urgent 2", "batch 0"]
    assert claimed([*batch, *urgent], live=[Live()] * 4) == ["urgent 0", "urgent 1"]
    assert claimed([*batch, *urgent], live=[Live()] * 6) == []
    assert claimed(batch, live=[Live()] * 3) == ["batch 0"]


def test_given_a_suspect_among_others_when_prompts_are_computed_then_only_the_suspect_waits() -> None:
    offered = [ticket("a"), ticket("suspect"), ticket("b")]

    assert claimed(offered, ["suspect"], [Live(is_unproven=True)]) == ["a", "b"]
    assert claimed(offered, ["suspect"], [Live()]) == ["suspect"]


def test_given_arrivals_without_end_when_a_suspect_waits_then_it_is_claimed_within_two_heartbeats() -> None:
    """Each arrival is claimed while it may, and none of them ever gets a token."""
    live = [Live(is_unproven=True)]
    for beat in range(3):
        offered = [ticket("suspect", waited_s=beat * BEAT_S), ticket(f"new {beat}")]
        chosen = claimed(offered, ["suspect"], live)
        if chosen == ["suspect"]:
            break
        live += [Live(is_unproven=True) for _ in chosen]

    assert chosen == ["suspect"]
    assert beat * BEAT_S <= 2.0


def test_given_a_suspect_that_has_waited_when_others_compute_their_prompts_then_no_more_are_claimed() -> None:
    offered = [ticket("suspect", waited_s=quarantine.PATIENCE_BEATS * BEAT_S), ticket("new")]

    assert claimed(offered, ["suspect"], [Live(is_unproven=True)]) == []


def test_given_an_engine_that_hangs_when_a_suspect_is_overdue_then_it_is_not_drawn_in() -> None:
    offered = [ticket("suspect", waited_s=60.0)]

    assert claimed(offered, ["suspect"], [Live(is_unproven=True)], is_moving=False) == []


def test_given_a_suspect_without_a_free_seat_when_it_waits_then_it_holds_up_nobody_who_has_one() -> None:
    offered = [ticket("suspect", waited_s=60.0), ticket("urgent", priority=0)]

    assert claimed(offered, ["suspect"], [Live()] * 4) == ["urgent"]


def test_given_a_suspect_that_runs_when_its_prompt_is_long_then_others_wait_for_some_steps_and_no_longer() -> None:
    suspect = Live(is_unproven=True, crashes=1, began_step=7)

    assert claimed([ticket("new")], live=[suspect], num_steps=7 + ISOLATED_STEPS - 1) == []
    assert claimed([ticket("new")], live=[suspect], num_steps=7 + ISOLATED_STEPS) == ["new"]
    assert claimed([ticket("new")], live=[suspect], num_steps=0) == [], "the count starts anew with an epoch"


def test_given_several_suspects_when_none_runs_then_the_first_in_their_order_is_claimed_alone() -> None:
    offered = [ticket("b"), ticket("a"), ticket("other")]

    assert claimed(offered, ["a", "b"]) == ["a"]
