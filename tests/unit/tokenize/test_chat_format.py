"""Chats with tools and reasoning: how they are written for a model, held to a form, and read."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import pytest
import transformers as tf
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from shardline.base.errors import Invalid
from shardline.contract.job import JobRequest
from shardline.contract.request_parsing import parse_request
from shardline_server.replies import deepseek
from shardline_server.tokenize import Tokens
from shardline_server.tokenize.grammars.grammar import Grammars

JOB_ID = UUID(int=7)
END, THINK, END_THINK, CALL, END_CALL, START = range(256, 262)
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = WITH_TOOLS.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NOTHING = {"type": "function", "function": {"name": "nothing"}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Rome?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "I need the weather.",
        "refusal": None,
        "annotations": [],
        "tool_calls": [
            {
                "id": "call_1",
                "index": 0,
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "Sunny."}]},
]


def bytes_with_markers() -> Tokenizer:
    """A token for each byte, and tokens for the marks of a chat."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({char: number for number, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer.add_tokens(
        [
            AddedToken(text, special=text == "<think>", normalized=False)
            for text in ("<think>", "</think>", "<tool_call>", "</tool_call>")
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True)])
    return tokenizer


def tokens_of(template: str) -> Tokens:
    return Tokens(
        model="m",
        tokenizer_json=bytes_with_markers().to_str(),
        chat_template=template,
        special_tokens={},
        context_length=4096,
        vocab_size=262,
        eos_ids=(END,),
    )


def asked(**fields: Any) -> JobRequest:
    return parse_request({"model": "m", "messages": CONVERSATION[:1], **fields})


def is_held(tokens: Tokens, request: JobRequest, text: str) -> bool:
    """Whether a completion may be this text, and nothing longer or shorter."""
    params = request.params()
    prepared = tokens.prepare(messages=request.messages, params=params)
    output = tokens.chat.output_of(params, prepared.prompt_ids)
    assert output is not None
    grammars = Grammars(bytes_with_markers().to_str(), vocab_size=262, eos_ids=(END,))
    matcher = grammars.matcher(output)
    for token_id in tokens.tokenizer.encode(text, add_special_tokens=False).ids:
        if not matcher.allows(token_id):
            return False
        matcher.take([token_id])
    mask = int.from_bytes(matcher.allowed(), "little")
    return bool(mask >> END & 1)


def test_tools_and_calls_are_rendered_as_transformers_renders_them() -> None:
    request = asked(messages=CONVERSATION, tools=[WEATHER])
    reference = tf.PreTrainedTokenizerFast(tokenizer_object=bytes_with_markers())
    call = {"name": "get_weather", "arguments": {"city": "Rome"}}
    conversation = [
        CONVERSATION[0],
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I need the weather.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        },
        {"role": "tool", "content": "Sunny."},
    ]
    expected = reference.apply_chat_template(
        conversation,
        tools=[WEATHER],
        chat_template=WITH_TOOLS,
        add_generation_prompt=True,
        tokenize=False,
    )
    assert tokens_of(WITH_TOOLS).render(request.messages or (), request.params()) == expected


def test_a_template_without_tools_has_them_in_the_system_message() -> None:
    request = asked(
        messages=[{"role": "system", "content": "Be kind."}, *CONVERSATION], tools=[WEATHER]
    )
    text = tokens_of(PLAIN).render(request.messages or (), request.params())
    assert text.count("<|im_start|>system") == 1
    assert text.index("Be kind.") < text.index('"get_weather"') < text.index("Rome?")
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}' in text
    assert "<|im_start|>user\n<tool_response>\nSunny.\n</tool_response>" in text


def test_a_template_that_leaves_calls_out_is_given_them_as_text() -> None:
    forgets = WITH_TOOLS.replace("{% for call in m.tool_calls %}", "{% for call in [] %}")
    request = asked(messages=CONVERSATION, tools=[WEATHER])
    text = tokens_of(forgets).render(request.messages or (), request.params())
    assert '"arguments": {"city": "Rome"}' in text


ROME = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NAUGHT = '<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ALLOWED = {
    "type": "allowed_tools",
    "allowed_tools": {
        "mode": "required",
        "tools": [{"type": "function", "function": {"name": "nothing"}}],
    },
}


@pytest.mark.parametrize(
    ("choice", "parallel", "text", "expected"),
    [
        ("required", True, ROME, True),
        ("required", True, f"{ROME}\n{NAUGHT}", True),
        ("required", False, f"{ROME}\n{NAUGHT}", False),
        ("required", False, NAUGHT, True),
        ("required", True, "Sunny.", False),
        ("required", True, ROME.replace("Rome", 'Rome", "unit": "K'), False),
        ("required", True, ROME[:-9], False),
        (NAMED, True, ROME, True),
        (NAMED, True, NAUGHT, False),
        (NAMED, True, f"{ROME}\n{ROME}", False),
        (ALLOWED, True, NAUGHT, True),
        (ALLOWED, True, ROME, False),
    ],
)
@pytest.mark.parametrize("template", [PLAIN, WITH_TOOLS])
def test_a_call_that_must_be_made_is_held_to_its_form_and_read_back(
    template: str, choice: Any, parallel: bool, text: str, expected: bool
) -> None:
    tokens = tokens_of(template)
    request = asked(tools=[WEATHER, NOTHING], tool_choice=choice, parallel_tool_calls=parallel)
    assert is_held(tokens, request, text) == expected
    if expected:
        reply = tokens.chat.reply(text, request.params(), JOB_ID, ())
        calls = [
            {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
            for call in reply.tool_calls
        ]
        assert [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls] == (
            text.split("\n<tool_call>", 1)
            if text.count("<tool_call>") == 1
            else text.replace("</tool_call>\n", "</tool_call>|").split("|")
        )
        assert reply.content == ""


ARGUMENTS = '{"city": "Rome"}'
JSON_CALL = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
DEEPSEEK = f"{deepseek.CALL}get_weather{deepseek.SEPARATOR}{ARGUMENTS}{deepseek.END_CALL}"


@pytest.mark.parametrize(
    ("signs", "family", "text", "num_calls"),
    [
        (
            "<|start_header_id|>",
            "llama",
            f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}',
            1,
        ),
        ("[TOOL_CALLS]", "mistral", f"[TOOL_CALLS][{JSON_CALL}, {JSON_CALL}]", 2),
        ("<|start_of_role|>", "granite", f"<|tool_call|>[{JSON_CALL}, {JSON_CALL}]", 2),
        (
            deepseek.CALLS,
            "deepseek",
            f"{deepseek.CALLS}{DEEPSEEK}{DEEPSEEK}{deepseek.END_CALLS}",
            2,
        ),
        (
            "<|tool_calls_section_begin|>",
            "kimi",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
            f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
            1,
        ),
        (
            "<|channel|>",
            "gpt-oss",
            "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
            f"{ARGUMENTS}",
            1,
        ),
    ],
)
def test_a_call_that_must_be_made_has_the_form_that_its_family_was_taught(
    signs: str, family: str, text: str, num_calls: int
) -> None:
    tokens = tokens_of(f'{{# {signs} "parameters" #}}{WITH_TOOLS}')
    request = asked(tools=[WEATHER], tool_choice="required")
    assert tokens.chat.family == family
    assert is_held(tokens, request, text)
    reply = tokens.chat.reply(text, request.params(), JOB_ID, ())
    calls = [(call.function.name, call.function.arguments) for call in reply.tool_calls]
    assert calls == [("get_weather", ARGUMENTS)] * num_calls
    assert not reply.content


@pytest.mark.parametrize(
    ("signs", "family", "own"),
    [
        (
            "<function=",
            "qwen3-xml",
            "<function=get_weather><parameter=city>Rome</parameter></function>",
        ),
        (
            "<arg_key>",
            "glm",
            "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>",
        ),
        ("<|tool_call>", "gemma", '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>}<tool_call|>'),
        (
            "<|open|><|close|><|sep|>",
            "kimi-k3",
            '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
            '<|open|>argument key="city" type="string"<|sep|>Rome<|close|>argument<|sep|>'
            "<|close|>call<|sep|><|close|>tools<|sep|>",
        ),
        ("xml_tools", "smollm", ROME),
    ],
)
def test_a_call_or_an_answer_of_a_family_without_a_grammar_is_held_and_read(
    signs: str, family: str, own: str
) -> None:
    tokens = tokens_of(f"{{# {signs} #}}{WITH_TOOLS}")
    schema = WEATHER["function"]["parameters"]
    request = asked(tools=[WEATHER], structured_outputs={"json": schema})
    assert tokens.chat.family == family
    assert not is_held(tokens, request, "Sunny.")
    assert is_held(tokens, request, ROME)
    for text, params in ((ROME, request.params()), (own, asked(tools=[WEATHER]).params())):
        reply = tokens.chat.reply(text, params, JOB_ID, ())
        calls = [(call.function.name, call.function.arguments) for call in reply.tool_calls]
        assert (calls, reply.content) == ([("get_weather", ARGUMENTS)], "")
    assert is_held(tokens, request, ARGUMENTS)
    reply = tokens.chat.reply(ARGUMENTS, request.params(), JOB_ID, ())
    assert (reply.tool_calls, reply.content) == ((), ARGUMENTS)


@pytest.mark.parametrize(
    ("fields", "text", "expected"),
    [
        ({"tool_choice": "required", "tools": [NOTHING]}, f"I think.</think>\n\n{NAUGHT}", True),
        ({"tool_choice": "required", "tools": [NOTHING]}, NAUGHT, False),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "Hm.</think>yes", True),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes", False),
        ({"structured_outputs": {"json_object": True}}, "Hm.</think>{}", True),
        ({"structured_outputs": {"regex": "[a-c]+"}}, "Hm.</think>abc", True),
        ({"thinking_token_budget": 4}, "Hmm.</think>Free <tool_call> text.", True),
        ({"thinking_token_budget": 4}, "Hmmm.</think>", False),
    ],
)
def test_thinking_that_the_prompt_has_begun_ends_before_what_is_held(
    fields: dict[str, Any], text: str, expected: bool
) -> None:
    tokens = tokens_of(THINKING)
    request = asked(**fields)
    assert is_held(tokens, request, text) == expected


def test_reasoning_that_the_prompt_has_begun_is_told_from_content_and_counted() -> None:
    tokens = tokens_of(THINKING)
    request = asked()
    prompt_ids = tokens.prepare(messages=request.messages, params=request.params()).prompt_ids
    text = "I think.\n</think>\n\nSunny."
    reply = tokens.chat.reply(text, request.params(), JOB_ID, prompt_ids)
    ids = tokens.tokenizer.encode(text, add_special_tokens=False).ids
    assert (reply.reasoning, reply.content) == ("I think.", "Sunny.")
    assert tokens.chat.num_reasoning_tokens(reply, text, ids) == len("I think.")


def test_a_callers_text_opens_no_thinking() -> None:
    tokens = tokens_of(WITH_TOOLS)
    request = asked(messages=[{"role": "user", "content": "Say <think>"}])
    prompt_ids = tokens.prepare(messages=request.messages, params=request.params()).prompt_ids
    reply = tokens.chat.reply("No.", request.params(), JOB_ID, prompt_ids)
    assert (reply.reasoning, reply.content) == (None, "No.")


def test_special_tokens_that_mark_reasoning_are_text_and_others_are_not() -> None:
    tokens = tokens_of(WITH_TOOLS)
    text = tokens.completion(asked().params(), 10, ()).say([THINK, START, 65, END_THINK, END])
    assert text.startswith("<think>")
    assert text.endswith("</think>")
    assert "im_" not in text


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [WEATHER], "tool_choice": "required", "min_tokens": 3}, "min_tokens"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        ({"messages": None, "prompt": "x", "tools": [WEATHER]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{**NOTHING, "function": {"name": "f", "description": "x" * (1 << 20)}}]},
            "tools",
        ),
    ],
)
def test_tools_that_mean_nothing_are_refused_by_their_field(
    fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(Invalid) as caught:
        asked(**fields)
    assert caught.value.field == field


@pytest.mark.parametrize("strict", [True, False])
def test_the_schema_of_a_strict_tool_is_checked_at_the_door(strict: bool) -> None:
    wrong = {"type": "object", "properties": {"a": {"type": "strange"}}}
    function = {"name": "f", "strict": strict, "parameters": wrong}
    request = asked(tools=[{"type": "function", "function": function}])
    if strict:
        with pytest.raises(Invalid) as caught:
            tokens_of(WITH_TOOLS).prepare(messages=request.messages, params=request.params())
        assert caught.value.field == "tools[0].function.parameters"
    else:
        tokens_of(WITH_TOOLS).prepare(messages=request.messages, params=request.params())


def test_a_model_without_a_token_that_ends_thinking_has_no_budget() -> None:
    plain = tokens_of(PLAIN)
    request = asked(thinking_token_budget=5)
    plain.chat.vocabulary.added_tokens.pop("</think>")
    with pytest.raises(Invalid) as caught:
        plain.prepare(messages=request.messages, params=request.params())
    assert caught.value.field == "thinking_token_budget"
