"""Engines on the test accelerator: what leaves when, in which order and with which bytes, while it
still copies."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from services.stage.device.accelerator import load_module
from services.stage.device.acquire import acquire
from services.stage.device.device import Device
from services.stage.engine.engine import FollowerEngine
from services.stage.engine.executor import Executor
from services.stage.engine.launched_steps import MAX_STEPS
from services.stage.engine.loading import load_forward
from services.stage.engine.memory import Limits
from services.stage.engine.tensors import name_of, tensor_of, view_of
from services.stage.fleet import profiling
from services.stage.hop import Frame, Kind, Receiver, Sender
from services.stage.hop.wiring import Wiring
from services.stage.model.model_info import ModelInfo
from services.stage.settings import StageSettings
from shardline.base.clock import monotonic_s
from shardline.contract.fleet.split import even_split
from shardline.contract.job import SamplingParams
from shardline_scheduler.step_plan import Open, Row, StepPlan, encode
from shardline_scheduler.step_times import StepTime
from shardline_server.host.threads import run_in_fresh_thread
from tests.chain import generate, requests
from tests.engines import PATIENCE_S, PIPELINE, Links, open_engines, open_links
from tests.models import VOCAB_SIZE, save_model
from tests.pinned import first_core
from tests.polling import until

NUM_LANES = 3
LENGTHS = (5, 1, 9, 2, 7)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
LIMITS = Limits(kv_bytes=1 << 19, token_budget=64, max_open=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of six layers."""
    return save_model(tmp_path_factory.mktemp("model"), num_hidden_layers=6)


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Device]]:
    """A core and the test accelerator."""
    locks = tmp_path_factory.mktemp("locks")
    load_module("tests.accelerator")
    with first_core(locks) as core:
        toy = acquire("toy:0", worker="tests", lock_folder=locks)
        yield {"cpu": core, "toy": toy}
        toy.release()


@pytest.fixture
def toy(devices: dict[str, Device]) -> ModuleType:
    return sys.modules["tests.accelerator.toy"]


def load(folder: Path, places: tuple[Device, ...]) -> list[Executor]:
    """A whole model, evenly split over these devices."""
    info = ModelInfo.read(folder)
    options: Any = {"dtype": "float32", "limits": LIMITS, "cache_folder": folder}
    return [
        Executor.load(model=info, layers=layers, device=device, **options)
        for layers, device in zip(even_split(info.num_layers, len(places)), places, strict=True)
    ]


@pytest.mark.parametrize(
    "places",
    [("toy", "cpu"), ("cpu", "toy", "cpu"), ("cpu", "toy"), ("toy", "toy", "toy")],
    ids="-".join,
)
def test_engines_with_an_accelerator_at_each_place_generate_the_same_tokens(
    places: tuple[str, ...], folder: Path, devices: dict[str, Device], tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in (1, 3, 70, 17, 41)
    ]
    expected = generate(load(folder, (devices["cpu"],)), requests(prompts, GREEDY), budget=32)

    with open_engines(
        load(folder, tuple(devices[place] for place in places)), tmp_path, budget=32
    ) as engines:
        assert engines.generate(requests(prompts, GREEDY)) == expected
        spent = [engine.progress for engine in (engines.head, *engines.later)]

    assert all(
        progress.compute_s > 0 and progress.hop_s >= 0 and progress.wait_s >= 0
        for progress in spent
    )


@pytest.fixture
def second(devices: dict[str, Device], tmp_path: Path) -> Iterator[Device]:
    """The other test accelerator, which is this thread's meanwhile."""
    second = acquire("toy:1", worker="tests", lock_folder=tmp_path / "locks")
    yield second
    second.release()
    devices["toy"].enter_thread()


def test_steps_run_on_the_device_of_their_stage_not_on_the_first_one(
    folder: Path,
    devices: dict[str, Device],
    second: Device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stages = load(folder, (devices["cpu"], second))
    run = stages[1].forward.sampled_outputs
    current = list[int]()

    def note(*args: Any) -> Tensor:
        # what a kernel's launch takes
        current.append(torch.get_device_module("toy").current_device())
        return run(*args)

    monkeypatch.setattr(stages[1].forward, "sampled_outputs", note)
    with open_engines(stages, tmp_path, budget=32) as engines:
        engines.generate(requests([[3, 4, 5]], GREEDY))

    assert set(current) == {1}


def test_a_stage_is_loaded_on_its_device_in_whatever_thread(
    folder: Path, devices: dict[str, Device], second: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = list[int]()

    def noted(given: Any) -> Any:
        current.append(torch.get_device_module("toy").current_device())
        return load_forward(given)

    monkeypatch.setattr("services.stage.engine.executor.load_forward", noted)
    run_in_fresh_thread(lambda: load(folder, (devices["cpu"], second)))

    assert current[-1] == 1


class Seen(Exception):
    """Enough was seen."""


def test_a_device_is_measured_as_the_current_one_in_whatever_thread(
    folder: Path, second: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = list[int]()

    def noted(*_: Any) -> None:
        current.append(torch.get_device_module("toy").current_device())  # what is waited for
        raise Seen

    monkeypatch.setattr(profiling, "measure", noted)
    settings = StageSettings(model=str(folder), cache_dir=tmp_path, streamed_layers="auto")
    with pytest.raises(Seen):
        run_in_fresh_thread(lambda: profiling.profile(settings, second, fresh=True, together=False))

    assert current == [1]


@dataclass(slots=True)
class Middle:
    """A later stage on the accelerator. The test plays the stage before it and the one behind
    it."""

    engine: FollowerEngine
    links: Links
    launched: queue.Queue[int]
    """Steps, once the executor has returned from them."""
    times: list[StepTime] = field(default_factory=list)
    to_it: Sender | None = None
    from_it: Receiver | None = None

    def wire(self, epoch: int) -> None:
        """Begins an epoch."""
        self.close()
        self.to_it, receiver = self.links.open(Kind.PLAN, epoch)
        sender, self.from_it = self.links.open(Kind.PLAN, epoch)
        self.engine.wire(
            Wiring(
                pipeline=PIPELINE,
                epoch=epoch,
                stage_index=1,
                num_stages=3,
                num_lanes=NUM_LANES,
                num_blocks=self.engine.executor.num_blocks,
                receiver=receiver,
                sender=sender,
            )
        )

    def send(self, epoch: int, step: int) -> None:
        """One step's frame."""
        states = states_of(step)
        assert self.to_it is not None
        self.to_it.send(
            Frame(
                kind=Kind.PLAN,
                pipeline=PIPELINE,
                epoch=epoch,
                step=step,
                message=encode(plan(step)),
                tensor=view_of(states),
                dtype=name_of(states.dtype),
                shape=tuple(states.shape),
            )
        )

    def receive(self) -> tuple[int, Tensor]:
        """The next step that leaves, and its activations."""
        assert self.from_it is not None
        frame = self.from_it.receive(PATIENCE_S)
        assert frame is not None
        return frame.step, tensor_of(frame, torch.float32)

    def close(self) -> None:
        """Closes the test's ends."""
        for end in (self.to_it, self.from_it):
            if end is not None:
                end.close()

    def turn(self) -> None:
        """Returns when the engine has looked twice at what it has to do."""
        for _ in range(2):
            done = threading.Event()
            self.engine.inbox.put(done.set)
            assert done.wait(PATIENCE_S)


def plan(step: int) -> StepPlan:
    """A prompt of one chunk, opened and closed in its step."""
    length = LENGTHS[step % len(LENGTHS)]
    opened = Open(
        seq=step, ids=(5,) * length, num_prompt=length, params=GREEDY, seed=0, num_blocks=1
    )
    return StepPlan(step, (opened,), (Row(step, 0, length, (), (0,), wants=True),), (step,))


def states_of(step: int) -> Tensor:
    """What the stage before gives: other values in every step."""
    return torch.randn(
        LENGTHS[step % len(LENGTHS)], 32, generator=torch.Generator().manual_seed(step)
    )


@pytest.fixture(scope="module")
def executor(folder: Path, devices: dict[str, Device]) -> Executor:
    """The middle of three stages, on the accelerator."""
    return load(folder, (devices["cpu"], devices["toy"], devices["cpu"]))[1]


@pytest.fixture(scope="module")
def expected(executor: Executor) -> list[Tensor]:
    """What it gives in the first steps, one after the other and with waits."""
    executor.reset()
    found = []
    for step in range(40):
        out = executor.run(plan(step), states_of(step))
        assert isinstance(out, Tensor)
        found.append(out.cpu())
    executor.reset()
    return found


@pytest.fixture
def middle(
    executor: Executor,
    expected: list[Tensor],  # first: an executor runs in one thread
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Middle]:
    with open_middle(executor, tmp_path, monkeypatch) as middle:
        yield middle


@contextmanager
def open_middle(
    executor: Executor, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Middle]:
    """Its engine runs, wired for epoch 1."""
    launched: queue.Queue[int] = queue.Queue()
    run = executor.run

    def watched(plan: StepPlan, hidden: Tensor | None) -> Any:
        out = run(plan, hidden)
        launched.put(plan.step)
        return out

    monkeypatch.setattr(executor, "run", watched)
    times: list[StepTime] = []
    lost: list[str] = []
    engine = FollowerEngine(
        executor,
        on_lost=lambda _, reason: lost.append(reason),
        on_step=lambda _, time: times.append(time),
    )
    engine.start()
    with open_links(folder, NUM_LANES) as links:
        middle = Middle(engine, links, launched, times)
        middle.wire(1)
        yield middle
        engine.stop()
        engine.join()
        middle.close()
    assert not lost


def test_the_next_step_is_launched_before_the_last_one_is_copied_and_no_further_one(
    middle: Middle, toy: ModuleType, expected: list[Tensor]
) -> None:
    with toy.copies_to_host_held():
        for step in range(NUM_LANES):
            middle.send(1, step)
        assert [middle.launched.get(timeout=PATIENCE_S) for _ in range(MAX_STEPS)] == [0, 1]
        middle.turn()
        assert middle.launched.empty(), "it is more than one step ahead"
        assert not middle.times, "a frame has left before it was copied"

    for step in range(NUM_LANES):
        number, states = middle.receive()
        assert number == step
        assert torch.equal(states, expected[step])


def test_under_load_frames_leave_in_order_with_the_bytes_of_their_steps(
    middle: Middle, expected: list[Tensor]
) -> None:
    for step in range(NUM_LANES):
        middle.send(1, step)
    for step, states in enumerate(expected):
        if step + NUM_LANES < len(expected):
            middle.send(1, step + NUM_LANES)
        number, found = middle.receive()
        assert number == step
        assert torch.equal(found, states), f"step {step} has other bytes"


def test_what_was_launched_in_an_epoch_that_is_over_never_leaves(
    middle: Middle, toy: ModuleType, expected: list[Tensor]
) -> None:
    with toy.copies_to_host_held():
        for step in range(MAX_STEPS):
            middle.send(1, step)
            assert middle.launched.get(timeout=PATIENCE_S) == step
        middle.engine.unwire()
        middle.wire(2)
        middle.send(2, 0)
        assert middle.launched.get(timeout=PATIENCE_S) == 0

    number, states = middle.receive()

    assert number == 0
    assert torch.equal(states, expected[0])
    until(lambda: middle.times)
    assert [(time.epoch, time.step) for time in middle.times] == [(2, 0)]


def test_the_time_of_a_copy_is_no_computation(middle: Middle, toy: ModuleType) -> None:
    with toy.copies_to_host_held():
        middle.send(1, 0)
        assert middle.launched.get(timeout=PATIENCE_S) == 0
        launched = middle.engine._launched
        assert launched is not None
        until(lambda: launched.oldest is not None and launched.oldest.copy.computed_s is not None)
        released_s = monotonic_s()
    until(lambda: middle.times)

    (time,) = middle.times
    assert time.compute_began_s + time.compute_s <= released_s <= time.ended_s
    assert time.hop_s >= time.ended_s - released_s
    assert middle.engine.clock.step_began_s is None


def test_a_step_that_waits_for_the_device_counts_as_begun(middle: Middle, toy: ModuleType) -> None:
    with toy.copies_to_host_held():
        middle.send(1, 0)
        assert middle.launched.get(timeout=PATIENCE_S) == 0
        middle.turn()
        assert middle.engine.clock.step_began_s is not None
