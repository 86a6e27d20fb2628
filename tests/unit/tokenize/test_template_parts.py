"""Chat templates of multimodal models, many of which render a content as a list of parts alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardline.base.errors import Invalid
from shardline_server.tokenize.chat import ChatTemplate
from shardline_server.tokenize.folder import model_row

PARTS = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}{{ part['text'] }}"
    "{% endif %}{% endfor %}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
EITHER = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}[{{ part['text'] }}]{% endfor %}{% endif %}</>{% endfor %}"
)
PLAIN = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</>{% endfor %}"
)
STRICT = "{% for m in messages %}{{ m['content'] + '!' }}{% endfor %}"
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": ""},
]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (PARTS, "<system>Be brief.</><user>Hello</><assistant></><assistant>"),
        (EITHER, "<system>Be brief.</><user>Hello</><assistant></>"),
        (PLAIN, "<system>Be brief.</><user>Hello</><assistant></>"),
        (STRICT, "Be brief.!Hello!!"),
    ],
)
def test_a_content_is_given_as_the_template_takes_it(source: str, expected: str) -> None:
    assert ChatTemplate(source, {}).render(MESSAGES, limit_chars=1000) == expected


def test_a_message_that_a_template_of_parts_leaves_out_is_refused() -> None:
    users_alone = PARTS.replace(
        "{% for message in messages %}",
        "{% for message in messages if message['role'] != 'system' %}",
    )
    with pytest.raises(Invalid, match=r"messages\[0\].*leaves out"):
        ChatTemplate(users_alone, {}).render(MESSAGES, limit_chars=1000)


def test_tools_are_described_to_a_template_of_parts() -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    text = ChatTemplate(PARTS, {}).render(MESSAGES[1:], limit_chars=10_000, tools=[tool])
    assert text is not None
    assert "look_up" in text
    assert "Hello" in text


def test_the_template_of_a_processor_is_read(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": PARTS}))
    row = model_row(
        tmp_path, name="a", fingerprint="b", context_length=8, vocab_size=8, eos_ids=[1]
    )
    assert row["chat_template"] == PARTS
