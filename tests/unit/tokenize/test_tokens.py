"""Tokenizing: the same ids as transformers, and every limit refused by name. The demo model's
folder is the example."""

from __future__ import annotations

import sys
import threading
from copy import copy
from pathlib import Path
from typing import Any, cast

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoTokenizer

from shardline.base.errors import ContextExceeded, Invalid
from shardline.contract.chat import Message
from shardline.contract.job import SamplingParams
from shardline_server.tokenize import ChatTemplate, Tokens, model_row
from tests.tiny_head import CLERK, clerk_row

NO_LIMITS = SamplingParams()
CHATML = (
    "{% for message in messages %}\n"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\n"
    "{% if loop.index > 8 %}{% break %}{% endif %}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}"
    "{% generation %}<|im_start|>assistant\n{% endgeneration %}{% endif %}"
    "{{ messages | tojson }}{{ eos_token }}"
)


@pytest.fixture(scope="module")
def row() -> dict[str, Any]:
    return clerk_row()


@pytest.fixture(scope="module")
def clerk(row: dict[str, Any]) -> Tokens:
    return Tokens.from_row(row)


def test_the_row_of_a_models_folder_has_its_texts_and_its_heads_limits(row: dict[str, Any]) -> None:
    assert (row["context_length"], row["vocab_size"], row["eos_token_ids"]) == (512, 896, [2])
    assert row["special_tokens"] == {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
    }
    assert "raise_exception" in row["chat_template"]


def test_of_text_far_over_the_context_only_a_beginning_is_tokenized(row: dict[str, Any]) -> None:
    # Given a text of whose kind a beginning is far over the context, and one of the same length
    # that fits
    seen: list[int] = []
    tokens = Tokens.from_row({**row, "context_length": 8192})
    tokenizer = tokens.tokenizer
    tokens.tokenizer = cast("Tokenizer", Spy(tokenizer, seen))

    with pytest.raises(
        ContextExceeded, match=r"1000000 characters make more than 16384.*at most 8191 tokens"
    ):
        tokens.prepare(prompt="3 1 4 1 5 " * 100_000, params=NO_LIMITS)

    assert seen == [8 * 8192]
    fits = "31 " * 1_000
    assert tokens.prepare(prompt=fits, params=NO_LIMITS).prompt_ids == tuple(
        tokenizer.encode(fits).ids
    )


def test_a_long_text_of_few_tokens_is_read_whole() -> None:
    tokenizer = Tokenizer(WordLevel({"<unk>": 0, "a" * 100: 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokens = Tokens(
        model="m",
        tokenizer_json=tokenizer.to_str(),
        chat_template=None,
        special_tokens={},
        context_length=4096,
        vocab_size=2,
        eos_ids=[],
    )
    assert (
        tokens.prepare(prompt=("a" * 100 + " ") * 4000, params=NO_LIMITS).prompt_ids == (1,) * 4000
    )


class Spy:
    """A tokenizer that notes the length of each text."""

    def __init__(self, tokenizer: Tokenizer, seen: list[int]) -> None:
        self._tokenizer = tokenizer
        self._seen = seen

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        """As the tokenizer does."""
        self._seen.extend(len(text) for text in texts)
        return self._tokenizer.encode_batch_fast(texts, **options)


def test_a_folder_without_tokenizer_takes_only_token_ids(tmp_path: Path) -> None:
    row = model_row(
        tmp_path, name="tiny", fingerprint="f2", context_length=64, vocab_size=96, eos_ids=(2, 3)
    )
    tokens = Tokens.from_row(row)

    assert tokens.prepare(prompt=(5, 6), params=NO_LIMITS).prompt_ids == (5, 6)
    assert tokens.completion(NO_LIMITS, 8, ()).say([5, 6]) == ""
    with pytest.raises(Invalid, match="list of token ids"):
        tokens.prepare(prompt="text", params=NO_LIMITS)
    with pytest.raises(Invalid, match=r"stop: tiny has no tokenizer.*Use stop_token_ids"):
        tokens.prepare(prompt=(5, 6), params=SamplingParams(stop=("text",)))


def test_prepared_text_has_the_ids_of_transformers(clerk: Tokens) -> None:
    reference = AutoTokenizer.from_pretrained(CLERK)
    for text in ("date: 3 March 2024 =", "Grüße, 北京 🎉", " spaces  and\nlines "):
        assert (
            list(clerk.prepare(prompt=text, params=NO_LIMITS).prompt_ids)
            == reference(text)["input_ids"]
        )


@pytest.mark.parametrize("template", [None, CHATML])
def test_rendered_messages_have_the_ids_of_transformers(
    row: dict[str, Any], template: str | None
) -> None:
    reference = AutoTokenizer.from_pretrained(CLERK)
    source = template or row["chat_template"]
    messages = [Message("system", "Be <brief> & right."), Message("user", "date: 3 März 2024")]
    expected = reference.apply_chat_template(
        [{"role": message.role, "content": str(message.content)} for message in messages],
        chat_template=source,
        add_generation_prompt=True,
        return_dict=False,
    )

    ids = (
        Tokens.from_row({**row, "chat_template": source})
        .prepare(messages=messages, params=NO_LIMITS)
        .prompt_ids
    )

    assert list(ids) == expected


def test_special_tokens_have_no_text(clerk: Tokens) -> None:
    ids = clerk.prepare(prompt="sum: 1 + 2 =", params=NO_LIMITS).prompt_ids
    assert clerk.completion(NO_LIMITS, 32, ()).say([*ids, 2]) == "sum: 1 + 2 ="
    assert clerk.vocabulary.name(2) == "<eos>"


def test_max_tokens_defaults_to_what_the_context_leaves(clerk: Tokens) -> None:
    prepared = clerk.prepare(prompt=(5,) * 500, params=NO_LIMITS)
    assert prepared.max_tokens == 12


@pytest.mark.parametrize(("kv_tokens", "max_tokens"), [(256, 56), (100_000, 312), (None, 312)])
def test_max_tokens_defaults_to_what_pipelines_below_the_context_leave(
    clerk: Tokens, kv_tokens: int | None, max_tokens: int
) -> None:
    assert (
        clerk.within(kv_tokens).prepare(prompt=(5,) * 200, params=NO_LIMITS).max_tokens
        == max_tokens
    )


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "field"), [(256, None, "prompt"), (200, 57, "max_tokens")]
)
def test_a_request_that_no_pipeline_holds_names_the_limit(
    clerk: Tokens, num_prompt: int, max_tokens: int | None, field: str
) -> None:
    with pytest.raises(
        Invalid, match=r"length is 256 tokens.*what the KV of clerk's pipelines holds"
    ) as caught:
        clerk.within(256).prepare(
            prompt=(5,) * num_prompt, params=SamplingParams(max_tokens=max_tokens)
        )
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("request_fields", "params", "field", "limit", "remedy"),
    [
        ({"prompt": ""}, {}, "prompt", "empty", "Send some text"),
        ({"prompt": (5,) * 512}, {}, "prompt", "512", "at most 511"),
        (
            {"prompt": (5,) * 500},
            {"max_tokens": 13},
            "max_tokens",
            "maximum context length is 512",
            "at most 12",
        ),
        ({"prompt": (5,) * 500}, {"min_tokens": 13}, "min_tokens", "12 that fit", "at most 12"),
        ({"prompt": (5, 896)}, {}, "prompt[1]", "vocabulary of 896", "0 to 895"),
        (
            {"prompt": "a"},
            {"stop_token_ids": (900,)},
            "stop_token_ids[0]",
            "vocabulary of 896",
            "0 to 895",
        ),
        ({"prompt": "x" * 70_000}, {}, "prompt", "maximum context length is 512", "at most 65536"),
        ({"prompt": "\ud800"}, {}, "prompt", "Unicode", "surrogates"),
        ({"messages": [Message("system", "x")]}, {}, "messages", "no user message", "roles"),
    ],
)
def test_a_request_over_a_limit_names_field_limit_and_remedy(
    clerk: Tokens,
    *,
    request_fields: dict[str, Any],
    params: dict[str, Any],
    field: str,
    limit: str,
    remedy: str,
) -> None:
    with pytest.raises(Invalid) as caught:
        clerk.prepare(**request_fields, params=SamplingParams(**params))
    assert caught.value.field == field
    assert limit in caught.value.problem
    assert remedy in caught.value.remedy


def test_ids_that_a_tokenizer_makes_beyond_the_vocabulary_are_refused_with_the_token(
    row: dict[str, Any],
) -> None:
    tokenizer = Tokenizer.from_str(row["tokenizer"])
    tokenizer.add_special_tokens([AddedToken("<image>", special=True)])
    tokens = Tokens.from_row({**row, "tokenizer": tokenizer.to_str()})

    for request in ({"prompt": "see <image> here"}, {"messages": [Message("user", "see <image>")]}):
        with pytest.raises(
            Invalid, match="'<image>' token 896, which the model's vocabulary of 896"
        ) as caught:
            tokens.prepare(**request, params=NO_LIMITS)
        assert caught.value.field in request


class WatchedTokenizer:
    """A tokenizer that says whether another thread ran during each of its calls."""

    def __init__(self, tokenizer: Tokenizer, turns: list[int]) -> None:
        self._tokenizer = tokenizer
        self._turns = turns
        self.num_turns: list[int] = []

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._tokenizer, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            before = self._turns[0]
            result = call(*arguments, **options)
            self.num_turns.append(self._turns[0] - before)
            return result

        return watched


def test_other_threads_run_while_a_long_text_is_tokenized(clerk: Tokens) -> None:
    """The interpreter takes no turns by time meanwhile: another thread runs only where the call
    lets it."""
    turns = [0]
    done = threading.Event()
    long = copy(clerk)
    long.context_length = long.longest = 1 << 20
    watched = WatchedTokenizer(clerk.tokenizer, turns)
    long.tokenizer = cast(Any, watched)

    def take_turns() -> None:
        while not done.wait(0.0001):
            turns[0] += 1

    other = threading.Thread(target=take_turns)
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(600)
    try:
        other.start()
        long.prepare(prompt="sum: 1 + 2 = " * 20_000, params=NO_LIMITS)
    finally:
        done.set()
        sys.setswitchinterval(before_s)
        other.join()

    assert watched.num_turns[0] > 0


def test_messages_for_a_model_without_template_name_the_other_door(row: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match="/v1/completions"):
        Tokens.from_row({**row, "chat_template": None}).prepare(
            messages=[Message("user", "x")], params=NO_LIMITS
        )


KNOWN_ROLES = (
    "{% for m in messages %}{% if m.role == 'system' and loop.first %}[S]{{ m.content | trim }}"
    "{% elif m.role == 'user' %}[U]{{ m.content | trim | upper }}"
    "{% elif m.role == 'assistant' %}[A]{{ m.content.split('</think>')[-1] }}{% endif %}"
    "{% endfor %}"
)
"""As many templates are: what no branch names is not rendered."""


def render(source: str, *messages: tuple[str, str], **variables: Any) -> str | None:
    given = [{"role": role, "content": content} for role, content in messages]
    return ChatTemplate(source, {}).render(given, limit_chars=1_000, variables=variables)


def test_a_developer_speaks_as_system_where_the_template_has_no_such_role() -> None:
    assert render(KNOWN_ROLES, ("developer", "Be brief."), ("user", "Hi")) == "[S]Be brief.[U]HI"
    knows = (
        KNOWN_ROLES
        + "{% if messages[0].role == 'developer' %}[D]{{ messages[0].content }}{% endif %}"
    )
    assert render(knows, ("developer", "Be brief."), ("user", "Hi")) == "[U]HI[D]Be brief."


@pytest.mark.parametrize("role", ["function", "Developer", "system ", ""])
@pytest.mark.parametrize("content", ["Be brief.", "i", "Hi"])
def test_a_message_that_the_template_leaves_out_is_refused_by_its_role(
    role: str, content: str
) -> None:
    with pytest.raises(Invalid, match=f"leaves out this message of role {role!r}") as caught:
        render(KNOWN_ROLES, ("user", "Hi"), (role, content), ("user", "Hi"))
    assert caught.value.field == "messages[1]"


def test_a_system_message_that_only_the_first_place_has_room_for_is_refused() -> None:
    with pytest.raises(Invalid, match=r"messages\[1\]: .* role 'system'"):
        render(KNOWN_ROLES, ("system", "Be brief."), ("developer", "Be kind."), ("user", "Hi"))


def test_a_message_whose_content_the_template_changes_is_there() -> None:
    messages = [
        ("user", " a "),
        ("assistant", "<think>so</think>"),
        ("assistant", "<think>b</think>c"),
        ("user", ""),
    ]
    assert render(KNOWN_ROLES, *messages) == "[U]A[A][A]c[U]"


def test_a_template_gets_the_variables_of_the_request() -> None:
    source = (
        "{{ messages[0].content }}{% if enable_thinking is false %}<think></think>{% endif %}"
        "{{ bos_token }}"
    )
    assert (
        render(source, ("user", "Hi"), enable_thinking=False, bos_token="<s>")
        == "Hi<think></think><s>"
    )
    assert render(source, ("user", "Hi")) == "Hi"
    for name in ("messages", "add_generation_prompt", "tools"):
        with pytest.raises(Invalid, match=f"chat_template_kwargs.{name}"):
            render(source, ("user", "Hi"), **{name: None})


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{{ ''.__class__.__mro__ }}", "refuses them"),
        ("{{ messages.clear() }}", "refuses them"),
        ("{{ 1 / 0 }}", "refuses them"),
    ],
)
def test_a_hostile_template_is_refused(source: str, problem: str) -> None:
    template = ChatTemplate(source, {})
    with pytest.raises(Invalid, match=problem):
        template.render([{"role": "user", "content": "x"}], limit_chars=1_000)


def test_a_template_that_says_more_than_the_limit_is_stopped() -> None:
    template = ChatTemplate("{% for a in range(90000) %}{{ 'xxxxxxxx' }}{% endfor %}", {})
    assert template.render([{"role": "user", "content": "x"}], limit_chars=1_000) is None


def test_a_broken_template_names_its_line() -> None:
    with pytest.raises(Invalid, match="line 2"):
        ChatTemplate("{{ a }}\n{% if %}", {})


def test_a_broken_tokenizer_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match=r"tokenizer\.json cannot be read"):
        Tokens.from_row({**row, "tokenizer": "{}"})
