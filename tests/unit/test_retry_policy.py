"""A job's retry policy: its bounds, what is refused by name, and how long each wait is."""

from __future__ import annotations

from typing import Any

import pytest

from shardline.base.errors import Invalid
from shardline.contract.request_parsing import parse_request, parse_retry
from shardline.contract.retry_policy import MAX_ATTEMPTS, RetryPolicy

WRONG = [
    ({"max_attempts": 0}, "retry.max_attempts", ">= 1"),
    ({"max_attempts": 33}, "retry.max_attempts", "<= 32"),
    ({"max_attempts": True}, "retry.max_attempts", "bool"),
    ({"backoff_s": 2}, "retry.max_attempts", "missing"),
    ({"max_attempts": 2, "backoff_s": 0.5}, "retry.backoff_s", ">= 1"),
    ({"max_attempts": 2, "backoff_s": 3_601}, "retry.backoff_s", "<= 3600"),
    ({"max_attempts": 2, "backoff_s": 601}, "retry.backoff_s", "max_backoff_s (600)"),
    ({"max_attempts": 2, "max_backoff_s": 0}, "retry.max_backoff_s", ">= 1"),
    ({"max_attempts": 2, "max_backoff_s": 86_401}, "retry.max_backoff_s", "<= 86400"),
    ({"max_attempts": 2, "on": []}, "retry.on", "length >= 1"),
    ({"max_attempts": 2, "on": ["crashed"] * 9}, "retry.on", "length <= 8"),
    ({"max_attempts": 2, "on": "crashed"}, "retry.on", "array"),
    ({"max_attempts": 2, "jitter": True}, "retry.jitter", "unknown"),
    ([], "retry", "array"),
    ("often", "retry", "str"),
]


@pytest.mark.parametrize(("document", "field", "said"), WRONG)
def test_a_wrong_policy_is_refused_with_its_field_and_limit(
    document: Any, field: str, said: str
) -> None:
    for parse in (parse_retry, lambda retry: parse_request({**JOB, "retry": retry})):
        with pytest.raises(Invalid) as refused:
            parse(document)
        assert refused.value.field == field
        assert said in refused.value.problem
        assert refused.value.remedy


@pytest.mark.parametrize(
    "name", ["lost", "released", "cancelled", "expired", "invalid_request", "parent_failed", "oom"]
)
def test_what_is_never_tried_again_is_refused_with_what_is(name: str) -> None:
    with pytest.raises(Invalid) as refused:
        parse_retry({"max_attempts": 2, "on": ["crashed", name]})
    assert refused.value.as_dict() == {
        "code": "invalid_request",
        "field": "retry.on[1]",
        "problem": f"'{name}' is never tried again",
        "remedy": "Send some of crashed, engine",
    }


def test_a_policy_beside_another_limit_of_crashes_is_refused() -> None:
    with pytest.raises(Invalid) as refused:
        parse_request({**JOB, "max_crashes": 7, "retry": {"max_attempts": 2}})
    assert refused.value.field == "max_crashes"


def test_null_is_a_default_and_a_whole_number_an_integer() -> None:
    document = {"max_attempts": 5.0, "backoff_s": None, "on": None}
    assert parse_request({**JOB, "retry": document}).retry == RetryPolicy(max_attempts=5)
    assert parse_request({**JOB, "retry": None}).retry is None


def test_waits_double_up_to_the_longest() -> None:
    policy = RetryPolicy(max_attempts=MAX_ATTEMPTS, backoff_s=3, max_backoff_s=20)
    assert [policy.wait_s(number) for number in (1, 2, 3, 4, 32)] == [3, 6, 12, 20, 20]


def test_attempts_are_those_of_the_policy_and_at_most_the_ceiling() -> None:
    policy = RetryPolicy(max_attempts=3)
    left = [policy.tries_again("crashed", number, MAX_ATTEMPTS) for number in (1, 2, 3)]
    assert left == [True, True, False]
    assert not policy.tries_again("crashed", 2, ceiling=2)
    assert not policy.tries_again("engine", 1, MAX_ATTEMPTS)


JOB = {"model": "m", "prompt": "a"}
