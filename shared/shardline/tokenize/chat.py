"""Chat templates, rendered in a sandbox the way transformers renders them. Knows no tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shardline.errors import Invalid

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


class Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it renders as what is inside."""

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
                "chat_template", f"it is over {MAX_TEMPLATE_CHARS} characters", "Use the model's own template"
            )
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise Invalid(
                "chat_template", f"line {error.lineno}: {error.message}", "Correct the model's file"
            ) from error

    def render(self, messages: Sequence[Mapping[str, Any]], *, limit_chars: int) -> str:
        """The prompt up to where the assistant begins. Raises Invalid with the template's own words."""
        parts: list[str] = []
        num_chars = 0
        try:
            for part in self._template.generate(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            ):
                parts.append(part)
                num_chars += len(part)
                if num_chars > limit_chars:
                    break
        except TEMPLATE_ERRORS as error:
            raise Invalid(
                "messages", f"the model's chat template refuses them: {error}", "Change the messages' roles or order"
            ) from error
        if num_chars > limit_chars:
            raise Invalid(
                "messages", f"they render to more than {limit_chars} characters", "Send shorter or fewer messages"
            )
        return "".join(parts)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], autoescape=False
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
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
