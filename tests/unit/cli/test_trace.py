"""Traces as Perfetto reads them: events of a stage follow each other, and stages share one time
line."""

from __future__ import annotations

from typing import Any

from shardline.cli.trace import chrome_trace
from shardline.contract.wire import StageTrace, StepSpan


def span(step: int, began_us: int, *, wait_us: int = 0, idle_us: int = 0) -> StepSpan:
    """Ten microseconds of hop, 30 of computation, 5 of hop."""
    return StepSpan(
        epoch=2,
        step=step,
        began_us=began_us,
        compute_began_us=began_us + 10,
        compute_us=30,
        ended_us=began_us + 45,
        wait_us=wait_us,
        idle_us=idle_us,
        rows=2,
        tokens=8,
        context=17,
        sampled=1,
    )


def stage(worker: str, layers: tuple[int, int], *steps: StepSpan) -> StageTrace:
    return StageTrace(worker=worker, pipeline="p", layers=layers, steps=steps)


def times(trace: dict[str, Any], pid: int) -> list[tuple[str, int, int]]:
    return [
        (e["name"], e["ts"], e["dur"])
        for e in trace["traceEvents"]
        if e["pid"] == pid and e["ph"] == "X"
    ]


def test_parts_of_a_step_follow_each_other_and_times_begin_at_0() -> None:
    trace = chrome_trace(
        [
            stage("head", (0, 6), span(0, 1_000_000)),
            stage("tail", (6, 12), span(0, 1_000_050), span(1, 1_000_200, wait_us=60, idle_us=45)),
        ]
    )
    assert times(trace, 0) == [("hop", 0, 10), ("compute", 10, 30), ("hop", 40, 5)]
    assert times(trace, 1)[3:] == [
        ("wait", 140, 60),
        ("hop", 200, 10),
        ("compute", 210, 30),
        ("hop", 240, 5),
    ]
    assert trace["otherData"] == {"began_unix_us": 1_000_000}
    event = trace["traceEvents"][-1]
    assert event["args"] == {
        "epoch": 2,
        "step": 1,
        "rows": 2,
        "tokens": 8,
        "context": 17,
        "sampled": 1,
    }


def test_a_head_waits_before_its_pipeline_is_idle() -> None:
    trace = chrome_trace(
        [stage("head", (0, 6), span(0, 100), span(1, 500, wait_us=40, idle_us=300))]
    )
    assert times(trace, 0)[3] == ("wait", 60, 40)


def test_each_stage_is_named_with_its_layers() -> None:
    trace = chrome_trace([stage("head", (0, 6)), stage("tail", (6, 12))])
    names = [
        event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"
    ]
    assert names == ["head, layers 0-5", "tail, layers 6-11"]
