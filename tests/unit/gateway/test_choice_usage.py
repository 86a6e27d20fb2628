"""The usage of a request with several choices."""

from __future__ import annotations

import pytest

from services.gateway.openai.choice_answers import total_usage
from shardline.contract.job import Usage


def of(prompt: int, output: int, cached: int | None, reasoning: int | None) -> Usage:
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=output,
        cached_tokens=cached,
        reasoning_tokens=reasoning,
    )


@pytest.mark.parametrize(
    ("usages", "n", "total"),
    [
        ([of(10, 3, 0, 2), of(10, 4, 8, 1)], 2, of(10, 7, 0, 3)),
        ([of(10, 3, 4, 0), of(20, 4, 16, 0)], 1, of(30, 7, 20, 0)),
        ([of(10, 3, None, None), of(10, 4, 8, 1)], 2, of(10, 7, None, None)),
    ],
    ids=["choices of one prompt", "two prompts", "what is not known of one is not of all"],
)
def test_prompts_count_once_and_output_counts_all(
    usages: list[Usage], n: int, total: Usage
) -> None:
    assert total_usage(usages, n) == total
