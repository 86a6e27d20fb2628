"""The executor against plans that fit and plans that do not."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from services.stage.attention.offload_area import OffloadArea
from services.stage.attention.paged_kv import KvShape, PagedKv
from services.stage.device.device import Device
from services.stage.engine.executor import Executor
from services.stage.engine.memory import Limits
from services.stage.model.model_info import ModelInfo
from shardline.base.errors import Invalid, ProtocolError
from shardline.contract.job import SamplingParams
from shardline_scheduler.kv_blocks import BLOCK_TOKENS
from shardline_scheduler.step_plan import Move, Open, Row, StepPlan, StepResult
from tests.chain import KV_BYTES, load_chain, run
from tests.models import save_model
from tests.pinned import first_core

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
IDS = (5, 6, 7, 8, 9)
MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its checksums."""
    return save_model(tmp_path_factory.mktemp("executor"))


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    """Core 0."""
    with first_core(tmp_path_factory.mktemp("locks")) as device:
        yield device


@pytest.fixture(scope="module")
def loaded(folder: Path, device: Device) -> list[Executor]:
    """A head and a tail."""
    return load_chain(folder, 2, device, folder)


@pytest.fixture
def stages(loaded: list[Executor]) -> list[Executor]:
    """Both in a new epoch."""
    for stage in loaded:
        stage.reset()
    return loaded


def opening(
    seq: int = 0, ids: tuple[int, ...] = IDS, *, num_blocks: int = 2, num_cached: int = 0
) -> Open:
    """A sequence with a prompt."""
    prompt: dict[str, Any] = {"ids": ids, "num_prompt": len(ids), "num_cached": num_cached}
    return Open(seq=seq, params=GREEDY, seed=seq, num_blocks=num_blocks, **prompt)


def plan(*rows: Row, opens: tuple[Open, ...] = (), closes: tuple[int, ...] = ()) -> StepPlan:
    """Step 0."""
    return StepPlan(0, opens, rows, closes)


PREFILL = Row(seq=0, start=0, length=5, ids=(), blocks=(0,), wants=True)


def test_the_tail_answers_a_prefill_and_blocks_are_counted(stages: list[Executor]) -> None:
    result = run(stages, plan(PREFILL, opens=(opening(),)))

    assert len(result.tokens) == 1
    assert result.compute_s > 0
    assert [(stage.blocks_used, stage.num_open) for stage in stages] == [(1, 1), (1, 1)]


def test_blocks_of_a_closed_sequence_are_not_counted(stages: list[Executor]) -> None:
    first = run(stages, plan(PREFILL, opens=(opening(),), closes=(0,)))

    assert [(stage.blocks_used, stage.num_open) for stage in stages] == [(0, 0), (0, 0)]
    assert run(stages, plan(PREFILL, opens=(opening(),))).tokens == first.tokens


def test_a_plan_that_only_closes_has_an_empty_answer(stages: list[Executor]) -> None:
    run(stages, plan(PREFILL, opens=(opening(),)))

    hidden = stages[0].run(plan(closes=(0,)), None)

    assert isinstance(hidden, Tensor)
    assert hidden.shape == (0, 32)
    result = stages[1].run(plan(closes=(0,)), hidden)
    assert isinstance(result, StepResult)
    assert result.tokens == ()
    assert stages[1].num_open == 0


def test_chunks_that_want_nothing_give_the_same_last_token(stages: list[Executor]) -> None:
    whole = run(stages, plan(PREFILL, opens=(opening(),), closes=(0,)))

    first = run(stages, plan(Row(0, 0, 3, (), (4,), wants=False), opens=(opening(),)))
    second = run(stages, plan(Row(0, 3, 2, (), (), wants=True)))

    assert first.tokens == ()
    assert second.tokens == whole.tokens


def test_the_next_token_is_the_same_when_the_history_is_opened_again(
    stages: list[Executor],
) -> None:
    ((token,),) = run(stages, plan(PREFILL, opens=(opening(),))).tokens
    expected = run(stages, plan(Row(0, 5, 1, (token,), (), wants=True)))
    for stage in stages:
        stage.reset()

    again = Open(seq=3, ids=(*IDS, token), num_prompt=5, params=GREEDY, seed=0, num_blocks=2)

    assert (
        run(stages, plan(Row(3, 0, 6, (), (9,), wants=True), opens=(again,))).tokens
        == expected.tokens
    )


def single_steps(stages: list[Executor], num: int) -> list[int]:
    """The first tokens of the prompt, one step for each."""
    ((token,),) = run(stages, plan(PREFILL, opens=(opening(),))).tokens
    tokens = [token]
    while len(tokens) < num:
        ((token,),) = run(stages, plan(Row(0, 4 + len(tokens), 1, (token,), (), wants=True))).tokens
        tokens.append(token)
    for stage in stages:
        stage.reset()
    return tokens


@pytest.mark.parametrize("num_true", [0, 1, 3])
def test_drafts_that_come_true_or_not_leave_the_tokens_of_single_steps(
    num_true: int, stages: list[Executor]
) -> None:
    tokens = single_steps(stages, 7)
    drafts = (*tokens[1 : 1 + num_true], *((token + 1) % 96 for token in tokens[1 + num_true : 4]))
    run(stages, plan(PREFILL, opens=(opening(),)))

    guessed = run(stages, plan(Row(0, 5, 4, (tokens[0],), (), wants=True, drafts=drafts)))
    after = run(stages, plan(Row(0, 6 + num_true, 1, (tokens[1 + num_true],), (), wants=True)))
    last = run(stages, plan(Row(0, 7 + num_true, 1, (tokens[2 + num_true],), (), wants=True)))

    assert guessed.tokens == (tuple(tokens[1 : 2 + num_true]),)
    assert (after.tokens, last.tokens) == (((tokens[2 + num_true],),), ((tokens[3 + num_true],),))


def test_a_plan_that_counts_other_drafts_than_came_true_is_a_protocol_error(
    stages: list[Executor],
) -> None:
    first, second, *_ = single_steps(stages, 3)
    run(stages, plan(PREFILL, opens=(opening(),)))
    run(stages, plan(Row(0, 5, 3, (first,), (), wants=True, drafts=(second, 0))))

    with pytest.raises(ProtocolError, match="goes on behind 6 tokens, but 7 came true"):
        run(stages, plan(Row(0, 6, 1, (second,), (), wants=True)))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (Row(0, 5, 3, (1,), (), wants=True, drafts=(2, 96)), "token id outside 0-95"),
        (Row(0, 5, 3, (1,), (), wants=True, drafts=(2, -1)), "token id outside 0-95"),
        (
            Row(0, 5, 2, (1,), (), wants=True, drafts=(2, 3)),
            "drafts in a row of 2 that is no decode",
        ),
        (
            Row(0, 5, 4, (1,), (), wants=True, drafts=(2, 3)),
            "drafts in a row of 4 that is no decode",
        ),
        (Row(0, 5, 3, (1,), (), wants=False, drafts=(2, 3)), "that is no decode"),
        (Row(0, 5, 2, (), (), wants=True, drafts=(2,)), "that is no decode"),
        (
            Row(0, 4, 3, (1,), (), wants=True, drafts=(2, 3)),
            "continues at 4 for 3, but 5 are computed",
        ),
        (Row(0, 5, 62, (1,), (), wants=True, drafts=(2,) * 61), "2 KV blocks, not 1"),
    ],
    ids=str,
)
def test_drafts_that_do_not_fit_are_a_protocol_error(
    row: Row, reason: str, stages: list[Executor]
) -> None:
    run(stages, plan(PREFILL, opens=(opening(),)))

    with pytest.raises(ProtocolError, match=reason):
        stages[0].run(plan(row), None)


def test_drafts_before_the_prompt_is_computed_are_a_protocol_error(stages: list[Executor]) -> None:
    run(stages, plan(Row(0, 0, 3, (), (0,), wants=False), opens=(opening(),)))

    with pytest.raises(ProtocolError, match="has drafts, but runs to 5 of 7 ids"):
        stages[0].run(plan(Row(0, 3, 2, (1,), (), wants=True, drafts=(2,))), None)


@pytest.mark.parametrize("start", [4, 5, 9])
def test_a_row_that_takes_back_more_than_drafts_is_a_protocol_error(
    start: int, stages: list[Executor]
) -> None:
    run(stages, plan(PREFILL, opens=(opening(),)))
    run(stages, plan(Row(0, 5, 3, (1,), (), wants=True, drafts=(2, 3))))

    with pytest.raises(ProtocolError, match=f"continues at {start} for 1, but 8 are computed"):
        stages[0].run(plan(Row(0, start, 1, (1,), (), wants=True)), None)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (plan(PREFILL), "not open"),
        (plan(opens=(opening(), opening())), "opened twice"),
        (plan(closes=(7,)), "was not open"),
        (plan(opens=(opening(ids=(5, 96)),)), "token id outside 0-95"),
        (plan(Row(0, 0, 6, (-1,), (0,), wants=True), opens=(opening(),)), "token id outside 0-95"),
        (
            plan(Row(0, 1, 4, (), (0,), wants=True), opens=(opening(),)),
            "continues at 1 for 4, but 0 are computed",
        ),
        (plan(Row(0, 0, 0, (), (0,), wants=True), opens=(opening(),)), "continues at 0 for 0"),
        (plan(Row(0, 0, 6, (), (0,), wants=True), opens=(opening(),)), "only 5 ids are known"),
        (plan(Row(0, 0, 5, (), (), wants=True), opens=(opening(),)), "1 KV blocks, not 0"),
        (plan(Row(0, 0, 5, (), (10**6,), wants=True), opens=(opening(),)), "KV block outside 0-"),
        (plan(Row(0, 0, 5, (), (-1,), wants=True), opens=(opening(),)), "KV block outside 0-"),
        (
            plan(Row(0, 0, 5, (), (0, 1, 2), wants=True), opens=(opening(),)),
            "more than its 2 KV blocks",
        ),
        (
            plan(PREFILL, Row(0, 0, 5, (), (), wants=True), opens=(opening(),)),
            "continues at 0 for 5, but 5 are computed",
        ),
        (
            plan(Row(0, 0, 600, (), (0,), wants=True), opens=(opening(ids=(5,) * 600),)),
            "600 tokens, the budget is 512",
        ),
        (plan(opens=(opening(num_cached=BLOCK_TOKENS),)), "opens with 64 of"),
        (plan(opens=(opening(num_cached=1),)), "opens with 1 of"),
        (plan(opens=tuple(opening(seq) for seq in range(65))), "beyond the limit of 64"),
    ],
)
def test_a_plan_that_does_not_fit_is_a_protocol_error(
    bad: StepPlan, reason: str, stages: list[Executor]
) -> None:
    with pytest.raises(ProtocolError, match=reason):
        stages[0].run(bad, None)


@pytest.mark.parametrize(
    ("hidden", "shown"),
    [
        (None, "not none"),
        (torch.zeros(4, 32), r"not \(4, 32\)"),
        (torch.zeros(5, 31), r"not \(5, 31\)"),
        (torch.zeros(5, 32, dtype=torch.bfloat16), "of torch.bfloat16"),
    ],
)
def test_activations_that_do_not_fit_the_plan_are_a_protocol_error(
    hidden: Tensor | None, shown: str, stages: list[Executor]
) -> None:
    with pytest.raises(
        ProtocolError, match=rf"activations \(5, 32\) of torch\.float32 are needed, .*{shown}"
    ):
        stages[1].run(plan(PREFILL, opens=(opening(),)), hidden)


def test_activations_that_are_not_finite_spoil_only_their_sequence(stages: list[Executor]) -> None:
    step = plan(PREFILL, Row(1, 0, 5, (), (1,), wants=True), opens=(opening(), opening(1)))
    hidden = stages[0].run(step, None)
    assert isinstance(hidden, Tensor)
    good = stages[1].run(step, hidden)
    stages[1].reset()
    broken = hidden.clone()
    broken[4] = float("nan")

    result = stages[1].run(step, broken)

    assert isinstance(good, StepResult)
    assert isinstance(result, StepResult)
    assert result.bad == (0,)
    assert result.tokens[1] == good.tokens[1]


def test_nothing_keeps_the_memory_of_a_stage_that_nobody_holds(
    folder: Path, device: Device
) -> None:
    (stage,) = load_chain(folder, 1, device, folder)
    run([stage], plan(PREFILL, opens=(opening(),)))
    attention = ref(stage.forward.attention)
    weight = ref(next(stage.forward.shard.model.parameters()))

    del stage
    gc.collect()

    assert attention() is None, "and its KV"
    assert weight() is None


def test_a_kv_budget_below_one_block_is_named(folder: Path, device: Device) -> None:
    with pytest.raises(Invalid, match=r"SHARDLINE_KV_MIB: .* hold no KV block"):
        load_chain(folder, 1, device, folder, kv_bytes=100)


@pytest.mark.parametrize(
    "move", [Move(0, 1 << 20, is_out=True), Move(1 << 20, 0, is_out=False)], ids=str
)
def test_a_move_beyond_blocks_or_slots_is_a_protocol_error(
    move: Move, folder: Path, device: Device
) -> None:
    (stage,) = load_chain(folder, 1, device, folder, offload_bytes=MIB)

    with pytest.raises(
        ProtocolError, match=r"are not both among the \d+ blocks and \d+ slots of this stage"
    ):
        stage.run(StepPlan(0, (), (), (), moves=(Move(0, 0, is_out=True), move)), None)


def test_more_moves_than_blocks_can_make_in_a_step_are_a_protocol_error(
    folder: Path, device: Device
) -> None:
    (stage,) = load_chain(folder, 1, device, folder, offload_bytes=MIB)
    back_and_forth = (Move(0, 0, is_out=True), Move(0, 0, is_out=False)) * (stage.num_blocks + 1)

    with pytest.raises(ProtocolError, match=r"\d+ moves in a step"):
        stage.run(StepPlan(0, (), (), (), moves=back_and_forth), None)


def test_a_stage_without_an_offload_area_refuses_moves(stages: list[Executor]) -> None:
    with pytest.raises(ProtocolError, match=r"and 0 slots of this stage"):
        stages[0].run(StepPlan(0, (), (), (), moves=(Move(0, 0, is_out=True),)), None)


def test_an_offload_area_leaves_no_file_and_says_what_a_copy_takes(
    folder: Path, device: Device, tmp_path: Path
) -> None:
    (stage,) = load_chain(
        folder, 1, device, folder, offload_bytes=MIB, offload_folder=tmp_path / "new"
    )

    assert stage.offload.num_slots == MIB // (KV_BYTES // stage.num_blocks)
    assert stage.offload.move_s > 0
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize(
    ("num_bytes", "in_folder", "shown"),
    [(2**60, True, "/new: "), (2**62, False, "this host's memory: ")],
)
def test_an_offload_area_that_finds_no_room_is_named(
    num_bytes: int, in_folder: bool, shown: str, tmp_path: Path
) -> None:
    kv = PagedKv(
        layers={0: KvShape(num_kv_heads=1, head_dim=16)}, num_blocks=1, dtype=torch.float32
    )

    with pytest.raises(Invalid, match=rf"SHARDLINE_KV_OFFLOAD_MIB: .* do not fit into .*{shown}"):
        OffloadArea(kv, num_bytes, tmp_path / "new" if in_folder else None)


def test_more_kv_than_memory_is_refused_before_loading(folder: Path, device: Device) -> None:
    with pytest.raises(Invalid, match=r"SHARDLINE_SPLIT: weights .* are free. Use more stages"):
        load_chain(folder, 1, device, folder, kv_bytes=2**50)


def test_a_step_that_fits_no_frame_is_refused_where_there_are_hops(
    tmp_path: Path, device: Device
) -> None:
    info = ModelInfo.read(save_model(tmp_path))
    limits = Limits(kv_bytes=1 << 20, token_budget=1 << 22, max_open=4)
    with pytest.raises(Invalid, match=r"SHARDLINE_TOKEN_BUDGET.*256 MiB.*2,097,152 or less"):
        Executor.load(
            model=info,
            layers=range(info.num_layers - 1),
            device=device,
            dtype="float32",
            limits=limits,
            cache_folder=tmp_path,
        )
