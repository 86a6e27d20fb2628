"""The pure parts of `make bench-peers`: what is asked, in which order, what tokens and times say,
what is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.peers import workloads
from tests.benchmarks.peers.limits import shapes as products
from tests.benchmarks.peers.machine import fields
from tests.benchmarks.peers.measure import Figures, Served, Unfair, agreement, quantile
from tests.benchmarks.peers.peer import CONTEXT, last_error
from tests.benchmarks.peers.plan import OURS, PLAN, SLOW, TRACES, Schedule, peers
from tests.benchmarks.peers.report import markdown
from tests.benchmarks.peers.results import HALF, Results
from tests.benchmarks.peers.roof import products_s, weights_ms
from tests.benchmarks.peers.runners.wire import Work as Said
from tests.benchmarks.peers.runners.wire import turn
from tests.benchmarks.peers.workloads import Work
from tests.benchmarks.workload import workload

SHAPES = workloads.shapes()


def served(
    *times_s: tuple[float, ...],
    ids: tuple[tuple[int, ...], ...] | None = None,
    arrivals_s: Any = None,
) -> Served:
    """A run of prompts of one token."""
    work = Work(
        prompts=((3,),) * len(times_s),
        new_tokens=len(times_s[0]),
        arrivals_s=arrivals_s or (0.0,) * len(times_s),
    )
    return Served.of(work, ids or [[7] * len(each) for each in times_s], times_s)


def test_workloads_have_the_sizes_that_their_titles_say() -> None:
    long, short, common = (SHAPES[name].work(1) for name in ("long", "short", "common"))
    assert {len(prompt) for prompt in long.prompts} == {1500}
    assert (len(short.prompts), short.num_prompt_tokens, short.num_output_tokens) == (
        512,
        512 * 32,
        512 * 16,
    )
    assert len({prompt[:512] for prompt in common.prompts}) == 1
    assert min(map(len, common.prompts)) >= 512 + 63
    assert SHAPES["W"].work(2).prompts == workload(64, run=2).prompts


@pytest.mark.parametrize("name", SHAPES)
def test_runs_of_a_workload_share_no_first_token_and_fit_the_context(name: str) -> None:
    one = SHAPES[name].work(1)
    other = SHAPES[name].work(2)
    assert {prompt[0] for prompt in one.prompts}.isdisjoint({prompt[0] for prompt in other.prompts})
    assert [len(prompt) for prompt in one.prompts] == [len(prompt) for prompt in other.prompts]
    assert max(map(len, one.prompts)) + one.new_tokens <= CONTEXT
    assert one == SHAPES[name].work(1)


def test_arrivals_of_a_trace_come_at_its_rate_and_all_others_at_once() -> None:
    arrivals_s = SHAPES["poisson-2"].work(0).arrivals_s
    assert list(arrivals_s) == sorted(arrivals_s)
    assert len(arrivals_s) / arrivals_s[-1] == pytest.approx(2.0, rel=0.1)
    assert set(SHAPES["W"].work(0).arrivals_s) == {0.0}


def test_figures_count_from_arrival_to_the_last_token() -> None:
    run = served((1.0, 1.5, 2.0), (3.0, 3.1, 4.0), arrivals_s=(0.5, 1.0))
    assert run.tokens_per_s == 6 / 4.0
    assert run.waits_s == [0.5, 2.0]
    figures = Figures.of(run)
    assert (figures.ttft_p50_ms, figures.ttft_p99_ms) == (500.0, 2000.0)
    assert (figures.itl_p50_ms, figures.itl_p99_ms) == (500.0, 900.0)
    faster = Figures.of(served((0.1, 0.2)))
    assert Figures.median([figures, faster, faster]) == faster


def test_a_quantile_is_a_value_that_was_measured() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile(list(map(float, range(1, 101))), 0.99) == 99.0
    assert quantile([5.0], 0.01) == 5.0


@pytest.mark.parametrize("ids", [[[1, 2], [1]], [[1, 2]], [[1, 2, 3], [1, 2]]])
def test_an_engine_that_gives_other_numbers_of_tokens_is_unfair(ids: list[list[int]]) -> None:
    work = Work(prompts=((3,), (4,)), new_tokens=2, arrivals_s=(0.0, 0.0))
    with pytest.raises(Unfair, match="2 tokens were asked"):
        Served.of(work, ids, [[0.1] * len(each) for each in ids])


def test_engines_agree_as_far_as_their_first_tokens() -> None:
    times = (1.0,) * 6
    ours = served(times, times, ids=((1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 5, 6)))
    theirs = served(times, times, ids=((1, 2, 3, 4, 9, 9), (1, 2, 9, 4, 5, 6)))
    assert agreement(ours, theirs) == 0.5


def test_every_engine_of_the_plan_is_a_peer_that_has_the_precision() -> None:
    known = peers()
    for precision, workloads_of in PLAN.items():
        for engine, names in workloads_of.items():
            assert precision in known[engine].precisions
            assert set(names) <= set(SHAPES)


def test_slow_engines_and_traces_are_run_once_and_rounds_begin_in_turn() -> None:
    schedule = Schedule(["a", "b", "c"], dict.fromkeys("abc", ("W", TRACES[0])))
    rounds: list[list[tuple[str, str]]] = [[], []]
    for number, asked in enumerate(rounds):
        for workload_name, engine in schedule.round(number, ["W", TRACES[0]]):
            asked.append((workload_name, engine))
            schedule.note(workload_name, engine, SLOW + 0.1 if engine == "c" else 1.0)
    assert rounds[0] == [*(("W", name) for name in "abc"), *((TRACES[0], name) for name in "abc")]
    assert rounds[1] == [("W", "b"), ("W", "a")]


def test_a_dropped_engine_is_asked_no_more() -> None:
    schedule = Schedule(["a", "b"], dict.fromkeys("ab", ("W", "long")))
    schedule.drop("a")
    schedule.drop(("long", "b"))
    assert list(schedule.round(0, ["W", "long"])) == [("W", "b")]


def test_the_floor_of_products_takes_the_best_rate_of_each_shape() -> None:
    measured = [
        {"precision": "bf16", "threads": 2, "shape": name, "rows": rows, "gflop_per_s": rate}
        for name in products()
        for rows, rate in ((1, 1), (64, 10))
    ]
    work = Work(prompts=((3, 4, 5),), new_tokens=2, arrivals_s=(0.0,))
    layers = sum(depth * width for name, (depth, width) in products().items() if name != "logits")
    flop = 2 * (4 * 12 * layers + 2 * 1024 * 32_000)
    assert products_s(work, measured, "bf16", 2) == pytest.approx(flop / 10e9)
    assert weights_ms("bf16", 10.0) == pytest.approx(2 * (12 * layers + 1024 * 32_000) / 10e9 * 1e3)


class Counter:
    """A stepper that gives every open request one token per step."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.widths: list[int] = []

    def add(self, index: int, prompt: list[int], new_tokens: int) -> None:
        """See `Stepper`."""
        assert prompt == [index + 1]
        self.left[index] = new_tokens

    def step(self) -> list[tuple[int, list[int]]]:
        """See `Stepper`."""
        self.widths.append(len(self.left))
        new = [(index, [index]) for index in self.left]
        self.left = {index: number - 1 for index, number in self.left.items() if number > 1}
        return new


def test_a_runner_turns_its_engine_until_every_request_has_its_tokens() -> None:
    stepper = Counter()
    said = turn(
        stepper, Said({"prompts": [[1], [2], [3]], "new_tokens": 2, "arrivals_s": [0.0, 0.0, 0.05]})
    ).said()
    assert said["ids"] == [[0, 0], [1, 1], [2, 2]]
    assert stepper.widths == [2, 2, 1, 1]
    assert said["times_s"][2][0] >= 0.05


def test_results_are_read_back_as_they_were_saved_and_the_page_has_their_figures(
    tmp_path: Path,
) -> None:
    results = Results(command="make bench-peers", machine={"cores": 2}, rounds=2)
    ours = served((0.1, 0.5))
    theirs = served((0.1, 1.0), ids=((7, 7),))
    for _ in range(2):
        results.note("bf16", "W", OURS, ours, ours)
    results.note("bf16", "W", "vllm", theirs, ours)
    results.note("bf16", "alone", OURS, ours, ours)
    results.note("bf16", "poisson-2", OURS, ours, None)
    results.rates[HALF] = [4.0, 5.0, 8.0]
    results.ceilings["bf16 W"] = 16.0
    results.skipped["openvino"] = "no wheel for this machine"
    results.limits = {
        "products": [
            {"precision": "bf16", "threads": 1, "shape": "o", "rows": 1, "gflop_per_s": 8}
        ],
        "stream_gb_per_s": {"1": 13.5},
    }
    results.save(tmp_path / "peers.json")
    again = Results.load(tmp_path / "peers.json")
    assert again == results
    page = markdown(again)
    assert "| Shardline | 4 |" in page
    assert "| vLLM | (2) |" in page
    assert "| Shardline / best of the others | 2.00 |" in page
    assert "| products at full rate / Shardline's time | 0.25 |" in page
    assert "| an engine on each core, sum, half of W each | 5 | 0.80 |" in page
    assert "| first 4 tokens equal to ours | W |\n|---|---:|\n| vLLM | 1.00 |" in page
    assert "- openvino: no wheel for this machine" in page
    assert "## fp32" not in page


def test_a_failed_command_says_its_last_error() -> None:
    log = (
        "Collecting x\n"
        "\x1b[31mERROR: No matching distribution found for x\x1b[0m\n"
        "hint: see above\n"
    )
    assert last_error(log) == "ERROR: No matching distribution found for x"
    assert last_error("") == "no output"


def test_fields_of_lscpu_are_split_at_the_first_colon() -> None:
    assert fields("Model name:   A: B\nno field\n") == {"Model name": "A: B"}
