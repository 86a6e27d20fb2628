"""Stages of two versions, or of two copies of the weights: refused by name, where an operator
looks; spares serve."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from services.stage.hop.sockets import Sockets
from shardline.contract.wire import PROTOCOL_VERSION, Capacity, StageCard, decode_card, encode_card
from tests.links import NUM_LAYERS, Pipes, make_card, open_pipes
from tests.polling import until

POLL_MS = 20
NEWER = PROTOCOL_VERSION + 1


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    with open_pipes(Sockets(bind="tcp://127.0.0.1")) as pipes:
        yield pipes


@pytest.fixture
def newer() -> Iterator[StageCard]:
    """The card of a stage of the next version: it answers whatever it reads in its own.

    A test asks for it before `pipes`, whose heads are gone then when its socket closes: where a
    peer connects meanwhile, libzmq may lose a command (1 of 1,700), and `term` waits for ever.
    """
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    stopping = threading.Event()

    def answer() -> None:
        while not stopping.is_set():
            if router.poll(POLL_MS):
                identity, _ = router.recv_multipart()
                router.send_multipart(
                    [identity, struct.pack("<2sH", b"SC", NEWER) + b"\xc1 of another form"]
                )
        router.close(linger=0)

    thread = threading.Thread(target=answer)
    thread.start()
    yield msgspec.structs.replace(make_card(8, NUM_LAYERS), control=f"tcp://127.0.0.1:{port}")
    stopping.set()
    thread.join()
    context.term()


def test_a_head_names_the_version_of_a_stage_of_another_one(newer: StageCard, pipes: Pipes) -> None:
    head = pipes.head(8, cards=lambda: [newer])

    reason = pipes.reason(
        head, f"protocol: the peer speaks protocol version {NEWER}, we speak {PROTOCOL_VERSION}"
    )

    assert newer.worker in reason
    # In each attempt it is forming, then this again.
    until(lambda: head.pipeline.status().reason == reason)


def test_a_card_of_the_version_without_a_capacity_can_be_read() -> None:
    card = make_card(8, NUM_LAYERS)
    fields = msgspec.json.decode(encode_card(card))
    del fields["capacity"]

    read = decode_card(msgspec.json.encode(fields))

    assert read == msgspec.structs.replace(card, capacity=Capacity())


def test_a_head_takes_the_spare_of_its_own_version(newer: StageCard, pipes: Pipes) -> None:
    pipes.stage(8, NUM_LAYERS)

    head = pipes.head(8, cards=lambda: [newer, *pipes.cards()])

    _, spare = head.ready().members
    assert spare.card.worker == pipes.stages[0].link.card().worker


def test_both_fingerprints_are_named_where_one_weight_differs(pipes: Pipes) -> None:
    flipped = "e" + "f" * 63
    pipes.stage(8, NUM_LAYERS, fingerprint=flipped)

    head = pipes.head(8)

    assert pipes.reason(head, f"other weights: {flipped[:12]}, not {'f' * 12}")
