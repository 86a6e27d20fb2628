"""The jobs of a load: as a trace says them, in the share of a sample, and what no trace may
hold."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from shardline.base.errors import Invalid
from shardline_fleet.simulator.arrivals import Arrival, Arrivals, read_trace
from shardline_fleet.simulator.fleet_file import FleetFile, LoadFile, Scenario, read_fleet
from shardline_fleet.simulator.simulation import Simulation

HEADER = "at_s,prompt,output\n"
MODEL = (
    "{num_hidden_layers: 4, hidden_size: 64, intermediate_size: 256, "
    "num_attention_heads: 4, vocab_size: 1000}"
)


def trace(folder: Path, text: str) -> Path:
    path = folder / "jobs.csv"
    path.write_text(text)
    return path


def traced(folder: Path, text: str) -> Arrivals:
    return Arrivals(LoadFile(scenario=Scenario.TRACE, trace=trace(folder, text).name), folder)


def test_a_trace_begins_with_its_first_job_in_any_order_and_columns(tmp_path: Path) -> None:
    text = "output,model,prompt,at_s\n8,clerk,20,1764040002.5\n4,clerk,10,1764040000\n"
    assert read_trace(trace(tmp_path, text)) == [
        Arrival(at_s=0.0, prompt=10, output=4),
        Arrival(at_s=2.5, prompt=20, output=8),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has 0 jobs"),
        (HEADER, "has 0 jobs"),
        (HEADER + "0,10,4\n1,0,4\n", "line 3: Expected `int` >= 1"),
        (HEADER + "0,10,\n", "line 2: Expected `int`"),
        (HEADER + "0,10\n", "line 2: Expected `int`"),
        ("at_s,prompt\n0,10\n", "missing required field `output`"),
        ("\x00\xff", "jobs.csv"),
    ],
)
def test_what_is_no_trace_is_refused_by_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = trace(tmp_path, "")
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(Invalid, match=r"load\.trace") as refused:
        read_trace(path)
    assert said in str(refused.value)


def test_a_trace_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"gone.csv cannot be read: No such file"):
        read_trace(tmp_path / "gone.csv")


@pytest.mark.parametrize("load", ["{scenario: trace}", "{trace: jobs.csv}"])
def test_a_trace_and_its_scenario_belong_together(tmp_path: Path, load: str) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(f"model: {MODEL}\ncells: [{{devices: {{l4: 1}}}}]\nload: {load}")
    with pytest.raises(Invalid, match=r"load\.trace"):
        read_fleet(file)


def test_sizes_of_a_trace_are_known_before_it_runs(tmp_path: Path) -> None:
    found = traced(tmp_path, HEADER + "0,10,4\n1,30,8\n")
    assert (found.prompt, found.output, found.max_len) == (20, 6, 39)


def test_a_sample_gets_its_share_of_a_trace(tmp_path: Path) -> None:
    found = traced(tmp_path, HEADER + "0,10,4\n" * 1000)
    assert len([*found.of_share(1.0, random.Random(1))]) == 1000
    assert 200 < len([*found.of_share(0.25, random.Random(1))]) < 300


def test_jobs_of_a_trace_come_when_it_says_and_end_with_its_tokens(tmp_path: Path) -> None:
    trace(tmp_path, HEADER + "0,10,4\n50,10,7\n")
    text = {
        "model": {
            "num_hidden_layers": 4,
            "hidden_size": 64,
            "intermediate_size": 256,
            "num_attention_heads": 4,
            "vocab_size": 1000,
        },
        "cells": [{"devices": {"l4": 1}}],
        "load": {"scenario": "trace", "trace": "jobs.csv"},
    }
    outcome = Simulation(msgspec.convert(text, FleetFile), tmp_path).run()
    assert outcome.jobs == 2
    assert {second: tokens for second, tokens in enumerate(outcome.timeline) if tokens} == {
        0: 4,
        50: 7,
    }
    assert outcome.keeps_bounds
