"""The harness's own parts that need no stack: how faults are drawn, what a reader keeps, what a
report says."""

from __future__ import annotations

import itertools
import json
import random
import threading
from uuid import uuid4

import pytest

from shardline.contract.request_parsing import parse_request
from tests.chaos.driver.catalog import GROUPS, chosen
from tests.chaos.driver.drawing import drawn
from tests.chaos.load.journal import Asked, Journal, Watched
from tests.chaos.load.reader import Event, events, note
from tests.chaos.load.users import CLERK, SCRIBE
from tests.chaos.load.workload import PLAIN, Workload, adapter_names, lab, of_users
from tests.chaos.report.finding import Finding
from tests.chaos.report.report import Report, Struck

ADAPTED = of_users([CLERK, SCRIBE]).with_adapters(adapter_names(3))


def kinds(seed: int, num: int) -> list[str]:
    """The first faults that this seed draws."""
    return [
        fault.kind for fault in itertools.islice(drawn(chosen("all"), random.Random(seed)), num)
    ]


def test_one_seed_draws_the_same_faults() -> None:
    assert kinds(1, 100) == kinds(1, 100)
    assert kinds(1, 100) != kinds(2, 100)


def test_every_kind_is_drawn_and_a_third_are_kills() -> None:
    faults = {fault.kind: fault for fault in chosen("all")}
    drawn_kinds = kinds(3, 3 * len(faults))
    assert set(drawn_kinds) == set(faults)
    assert sum(faults[kind].is_kill for kind in drawn_kinds) > len(drawn_kinds) / 3


def test_no_two_faults_share_a_kind() -> None:
    assert len(chosen("all")) == sum(len(faults) for faults in GROUPS.values())


def test_choosing_a_whole_kind_leaves_longer_kinds_out() -> None:
    assert [fault.kind for fault in chosen("kill head")] == ["kill head"]
    assert len(chosen("kill head at")) > 1


def test_choosing_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"earthquake.*redis"):
        chosen("earthquake")


@pytest.mark.parametrize(
    "workload",
    [lab(), of_users([CLERK, SCRIBE]), ADAPTED],
    ids=["lab", "users", "users of adapters"],
)
def test_all_requests_of_a_set_differ_and_are_valid(workload: Workload) -> None:
    assert len({json.dumps(request) for request in workload.requests}) == len(workload.requests)
    for request in workload.requests:
        assert parse_request({**request, **PLAIN.fields}).seed is not None


def test_the_users_load_holds_what_users_send() -> None:
    requests = of_users([CLERK, SCRIBE]).requests
    lengths = {len(one["prompt"]) for one in requests if isinstance(one.get("prompt"), list)}
    turns = [
        [message["role"] for message in one["messages"]] for one in requests if "messages" in one
    ]
    assert {1, CLERK.limit - 1, SCRIBE.limit - 1} <= lengths
    assert any(roles[0] == "system" for roles in turns)
    assert any("assistant" in roles for roles in turns)
    assert all(
        any(name in one for one in requests)
        for name in ("stop", "stop_token_ids", "logprobs", "min_tokens")
    )
    assert any("max_tokens" not in one for one in requests)
    assert not any("max_crashes" in one for one in requests)


def test_every_adapter_of_every_model_is_asked_for_and_no_other_request_changes() -> None:
    plain = of_users([CLERK, SCRIBE]).requests
    asked = {one["model"] for one in ADAPTED.requests[len(plain) :]}
    assert ADAPTED.requests[: len(plain)] == plain
    assert asked == {
        f"{model.name}:tuned-{place}" for model in (CLERK, SCRIBE) for place in range(3)
    }


def test_tokens_gaps_and_the_end_are_read_from_a_stream() -> None:
    watched = Watched(job_id=uuid4())
    lines = [
        "retry: 1000",
        "",
        ": keep-alive",
        "",
        "id: 2-abc",
        "event: delta",
        (
            'data: {"start": 0, "token_ids": [1, 2], "text": "ab",'
            ' "logprobs": [[1, -0.5, []], [2, -0.5, []]]}'
        ),
        "",
        "event: delta",
        'data: {"start": 3, "token_ids": [4], "text": "d"}',
        "id: 4-def",
        "",
        "event: end",
        'data: {"state": "succeeded", "result": {"token_ids": [1, 2, 3, 4]}}',
        "id: 4-def",
        "",
    ]
    for each in events(iter(lines)):
        note(watched, each)
    assert watched.place == "4-def"
    assert watched.tokens == [1, 2, 4]
    assert watched.text == "abd"
    assert [entry[0] for entry in watched.logprobs] == [1, 2]
    assert len(watched.gaps) == 1
    assert (watched.end_state, watched.end_tokens) == ("succeeded", [1, 2, 3, 4])


def test_a_stream_that_begins_anew_counts_as_taken_back() -> None:
    watched = Watched(job_id=uuid4(), tokens=[1, 2])
    error = {"error": {"message": "diverged"}}
    note(watched, Event(name="interrupted", place="2-abc", document=error))
    assert watched.gaps == []
    note(watched, Event(name="interrupted", place="0", document=error))
    assert len(watched.gaps) == 1


def test_a_waiter_hears_when_an_open_job_ends() -> None:
    journal = Journal()
    asked = journal.ask(Asked(id=uuid4(), number=0, door="sql"))
    assert not journal.wait_until_quiet(0)
    threading.Thread(target=journal.ended, args=([(asked.id, 100.0)],)).start()
    assert journal.wait_for_end(99.0, 10) == 100.0
    assert journal.wait_for_end(100.0, 0) is None
    assert journal.wait_until_quiet(0)


def test_a_later_token_is_progress_and_a_late_reader_is_not() -> None:
    journal = Journal()
    first, second = (journal.ask(Asked(id=uuid4(), number=0, door="sql")).id for _ in range(2))
    journal.has_rows([first, second])
    watched = journal.watch(first)
    watched.tokens = [1, 2]
    mark = journal.mark()
    journal.watch(second).tokens = [1]
    assert journal.wait_for_progress(mark, 0) is None
    watched.tokens.append(3)
    assert journal.wait_for_progress(mark, 0) is not None


def test_only_the_end_of_a_job_accepted_before_the_mark_is_progress() -> None:
    journal = Journal()
    before, after = (journal.ask(Asked(id=uuid4(), number=0, door="sql")) for _ in range(2))
    journal.has_rows([before.id])
    mark = journal.mark()
    journal.has_rows([after.id])
    journal.ended([(after.id, mark.at_s + 1)])
    assert journal.wait_for_progress(mark, 0) is None
    journal.ended([(before.id, mark.at_s + 2)])
    assert journal.wait_for_progress(mark, 0) == mark.at_s + 2


def test_any_end_is_progress_after_ends_that_nobody_saw() -> None:
    journal = Journal()
    before, after = (journal.ask(Asked(id=uuid4(), number=0, door="sql")) for _ in range(2))
    journal.has_rows([before.id])
    mark = journal.mark()
    journal.ended([(before.id, mark.at_s - 1)])
    assert journal.wait_for_progress(mark, 0) is None
    journal.ended([(after.id, mark.at_s + 1)])
    assert journal.wait_for_progress(mark, 0) == mark.at_s + 1


def test_a_reported_finding_is_counted_and_fails_the_run() -> None:
    struck = [Struck(at_s=0, kind="kill head", is_kill=True, took_s=0, recovery_s=1)]
    calm = Report(
        seed=1,
        minutes=1,
        dtype="float32",
        stages=2,
        faults={"kill head": 1},
        num_faults=1,
        num_kills=1,
        not_run={},
        accepted=1,
        succeeded=1,
        failed_expected=0,
        struck=struck,
    )
    assert calm.with_findings([]).holds
    hurt = calm.with_findings([Finding(invariant="I1", count="lost", what="no row")])
    assert hurt.lost == 1
    assert not hurt.holds
