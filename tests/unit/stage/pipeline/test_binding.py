"""A stage obeys one pipeline at a time, and of that the highest epoch: the rules, then the link
that keeps them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from uuid import UUID, uuid4

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from services.stage.hop.sockets import Sockets
from services.stage.pipeline import messages
from services.stage.pipeline.binding import Binding
from services.stage.pipeline.control_client import ControlClient, StageRefusal
from services.stage.pipeline.status import StageStatus
from shardline.base.clock import monotonic_s
from shardline.base.errors import LinkLost
from shardline.contract.wire import StageCard
from tests.links import NUM_LAYERS, PATIENCE_S, TIMES, Pipes, make_card, open_pipes

OURS = UUID(int=1)
OTHERS = UUID(int=2)
UNBIND_S = 5.0
LAST_EPOCH = (1 << 63) - 1
CARD = make_card(8, NUM_LAYERS)


def hello(pipeline: UUID, epoch: int, card: StageCard = CARD) -> messages.Hello:
    return messages.Hello(
        pipeline=pipeline,
        epoch=epoch,
        head="head@here",
        model=card.model,
        fingerprint=card.fingerprint,
        dtype=card.dtype,
        first_layer=card.first_layer,
        last_layer=card.last_layer,
        max_lanes=2,
    )


def ping(pipeline: UUID, epoch: int, seq: int = 1) -> messages.Ping:
    return messages.Ping(pipeline=pipeline, epoch=epoch, seq=seq)


@pytest.fixture
def binding() -> Binding:
    return Binding(CARD, UNBIND_S)


def test_a_free_stage_binds(binding: Binding) -> None:
    assert binding.hello(hello(OURS, 3), 0.0) is None
    assert binding.obeys(ping(OURS, 3), 0.0)


def test_a_bound_stage_refuses_another_pipeline_by_name(binding: Binding) -> None:
    binding.hello(hello(OURS, 3), 0.0)

    refusal = binding.hello(hello(OTHERS, 9), 1.0)

    assert refusal is not None
    assert (refusal.code, refusal.pipeline) == (messages.RefusalCode.BUSY, OTHERS)
    assert f"bound to pipeline {OURS} of head head@here" in refusal.reason
    assert binding.obeys(ping(OURS, 3), 1.0)


@pytest.mark.parametrize("epoch", [2, 3])
def test_an_epoch_that_is_not_higher_is_stale(binding: Binding, epoch: int) -> None:
    binding.hello(hello(OURS, 3), 0.0)

    refusal = binding.hello(hello(OURS, epoch), 1.0)

    assert refusal is not None
    assert refusal.code == messages.RefusalCode.STALE


def test_a_released_stage_still_knows_its_last_epoch(binding: Binding) -> None:
    binding.hello(hello(OURS, 3), 0.0)
    binding.release()

    refusal = binding.hello(hello(OURS, 3), 1.0)

    assert refusal is not None
    assert binding.hello(hello(OURS, 4), 1.0) is None


@pytest.mark.parametrize("is_released", [True, False])
def test_an_epoch_that_nobody_can_pass_is_forgotten_with_its_silent_head(
    binding: Binding, is_released: bool
) -> None:
    binding.hello(hello(OURS, LAST_EPOCH), 0.0)
    if is_released:
        binding.release()

    refusal = binding.hello(hello(OURS, 4), UNBIND_S)

    assert refusal is not None
    assert "not above 9223372036854775807, which this stage forgets after 5 s" in refusal.reason
    assert binding.hello(hello(OURS, 4), UNBIND_S + 0.1) is None
    assert not binding.obeys(ping(OURS, LAST_EPOCH), UNBIND_S + 0.1)


def test_a_head_that_is_heard_keeps_older_epochs_away_for_as_long_as_it_lives(
    binding: Binding,
) -> None:
    binding.hello(hello(OURS, 3), 0.0)
    for second in range(60):
        binding.obeys(ping(OURS, 3), float(second))
        assert binding.hello(hello(OURS, 2), second + 0.5) is not None


def test_a_higher_epoch_of_the_same_pipeline_takes_over(binding: Binding) -> None:
    binding.hello(hello(OURS, 3), 0.0)

    assert binding.hello(hello(OURS, 4), 1.0) is None

    assert binding.obeys(ping(OURS, 4), 1.0)
    assert not binding.obeys(ping(OURS, 3), 1.0)


def test_silence_is_counted_from_the_last_word_of_the_epoch_in_force(binding: Binding) -> None:
    binding.hello(hello(OURS, 3), 0.0)
    binding.obeys(ping(OURS, 3), 4.0)
    binding.obeys(ping(OURS, 2), 8.0)
    binding.obeys(ping(OTHERS, 3), 8.0)

    assert not binding.is_silent(4.0 + UNBIND_S, UNBIND_S)
    assert binding.is_silent(4.1 + UNBIND_S, UNBIND_S)


@pytest.mark.parametrize(
    ("change", "code", "reason"),
    [
        ({"model": "big"}, "model", "the head wants model big, this stage has tiny"),
        ({"fingerprint": "0"}, "weights", "the head wants weights 0, this stage has ffff"),
        ({"dtype": "bfloat16"}, "dtype", "the head wants dtype bfloat16, this stage has float32"),
        ({"first_layer": 7}, "layers", "the head wants layers [7, 12), this stage has [8, 12)"),
    ],
)
def test_a_stage_that_does_not_fit_says_why(
    binding: Binding, change: dict[str, object], code: str, reason: str
) -> None:
    refusal = binding.hello(msgspec.structs.replace(hello(OURS, 3), **change), 0.0)

    assert refusal is not None
    assert refusal.code == code
    assert reason in refusal.reason
    assert binding.bound is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from([OURS, OTHERS]), st.integers(0, 5), st.sampled_from(["hello", "bye"])
        )
    )
)
def test_whatever_heads_say_one_pipeline_at_a_time_and_its_epochs_only_grow(
    calls: list[tuple[UUID, int, str]],
) -> None:
    binding = Binding(CARD, UNBIND_S)
    for pipeline, epoch, word in calls:
        before = binding.bound
        if word == "hello":
            accepted = binding.hello(hello(pipeline, epoch), 0.0) is None
            if before is not None:
                assert accepted == (before.pipeline == pipeline and epoch > before.epoch)
        elif binding.obeys(messages.Bye(pipeline=pipeline, epoch=epoch), 0.0):
            binding.release()
            assert before is not None


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    with open_pipes(Sockets(bind="tcp://127.0.0.1")) as pipes:
        yield pipes


def bind(call: ControlClient, pipeline: UUID, epoch: int) -> messages.Welcome:
    call.send(hello(pipeline, epoch, call.card))
    return call.expect(messages.Welcome, PATIENCE_S)


def test_a_stage_welcomes_with_what_it_can_do(pipes: Pipes) -> None:
    stage = pipes.stage(8, NUM_LAYERS, num_blocks=33)
    call = pipes.call(stage)

    welcome = bind(call, OURS, 1)

    assert welcome.card == call.card
    assert welcome.card.capacity.num_blocks == 33
    assert welcome.address.startswith("tcp://127.0.0.1:")
    call.close()


def test_a_higher_epoch_voids_the_wiring_before(pipes: Pipes) -> None:
    stage = pipes.stage(8, NUM_LAYERS)
    head = pipes.head(8)
    wiring = head.ready()
    stage.wirings.get(timeout=PATIENCE_S)
    call = pipes.call(stage)

    welcome = bind(call, wiring.pipeline, wiring.epoch + 1)

    stage.unbinds.get(timeout=PATIENCE_S)
    assert welcome.epoch == wiring.epoch + 1
    head.losses.get(timeout=PATIENCE_S)
    call.close()


def test_a_head_gets_its_stage_back_from_an_epoch_that_it_cannot_pass(pipes: Pipes) -> None:
    stage = pipes.stage(8, NUM_LAYERS, TIMES.model_copy(update={"unbind_s": 0.3}))
    head = pipes.head(8)
    wiring = head.ready()
    intruder = pipes.call(stage)

    bind(intruder, wiring.pipeline, LAST_EPOCH)
    intruder.close()
    head.losses.get(timeout=PATIENCE_S)

    assert wiring.epoch < head.ready().epoch < LAST_EPOCH


def test_a_head_that_dies_frees_its_stage_after_the_silence(pipes: Pipes) -> None:
    stage = pipes.stage(8, NUM_LAYERS, TIMES.model_copy(update={"unbind_s": 0.3}))
    dying = pipes.call(stage)
    other = pipes.call(stage)
    bind(dying, OURS, 1)
    other.send(hello(OTHERS, 1, other.card))
    with pytest.raises(StageRefusal, match="busy: bound to pipeline"):
        other.expect(messages.Welcome, PATIENCE_S)

    dying.close()
    stage.unbinds.get(timeout=PATIENCE_S)

    assert bind(other, OTHERS, 1).pipeline == OTHERS
    other.close()


def test_a_stage_that_lost_its_epoch_leaves_a_silent_head_after_a_heartbeat(pipes: Pipes) -> None:
    stage = pipes.stage(8, NUM_LAYERS, TIMES.model_copy(update={"unbind_s": 2 * PATIENCE_S}))
    head = pipes.call(stage)
    other = pipes.call(stage)
    bind(head, OURS, 1)

    stage.last_status = StageStatus(epoch=1, error="no steps after 7: the connection was closed")
    stage.unbinds.get(timeout=PATIENCE_S)

    assert bind(other, OTHERS, 1).pipeline == OTHERS
    for call in (head, other):
        call.close()


def test_a_stage_keeps_a_head_that_speaks_though_its_epoch_is_lost(pipes: Pipes) -> None:
    stage = pipes.stage(8, NUM_LAYERS)
    head = pipes.call(stage)
    other = pipes.call(stage)
    bind(head, OURS, 1)
    stage.last_status = StageStatus(epoch=1, error="no steps after 7: the connection was closed")

    until_s = monotonic_s() + 4 * TIMES.heartbeat_s
    while monotonic_s() < until_s:
        head.send(messages.Ping(pipeline=OURS, epoch=1, seq=0))
        other.send(hello(OTHERS, 1, other.card))
        with pytest.raises(StageRefusal, match="busy: bound to pipeline"):
            other.expect(messages.Welcome, PATIENCE_S)

    assert stage.unbinds.empty()
    for call in (head, other):
        call.close()


def test_a_released_stage_is_free_at_once(pipes: Pipes) -> None:
    stage = pipes.stage(8, NUM_LAYERS)
    first = pipes.call(stage)
    second = pipes.call(stage)
    bind(first, OURS, 1)

    first.close(messages.Bye(pipeline=OURS, epoch=1))
    stage.unbinds.get(timeout=PATIENCE_S)

    assert bind(second, OTHERS, 1).pipeline == OTHERS
    second.close()


def test_a_goodbye_of_an_older_epoch_does_nothing(pipes: Pipes) -> None:
    stage = pipes.stage(8, NUM_LAYERS)
    call = pipes.call(stage)
    bind(call, OURS, 1)
    bind(call, OURS, 2)

    call.send(messages.Bye(pipeline=OURS, epoch=1))
    call.send(ping(OURS, 2, seq=5))

    pong = call.receive()
    while pong is None:
        pong = call.receive()
    assert isinstance(pong, messages.Pong)
    assert pong.seq == 5
    call.close()


def test_a_head_that_is_not_obeyed_any_more_is_told(pipes: Pipes) -> None:
    stage = pipes.stage(8, NUM_LAYERS)
    call = pipes.call(stage)

    call.send(ping(OURS, 1))

    with pytest.raises(StageRefusal, match="stale: this stage is not bound to you"):
        call.expect(messages.Ready, PATIENCE_S)
    call.close()


def test_a_next_stage_that_cannot_be_reached_is_a_refusal(pipes: Pipes) -> None:
    stage = pipes.stage(8, NUM_LAYERS)
    call = pipes.call(stage)
    bind(call, OURS, 1)

    call.send(
        messages.Start(
            pipeline=OURS,
            epoch=1,
            place=1,
            num_stages=2,
            num_lanes=2,
            num_blocks=10,
            next_address="tcp://127.0.0.1:1",
        )
    )

    with pytest.raises(StageRefusal, match=r"failed: no link to tcp://127\.0\.0\.1:1"):
        call.expect(messages.Ready, PATIENCE_S)
    assert stage.link.card().bound_to is None
    call.close()


def test_a_head_of_another_version_is_refused_by_name(pipes: Pipes) -> None:
    stage = pipes.stage(8, NUM_LAYERS)
    call = pipes.call(stage)

    call.socket.send(b"SC\x09\x00 whatever version 9 says")

    with pytest.raises(
        StageRefusal, match="protocol: the peer speaks protocol version 9, we speak"
    ):
        call.expect(messages.Welcome, PATIENCE_S)
    call.close()


def test_thousands_of_fuzzed_messages_leave_the_stage_alive(pipes: Pipes) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    stage = pipes.stage(8, NUM_LAYERS)
    intruder = pipes.call(stage)
    call = pipes.call(stage)
    intruder.socket.setsockopt(zmq.SNDTIMEO, int(PATIENCE_S * 1000))
    stranger = make_card(8, NUM_LAYERS, fingerprint="0" * 64)
    valid = [messages.encode(hello(uuid4(), 1, stranger)), messages.encode(ping(OURS, 1))]

    for _ in range(5000):
        raw = bytearray(dice.choice(valid))
        for _ in range(dice.randrange(1, 6)):
            raw[dice.randrange(len(raw))] = dice.randrange(256)
        parts = [
            bytes(raw),
            bytes(raw[: dice.randrange(len(raw))]),
            dice.randbytes(dice.randrange(100)),
        ]
        intruder.socket.send_multipart(dice.sample(parts, dice.randrange(1, 4)))
    intruder.close()

    assert bind(call, OURS, 1 << 40).pipeline == OURS
    assert stage.exits.empty()
    call.close()


def test_a_message_over_the_limit_breaks_only_its_own_link(pipes: Pipes) -> None:
    stage = pipes.stage(8, NUM_LAYERS)
    intruder = pipes.call(stage)
    call = pipes.call(stage)

    intruder.socket.send(b"\0" * (messages.MAX_CONTROL_BYTES + 1))

    with pytest.raises(LinkLost, match="closed"):
        intruder.expect(messages.Welcome, PATIENCE_S)
    assert bind(call, OURS, 1).pipeline == OURS
    intruder.close()
    call.close()
