"""Several heads want the same stages: they form their pipelines without deadlock, and release what
they do not use."""

from __future__ import annotations

import queue
import random
from collections.abc import Iterator

import pytest
import zmq

from services.stage.hop.sockets import Sockets
from services.stage.hop.wiring import Wiring
from tests.links import NUM_LAYERS, PATIENCE_S, TIMES, Pipes, make_card, open_pipes


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    with open_pipes(Sockets(bind="tcp://127.0.0.1")) as pipes:
        yield pipes


def test_two_heads_share_two_tails_without_deadlock(pipes: Pipes) -> None:
    for _ in range(5):
        tails = [pipes.stage(8, NUM_LAYERS), pipes.stage(8, NUM_LAYERS)]
        heads = [pipes.head(8), pipes.head(8)]

        chosen = {head.ready().members[1].card.incarnation for head in heads}

        assert chosen == {tail.link.card().incarnation for tail in tails}
        while pipes.heads:
            pipes.heads.pop().close()
        for tail in tails:
            pipes.lose(tail)


def test_of_two_heads_and_one_chain_one_waits_for_the_other(pipes: Pipes) -> None:
    pipes.stage(4, 8)
    pipes.stage(8, NUM_LAYERS)
    readies: queue.Queue[Wiring] = queue.Queue()
    heads = [pipes.head(4, readies=readies), pipes.head(4, readies=readies)]
    winner = str(readies.get(timeout=PATIENCE_S).pipeline)
    first, other = sorted(heads, key=lambda head: head.pipeline.status().pipeline != winner)
    pipes.reason(other, f"bound to pipeline {winner}")

    pipes.heads.remove(first)
    first.close()

    assert other.ready().num_stages == 3


def test_two_heads_build_two_chains_of_three_without_deadlock(pipes: Pipes) -> None:
    for first_layer, last_layer in [(4, 8), (8, NUM_LAYERS)] * 2:
        pipes.stage(first_layer, last_layer)
    heads = [pipes.head(4), pipes.head(4)]

    wirings = [head.ready() for head in heads]

    assert len({member.card.incarnation for wiring in wirings for member in wiring.members}) == 6


def test_an_attempt_that_fails_releases_what_it_bound(pipes: Pipes) -> None:
    deaf, address = pipes.sockets.bind(zmq.ROUTER, {})
    deaf_card = make_card(8, NUM_LAYERS, control=address)
    middle = pipes.stage(4, 8)
    head = pipes.head(
        4, TIMES.model_copy(update={"link_dead_s": 0.3}), cards=lambda: [*pipes.cards(), deaf_card]
    )

    middle.unbinds.get(timeout=PATIENCE_S)

    assert f"{deaf_card.worker} [8, 12): {deaf_card.worker}: no WELCOME in 0.3 s" in pipes.reason(
        head, "layer 8"
    )
    assert head.readies.empty()
    deaf.close()


def test_stages_that_are_bound_wait_for_a_head_that_tries_many_others(
    pipes: Pipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given stages that do not answer, all of them tried before the one that does, for longer than a
    # stage waits
    monkeypatch.setattr(random, "shuffle", lambda _: None)
    deaf = [pipes.sockets.bind(zmq.ROUTER, {}) for _ in range(3)]
    deaf_cards = [make_card(8, NUM_LAYERS, control=address) for _, address in deaf]
    times = TIMES.model_copy(update={"link_dead_s": 1.0, "unbind_s": 2.5})
    middle = pipes.stage(4, 8, times)
    pipes.stage(8, NUM_LAYERS, times)

    # When a head forms its pipeline
    head = pipes.head(4, times, cards=lambda: [*deaf_cards, *pipes.cards()])

    # Then the first that it bound is still its own
    assert head.ready().num_stages == 3
    assert middle.unbinds.empty()
    for socket, _ in deaf:
        socket.close()
