"""Layers whose weights are read again in every step."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import nn

from services.stage.device.device import Device
from services.stage.engine.executor import Executor
from services.stage.kernels import kernel
from services.stage.products.packing import pack, packing_for
from services.stage.products.tiled_linear import TiledLinear
from services.stage.streaming.layer_file import LayerFile
from services.stage.streaming.streamed_layers import StreamedLayers, tiles
from shardline.base.errors import Invalid, Unavailable
from shardline.contract.fleet.stage_memory import NUM_BUFFERS
from shardline.contract.job import SamplingParams
from shardline.contract.structured_output import StructuredOutput
from shardline_scheduler.events import SequenceFinished
from shardline_scheduler.step_plan import Open
from tests.chain import complete, load_chain, requests
from tests.models import VOCAB_SIZE, save_model
from tests.pinned import first_core
from tests.tiny_head import CLERK

SAMPLED = SamplingParams(max_tokens=8, temperature=0.9, logprobs=1)
LENGTHS = (1, 5, 40, 17)
BUDGET = 24
"""Below the longest prompt: some steps sample nothing, so that the last layer stops behind its
KV."""

TOKENIZER = str(CLERK / "tokenizer.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and their checksums."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    """Core 0."""
    with first_core(tmp_path_factory.mktemp("locks")) as device:
        yield device


def products(executor: Executor) -> list[TiledLinear]:
    """Of all its layers."""
    layers = executor.forward.shard.layer_modules.values()
    return list(
        {
            module: None
            for layer in layers
            for module in layer.modules()
            if isinstance(module, TiledLinear)
        }
    )


def num_fused(executor: Executor) -> int:
    """Layers that are one call of the kernel."""
    return sum("forward" in vars(layer) for layer in executor.forward.shard.layer_modules.values())


def completions(stages: list[Executor]) -> list[SequenceFinished]:
    """Tokens and log-probabilities of prompts together."""
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS
    ]
    return complete(stages, requests(prompts, SAMPLED), budget=BUDGET, seats=len(prompts))


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_streamed_layers_change_no_bit(
    num: int, num_stages: int, folder: Path, device: Device
) -> None:
    path = save_model(folder)
    held = load_chain(path, num_stages, device, folder)
    expected = completions(held)

    stages = load_chain(
        path, num_stages, device, folder, streamed_layers=num, streamed_folder=folder
    )

    assert completions(stages) == expected
    assert all(stage.exact for stage in stages)
    assert [num_fused(stage) for stage in stages] == [num_fused(stage) for stage in held]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("gemma2", "float32"), ("mixtral", "float32")),
        *(("llama-tied", "int8"), ("llama-tied", "int4")),
    ],
)
def test_other_models_and_dtypes_change_no_bit(
    name: str, dtype: str, folder: Path, device: Device
) -> None:
    stored = torch.float32 if dtype == "float32" else torch.bfloat16
    path = save_model(folder / dtype, name, dtype=stored)
    expected = completions(load_chain(path, 1, device, folder, dtype=dtype))

    stages = load_chain(
        path, 1, device, folder, dtype=dtype, streamed_layers=3, streamed_folder=folder
    )

    assert completions(stages) == expected


def test_streamed_weights_lie_in_two_buffers(folder: Path, device: Device) -> None:
    path = save_model(folder)

    (stage,) = load_chain(path, 1, device, folder, streamed_layers=4, streamed_folder=folder)

    assert (
        len({product.tiles.untyped_storage().data_ptr() for product in products(stage)})
        == NUM_BUFFERS
    )
    assert all(product.call.weights == product.tiles.data_ptr() for product in products(stage))


def layers() -> nn.ModuleList:
    """Three packed layers of one product each."""
    found = nn.ModuleList(nn.Sequential(nn.Linear(64, 64)) for _ in range(3))
    pack(found, packing_for(torch.float32, kernel.load()))
    return found


def streamed(folder: Path) -> nn.ModuleList:
    """The same, streamed."""
    found = layers()
    streaming = StreamedLayers(LayerFile(folder), tiles)
    for layer in found:
        streaming.take(layer)
    streaming.start()
    return found


def test_layers_called_in_any_order_have_their_own_weights(tmp_path: Path) -> None:
    torch.manual_seed(5)
    held = layers()
    torch.manual_seed(5)
    others = streamed(tmp_path)
    x = torch.randn(2, 64)

    for number in (0, 1, 2, 0, 2, 1, 1, 0):
        assert torch.equal(others[number](x), held[number](x))
        part = others[number].get_submodule("0")
        assert torch.equal(part(x), held[number](x))


def test_a_disk_that_fails_ends_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = streamed(tmp_path)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)

    def one_round() -> None:
        for layer in (*found, found[0]):  # two may have been read ahead
            layer(torch.randn(2, 64))

    with pytest.raises(Unavailable, match=r"cannot be read from .*Input/output error"):
        one_round()


def test_a_folder_without_room_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()

    with pytest.raises(Invalid, match=r"find no room in .*file") as refused:
        LayerFile(file)

    assert refused.value.field == "SHARDLINE_STREAMED_LAYERS_DIR"


def test_weights_of_another_dtype_are_converted_on_disk(
    tmp_path: Path, folder: Path, device: Device
) -> None:
    path = save_model(folder)
    expected = completions(load_chain(path, 2, device, folder, dtype="bfloat16"))

    stages = load_chain(
        path, 2, device, tmp_path, dtype="bfloat16", streamed_layers=2, streamed_folder=tmp_path
    )

    assert completions(stages) == expected
    written = {file.name for file in (tmp_path / "floats").rglob("layer-*.safetensors")}
    assert written == {f"layer-{number}.safetensors" for number in range(4)}


def test_layers_of_float_files_leave_the_vocabulary_with_the_model(
    device: Device, tmp_path: Path
) -> None:
    # The demo model is bfloat16: in float32 its layers are streamed from files in another folder
    (stage,) = load_chain(CLERK, 1, device, tmp_path, streamed_layers=2)
    assert stage.info.path != CLERK
    yes = SamplingParams(structured_outputs=StructuredOutput(choice=("yes",)))
    sequence = stage._sampler.open(Open(0, (5, 6), 2, yes, 1, 1))
    sample = stage._sampler.sample(torch.zeros(1, stage.info.vocab_size), [sequence])
    assert (sequence.refusal, sample.refused) == ("", ())
    assert "yes".startswith(Tokenizer.from_file(TOKENIZER).decode(sample.tokens[0]))
