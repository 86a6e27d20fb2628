"""A thread of its own for what computes before another thread computes for good."""

from __future__ import annotations

import threading

import pytest

from shardline_server.host.threads import run_in_fresh_thread


def test_what_runs_apart_gives_its_result_and_leaves_no_thread() -> None:
    before = threading.active_count()

    thread = run_in_fresh_thread(threading.current_thread)

    assert thread is not threading.current_thread()
    assert not thread.is_alive()
    assert threading.active_count() == before


def test_what_runs_apart_raises_its_own_error() -> None:
    with pytest.raises(ZeroDivisionError):
        run_in_fresh_thread(lambda: 1 // 0)
