"""An accelerator, alone and between CPU stages, gives token for token what transformers' `generate`
gives.

It is the test accelerator, unless SHARDLINE_TEST_DEVICE names a real one (`make test-gpu`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.stage.device.accelerator import load_module
from services.stage.device.acquire import acquire
from services.stage.device.device import Device
from services.stage.engine.accelerator_options import AcceleratorOptions
from services.stage.engine.executor import Executor
from services.stage.engine.memory import Limits
from services.stage.model.cpu_parts import CpuPart, parse_parts
from services.stage.model.model_info import ModelInfo
from shardline.contract.fleet.split import even_split
from shardline.contract.job import SamplingParams
from tests.adapters import save_adapter
from tests.chain import MAX_BUDGET, MAX_OPEN, generate, load_chain, requests, with_adapters
from tests.conformance.test_architectures import BUDGET, NUM_NEW, prompts, reference
from tests.models import CONFIGS, RECURRENT, save_model

KV_BYTES = 1 << 19
"""The test accelerator copies a layer's KV for each operator on it."""


@pytest.fixture(scope="module")
def accelerator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    """The first one."""
    name = os.environ.get("SHARDLINE_TEST_DEVICE")
    load_module("tests.accelerator" if name is None else os.environ.get("SHARDLINE_DEVICE_MODULE"))
    device = acquire(name or "toy:0", worker="tests", lock_folder=tmp_path_factory.mktemp("locks"))
    yield device
    device.release()


@pytest.mark.parametrize(
    "places",
    [("accelerator",), ("cpu", "accelerator", "cpu"), ("accelerator", "cpu")],
    ids="-".join,
)
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in RECURRENT])
def test_a_pipeline_over_an_accelerator_generates_the_tokens_of_generate(
    name: str, places: tuple[str, ...], model_folder: Path, device: Device, accelerator: Device
) -> None:
    path = model_folder / name
    if not path.exists():
        save_model(model_folder, name)
    expected = reference(path)
    devices = {"cpu": device, "accelerator": accelerator}
    info = ModelInfo.read(path)
    limits = Limits(kv_bytes=KV_BYTES, token_budget=MAX_BUDGET, max_open=MAX_OPEN)
    stages = [
        Executor.load(
            model=info,
            layers=layers,
            device=devices[place],
            dtype="float32",
            limits=limits,
            cache_folder=model_folder,
        )
        for layers, place in zip(even_split(info.num_layers, len(places)), places, strict=True)
    ]

    found = generate(
        stages,
        requests(prompts(), SamplingParams(max_tokens=NUM_NEW, temperature=0.0)),
        budget=BUDGET,
    )

    assert found == expected


@pytest.mark.parametrize("parts", ["embedding", "output", "embedding,output"])
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma2"])
def test_parts_on_the_cpu_change_no_token_and_take_no_memory_there(
    name: str, num_stages: int, parts: str, model_folder: Path, accelerator: Device
) -> None:
    path = model_folder / name
    if not path.exists():
        save_model(model_folder, name)
    info = ModelInfo.read(path)
    limits = Limits(kv_bytes=KV_BYTES, token_budget=MAX_BUDGET, max_open=MAX_OPEN)
    options: Any = {
        "device": accelerator,
        "dtype": "float32",
        "limits": limits,
        "cache_folder": model_folder,
    }
    stages = [
        Executor.load(
            model=info,
            layers=layers,
            on_accelerator=AcceleratorOptions(cpu_parts=parse_parts(parts)),
            **options,
        )
        for layers in even_split(info.num_layers, num_stages)
    ]

    found = generate(
        stages,
        requests(prompts(), SamplingParams(max_tokens=NUM_NEW, temperature=0.0)),
        budget=BUDGET,
    )

    assert found == reference(path)
    head = stages[0].forward.shard
    tail = stages[-1].forward.shard
    on_cpu = {
        CpuPart.EMBEDDING: head.model.get_input_embeddings().weight.device.type == "cpu",
        CpuPart.OUTPUT: tail.output_device.type == "cpu",
    }
    assert {part for part, is_on_cpu in on_cpu.items() if is_on_cpu} == parse_parts(parts)
    assert all(
        next(layer.parameters()).device == accelerator.torch_device
        for layer in head.layer_modules.values()
    )


@pytest.mark.parametrize("places", [("accelerator",), ("cpu", "accelerator")], ids="-".join)
def test_jobs_with_adapters_on_an_accelerator_get_the_tokens_that_cores_give(
    places: tuple[str, ...], device: Device, accelerator: Device, tmp_path: Path
) -> None:
    # Given stages on cores and elsewhere, with places for one of two adapters
    model = save_model(tmp_path)
    for seed, name in enumerate(("a", "b")):
        save_adapter(model, tmp_path / "adapters" / name, rank=3 + seed, seed=seed)
    adapters: Any = {"adapters_folder": tmp_path / "adapters", "max_adapters": 1}
    on_cores = load_chain(model, 2, device, tmp_path, **adapters)
    info = ModelInfo.read(model)
    devices = {"cpu": device, "accelerator": accelerator}
    limits = Limits(kv_bytes=KV_BYTES, token_budget=MAX_BUDGET, max_open=MAX_OPEN, **adapters)
    stages = [
        Executor.load(
            model=info,
            layers=layers,
            device=devices[place],
            dtype="float32",
            limits=limits,
            cache_folder=tmp_path,
        )
        for layers, place in zip(even_split(info.num_layers, len(places)), places, strict=True)
    ]

    # When jobs with either and with none run together
    greedy = requests(prompts(), SamplingParams(max_tokens=NUM_NEW, temperature=0.0))
    wanted = with_adapters(on_cores, greedy, "a", "b", None)
    found = generate(stages, wanted, budget=BUDGET)

    # Then they have the tokens that cores give, which are not those of the bare model
    assert found == generate(on_cores, wanted, budget=BUDGET)
    assert [found[place] == tokens for place, tokens in enumerate(reference(model))] == [
        False,
        False,
        True,
    ] * 2


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_streamed_layers_change_no_token(
    name: str, model_folder: Path, accelerator: Device
) -> None:
    path = model_folder / name
    if not path.exists():
        save_model(model_folder, name)
    info = ModelInfo.read(path)
    limits = Limits(
        kv_bytes=KV_BYTES, token_budget=MAX_BUDGET, max_open=MAX_OPEN, streamed_layers=2
    )
    options: Any = {
        "device": accelerator,
        "dtype": "float32",
        "limits": limits,
        "cache_folder": model_folder,
    }
    stages = [
        Executor.load(model=info, layers=layers, **options)
        for layers in even_split(info.num_layers, 2)
    ]

    found = generate(
        stages,
        requests(prompts(), SamplingParams(max_tokens=NUM_NEW, temperature=0.0)),
        budget=BUDGET,
    )

    assert found == reference(path)
    assert [len(stage.forward.shard.streamed_layers) for stage in stages] == [2, 2]


def test_the_accelerator_refuses_tensors_of_two_devices(accelerator: Device) -> None:
    with pytest.raises(RuntimeError, match=r"on (the same|one) device"):
        torch.ones(2, 2, device=accelerator.torch_device) @ torch.ones(2, 2)
