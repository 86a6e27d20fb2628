"""Who may be claimed: within the seats, interactive jobs in seats of their own, and suspects soon
but alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from services.stage.celery.delivery import Delivery
from services.stage.celery.hub_calls import HubCalls
from services.stage.hop.wakeup import Wakeup
from services.stage.jobs import quarantine
from services.stage.jobs.live_job import LiveJob
from services.stage.jobs.quarantine import ISOLATED_STEPS, ClaimContext, Seats, claimable

SEATS = Seats(num_any=4, num_interactive=2)
HUB = HubCalls(Wakeup())
NOW_S = 100.0
BEAT_S = 1.0


def delivery(name: str, priority: int = 5, waited_s: float = 0.0) -> Delivery:
    return Delivery(
        number=0,
        job_id=name,
        priority=priority,
        hub=HUB,
        on_accepted=lambda *_: None,
        on_ended=lambda _: None,
        forget=lambda _: True,
        began_s=NOW_S - waited_s,
    )


class Live:
    """What a decision reads of a live job."""

    def __init__(self, *, is_unsaved: bool = False, crashes: int = 0, began_step: int = 0) -> None:
        self.is_unsaved = is_unsaved
        self.began_step = began_step
        self.is_quarantined = crashes > 0


def claimed(
    deliveries: Sequence[Delivery],
    suspects: Sequence[str] = (),
    live: Sequence[Live] = (),
    *,
    num_steps: int = 0,
    is_moving: bool = True,
) -> list[str]:
    context = ClaimContext(
        live=cast(list[LiveJob], list(live)),
        now_s=NOW_S,
        heartbeat_s=BEAT_S,
        num_steps=num_steps,
        is_moving=is_moving,
    )
    return [one.job_id for one in claimable(deliveries, suspects, SEATS, context)]


def test_batch_jobs_leave_the_reserve_of_seats_to_interactive_ones() -> None:
    batch = [delivery(f"batch {number}", priority=5 + number) for number in range(9)]
    urgent = [delivery(f"urgent {number}", priority=3) for number in range(3)]

    assert claimed([*batch[:5], *urgent]) == ["urgent 0", "urgent 1", "urgent 2", "batch 0"]
    assert claimed([*batch, *urgent], live=[Live()] * 4) == ["urgent 0", "urgent 1"]
    assert claimed([*batch, *urgent], live=[Live()] * 6) == []
    assert claimed(batch, live=[Live()] * 3) == ["batch 0"]


def test_only_the_suspect_waits_while_prompts_are_computed() -> None:
    offered = [delivery("a"), delivery("suspect"), delivery("b")]

    assert claimed(offered, ["suspect"], [Live(is_unsaved=True)]) == ["a", "b"]
    assert claimed(offered, ["suspect"], [Live()]) == ["suspect"]


def test_a_suspect_is_claimed_within_two_heartbeats_of_endless_arrivals() -> None:
    """Each arrival is claimed while it may, and none of them ever gets a token."""
    live = [Live(is_unsaved=True)]
    for beat in range(3):
        offered = [delivery("suspect", waited_s=beat * BEAT_S), delivery(f"new {beat}")]
        chosen = claimed(offered, ["suspect"], live)
        if chosen == ["suspect"]:
            break
        live += [Live(is_unsaved=True) for _ in chosen]

    assert chosen == ["suspect"]
    assert beat * BEAT_S <= 2.0


def test_no_more_jobs_are_claimed_once_a_suspect_has_waited() -> None:
    offered = [delivery("suspect", waited_s=quarantine.PATIENCE_BEATS * BEAT_S), delivery("new")]

    assert claimed(offered, ["suspect"], [Live(is_unsaved=True)]) == []


def test_an_overdue_suspect_is_not_claimed_into_a_hanging_engine() -> None:
    offered = [delivery("suspect", waited_s=60.0)]

    assert claimed(offered, ["suspect"], [Live(is_unsaved=True)], is_moving=False) == []


def test_a_suspect_without_a_free_seat_holds_up_nobody_who_has_one() -> None:
    offered = [delivery("suspect", waited_s=60.0), delivery("urgent", priority=0)]

    assert claimed(offered, ["suspect"], [Live()] * 4) == ["urgent"]


def test_others_wait_a_bounded_number_of_steps_for_a_suspects_long_prompt() -> None:
    suspect = Live(is_unsaved=True, crashes=1, began_step=7)

    assert claimed([delivery("new")], live=[suspect], num_steps=7 + ISOLATED_STEPS - 1) == []
    assert claimed([delivery("new")], live=[suspect], num_steps=7 + ISOLATED_STEPS) == ["new"]
    assert claimed([delivery("new")], live=[suspect], num_steps=0) == [], (
        "the count starts anew with an epoch"
    )


def test_the_first_of_several_suspects_is_claimed_alone() -> None:
    offered = [delivery("b"), delivery("a"), delivery("other")]

    assert claimed(offered, ["a", "b"]) == ["a"]
