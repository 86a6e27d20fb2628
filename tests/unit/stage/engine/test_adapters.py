"""Adapters in a chain of stages: what they compute, beside others and alone; which are loaded,
which refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.stage.device.device import Device
from services.stage.engine.executor import Executor
from shardline.contract.job import SamplingParams
from shardline_scheduler.events import SequenceFailed, SequenceFinished
from tests.adapters import PREFIX, merged, rename_tensors, save_adapter
from tests.chain import Guesses, complete, load_chain, requests, with_adapters
from tests.engines import open_engines
from tests.models import VOCAB_SIZE, save_model
from tests.pinned import first_core

NUM_NEW = 12
GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, logprobs=0)
WARM = SamplingParams(max_tokens=NUM_NEW, temperature=0.8, logprobs=2)
NAMES = ("all", "rooted", "pattern")
KINDS = [("float32", 1), ("float32", 2), ("bfloat16", 2), ("int8", 1)]


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    """Core 0."""
    with first_core(tmp_path_factory.mktemp("locks")) as device:
        yield device


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters of unlike ranks, scales and layers."""
    folder = tmp_path_factory.mktemp("adapters")
    save_adapter(model, folder / "all", rank=4, seed=1)
    save_adapter(
        model, folder / "rooted", targets=("q_proj", "v_proj"), rank=9, seed=2, use_rslora=True
    )
    patterns = {
        "rank_pattern": {"down_proj": 2},
        "alpha_pattern": {"layers.1.self_attn.o_proj": 16},
    }
    save_adapter(
        model, folder / "pattern", targets=("o_proj", "down_proj"), rank=16, seed=3, **patterns
    )
    return folder


Chains = dict[tuple[str, int], list[Executor]]


@pytest.fixture(scope="module")
def chains(model: Path, folder: Path, device: Device) -> Chains:
    """Each loaded once."""
    return {
        (dtype, num_stages): load_chain(
            model, num_stages, device, model, dtype=dtype, adapters_folder=folder, max_adapters=3
        )
        for dtype, num_stages in KINDS
    }


def prompts(num: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(3, VOCAB_SIZE, (4 + 7 * n,), generator=generator).tolist() for n in range(num)
    ]


def outcomes(ends: list[SequenceFinished]) -> list[object]:
    return [(end.output_ids, end.logprobs) for end in ends]


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_gives_what_merged_weights_give(
    name: str, chains: Chains, model: Path, folder: Path
) -> None:
    stages = chains["float32", 2]
    (asked,) = with_adapters(stages, requests(prompts(3)[2:], GREEDY), name)

    (end,) = complete(stages, [asked], budget=64, seats=4)

    ids = torch.tensor([[*asked.prompt_ids, *end.output_ids]])
    with torch.inference_mode():
        expected = (
            merged(model, folder / name)(ids)
            .logits[0, len(asked.prompt_ids) - 1 : -1]
            .log_softmax(-1)
        )
    assert tuple(expected.argmax(-1).tolist()) == end.output_ids
    assert end.logprobs is not None
    given = torch.tensor([each.logprob for each in end.logprobs if each is not None])
    torch.testing.assert_close(given, expected.max(-1).values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("dtype", "num_stages"), KINDS)
def test_a_job_has_the_same_bits_alone_and_in_a_crowd_of_adapters(
    dtype: str, num_stages: int, chains: Chains
) -> None:
    # Given jobs of three adapters and of none
    stages = chains[dtype, num_stages]
    assert all(stage.exact for stage in stages)
    wanted = with_adapters(stages, requests(prompts(16), WARM), *NAMES, None)

    # When all run together, and each alone
    crowd = outcomes(complete(stages, wanted, budget=96, seats=16, guesses=Guesses()))
    alone = [
        outcomes(complete(stages, [one], budget=256, seats=1, prefix_cache=False))[0]
        for one in wanted
    ]

    # Then no bit differs, and adapters change tokens
    assert crowd == alone
    plain = outcomes(complete(stages, with_adapters(stages, wanted, None), budget=96, seats=16))
    assert [one == other for one, other in zip(crowd, plain, strict=True)] == [
        False,
        False,
        False,
        True,
    ] * 4


def test_kv_is_shared_by_jobs_of_one_adapter_only(chains: Chains) -> None:
    stages = chains["float32", 2]
    prompt = torch.randint(
        3, VOCAB_SIZE, (150,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    wanted = with_adapters(stages, requests([prompt] * 4, GREEDY), "all", "rooted", None, "all")

    ends = complete(stages, wanted, budget=256, seats=1)

    assert [end.num_cached for end in ends] == [0, 0, 0, 128]
    assert ends[0].output_ids == ends[3].output_ids


@pytest.mark.parametrize("change", [(".weight", ".default.weight"), (PREFIX, "")])
def test_tensors_by_the_names_of_a_state_dict_give_the_same_bits(
    change: tuple[str, str], model: Path, device: Device, tmp_path: Path
) -> None:
    adapter = save_adapter(model, tmp_path / "adapters" / "a", seed=1)
    found = []
    for names in (("", ""), change):
        rename_tensors(adapter, *names)
        stages = load_chain(model, 2, device, model, adapters_folder=adapter.parent)
        wanted = with_adapters(stages, requests(prompts(2), GREEDY), "a")
        found.append(outcomes(complete(stages, wanted, budget=64, seats=4)))

    assert found[0] == found[1]


def test_more_adapters_than_fit_take_turns_and_keep_their_bits(
    chains: Chains, model: Path, folder: Path, device: Device
) -> None:
    stages = load_chain(model, 2, device, model, adapters_folder=folder, max_adapters=1)
    wanted = with_adapters(stages, requests(prompts(9), WARM), *NAMES)

    ends = complete(stages, wanted, budget=96, seats=16)

    assert outcomes(ends) == outcomes(complete(chains["float32", 2], wanted, budget=96, seats=16))
    assert [stage.num_adapters for stage in stages] == [1, 1]


def test_a_stage_with_other_files_fails_that_job_alone_and_the_epoch_lives(
    chains: Chains, model: Path, folder: Path, device: Device, tmp_path: Path
) -> None:
    # Given a middle whose copy of an adapter differs, and not that of another name for the same
    # files
    shutil.copytree(folder, tmp_path / "files")
    shutil.copytree(folder / "all", tmp_path / "files" / "alias")
    shutil.copytree(tmp_path / "files", tmp_path / "other")
    shutil.rmtree(tmp_path / "other" / "all")
    save_adapter(model, tmp_path / "other" / "all", seed=99)
    stages = [
        load_chain(model, 3, device, model, adapters_folder=files, max_adapters=2)[place]
        for place, files in enumerate((tmp_path / "files", tmp_path / "other", tmp_path / "files"))
    ]
    wanted = with_adapters(
        stages, requests(prompts(5), GREEDY), "all", "rooted", None, "all", "alias"
    )
    known = with_adapters(chains["float32", 1], wanted, "all", "rooted", None, "all", "all")
    expected = [end.output_ids for end in complete(chains["float32", 1], known, budget=64, seats=8)]

    # When jobs with it and with others run in a pipeline over real hops
    with open_engines(stages, tmp_path / "sockets", budget=64) as engines:
        ends = engines.ends(wanted)

    # Then those with it fail with the reason, and no others
    reason = "layers 2-2: adapter 'all': its files here are others than the head's"
    refused = [isinstance(end, SequenceFailed) and end.reason.startswith(reason) for end in ends]
    assert refused == [True, False, False, True, False]
    assert [end.output_ids for end in ends if isinstance(end, SequenceFinished)] == [
        *expected[1:3],
        expected[4],
    ]


@pytest.mark.parametrize(
    ("architecture", "targets"),
    [
        ("phi3", ("qkv_proj", "gate_up_proj")),
        ("gemma2", ("q_proj", "down_proj")),
        ("gpt-neox", ("query_key_value", "dense_4h_to_h")),
        ("qwen3-moe", ("v_proj", "o_proj")),
    ],
)
def test_adapters_serve_other_architectures(
    architecture: str, targets: tuple[str, ...], device: Device, tmp_path: Path
) -> None:
    model = save_model(tmp_path, architecture)
    adapter = save_adapter(model, tmp_path / "adapters" / "a", targets=targets, seed=4)
    stages = load_chain(model, 2, device, tmp_path, adapters_folder=tmp_path / "adapters")
    (asked,) = with_adapters(stages, requests(prompts(2)[1:], GREEDY), "a")

    (end,) = complete(stages, [asked], budget=64, seats=4)

    with torch.inference_mode():
        ids = torch.tensor([[*asked.prompt_ids, *end.output_ids]])
        expected = merged(model, adapter)(ids).logits[0, len(asked.prompt_ids) - 1 : -1]
    assert tuple(expected.argmax(-1).tolist()) == end.output_ids
