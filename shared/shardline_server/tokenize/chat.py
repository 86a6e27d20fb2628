"""Chat templates, rendered in a sandbox the way transformers renders them, with tools and calls.
Knows no tokenizer."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shardline.base.errors import Invalid
from shardline.contract.chat import TOOL
from shardline_server.tokenize.template_abilities import TemplateAbilities, abilities_of
from shardline_server.tokenize.template_parts import takes_parts_alone, with_parts
from shardline_server.tokenize.tool_prompt import with_calls_as_text, with_tools

Document = Mapping[str, Any]

MAX_TEMPLATE_CHARS = 1 << 20
TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)
"""What a template that meets unexpected messages can raise: it is a program."""

DEVELOPER = "developer"
"""OpenAI's name for the role of instructions: most templates call it `system`."""

MAX_PROBE_CHARS = 64 << 10
STRICT_ID_CHARS = 9
"""Of calls in templates that refuse other ids, as Mistral's do."""

STRICT_IDS = re.compile(r"id\s*\|\s*length\s*!=\s*9")
THINKING = re.compile(r"(?<![\w.'\"])(enable_thinking|thinking)\b(?!['\"])")
"""Variables of templates that switch thinking on and off."""

PLAIN_ROLES = frozenset({"system", "user", "assistant"})
LEAVES_OUT = "leaves messages out on purpose"
"""A template with this comment may render some messages of the plain roles alone."""

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "chat_template"})
"""Variables of a template that no request sets."""

BY_TOOLS = "{% if tools +%}"
"""How a text begins that is a template for tools, and else another one."""

MARK = "60172839465"
"""Digits, which no template changes: with a message's number they show whether its content is
rendered."""

MARKS = re.compile(f"{MARK}([0-9]{{1,7}}?){MARK}")


class Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it renders as what is
    inside."""

    tags = {"generation"}  # noqa: RUF012 jinja2 declares it as a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Parse the tag as its body alone."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One model's template, compiled once. `special_tokens` are its variables such as bos_token."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise Invalid(
                "chat_template",
                f"it is over {MAX_TEMPLATE_CHARS} characters",
                "Use the model's own template",
            )
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._knows_developer = DEVELOPER in source
        self._leaves_out = LEAVES_OUT in source.lower()
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise Invalid(
                "chat_template", f"line {error.lineno}: {error.message}", "Correct the model's file"
            ) from error

    @cached_property
    def abilities(self) -> TemplateAbilities:
        """What it renders of tools by itself."""

        def render(messages: Sequence[Document], variables: Document) -> str | None:
            used = self._special_tokens | dict(variables)
            return self._render(messages, used, limit_chars=MAX_PROBE_CHARS)

        return abilities_of(render)

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether it renders a content as a list of parts alone, as many of multimodal models
        do."""

        def render(messages: Sequence[Document], variables: Document) -> str | None:
            used = self._special_tokens | dict(variables)
            return self._rendered(messages, used, limit_chars=MAX_PROBE_CHARS)

        return takes_parts_alone(render)

    @cached_property
    def thinking_variables(self) -> frozenset[str]:
        """The variables by which it lets the model think or not."""
        return frozenset(THINKING.findall(self.source))

    def render(
        self,
        messages: Sequence[Document],
        *,
        limit_chars: int,
        variables: Document | None = None,
        tools: Sequence[Document] = (),
        add_generation_prompt: bool = True,
    ) -> str | None:
        """The prompt up to where the assistant begins, or without `add_generation_prompt` to the
        messages' end, with `variables` of the request's own; None if it is longer.

        A developer's message is a system's where the template does not know that role. Tools and
        calls that it does not know are described in messages. Raises Invalid with the template's
        own words, and where it leaves a message out unsaid: a model must not miss what its caller
        wrote.
        """
        known = [self._with_known_role(message) for message in messages]
        used = self._special_tokens | dict(variables or {})
        for name in sorted(RESERVED & used.keys()):
            raise Invalid(f"chat_template_kwargs.{name}", "a request cannot set it", "Leave it out")
        used["add_generation_prompt"] = add_generation_prompt
        if any("tool_calls" in message or message["role"] == TOOL for message in known):
            is_usual = not tools and self.source.startswith(BY_TOOLS)
            known = with_calls_as_text(known) if is_usual else self._with_known_calls(known)
        if tools and self.abilities.has_tools:
            used["tools"] = list(tools)
        elif tools:
            known = with_tools(known, tools, has_system=self.abilities.has_system)
        text = self._render(known, used, limit_chars=limit_chars)
        is_free = self._leaves_out and all(message["role"] in PLAIN_ROLES for message in known)
        if text is not None and not is_free and not _has_all(text, known):
            self._check_none_is_left_out(known, used, limit_chars)
        return text

    def _with_known_calls(self, messages: Sequence[Document]) -> list[Document]:
        """Calls and their answers as the template takes them."""
        if not self.abilities.has_calls:
            return with_calls_as_text(messages)
        shorten = _strict_id if STRICT_IDS.search(self.source) else str
        return [self._with_calls(message, shorten) for message in messages]

    def _with_calls(self, message: Document, shorten: Callable[[str], str]) -> Document:
        known = dict(message)
        if "tool_call_id" in known:
            known["tool_call_id"] = shorten(known["tool_call_id"])
        if "tool_calls" in known:
            calls = known["tool_calls"]
            known["tool_calls"] = [{**call, "id": shorten(call["id"])} for call in calls]
            if self.abilities.takes_objects:
                known["tool_calls"] = [_with_object(call) for call in known["tool_calls"]]
            if not known["content"] and self.abilities.takes_no_content:
                known["content"] = None
        return known

    def _with_known_role(self, message: Document) -> Document:
        is_unknown = message["role"] == DEVELOPER and not self._knows_developer
        return {**message, "role": "system"} if is_unknown else message

    def _check_none_is_left_out(
        self, messages: Sequence[Document], variables: Document, limit_chars: int
    ) -> None:
        marks = {
            place: f"{MARK}{place}{MARK}"
            for place, message in enumerate(messages)
            if _said(message) or "tool_calls" in message
        }
        marked = [_marked(message, marks.get(place, "")) for place, message in enumerate(messages)]
        try:
            text = self._render(
                marked, variables, limit_chars=2 * limit_chars + len(MARK) * 4 * len(messages)
            )
        except Invalid:
            return  # It took the messages themselves: others do not matter.
        rendered = {int(place) for place in MARKS.findall(text or "")}
        for place in marks:
            if text is not None and place not in rendered:
                raise Invalid(
                    f"messages[{place}]",
                    "the model's chat template leaves out this message "
                    f"of role {messages[place]['role'][:64]!r}",
                    "Use a role and a place that it renders: "
                    "many take system as the first one alone",
                )

    def _render(
        self, messages: Sequence[Document], variables: Document, *, limit_chars: int
    ) -> str | None:
        known = [with_parts(message) for message in messages] if self._takes_parts else messages
        return self._rendered(known, variables, limit_chars=limit_chars)

    def _rendered(
        self, messages: Sequence[Document], variables: Document, *, limit_chars: int
    ) -> str | None:
        parts: list[str] = []
        num_chars = 0
        given = {"tools": None, "documents": None, **variables}
        try:
            for part in self._template.generate(messages=messages, **given):
                parts.append(part)
                num_chars += len(part)
                if num_chars > limit_chars:
                    return None
        except TEMPLATE_ERRORS as error:
            raise Invalid(
                "messages",
                f"the model's chat template refuses them: {error}",
                "Change the messages' roles or order",
            ) from error
        return "".join(parts)


def _has_all(text: str, messages: Sequence[Document]) -> bool:
    """Whether all contents are plainly there, in order. Roles that few templates know are looked at
    closely: a short content may be anywhere in a text."""
    place = 0
    for message in messages:
        content = _said(message)
        found = text.find(content, place)
        if found < 0 or message["role"] not in PLAIN_ROLES or "tool_calls" in message:
            return False
        place = found + len(content)
    return True


def _said(message: Document) -> str:
    return (message["content"] or "").strip()


def _marked(message: Document, mark: str) -> Document:
    """The message with a mark where its content ends, or in the name of its last call: some
    templates render no content with calls, as transformers knows them."""
    if "tool_calls" not in message:
        return {**message, "content": (message["content"] or "") + mark}
    *others, last = message["tool_calls"]
    function = {**last["function"], "name": last["function"]["name"] + mark}
    return {**message, "tool_calls": [*others, {**last, "function": function}]}


def _with_object(call: Document) -> Document:
    """The call with its arguments as an object; as they are if they are none: a model wrote
    them."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _strict_id(call_id: str) -> str:
    if len(call_id) == STRICT_ID_CHARS and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:STRICT_ID_CHARS]


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, loopcontrols],
        autoescape=False,
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
