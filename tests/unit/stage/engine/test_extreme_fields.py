"""Fields at their limits and beyond, combined, through a real head and tail: no request harms
another one's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardline.base.errors import Invalid
from shardline.contract.job import JobRequest, SamplingParams
from shardline.contract.request_parsing import parse_request
from shardline.store.connection.encoding import dump
from shardline_scheduler.events import SequenceFailed
from shardline_scheduler.sequence import Request
from tests.chain import generate, load_chain, requests
from tests.engines import Engines, open_engines
from tests.extreme_fields import Drawn, drawn
from tests.models import save_model
from tests.pinned import first_core

INNOCENT = requests(
    [[5, 6, 7], [9] * 30], SamplingParams(max_tokens=4, temperature=0.8, logprobs=2)
)
NUM_NEW = 3
BUDGET = 64


@pytest.fixture(scope="module")
def pipeline(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Engines, list[tuple[int, ...]]]]:
    """Two stages over real hops, and what the innocent requests give in them alone."""
    folder = save_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2)
    with first_core(tmp_path_factory.mktemp("locks")) as core:
        stages = load_chain(folder, 2, core, folder)
        expected = generate(stages, INNOCENT, budget=BUDGET)
        with open_engines(stages, tmp_path_factory.mktemp("links"), budget=BUDGET) as engines:
            yield engines, expected


NAMES = count()


def job(params: SamplingParams, *, seed: int) -> Request:
    """As a head takes it from a claim, short."""
    most = NUM_NEW if params.max_tokens is None else min(NUM_NEW, params.max_tokens)
    params = msgspec.structs.replace(params, max_tokens=most)
    return Request(
        key=(f"extreme-{next(NAMES)}", 1), prompt_ids=(3, 4, 5, 4), params=params, seed=seed
    )


def run_beside_others(
    engines: Engines, expected: list[tuple[int, ...]], extreme: list[Request]
) -> list[str]:
    """Why each of the extreme ones failed; the others have their tokens, and the epoch goes on."""
    others = [replace(each, key=(f"innocent-{next(NAMES)}", 1)) for each in INNOCENT]
    ends = engines.ends([others[0], *extreme, others[1]])
    first, *strange, last = ends
    assert not isinstance(first, SequenceFailed), first
    assert not isinstance(last, SequenceFailed), last
    assert [first.output_ids, last.output_ids] == expected
    assert engines.lost == []
    return [end.reason for end in strange if isinstance(end, SequenceFailed)]


def parsed(one: Drawn) -> JobRequest | None:
    """What a door makes of it: exactly what is beyond a limit is refused, by the name of a wrong
    field."""
    if not one.beyond:
        return parse_request(one.document)
    with pytest.raises(Invalid) as caught:
        parse_request(one.document)
    assert caught.value.field.partition("[")[0] in one.beyond, one
    return None


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(documents=st.lists(drawn(), min_size=1, max_size=6))
def test_what_a_door_takes_runs_and_harms_nobody(
    documents: list[Drawn], pipeline: tuple[Engines, list[tuple[int, ...]]]
) -> None:
    taken = [request for one in documents if (request := parsed(one)) is not None]
    for request in taken:
        dump(msgspec.to_builtins(request.params()))  # as Postgres is sent it
    assert (
        run_beside_others(*pipeline, [job(one.params(), seed=one.seed or 0) for one in taken]) == []
    )


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    documents=st.lists(drawn(), min_size=1, max_size=4),
    seed=st.sampled_from((-1, 0, 2**63 - 1, 2**63, 2**64)),
)
def test_a_row_that_no_door_has_checked_ends_alone(
    documents: list[Drawn], seed: int, pipeline: tuple[Engines, list[tuple[int, ...]]]
) -> None:
    rows = [
        SamplingParams(**{**one.document, "max_tokens": NUM_NEW})
        for one in map(without_door, documents)
    ]
    reasons = run_beside_others(*pipeline, [job(params, seed=seed) for params in rows])
    assert all("stages do not take its parameters" in reason for reason in reasons)
    if not 0 <= seed < 2**63:
        assert len(reasons) == len(rows)


def without_door(one: Drawn) -> Drawn:
    """The sampling fields of a document as they are."""
    names = SamplingParams.__struct_fields__
    return Drawn({name: value for name, value in one.document.items() if name in names}, one.beyond)
