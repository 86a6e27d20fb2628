"""A background thread leaves the interpreter to the one that computes, unless work is urgent."""

from __future__ import annotations

import threading

import pytest

from shardline_server.host.duty_cycle import DutyCycle

PATIENCE_S = 60.0


def test_work_is_at_most_its_share_until_the_longest_rest() -> None:
    duty = DutyCycle(share=0.2, longest_rest_s=0.05)
    assert duty.rest_s(0.01) == pytest.approx(0.04)
    assert duty.rest_s(0.01) / (0.01 + duty.rest_s(0.01)) == pytest.approx(0.8)
    assert duty.rest_s(1.0) == 0.05
    assert duty.rest_s(0.0) == 0.0


def test_a_rest_ends_when_urgent_work_comes() -> None:
    duty = DutyCycle(share=1e-9, longest_rest_s=10 * PATIENCE_S)
    rested = threading.Event()

    def work() -> None:
        with duty:
            sum(range(1_000))
        rested.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while not rested.is_set():
        duty.hasten()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
