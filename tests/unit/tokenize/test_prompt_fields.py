"""Fields that decide a prompt's tokens, and words as tokens: by the demo model's tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

from shardline.base.errors import Invalid
from shardline.contract.chat import Message
from shardline.contract.job import SamplingParams
from shardline_server.tokenize import Tokens
from shardline_server.tokenize.bad_words import banned_ids
from tests.tiny_head import clerk_row
from tests.unit.tokenize.small_tokenizers import byte_level

PROMPT = "sort: 31, 7, 30, 12 ="
ASKED = (Message("user", "sum: 1 + 2 ="), Message("assistant", " it is "))


@pytest.fixture(scope="module")
def clerk() -> Tokens:
    return Tokens.from_row(clerk_row())


def ids(tokens: Tokens, **params: Any) -> tuple[int, ...]:
    return tokens.prepare(prompt=PROMPT, params=SamplingParams(**params)).prompt_ids


def test_a_prompt_is_cut_to_its_last_tokens(clerk: Tokens) -> None:
    whole = ids(clerk)
    assert ids(clerk, truncate_prompt_tokens=3) == whole[-3:]
    assert ids(clerk, truncate_prompt_tokens=len(whole) + 1) == whole
    small = clerk.within(12)
    assert ids(small, truncate_prompt_tokens=-1) == whole[-11:]
    assert ids(small, truncate_prompt_tokens=-1, max_tokens=5) == whole[-7:]
    assert ids(small, truncate_prompt_tokens=-1, min_tokens=4) == whole[-8:]


def test_special_tokens_are_added_where_they_are_wanted(clerk: Tokens) -> None:
    whole = ids(clerk)
    assert ids(clerk, add_special_tokens=False) == whole[1:]
    chat = SamplingParams(add_special_tokens=True)
    plain = clerk.prepare(messages=ASKED[:1], params=SamplingParams()).prompt_ids
    assert clerk.prepare(messages=ASKED[:1], params=chat).prompt_ids == (whole[0], *plain)


def test_the_last_message_is_continued_where_it_ends(clerk: Tokens) -> None:
    params = SamplingParams(continue_final_message=True, add_generation_prompt=False)

    prepared = clerk.prepare(messages=ASKED, params=params)

    rendered = clerk.render(ASKED[:1], SamplingParams())
    expected = clerk.tokenizer.encode(f"{rendered}{ASKED[1].content}", add_special_tokens=False).ids
    assert prepared.prompt_ids == tuple(expected)


@pytest.mark.parametrize(
    ("request_", "field", "problem"),
    [
        ({"messages": ASKED[:1], "continue": True}, "messages[0]", "role is 'user'"),
        (
            {"messages": ASKED, "continue": True, "begin": True},
            "continue_final_message",
            "begins a new one",
        ),
        ({"prompt": "a", "continue": True}, "add_generation_prompt", "not rendered"),
    ],
)
def test_what_cannot_be_continued_is_refused(
    clerk: Tokens, request_: dict[str, Any], field: str, problem: str
) -> None:
    params = SamplingParams(
        continue_final_message=True, add_generation_prompt=request_.get("begin", False)
    )
    with pytest.raises(Invalid, match=problem) as caught:
        clerk.prepare(
            prompt=request_.get("prompt"), messages=request_.get("messages"), params=params
        )
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"logit_bias": {3: 1.0, 896: 1.0}}, "logit_bias[1]"),
        ({"allowed_token_ids": (896,)}, "allowed_token_ids[0]"),
        ({"bad_words": ("a", "b" * 128)}, "bad_words[1]"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_tokens_beyond_the_vocabulary_and_words_beyond_a_limit_are_refused(
    clerk: Tokens, params: dict[str, Any], field: str
) -> None:
    with pytest.raises(Invalid) as caught:
        ids(clerk, **params)
    assert caught.value.field == field


def test_a_word_is_banned_at_a_beginning_and_behind_a_space() -> None:
    tokenizer = byte_level()
    spelled = banned_ids(tokenizer, ["hello", " hello", "\n"], vocab_size=10_000)
    assert [tokenizer.decode([*one]) for one in spelled] == ["hello", " hello", "\n"]
