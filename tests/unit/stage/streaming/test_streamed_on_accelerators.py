"""Streamed layers of an accelerator: their weights lie in the host's memory, and the bits are those
of all in its own.

The test accelerator copies from pinned memory later, on threads of its streams: what does not wait
has wrong weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from services.stage.device.accelerator import STREAM_PARTS, load_module
from services.stage.device.acquire import acquire
from services.stage.device.device import Device
from services.stage.device.uploads import Uploads
from services.stage.engine.accelerator_options import AcceleratorOptions
from services.stage.engine.executor import Executor
from services.stage.engine.memory import Limits
from services.stage.model.cpu_parts import parse_parts
from services.stage.model.model_info import ModelInfo
from services.stage.products.packing import pack, triton_packing
from services.stage.streaming.layer_file import PAGE_BYTES
from services.stage.streaming.layer_memory import CHUNK_BYTES, LayerMemory
from services.stage.streaming.streamed_layers import StreamedLayers, matrices, measure, store_of
from shardline.base.errors import Invalid
from shardline.contract.fleet.split import even_split
from shardline.contract.fleet.stage_memory import NUM_BUFFERS
from shardline.contract.job import SamplingParams
from shardline_scheduler.events import SequenceFinished
from tests.chain import complete, requests
from tests.engines import open_engines
from tests.models import VOCAB_SIZE, save_model

SAMPLED = SamplingParams(max_tokens=6, temperature=0.9, logprobs=1)
LENGTHS = (1, 5, 30)
BUDGET = 24
"""Below the longest prompt: some steps sample nothing, so that the last layer stops behind its
KV."""
KV_BYTES = 1 << 18
"""The test accelerator copies a layer's KV for each operator on it."""
ALL_THERE = AcceleratorOptions()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and their checksums."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    """The first test accelerator."""
    load_module("tests.accelerator")
    device = acquire("toy:0", worker="tests", lock_folder=tmp_path_factory.mktemp("locks"))
    yield device
    device.release()


@pytest.fixture
def toy(device: Device) -> ModuleType:
    return sys.modules["tests.accelerator.toy"]


def load(
    path: Path,
    device: Device,
    *,
    num_stages: int = 1,
    dtype: str = "float32",
    options: AcceleratorOptions = ALL_THERE,
    **further: Any,
) -> list[Executor]:
    """A whole model on the accelerator. `further` are limits."""
    info = ModelInfo.read(path)
    limits = Limits(**{"kv_bytes": KV_BYTES, "token_budget": 64, "max_open": 8, **further})
    return [
        Executor.load(
            model=info,
            layers=layers,
            device=device,
            dtype=dtype,
            limits=limits,
            cache_folder=path,
            on_accelerator=options,
        )
        for layers in even_split(info.num_layers, num_stages)
    ]


def completions(stages: list[Executor]) -> list[SequenceFinished]:
    """Tokens and log-probabilities of prompts together."""
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS
    ]
    return complete(stages, requests(prompts, SAMPLED), budget=BUDGET, seats=len(prompts))


def num_streamed(stage: Executor) -> int:
    return len(stage.forward.shard.streamed_layers)


@pytest.fixture(scope="module")
def llama(folder: Path) -> Path:
    return save_model(folder)


@pytest.fixture(scope="module")
def expected(llama: Path, device: Device) -> list[SequenceFinished]:
    """Of one stage with all weights on the accelerator."""
    return completions(load(llama, device))


@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_streamed_layers_change_no_bit(
    num: int, llama: Path, device: Device, expected: list[SequenceFinished]
) -> None:
    (stage,) = load(llama, device, streamed_layers=num)

    assert completions([stage]) == expected
    assert num_streamed(stage) == num


def test_weights_of_another_dtype_change_no_bit(llama: Path, device: Device) -> None:
    expected = completions(load(llama, device, dtype="float16"))

    assert completions(load(llama, device, dtype="float16", streamed_layers=3)) == expected


def test_parts_on_the_cpu_stay_there_beside_streamed_layers(llama: Path, device: Device) -> None:
    options = AcceleratorOptions(cpu_parts=parse_parts("embedding,output"))
    expected = completions(load(llama, device, options=options))

    (stage,) = load(llama, device, options=options, streamed_layers=2)

    assert completions([stage]) == expected
    assert stage.forward.shard.output_device.type == "cpu"


@pytest.fixture(params=STREAM_PARTS)
def without_streams(
    request: pytest.FixtureRequest, toy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend lacks one of the parts."""
    monkeypatch.delattr(toy, request.param)


@pytest.mark.usefixtures("without_streams")
def test_a_backend_without_streams_or_events_copies_with_waits(
    llama: Path, device: Device, expected: list[SequenceFinished]
) -> None:
    assert completions(load(llama, device, streamed_layers=3)) == expected


def test_engines_that_launch_ahead_give_the_same_tokens(
    llama: Path, device: Device, tmp_path: Path
) -> None:
    wanted = requests(
        [[3] * length for length in LENGTHS], SamplingParams(max_tokens=6, temperature=0.0)
    )
    tokens = []
    for num in (0, 2):
        stages = load(llama, device, num_stages=2, streamed_layers=num)
        with open_engines(stages, tmp_path, budget=BUDGET) as engines:
            tokens.append(engines.generate(wanted))

    assert tokens[0] == tokens[1]


def weight_storages(stage: Executor, device: Device) -> dict[int, int]:
    """Bytes of its weights' memory on the device, by address."""
    model = stage.forward.shard.model
    tensors = [
        each
        for each in (*model.parameters(), *model.buffers())
        if each.device == device.torch_device
    ]
    storages = [each.untyped_storage() for each in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def test_the_accelerator_holds_two_buffers_of_them(llama: Path, device: Device) -> None:
    (held,), (stage,) = load(llama, device), load(llama, device, streamed_layers=4)
    sizes = [
        sum(len(weight.data) for weight in matrices(each))
        for each in held.forward.shard.layer_modules.values()
    ]

    layers = stage.forward.shard.layer_modules.values()
    streamed = [weight.data for layer in layers for weight in matrices(layer)]
    assert len({data.untyped_storage().data_ptr() for data in streamed}) == NUM_BUFFERS
    saved = sum(sizes) - NUM_BUFFERS * max(sizes)
    of_all, of_some = (sum(weight_storages(each, device).values()) for each in (held, stage))
    assert of_some == pytest.approx(of_all - saved, abs=NUM_BUFFERS * PAGE_BYTES)


def test_as_few_as_must_be_are_streamed_within_a_limit(
    llama: Path, device: Device, expected: list[SequenceFinished]
) -> None:
    limit_bytes = KV_BYTES + 110_000
    with pytest.raises(Invalid, match="SHARDLINE_STREAMED_LAYERS=auto"):
        load(llama, device, memory_bytes=limit_bytes)

    (stage,) = load(llama, device, memory_bytes=limit_bytes, streamed_layers="auto")
    (whole,) = load(llama, device, streamed_layers="auto")

    assert num_streamed(stage) == 4
    assert num_streamed(whole) == 0
    assert completions([stage]) == completions([whole]) == expected


def test_a_copy_waits_for_what_reads_its_buffer(device: Device, toy: ModuleType) -> None:
    memory = memory_of(device)
    other = toy.Stream(device.torch_device)
    memory.write([(0, torch.full((64,), 7, dtype=torch.int8))], 0, 64)
    buffer, elsewhere = (
        torch.full((64,), 3, dtype=torch.int8, device=device.torch_device) for _ in range(2)
    )
    seen = torch.zeros(64, dtype=torch.int8, pin_memory=True)

    with toy.copies_to_host_held():
        seen.copy_(buffer, non_blocking=True)  # it reads the buffer when it is let go
        wait = memory.fetch(buffer, 0)
        with toy.stream(other):
            for _ in range(4):  # as long as four copies like it take
                elsewhere.copy_(seen, non_blocking=True)
        other.synchronize()
        assert (seen == 0).all()
    wait()

    assert (buffer.cpu() == 7).all()
    assert (seen == 3).all()


def test_memory_that_goes_has_no_copy_under_way(device: Device) -> None:
    memory = memory_of(device)
    memory.write(
        [(each, torch.full((64,), each, dtype=torch.int8)) for each in range(0, 128, 64)], 0, 128
    )
    buffer = memory.buffer(64)
    for _ in range(50):
        memory.fetch(buffer, 0)
    memory.fetch(buffer, 64)

    del memory

    assert (buffer.cpu() == 64).all()


def test_bytes_come_back_from_wherever_they_lie(device: Device) -> None:
    memory = memory_of(device)
    generator = torch.Generator().manual_seed(4)
    begin = CHUNK_BYTES - 4096
    data = torch.randint(-128, 128, (8192,), dtype=torch.int8, generator=generator)
    memory.write([(0, data[:100]), (512, data[512:])], begin, len(data))

    target = memory.buffer(len(data))
    memory.fetch(target, begin)()

    found = target.cpu()
    assert torch.equal(found[:100], data[:100])
    assert torch.equal(found[512:], data[512:])


def test_copies_to_the_accelerator_have_a_measured_rate(device: Device, tmp_path: Path) -> None:
    assert 1e6 < measure(store_of(device.uploads(), tmp_path), device.synchronize) < 1e12
    assert list(tmp_path.iterdir()) == [], "the host's memory is their store"


def memory_of(device: Device) -> LayerMemory:
    uploads = device.uploads()
    assert uploads is not None
    return LayerMemory(uploads)


def test_products_in_triton_read_the_buffer_that_their_layer_has() -> None:
    def layers() -> nn.ModuleList:
        torch.manual_seed(6)
        found = nn.ModuleList(nn.Sequential(nn.Linear(32, 32)) for _ in range(3))
        pack(found, triton_packing())
        return found

    held = layers()
    others = layers()
    x = torch.randn(2, 32)
    streaming = StreamedLayers(
        LayerMemory(Uploads(torch.device("cpu"), None, pins=False)), matrices
    )
    for layer in others:
        streaming.take(layer)
    streaming.start()

    for number in (0, 1, 2, 0, 2, 1, 1, 0):
        assert torch.equal(others[number](x), held[number](x))
