"""A stage of two ranks: every bit is that of one process, whatever the model, its dtype and its
place in the chain."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from gguf import GGMLQuantizationType

from services.stage.attention.paged_kv import Span
from services.stage.device.acquire import acquire
from services.stage.device.device import Device
from services.stage.engine.executor import Executor
from services.stage.engine.shard_runner import Pass
from services.stage.products.tiled_linear import TiledLinear
from services.stage.ranks.messages import PassKind
from services.stage.ranks.processes import PROGRAM
from shardline.base.errors import ProtocolError
from shardline.contract.job import SamplingParams
from shardline_scheduler.events import SequenceFinished
from tests.adapters import save_adapter
from tests.chain import Pressure, complete, load_chain, requests, with_adapters
from tests.gguf_models import write_gguf
from tests.models import VOCAB_SIZE, save_model
from tests.mxfp4_models import save_mxfp4
from tests.pinned import unpinned_afterwards
from tests.unit.stage.model.packed_models import Pack, awq, gptq, save_both

SAMPLED = SamplingParams(max_tokens=8, temperature=0.9, logprobs=1)
LENGTHS = (1, 5, 40, 17)
BUDGET = 24
"""Below the longest prompt: some steps sample nothing, so that the last layer stops behind its
KV."""
FUSED_ALONE = {"olmo2", "phi3"}
"""Models whose layers are one call in one process, not in ranks."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and their checksums."""
    return tmp_path_factory.mktemp("models")


class Devices(NamedTuple):
    """Of this process, side by side."""

    one: Device
    """Core 0."""
    two: Device
    """Cores 0 and 1, the second another rank's."""


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Devices]:
    folder = tmp_path_factory.mktemp("locks")
    with unpinned_afterwards():
        one, two = (
            acquire(name, worker=name, lock_folder=folder / name, num_ranks=num)
            for name, num in (("cpu:0", 1), ("cpu:0-1", 2))
        )
        yield Devices(one, two)
        one.release()
        two.release()


def completions(stages: list[Executor]) -> list[SequenceFinished]:
    """Tokens and log-probabilities of prompts together."""
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS
    ]
    return complete(stages, requests(prompts, SAMPLED), budget=BUDGET, seats=len(prompts))


def num_fused(stages: list[Executor]) -> int:
    """Layers that are one call of the kernel."""
    layers = [layer for stage in stages for layer in stage.forward.shard.layer_modules.values()]
    return sum("forward" in vars(layer) for layer in layers)


@pytest.mark.parametrize(
    ("name", "dtype", "num_stages"),
    [
        *(
            ("llama", dtype, num_stages)
            for dtype in ("float32", "bfloat16", "int8")
            for num_stages in (1, 3)
        ),
        ("llama-tied", "float32", 2),
        ("llama-tied", "int8", 1),
        ("llama-tied", "int4", 1),
        ("qwen3", "bfloat16", 1),  # norms of attention heads
        ("gemma3", "bfloat16", 1),  # norms of what ranks have put together
        ("olmo2", "float32", 1),  # a norm of all heads
        ("phi3", "float32", 1),  # outputs of one product that no rank may keep
        ("mixtral", "float32", 1),  # experts
        ("gpt2", "float32", 1),  # no plan of transformers
    ],
)
def test_two_ranks_give_every_bit_of_one_process(
    name: str, dtype: str, num_stages: int, folder: Path, devices: Devices
) -> None:
    # Given what one process gives
    stored = torch.bfloat16 if dtype in {"int8", "int4"} else torch.float32
    path = save_model(folder, name, dtype=stored)
    whole = load_chain(path, num_stages, devices.one, folder, dtype=dtype)
    expected = completions(whole)

    # When two ranks divide every layer
    stages = load_chain(path, num_stages, devices.two, folder, dtype=dtype)

    # Then nothing shows it: tokens, log-probabilities, exactness, layers as one call
    assert completions(stages) == expected
    assert [stage.exact for stage in stages] == [stage.exact for stage in whole]
    assert num_fused(stages) == (0 if name in FUSED_ALONE else num_fused(whole))
    for stage in stages:
        stage.drop()


def test_two_ranks_of_a_file_of_4_bits_give_every_bit_of_one_process(
    folder: Path, devices: Devices
) -> None:
    model = save_model(
        folder / "wide", "llama-tied", hidden_size=256, head_dim=64, intermediate_size=512
    )
    others = {"attn_v": GGMLQuantizationType.Q8_0, "token_embd": GGMLQuantizationType.Q8_0}
    kind = GGMLQuantizationType.Q4_1
    path = write_gguf(model, folder / "model.gguf", kind=kind, others=others)
    whole, stages = (load_chain(path, 1, device, folder, dtype="int4") for device in devices)

    assert completions(stages) == completions(whole)
    assert stages[0].exact
    assert num_fused(stages) == num_fused(whole)
    stages[0].drop()


@pytest.mark.parametrize(
    ("pack", "config"),
    [
        (gptq(group=64, alike=True), {"quant_method": "gptq", "bits": 4}),  # one order for q, k, v
        (gptq(group=32, reordered=True), {"quant_method": "gptq", "bits": 4}),
        (awq(128), {"quant_method": "awq", "bits": 4}),
    ],
    ids=["ordered", "ordered-apart", "awq"],
)
def test_two_ranks_of_a_packed_checkpoint_give_every_bit_of_one_process(
    pack: Pack, config: dict[str, Any], tmp_path: Path, devices: Devices
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
    _, path = save_both(tmp_path, pack, config, **sizes)
    whole, stages = (load_chain(path, 1, device, tmp_path, dtype="int4") for device in devices)

    assert completions(stages) == completions(whole)
    assert stages[0].exact
    assert num_fused(stages) == num_fused(whole)
    stages[0].drop()


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_two_ranks_of_experts_in_mxfp4_give_every_bit_of_one_process(
    dtype: str, tmp_path: Path, devices: Devices
) -> None:
    _, path = save_mxfp4(tmp_path)
    whole, stages = (load_chain(path, 1, device, tmp_path, dtype=dtype) for device in devices)

    assert completions(stages) == completions(whole)
    assert stages[0].exact
    stages[0].drop()


@pytest.mark.parametrize(("name", "same"), [("llama", True), ("starcoder2", False)])
def test_ranks_whose_shares_may_fill_no_vector_do_not_pass_for_one_process(
    name: str, same: bool, folder: Path, devices: Devices
) -> None:
    path = save_model(folder, name)
    (whole,), (stage,) = (load_chain(path, 1, device, folder) for device in devices)

    assert (stage.fingerprint == whole.fingerprint) is same
    assert stage.exact
    stage.drop()


def test_ranks_take_half_of_the_kv_and_of_the_products_each(folder: Path, devices: Devices) -> None:
    path = save_model(folder / "even", intermediate_size=64)
    (whole,), (half,) = (load_chain(path, 1, device, folder) for device in devices)

    def products_and_kv(stage: Executor) -> tuple[int, int]:
        layers = stage.forward.shard.layer_modules.values()
        products = {
            each for layer in layers for each in layer.modules() if isinstance(each, TiledLinear)
        }
        kv = stage.forward.kv
        return sum(each.tiles.numel() for each in products), sum(
            each.numel() for each in (*kv.keys.values(), *kv.values.values())
        )

    assert half.num_blocks == whole.num_blocks
    assert products_and_kv(half) == tuple(number // 2 for number in products_and_kv(whole))
    half.drop()


def test_heads_that_ranks_cannot_divide_evenly_stay_whole(folder: Path, devices: Devices) -> None:
    path = save_model(folder / "odd", hidden_size=48, num_attention_heads=6, num_key_value_heads=3)
    expected = completions(load_chain(path, 1, devices.one, folder))

    stages = load_chain(path, 1, devices.two, folder)

    assert completions(stages) == expected
    assert num_fused(stages) == 4
    assert {keys.shape[1] for keys in stages[0].forward.kv.keys.values()} == {2}, (
        "the other rank has one KV head"
    )
    stages[0].drop()


def test_layers_of_ranks_may_be_streamed(folder: Path, devices: Devices) -> None:
    path = save_model(folder)
    expected = completions(load_chain(path, 1, devices.one, folder))

    stages = load_chain(path, 1, devices.two, folder, streamed_layers=2, streamed_folder=folder)

    assert completions(stages) == expected
    assert len(stages[0].forward.shard.streamed_layers) == 2
    stages[0].drop()


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_adapters_of_ranks_give_every_bit_of_one_process(
    dtype: str, folder: Path, devices: Devices
) -> None:
    # Given more adapters than a stage holds, of unlike layers, and what one process gives
    path = save_model(folder)
    adapters = folder / f"adapters-{dtype}"
    save_adapter(path, adapters / "all", rank=4, seed=1)
    save_adapter(path, adapters / "heads", targets=("q_proj", "v_proj"), rank=9, seed=2)
    save_adapter(path, adapters / "outputs", targets=("o_proj", "down_proj"), rank=16, seed=3)
    prompts = [[5 + (place * 7 + at) % 80 for at in range(3 + 20 * place)] for place in range(6)]
    names = ("all", "heads", "", "outputs", "all", "heads")

    def outcomes(device: Device) -> list[SequenceFinished]:
        stages = load_chain(
            path, 2, device, folder, dtype=dtype, adapters_folder=adapters, max_adapters=2
        )
        asked = [
            with_adapters(stages, [request], name)[0] if name else request
            for request, name in zip(requests(prompts, SAMPLED), names, strict=True)
        ]
        found = complete(stages, asked, budget=BUDGET, seats=len(asked))
        for stage in stages:
            stage.drop()
        return found

    # Then ranks give the same
    assert outcomes(devices.two) == outcomes(devices.one)


def test_kv_of_preempted_sequences_goes_to_slots_and_back_on_each_rank(
    folder: Path, devices: Devices
) -> None:
    # Given more sequences than the KV holds, and what they give with room
    path = save_model(folder)
    prompts = [[5 + (place * 7 + at) % 80 for at in range(70)] for place in range(6)]
    wanted = requests(prompts, SamplingParams(max_tokens=70, temperature=0.0, ignore_eos=True))
    expected = complete(load_chain(path, 1, devices.one, folder), wanted, budget=256, seats=6)

    # When two ranks move what does not fit
    stages = load_chain(path, 1, devices.two, folder, offload_bytes=1 << 20)
    pressure = Pressure(num_blocks=8, num_slots=stages[0].offload.num_slots)
    found = complete(stages, wanted, budget=256, seats=6, pressure=pressure)

    # Then nothing shows it
    assert any(not move.is_out for move in pressure.moves), "nothing came back"
    assert [each.output_ids for each in found] == [each.output_ids for each in expected]
    stages[0].drop()


def test_a_rank_ends_whose_stage_ended_while_it_was_starting() -> None:
    of_another = str(os.getppid())
    argv = [sys.executable, "-m", PROGRAM, of_another, "1", "2", "0", "0", "0"]
    assert subprocess.run(argv, stdin=subprocess.DEVNULL, check=False, timeout=60).returncode == 0


def test_a_stage_has_one_thread_after_its_imports_so_that_its_ranks_can_be_forks() -> None:
    script = (
        "import services.stage.__main__; "
        "from shardline_server.host.threads import num_threads; print(num_threads())"
    )
    environment = {
        name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")
    }
    argv = [sys.executable, "-c", script]
    run = subprocess.run(
        argv,
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        check=True,
    )
    assert run.stdout.split() == [b"1"]


def test_rows_outside_the_kv_are_refused_and_the_ranks_go_on(
    folder: Path, devices: Devices
) -> None:
    (stage,) = load_chain(save_model(folder), 1, devices.two, folder)
    before = completions([stage])
    outside = [Span(start=0, length=1, blocks=[stage.num_blocks])]

    with pytest.raises(ProtocolError, match="outside"):
        stage.run_pass(Pass(kind=PassKind.HIDDEN, spans=outside), torch.tensor([5]))

    assert completions([stage]) == before
    stage.drop()
