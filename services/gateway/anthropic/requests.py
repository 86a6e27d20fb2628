"""Anthropic's requests as jobs: the one place where a field of theirs becomes one of ours.

Knows no server. Bodies may have our own fields too (`priority`, `seed`, …), which become the job's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar, get_args

import msgspec

from services.gateway.anthropic import bodies
from services.gateway.anthropic.server_blocks import AnyServerBlock, ServerBlock
from services.gateway.errors import ThreadUnsupported
from services.gateway.field_names import renaming
from services.gateway.http.json_body import Document
from services.gateway.openai.bodies import ChatCompletionRequest
from services.gateway.openai.neutral_fields import drop_neutral
from shardline.base.errors import Invalid
from shardline.contract.job import JobRequest
from shardline.contract.request_parsing import check_request, parse_fields, shown
from shardline.contract.structured_output import closed

BodyT = TypeVar("BodyT", bound=bodies.CountTokensBody)

ELSEWHERE = frozenset(
    {
        *bodies.MessagesBody.__struct_fields__,
        *("prompt", "stop", "logprobs", "prompt_logprobs", "structured_outputs"),
        *("parallel_tool_calls", "reasoning_effort", "include_reasoning"),
        *("depends_on", "on_parent_failure"),
    }
)
"""Fields of a job that these requests express otherwise, or that their answers cannot show."""

OWN = frozenset(JobRequest.__struct_fields__) - ELSEWHERE
"""Our own fields that a body may have in addition to Anthropic's."""

OWN_COUNTED = frozenset({"adapter", "chat_template_kwargs"})
"""Those of them that change the prompt."""

BLOCKS = (
    *("text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
    *("document", "search_result"),
)
LEFT_OUT = frozenset(str(kind.__struct_config__.tag) for kind in get_args(AnyServerBlock))
"""Blocks of tools that ran at Anthropic."""
SOURCES = ("text", "content")
"""Of documents: those that hold text."""

SERVER_TOOL = re.compile(
    r"(web_search|web_fetch|code_execution|advisor|tool_search_tool_(regex|bm25))(_\d{8})?"
)
"""Types of tools that run at Anthropic. Declared, they are permissions that the model does not use:
they are left out."""


class MessageRequest(ChatCompletionRequest, frozen=True, kw_only=True):
    """The job of a request to `/v1/messages`."""

    takes_what_fits = True
    is_of_old_form: bool = False
    """Its schema is in `output_format`."""
    tool_places: tuple[int, ...] = ()
    """Of its tools among those of the body."""

    @property
    def field_names(self) -> Mapping[str, str]:
        """Fields of its job, and what this request calls them."""
        form = "output_format" if self.is_of_old_form else "output_config.format"
        return {
            "structured_outputs.json": f"{form}.schema",
            "structured_outputs": form,
            "stop": "stop_sequences",
            "reasoning_effort": "output_config.effort",
            **{
                f"tools[{number}].function.parameters": f"tools[{place}].input_schema"
                for number, place in enumerate(self.tool_places)
            },
            **{
                f"tools[{number}].function": f"tools[{place}]"
                for number, place in enumerate(self.tool_places)
            },
        }


def message_request(document: Document) -> MessageRequest:
    """Parse the body of `POST /v1/messages`. Raises Invalid."""
    body, own = _parsed(document, bodies.MessagesBody, OWN)
    fields = {
        **own,
        **_chat(body),
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stream": body.stream,
    }
    if body.metadata.user_id is not None:
        fields["metadata"] = {"user_id": body.metadata.user_id}
    return _checked(fields)


def counted_request(document: Document) -> MessageRequest:
    """Parse the body of `POST /v1/messages/count_tokens`. Raises Invalid."""
    body, own = _parsed(document, bodies.CountTokensBody, OWN_COUNTED)
    return _checked({**own, **_chat(body)})


def _checked(fields: Document) -> MessageRequest:
    request = parse_fields(fields, MessageRequest)
    with renaming(request.field_names):
        check_request(request)
    return request


def _parsed(document: Document, kind: type[BodyT], own: frozenset[str]) -> tuple[BodyT, Document]:
    """Anthropic's part of a body, and ours."""
    fields = {name: value for name, value in document.items() if value is not None}
    drop_neutral(fields, bodies.NEUTRAL)
    _refuse_unsupported(fields)
    ours = {name: fields.pop(name) for name in sorted(own & fields.keys())}
    places = _keep_client_tools(fields)
    ours["tool_places"] = places
    with renaming({f"tools[{number}]": f"tools[{place}]" for number, place in enumerate(places)}):
        return parse_fields(fields, kind), ours


def _keep_client_tools(fields: Document) -> list[int]:
    """Takes tools that run at Anthropic out of a body, and returns the places of the others. Raises
    Invalid for a choice of one of them, which nothing could obey."""
    tools = fields.get("tools")
    if not isinstance(tools, list):
        return []
    places = [place for place, tool in enumerate(tools) if not _is_of_server(tool)]
    choice = fields.get("tool_choice")
    chosen = choice.get("name") if isinstance(choice, dict) else None
    named = [tool.get("name") for tool in tools if _is_of_server(tool)]
    if chosen is not None and chosen in named:
        problem = f"{shown(str(chosen))!r} runs at Anthropic, and is left out"
        raise Invalid("tool_choice.name", problem, "Send auto, or name a tool with an input_schema")
    fields["tools"] = [tools[place] for place in places]
    return places


def _is_of_server(tool: object) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and SERVER_TOOL.fullmatch(kind) is not None


def _refuse_unsupported(fields: Document) -> None:
    """Names what Anthropic's models take and Shardline's do not: images, documents, tools that only
    they know, conversations that Anthropic holds. Raises Invalid. `parse_fields` refuses what is no
    object."""
    if "thread" in fields:
        problem = "conversations are not held between requests"
        raise ThreadUnsupported("thread", problem, "Leave it out, and send all messages")
    remedy = f"Send blocks of type {', '.join(BLOCKS)}"
    for field, block in _blocks(fields):
        if (kind := block.get("type")) not in BLOCKS:
            raise Invalid(f"{field}.type", f"{shown(str(kind))!r} is not supported", remedy)
        _refuse_source(field, block)
    tools = fields.get("tools")
    for place, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind not in (None, "custom") and not _is_of_server(tool):
            problem = f"{shown(str(kind))!r} is not supported"
            raise Invalid(f"tools[{place}].type", problem, "Send tools with an input_schema")


def _refuse_source(field: str, block: Document) -> None:
    """Raises Invalid for a document that is no text."""
    source = block.get("source") if block["type"] == "document" else None
    if isinstance(source, dict) and (kind := source.get("type")) not in SOURCES:
        problem = f"{shown(str(kind))!r} is not supported"
        raise Invalid(f"{field}.source.type", problem, "Send the text of the document")


def _blocks(fields: Document) -> Iterator[tuple[str, Document]]:
    """Every object in a content, also of a call's result, with its place."""
    turns = fields.get("messages")
    for place, turn in enumerate(turns if isinstance(turns, list) else ()):
        content = turn.get("content") if isinstance(turn, dict) else None
        for field, block in _objects(f"messages[{place}].content", content):
            if block.get("type") in LEFT_OUT:
                continue
            yield field, block
            yield from _objects(f"{field}.content", block.get("content"))


def _objects(field: str, content: object) -> Iterator[tuple[str, Document]]:
    for place, block in enumerate(content if isinstance(content, list) else ()):
        if isinstance(block, dict):
            yield f"{field}[{place}]", block


def _chat(body: bodies.CountTokensBody) -> Document:
    """The fields of a chat: what is rendered, and the form of the answer."""
    fields: Document = {"model": body.model, "messages": list(_messages(body))}
    fields |= _continuation(body)
    if body.tools:
        fields |= {"tools": [_tool(tool) for tool in body.tools], **_choice(body.tool_choice)}
    elif isinstance(body.tool_choice, bodies.AnyChoice | bodies.ToolChoiceByName):
        raise Invalid("tool_choice", "there are no tools", "Send tools, or leave it out")
    # A required call leaves no content.
    is_text = not isinstance(body.tool_choice, bodies.AnyChoice | bodies.ToolChoiceByName)
    if is_text and (form := body.output_config.format or body.output_format) is not None:
        fields["structured_outputs"] = {"json": closed(form.schema)}
        fields["is_of_old_form"] = body.output_config.format is None
    return fields | _thinking(body)


def _continuation(body: bodies.CountTokensBody) -> Document:
    """How the answer goes on with the last message, if that is the assistant's. Raises Invalid
    where it cannot: a text alone is gone on with, and Anthropic's models do not do it either beside
    tools, thinking or a form of the answer."""
    last = body.messages[-1]
    if last.role != "assistant":
        return {}
    is_text = isinstance(last.content, str) or all(
        isinstance(block, bodies.TextInput | ServerBlock) for block in last.content
    )
    thinks = isinstance(body.thinking, bodies.ThinkingEnabled | bodies.ThinkingAdaptive)
    has_form = body.output_config.format is not None or body.output_format is not None
    obstacles = {"a call or thoughts": not is_text, "tools": bool(body.tools)}
    obstacles |= {"thinking": thinks, "a format": has_form}
    if found := next((name for name, is_there in obstacles.items() if is_there), None):
        problem = f"the last message is the assistant's, and with {found} no answer goes on with it"
        raise Invalid("messages", problem, "Let a message of the user be the last one")
    return {"continue_final_message": True, "add_generation_prompt": False}


def _messages(body: bodies.CountTokensBody) -> Iterator[Document]:
    """The chat's messages. Turns of one side in a row are one message: many chat templates want the
    sides to take turns."""
    if system := bodies.text_of(body.system):
        yield {"role": "system", "content": system}
    last: Document = {}
    for turn in body.messages:
        for message in _of_turn(turn):
            if last and last["role"] == message["role"] and "tool_call_id" not in message:
                last = _merged(last, message)
                continue
            if last:
                yield last
            last = message
    yield last


def _merged(first: Document, second: Document) -> Document:
    """Returns one message with the content of both."""
    whole = {**first, **second}
    for name in ("content", "reasoning"):
        if texts := [one[name] for one in (first, second) if one.get(name)]:
            whole[name] = "\n".join(texts)
    if calls := [*first.get("tool_calls", ()), *second.get("tool_calls", ())]:
        whole["tool_calls"] = calls
    return whole


def _of_turn(turn: bodies.Turn) -> Iterator[Document]:
    """Yields a turn's messages in the order of its blocks; each result of a call is one message."""
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
        return
    others: list[bodies.AnyInput] = []
    for block in turn.content:
        if isinstance(block, bodies.ToolResultInput):
            if others:
                yield _message(turn.role, others)
                others = []
            yield {
                "role": "tool",
                "tool_call_id": block.tool_use_id,
                "content": bodies.text_of(block.content),
            }
        else:
            others.append(block)
    if others or not turn.content:
        yield _message(turn.role, others)


def _message(role: str, blocks: Sequence[bodies.AnyInput]) -> Document:
    message: Document = {
        "role": role,
        "content": bodies.text_of(
            [block for block in blocks if isinstance(block, bodies.TextualInput)]
        ),
    }
    thoughts = [block.thinking for block in blocks if isinstance(block, bodies.ThinkingInput)]
    if thoughts:
        message["reasoning"] = "\n".join(thoughts)
    calls = [_call(block) for block in blocks if isinstance(block, bodies.ToolUseInput)]
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: bodies.ToolUseInput) -> Document:
    arguments = msgspec.json.encode(block.input).decode()
    return {
        "id": block.id,
        "type": "function",
        "function": {"name": block.name, "arguments": arguments},
    }


def _tool(tool: bodies.ClientTool) -> Document:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    given = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": given}


def _choice(choice: bodies.ToolChoiceInput) -> Document:
    fields: Document = {"parallel_tool_calls": not choice.disable_parallel_tool_use}
    if isinstance(choice, bodies.AnyChoice):
        fields["tool_choice"] = "required"
    elif isinstance(choice, bodies.ToolChoiceByName):
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif isinstance(choice, bodies.NoChoice):
        fields["tool_choice"] = "none"
    return fields


def _thinking(body: bodies.CountTokensBody) -> Document:
    """How much the model is to think, and whether the answer shows it."""
    fields: Document = {}
    if body.output_config.effort is not None:
        fields["reasoning_effort"] = body.output_config.effort
    thinking = body.thinking
    if isinstance(thinking, bodies.ThinkingDisabled):
        fields["reasoning_effort"] = "none"
    elif thinking is not None and thinking.display == "omitted":
        fields["include_reasoning"] = False
    return fields
