"""Heads form their pipelines from free stages, lose them, and form them anew."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from services.stage.hop.sockets import Sockets
from services.stage.pipeline.status import StageProgress, StageStatus
from shardline.base.errors import Unavailable
from shardline.contract.fleet.lanes import MAX_LANES
from shardline.contract.wire import StageCard
from tests.chaos.network.proxy import Proxy
from tests.links import NUM_LAYERS, PATIENCE_S, TIMES, Pipes, open_pipes, pass_a_step


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    with open_pipes(Sockets(bind="tcp://127.0.0.1")) as pipes:
        yield pipes


def test_a_head_that_holds_all_layers_is_ready_alone(pipes: Pipes) -> None:
    wiring = pipes.head(NUM_LAYERS).ready()

    assert (wiring.stage_index, wiring.num_stages, wiring.num_lanes, wiring.first_lanes) == (
        0,
        1,
        1,
        1,
    )
    assert wiring.is_head
    assert wiring.is_tail
    assert (wiring.receiver, wiring.sender) == (None, None)


def test_two_stages_form_and_pass_steps(pipes: Pipes) -> None:
    tail = pipes.stage(8, NUM_LAYERS, num_blocks=60)
    head = pipes.head(8, num_blocks=80)

    wirings = [head.ready(), tail.wirings.get(timeout=PATIENCE_S)]

    assert [wiring.num_blocks for wiring in wirings] == [60, 60]
    assert [wiring.num_lanes for wiring in wirings] == [MAX_LANES, MAX_LANES]
    assert wirings[0].first_lanes == 2
    assert wirings[1].is_tail
    for step in range(3):
        pass_a_step(wirings[0].pipeline, wirings, step)


def test_a_head_has_the_least_slots_and_the_slowest_copy_of_all_stages(pipes: Pipes) -> None:
    pipes.stage(8, NUM_LAYERS, num_slots=7, move_us=2500)
    pipes.stage(4, 8, num_slots=9, move_us=0)
    wiring = pipes.head(4, num_slots=8).ready()

    assert (wiring.num_slots, wiring.move_s) == (7, 0.0025)


def test_three_stages_form_in_the_order_of_their_layers(pipes: Pipes) -> None:
    tail = pipes.stage(8, NUM_LAYERS)
    middle = pipes.stage(4, 8)
    head = pipes.head(4)

    wirings = [head.ready(), *(stage.wirings.get(timeout=PATIENCE_S) for stage in (middle, tail))]

    assert [wiring.stage_index for wiring in wirings] == [0, 1, 2]
    cards = [member.card for member in wirings[0].members]
    assert [(card.first_layer, card.last_layer) for card in cards] == [(0, 4), (4, 8), (8, 12)]
    pass_a_step(wirings[0].pipeline, wirings, 0)


def test_the_card_says_who_holds_the_stage(pipes: Pipes) -> None:
    tail = pipes.stage(8, NUM_LAYERS)
    assert tail.link.card().bound_to is None

    wiring = pipes.head(8).ready()

    assert tail.link.card().bound_to == str(wiring.pipeline)


def test_equal_stages_give_their_own_exactness_and_others_a_new_one(pipes: Pipes) -> None:
    equal = pipes.stage(8, NUM_LAYERS)
    assert pipes.head(8).ready().exactness == "e"
    pipes.lose(equal)

    pipes.stage(8, NUM_LAYERS, exactness="other threads")

    assert pipes.heads[0].ready().exactness not in ("e", "other threads")


def test_activations_are_int8_between_machines_only_and_then_nothing_is_exact(pipes: Pipes) -> None:
    later = [
        pipes.stage(6, 8),
        pipes.stage(8, 10, machine="far"),
        pipes.stage(10, NUM_LAYERS, machine="far"),
    ]

    wiring = pipes.head(6, far_int8=True).ready()

    assert [member.sends_int8 for member in wiring.members] == [False, True, False, False]
    assert [stage.wirings.get(timeout=PATIENCE_S).sends_int8 for stage in later] == [
        True,
        False,
        False,
    ]
    assert (wiring.sends_int8, wiring.exact) == (False, False)
    assert wiring.exactness != "e"


@pytest.mark.parametrize(("machine", "far_int8"), [("far", False), ("m", True)])
def test_a_pipeline_without_a_rounded_hop_stays_exact(
    pipes: Pipes, machine: str, far_int8: bool
) -> None:
    pipes.stage(8, NUM_LAYERS, machine=machine)
    wiring = pipes.head(8, far_int8=far_int8).ready()
    assert (wiring.sends_int8, wiring.exact, wiring.exactness) == (False, True, "e")


def test_a_head_hears_of_lanes_that_hide_a_slow_link(pipes: Pipes) -> None:
    tail = pipes.stage(8, NUM_LAYERS)
    host, port = tail.link.card().control.removeprefix("tcp://").split(":")
    proxy = Proxy((host, int(port)))
    proxy.start()
    proxy.delay(0.1)
    cards = [replace(tail.link.card(), control=f"tcp://{proxy.host}:{proxy.port}")]
    head = pipes.head(8, cards=lambda: cards)
    epoch = head.ready().epoch

    tail.has_told(StageStatus(epoch=epoch, num_steps=100, compute_us=5_000_000))

    assert head.lanes.get(timeout=PATIENCE_S) == 2 + 4
    proxy.stop()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fingerprint": "0" * 64}, "other weights: 000000000000, not ffffffffffff"),
        ({"dtype": "bfloat16"}, "dtype bfloat16, not float32"),
        ({"num_layers": 24}, "a model of 24 layers, not 12"),
        ({"bound_to": "another"}, "bound to pipeline another"),
    ],
)
def test_a_card_that_does_not_fit_is_named_with_its_reason(
    pipes: Pipes, change: dict[str, Any], reason: str
) -> None:
    stage = pipes.stage(8, NUM_LAYERS, **change)
    head = pipes.head(8, cards=lambda: [stage.link._card])

    assert stage.link._card.worker in pipes.reason(head, reason)


def test_layers_that_leave_a_gap_are_named(pipes: Pipes) -> None:
    pipes.stage(9, NUM_LAYERS)
    head = pipes.head(8)

    reason = pipes.reason(head, "goes on from layer 8 (of 12)")

    assert "[9, 12): its layers do not fit here" in reason


def test_without_any_other_stage_that_is_said(pipes: Pipes) -> None:
    head = pipes.head(8)

    pipes.reason(head, "no other stage is registered")


def test_a_stage_whose_card_was_wrong_refuses_and_a_spare_serves(pipes: Pipes) -> None:
    liar = pipes.stage(8, NUM_LAYERS, fingerprint="0" * 64)
    head = pipes.head(
        8, cards=lambda: [replace(card, fingerprint="f" * 64) for card in pipes.cards()]
    )
    pipes.reason(head, "weights: the head wants weights")

    spare = pipes.stage(8, NUM_LAYERS)

    assert head.ready().members[1].card.incarnation == spare.link.card().incarnation
    assert liar.wirings.empty()


def test_no_epoch_is_taken_while_a_stage_is_missing(pipes: Pipes) -> None:
    epochs = itertools.count(1)
    head = pipes.head(8, next_epoch=epochs.__next__)
    pipes.reason(head, "no other stage is registered")

    pipes.stage(8, NUM_LAYERS)

    assert head.ready().epoch == 1


def test_while_postgres_is_away_the_head_says_so_and_goes_on(pipes: Pipes) -> None:
    answers = iter([None, 5])

    def next_epoch() -> int:
        epoch = next(answers)
        if epoch is None:
            raise Unavailable("Postgres unreachable")
        return epoch

    pipes.stage(8, NUM_LAYERS)

    assert pipes.head(8, next_epoch=next_epoch).ready().epoch == 5


def test_a_lost_stage_is_replaced_by_the_spare_in_a_new_epoch(pipes: Pipes) -> None:
    first = pipes.stage(8, NUM_LAYERS)
    second = pipes.stage(8, NUM_LAYERS)
    head = pipes.head(8)
    before = head.ready()
    dead, spare = (first, second) if not first.wirings.empty() else (second, first)

    pipes.lose(dead)

    assert "closed" in head.losses.get(timeout=PATIENCE_S)
    after = head.ready()
    assert after.epoch > before.epoch
    pass_a_step(after.pipeline, [after, spare.wirings.get(timeout=PATIENCE_S)], 0)


def test_the_survivors_of_a_lost_stage_serve_again(pipes: Pipes) -> None:
    middle = pipes.stage(4, 8)
    tail = pipes.stage(8, NUM_LAYERS)
    head = pipes.head(4)
    head.ready()
    middle.wirings.get(timeout=PATIENCE_S)

    pipes.lose(tail)
    head.losses.get(timeout=PATIENCE_S)
    middle.unbinds.get(timeout=PATIENCE_S)
    returned = pipes.stage(8, NUM_LAYERS)

    wirings = [
        head.ready(),
        *(stage.wirings.get(timeout=PATIENCE_S) for stage in (middle, returned)),
    ]
    pass_a_step(wirings[0].pipeline, wirings, 0)


def test_while_redis_is_away_the_known_stages_serve_again(pipes: Pipes) -> None:
    tail = pipes.stage(8, NUM_LAYERS)
    listings = iter([pipes.cards()])

    def cards() -> list[StageCard]:
        for listing in listings:
            return listing
        raise Unavailable("Redis unreachable")

    head = pipes.head(8, cards=cards)
    first = head.ready()

    head.pipeline.lost(first.epoch, "a frame was lost")

    assert head.losses.get(timeout=PATIENCE_S) == "a frame was lost"
    assert head.ready().epoch > first.epoch
    assert tail.wirings.qsize() == 2


def test_a_loss_of_an_older_epoch_does_nothing(pipes: Pipes) -> None:
    pipes.stage(8, NUM_LAYERS)
    head = pipes.head(8)
    first = head.ready()
    head.pipeline.lost(first.epoch, "once")
    second = head.ready()

    head.pipeline.lost(first.epoch, "told late")
    head.pipeline.lost(second.epoch, "twice")

    assert [head.losses.get(timeout=PATIENCE_S) for _ in range(2)] == ["once", "twice"]


def test_an_error_that_a_stage_reports_loses_the_pipeline_at_once(pipes: Pipes) -> None:
    tail = pipes.stage(8, NUM_LAYERS)
    head = pipes.head(8)
    head.ready()

    tail.fail("step 9 came where step 8 was due")

    assert "step 9 came where step 8 was due" in head.losses.get(timeout=PATIENCE_S)
    head.ready()


def test_a_silent_stage_loses_the_pipeline(pipes: Pipes) -> None:
    times = TIMES.model_copy(update={"link_dead_s": 0.5})
    silent = pipes.stage(8, NUM_LAYERS)
    head = pipes.head(8, times)
    head.ready()

    silent.may_answer.clear()

    assert "silent for" in head.losses.get(timeout=PATIENCE_S)


def test_a_hung_stage_is_told_to_exit(pipes: Pipes) -> None:
    times = TIMES.model_copy(update={"stall_s": 0.5})
    middle = pipes.stage(4, 8)
    tail = pipes.stage(8, NUM_LAYERS)
    head = pipes.head(4, times)
    epoch = head.ready().epoch
    middle.has_told(StageStatus(epoch=epoch, num_steps=7))
    tail.has_told(StageStatus(epoch=epoch, num_steps=6))

    head.last_progress = StageProgress(epoch=epoch, num_steps=6, num_outstanding=1)

    assert "6 of 7 done" in tail.exits.get(timeout=PATIENCE_S)
    assert "hangs" in head.losses.get(timeout=PATIENCE_S)
    assert middle.exits.empty()


def test_a_head_that_hangs_in_its_own_step_exits_and_blames_nobody(pipes: Pipes) -> None:
    tail = pipes.stage(8, NUM_LAYERS)
    head = pipes.head(8, TIMES.model_copy(update={"stall_s": 0.5}))
    epoch = head.ready().epoch
    tail.has_told(StageStatus(epoch=epoch, num_steps=6))

    head.last_progress = StageProgress(
        epoch=epoch, num_steps=6, num_outstanding=1, step_began_s=1.0
    )

    assert "this head hangs" in head.losses.get(timeout=PATIENCE_S)
    assert tail.exits.empty()


def test_what_the_stages_say_stands_in_the_status(pipes: Pipes) -> None:
    tail = pipes.stage(8, NUM_LAYERS)
    head = pipes.head(8)
    epoch = head.ready().epoch

    tail.has_told(StageStatus(epoch=epoch, num_steps=3, num_blocks_used=4))

    (stage,) = head.pipeline.status().stages
    shown = stage.describe()
    assert (shown["worker"], shown["layers"]) == (tail.link.card().worker, "8-11")
    assert (shown["num_steps"], shown["num_blocks_used"]) == (3, 4)


def test_a_pipeline_that_stops_releases_its_stages(pipes: Pipes) -> None:
    tail = pipes.stage(8, NUM_LAYERS)
    head = pipes.head(8)
    head.ready()

    head.close()

    tail.unbinds.get(timeout=PATIENCE_S)
    assert tail.link.card().bound_to is None
    assert head.losses.empty()
