"""Steps that are recorded and replayed: the tokens of steps that are not, whoever comes and goes.

Without a GPU a recording is the function itself, which runs again over the same buffers.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from services.stage.attention.paged_kv import Span
from services.stage.device.device import Device
from services.stage.engine.executor import Executor
from services.stage.engine.shard_runner import Pass
from services.stage.engine.step_graphs import CudaRecorder, Recorder, graph_sizes
from services.stage.ranks.messages import PassKind
from shardline.base.errors import ProtocolError
from shardline.contract.job import SamplingParams
from shardline_scheduler.events import SequenceFinished
from tests.chain import Guesses, complete, load_chain, requests
from tests.conformance.test_architectures import BUDGET, prompts, reference
from tests.models import save_model
from tests.pinned import first_core
from tests.unit.stage.engine.triton_stage import DEVICE, load_forward, stage_of

SEATS = 4
"""Fewer than there are prompts, so that sequences come while others go."""
SAMPLED = SamplingParams(max_tokens=9, temperature=0.8, top_p=0.9, logprobs=2)


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    """Core 0."""
    with first_core(tmp_path_factory.mktemp("locks")) as device:
        yield device


class Again:
    """Records a function as itself."""

    def __init__(self) -> None:
        self.replayed: list[int] = []
        """Rows of each replay."""

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Runs it, and returns it."""
        num_rows = len(run())

        def replay() -> Tensor:
            self.replayed.append(num_rows)
            return run()

        return replay


class Watching(TorchDispatchMode):
    """Notes which tensors a function reads that were there before, and forgets the function."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[weakref.ref[Tensor]] = []
        self._made: list[Tensor] = []

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Runs it once; replays nothing."""
        with self:
            out = run()
        self._made.clear()
        return lambda: out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = {id(one) for one in self._made}
        self.read += [
            weakref.ref(one) for one in args if isinstance(one, Tensor) and id(one) not in made
        ]
        out = func(*args, **(kwargs or {}))
        self._made += [
            one for one in (out if isinstance(out, tuple) else (out,)) if one is not None
        ]
        return out


@torch.inference_mode()
def record(
    stages: Sequence[Executor], recorder: Recorder, *, max_rows: int, max_sampled: int | None = None
) -> None:
    """All stages replay their steps of so many rows from now on."""
    for stage in stages:
        stage.forward.record_steps(recorder, max_rows=max_rows, max_sampled=max_sampled or max_rows)


def ends(stages: Sequence[Executor], *, guesses: Guesses | None = None) -> list[SequenceFinished]:
    """Of all prompts, some at a time, more than once: the second time after a reset of every
    stage."""
    wanted = requests(prompts(), SAMPLED)
    return [
        end
        for _ in range(2)
        for end in complete(stages, wanted, budget=BUDGET, seats=SEATS, guesses=guesses)
    ]


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_replayed_steps_give_the_tokens_and_logprobs_of_others(
    num_stages: int, tmp_path: Path, device: Device
) -> None:
    stages = load_chain(save_model(tmp_path), num_stages, device, tmp_path)
    expected = ends(stages)
    recorder = Again()

    record(stages, recorder, max_rows=SEATS)

    assert ends(stages) == expected
    assert {1, 2} <= set(recorder.replayed) <= set(graph_sizes(SEATS))


def test_a_step_of_more_rows_than_any_graph_has_runs_as_before(
    tmp_path: Path, device: Device
) -> None:
    stages = load_chain(save_model(tmp_path), 1, device, tmp_path)
    expected = ends(stages)
    recorder = Again()

    record(stages, recorder, max_rows=2)

    assert ends(stages) == expected
    assert set(recorder.replayed) == {1, 2}


def test_steps_with_chunks_and_guesses_are_replayed_too(tmp_path: Path, device: Device) -> None:
    stages = load_chain(save_model(tmp_path), 2, device, tmp_path)
    expected = ends(stages)
    recorder = Again()
    guesses = Guesses()

    record(stages, recorder, max_rows=BUDGET, max_sampled=BUDGET)

    assert ends(stages, guesses=guesses) == expected
    assert guesses.num_made > 0
    assert BUDGET in recorder.replayed


def test_all_that_a_recording_reads_is_kept(tmp_path: Path, device: Device) -> None:
    # Given recordings that keep memory no more than a GPU's graph does
    (stage,) = load_chain(save_model(tmp_path), 1, device, tmp_path)
    recorder = Watching()

    record([stage], recorder, max_rows=2)
    gc.collect()

    assert recorder.read
    assert all(each() is not None for each in recorder.read)


def test_what_a_step_returned_survives_the_next_one(tmp_path: Path, device: Device) -> None:
    (stage, *_) = load_chain(save_model(tmp_path), 2, device, tmp_path)
    record([stage], Again(), max_rows=2)
    spans = [Span(start=0, length=1, blocks=[3])]
    with torch.inference_mode():
        first = stage.forward.hidden(spans, torch.tensor([5]))
        kept = first.clone()
        stage.forward.hidden(spans, torch.tensor([6]))

    assert torch.equal(first, kept)


@pytest.mark.parametrize("left_out", [(), (1,)])
def test_a_recorded_pass_gives_the_states_of_the_layers_that_are_there(
    left_out: tuple[int, ...], tmp_path: Path, device: Device
) -> None:
    (stage,) = load_chain(save_model(tmp_path), 1, device, tmp_path)
    spans = [Span(start=0, length=5, blocks=[3]), Span(start=0, length=1, blocks=[1])]
    with torch.inference_mode():
        x = stage.forward.random_inputs(6, torch.Generator().manual_seed(1))
        expected = stage.run_pass(Pass(kind=PassKind.HIDDEN, spans=spans, left_out=left_out), x)

        with stage.forward.shard.without(left_out):
            found = stage.forward.recorded(Again(), spans, x)()

    assert torch.equal(found, expected)


def test_blocks_outside_the_pool_are_refused(tmp_path: Path, device: Device) -> None:
    (stage,) = load_chain(save_model(tmp_path), 1, device, tmp_path)
    record([stage], Again(), max_rows=2)
    spans = [Span(start=0, length=1, blocks=[stage.num_blocks])]
    with torch.inference_mode(), pytest.raises(ProtocolError, match="KV blocks"):
        stage.forward.sampled_outputs(spans, torch.tensor([5]), [0])


def test_a_gpus_attention_reads_the_buffers_of_a_graph(tmp_path: Path) -> None:
    # Given a stage over Triton, whose graphs are CUDA's where there is a GPU
    path = save_model(tmp_path, num_hidden_layers=1)
    greedy = SamplingParams(max_tokens=4, temperature=0.0)
    with stage_of(load_forward(path, torch.float32), tmp_path) as stage:
        record([stage], CudaRecorder() if DEVICE.type == "cuda" else Again(), max_rows=3)

        # When three sequences are decoded
        found = complete([stage], requests(prompts()[1:4], greedy), budget=BUDGET, seats=SEATS)

    # Then their tokens are those of `generate`
    assert [end.output_ids for end in found] == [ids[:4] for ids in reference(path)[1:4]]


@pytest.mark.parametrize(
    ("max_rows", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (72, [1, 2, 4, 8, 16, 32, 64, 72]),
        (256, [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256]),
    ],
)
def test_graphs_have_powers_of_two_rows_their_middles_and_the_budget(
    max_rows: int, sizes: list[int]
) -> None:
    assert graph_sizes(max_rows) == sizes
