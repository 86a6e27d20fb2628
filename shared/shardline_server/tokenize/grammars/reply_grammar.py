"""What holds a reply to its form: calls that must be made, a schema behind the thinking, a budget
of thinking. Each family's form of a call is here, next to nothing else.

Knows no request and no template. Markers that are tokens are forced as tokens: models know them as
such.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardline.base.errors import Invalid
from shardline.contract.structured_output import (
    GUIDANCE,
    MAX_GRAMMAR_BYTES,
    StructuredOutput,
)
from shardline.contract.tool_choice import CallableTools
from shardline_server.replies import deepseek, harmony, hermes, kimi, mistral
from shardline_server.tokenize.grammars.argument_schema import arguments_schema
from shardline_server.tokenize.grammars.grammar import JSON_FORM, grammar_of
from shardline_server.tokenize.grammars.json_schema import readable

MAX_FORCED_CALLS = 8
"""In one reply: a model at a high temperature would go on for ever."""

THINK = "<think>"
END_THINK = "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How a family writes calls: `begin`, calls with `between` among them, `end`; and each call as
    its name and its arguments between three texts."""

    call: tuple[str, str, str]
    begin: str = ""
    between: str | None = None
    """None: one call at most."""
    end: str = ""


_JSON = ('{"name": "', '", "arguments": ', "}")

CALL_FORMS: Mapping[str, CallForm] = {
    "hermes": CallForm(
        call=('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"), between="\n"
    ),
    "llama": CallForm(call=('{"name": "', '", "parameters": ', "}")),
    "mistral": CallForm(begin=f"{mistral.CALLS}[", call=_JSON, between=", ", end="]"),
    "granite": CallForm(begin=f"{hermes.GRANITE_CALL}[", call=_JSON, between=", ", end="]"),
    "deepseek": CallForm(
        begin=deepseek.CALLS,
        call=(deepseek.CALL, deepseek.SEPARATOR, deepseek.END_CALL),
        between="",
        end=deepseek.END_CALLS,
    ),
    "kimi": CallForm(
        begin=kimi.SECTIONS[0],
        call=(f"{kimi.CALL}functions.", f":0{kimi.ARGUMENTS}", kimi.END_CALL),
        end=kimi.END_SECTIONS[0],
    ),
    "gpt-oss": CallForm(
        call=(
            f"{harmony.CHANNEL}commentary to=functions.",
            f" {harmony.CONSTRAIN}json{harmony.MESSAGE}",
            "",
        )
    ),
}
"""By the family's name. Held calls of a family that is not here are written as Hermes writes them,
and read so."""

FORCED = "hermes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """How the thinking before a reply is held."""

    is_open: bool
    """The prompt has begun it."""
    may_begin: bool
    """The model may begin it."""
    budget: int | None = None
    """Tokens, after which its end is forced."""


class ReplyGrammar:
    """Writes the grammars of one model's replies. `tokens` are its added tokens, by their text; the
    ids in `ends` end a text and are in none."""

    def __init__(self, tokens: Mapping[str, int], *, ends: frozenset[int] = frozenset()) -> None:
        self._tokens = tokens
        longest_first = sorted(tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._inner = sorted(
            token_id
            for text, token_id in tokens.items()
            if token_id not in ends and text not in (THINK, END_THINK)
        )

    def of(
        self,
        *,
        family: str,
        called: CallableTools,
        answer: StructuredOutput | None,
        thinking: Thinking,
    ) -> StructuredOutput | None:
        """Returns what the reply must be; None: anything. Raises Invalid."""
        if thinking.budget is not None and END_THINK not in self._tokens:
            # Its end may be cut by the tokens anywhere, so none can be forced to begin it.
            problem = "the model has no token that ends its thinking"
            raise Invalid("thinking_token_budget", problem, "Leave it out for this model")
        is_thinking = thinking.is_open or thinking.may_begin
        has_calls = called.is_required or (answer is not None and bool(called.tools))
        if not (has_calls or (answer is not None and is_thinking) or thinking.budget is not None):
            return answer
        rules: list[str] = []
        parts = []
        if has_calls:
            rules += self._calls(CALL_FORMS[family], called)
            parts.append("calls")
        if answer is not None:
            parts.append("@answer")
        if not parts:
            rules.append(self._anything())
            parts.append("anything")
        rules.append(f"reply: {' | '.join(parts)}")
        rules += self._thought(thinking)
        return _composed("\n".join(rules), answer)

    def _thought(self, thinking: Thinking) -> Iterator[str]:
        """The rules of a reply and the thinking before it."""
        if not (thinking.is_open or thinking.may_begin):
            yield "start: reply"
            return
        budget = "" if thinking.budget is None else f"max_tokens={thinking.budget}"
        if END_THINK in self._tokens:
            attributes = f"[{budget}]" if budget else ""
            yield f"thought{attributes}: /(?s:.*)/"
            end = f" <[{self._tokens[END_THINK]}]>"
        else:
            yield f"thought[suffix={json.dumps(END_THINK)}]: /(?s:.*)/"
            end = ""
        space = "/\\s*/"
        begin = f"{self._literal(THINK)} " if not thinking.is_open else ""
        behind = f"{begin}thought{end} {space} reply"
        yield f"start: {behind}" if thinking.is_open else f"start: reply | {behind}"

    def _anything(self) -> str:
        """Text with all tokens that end none."""
        ids = ",".join(map(str, self._inner))
        return f"anything: (/(?s:.+)/{f' | <[{ids}]>' if ids else ''})*"

    def _calls(self, form: CallForm, called: CallableTools) -> Iterator[str]:
        more = ""
        if form.between is not None and not called.is_single:
            more = f"({self._literal(form.between)} call){{0,{MAX_FORCED_CALLS - 1}}}"
        parts = [self._literal(form.begin), "call", more, self._literal(form.end)]
        yield f"calls: {' '.join(part for part in parts if part)}"
        names = [f"call_{number}" for number in range(len(called.tools))]
        yield f"call: {' | '.join(names)}"
        for number, tool in enumerate(called.tools):
            before, between, behind = form.call
            begin = self._literal(f"{before}{tool.function.name}{between}")
            yield f"call_{number}: {begin} arguments_{number} {self._literal(behind)}"
            schema = arguments_schema(tool.function)
            schema[GUIDANCE] = {**JSON_FORM, **schema.get(GUIDANCE, {})}
            yield f"arguments_{number}: %json {json.dumps(readable(schema))}"

    def _literal(self, text: str) -> str:
        """The text as terms: tokens by their ids, all else as it is."""
        terms = []
        place = 0
        for found in self._pattern.finditer(text):
            if found.start() > place:
                terms.append(json.dumps(text[place : found.start()], ensure_ascii=False))
            terms.append(f"<[{self._tokens[found.group()]}]>")
            place = found.end()
        if place < len(text):
            terms.append(json.dumps(text[place:], ensure_ascii=False))
        return " ".join(terms)


def _composed(lark: str, answer: StructuredOutput | None) -> StructuredOutput:
    grammars: list[dict[str, object]] = [{"lark_grammar": lark}]
    if answer is not None:
        grammars.append({"name": "answer", **_alone(grammar_of(answer))})
    text = json.dumps({"grammars": grammars})
    if len(text) > MAX_GRAMMAR_BYTES:
        problem = f"as a grammar they have more than {MAX_GRAMMAR_BYTES} bytes"
        raise Invalid("tools", problem, "Send fewer, or smaller schemas")
    return StructuredOutput(grammar=text)


def _alone(grammar: str) -> dict[str, object]:
    """A grammar of llguidance as a member of others."""
    if grammar.lstrip().startswith("{"):
        (member,) = json.loads(grammar)["grammars"]
        return {name: value for name, value in member.items() if name != "name" and value}
    return {"lark_grammar": grammar}
