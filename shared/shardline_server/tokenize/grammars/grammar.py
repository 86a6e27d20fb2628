"""Structured output as grammars of llguidance, and the matchers that hold a completion to one.

Owns the limits of a grammar: what is compiled or matched beyond them is an error of that grammar.
Knows no logits and no job. Doors try a grammar in a separate process: see `grammar_trial`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from shardline.base.errors import Invalid
from shardline.contract.structured_output import FIELD, StructuredOutput
from shardline_server.tokenize.grammars.json_schema import readable

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_COMPILED = 32
"""Grammars of a model that stay compiled, those used last."""

MAX_REASON_CHARS = 300

NO_TEXT = "NoExtensionBias"
"""The error of llguidance for a grammar without a first token."""
EMPTY = "no text is of this form"

COMPOSED = '{"grammars"'
"""How a grammar begins that is of llguidance's own form: `reply_grammar` writes some."""

REMEDIES = {
    "json": "See docs/jobs.md for the keywords of JSON Schema",
    "regex": "Use the syntax of Rust's regex, without look-around",
    "choice": "Send texts",
    "grammar": "Use Lark's or GBNF's syntax",
    "json_object": "Send a json schema instead",
}


JSON_FORM: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""One line, as most JSON that models have read: no spaces without end, and what stands between two
values is forced. A schema's `x-guidance` may set another form."""

STEP_FUEL = 200_000
"""Of a stage, for the states of one token. A door gives a tenth of it."""
DOOR_STEP_FUEL = 20_000


def limits(step_fuel: int = STEP_FUEL) -> LLParserLimits:
    """Returns limits about or below llguidance's own, because a tail compiles and masks between the
    steps of others. `step_max_items` is where rows of its parser end, too: an ambiguous grammar
    takes 5 ms a token there, and 170 ms at five times as many."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=step_fuel,
        step_max_items=2_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


class GrammarError(Exception):
    """A grammar, or a completion by it, is beyond a limit, which the message names."""


def grammar_of(output: StructuredOutput) -> str:
    """Returns the grammar as llguidance reads it. Raises Invalid for one that cannot be read."""
    kind = output.kind
    try:
        if kind == "json_object":
            return json_grammar({"type": "object"})
        if kind == "json":
            assert output.json is not None
            return json_grammar(output.json)
        if kind == "choice":
            # One lexeme: a parser would have a row for each text.
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in output.choice)
            return grammar_from("grammar", f"start: CHOICE\nCHOICE: {texts}")
        if kind == "grammar" and output.grammar and output.grammar.startswith(COMPOSED):
            return output.grammar
        return grammar_from("regex" if kind == "regex" else "grammar", getattr(output, kind))
    except (ValueError, RecursionError) as error:
        raise invalid(kind, str(error)) from error


def json_grammar(schema: dict[str, Any] | str) -> str:
    """Returns the grammar of a JSON schema, an object or its text. Raises ValueError."""
    return LLMatcher.grammar_from_json_schema(readable(schema), defaults=JSON_FORM)


def invalid(field: str, problem: str) -> Invalid:
    """Returns the refusal of a field of `structured_outputs`, or of a place inside it."""
    problem = EMPTY if NO_TEXT in problem else one_line(problem)
    return Invalid(f"{FIELD}.{field}", problem, REMEDIES[field.partition(".")[0]])


class Grammars:
    """The grammars of one model's vocabulary. Used by one thread."""

    def __init__(self, tokenizer_json: str, *, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """Reads the vocabulary, which takes some 0.1 s for each 10,000 tokens. Raises GrammarError
        for one that no grammar can be matched with."""
        try:
            self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=[*eos_ids])
        except Exception as error:  # a parser's error stops no other job
            raise GrammarError(f"its vocabulary cannot be used: {one_line(str(error))}") from error
        self._compiled = lru_cache(maxsize=MAX_COMPILED)(self._compile)

    def matcher(self, output: StructuredOutput) -> GrammarMatcher:
        """Returns a matcher at the beginning of a completion. Raises Invalid or GrammarError."""
        grammar = grammar_of(output)
        return GrammarMatcher(self._compiled(grammar).deep_copy(), partial(self._compile, grammar))

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits())
        if matcher.is_error():
            raise GrammarError(one_line(matcher.get_error()))
        return matcher


class GrammarMatcher:
    """Follows a completion through its grammar.

    Copies of a compiled grammar share the states of its lexer, and their limit. One that reaches it
    goes on with fresh states, so that a completion never fails because of its neighbors.
    """

    def __init__(self, matcher: LLMatcher, fresh: Callable[[], LLMatcher]) -> None:
        self._matcher = matcher
        self._fresh: Callable[[], LLMatcher] | None = fresh
        self._ids: list[int] = []
        self._num_ahead = 0
        """Tokens at the end that `forced_after` took before they were given."""

    def take(self, ids: Sequence[int]) -> None:
        """Goes on by these tokens. Raises GrammarError when they do not follow."""
        news = ids[self._num_ahead :]
        self._num_ahead = max(0, self._num_ahead - len(ids))
        if news:
            self._consume(news)

    def forced_after(self, token_id: int) -> tuple[int, ...]:
        """Goes on by a token that `take` is to bring next, and returns the tokens that most likely
        follow it: they have the bytes that must follow. Raises GrammarError."""
        self._consume((token_id,))
        self._num_ahead = 1
        return tuple(self._matcher.compute_ff_tokens())

    def allows(self, token_id: int) -> bool:
        """Whether this token may be next."""
        return self._matcher.validate_tokens([token_id]) == 1

    def allowed(self) -> bytes:
        """Returns the tokens that may be next: a bit each, the lowest first. Raises GrammarError
        when they take too long to find."""
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._begin_again()
            mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise GrammarError(self._error())
        return mask

    def _consume(self, ids: Sequence[int]) -> None:
        self._ids += ids
        if not self._matcher.consume_tokens([*ids]):
            self._begin_again()

    def _begin_again(self) -> None:
        """Takes all tokens again with fresh states, the first time. Raises GrammarError."""
        if self._fresh is None:
            raise GrammarError(self._error())
        self._matcher = self._fresh()
        self._fresh = None
        if self._ids and not self._matcher.consume_tokens(self._ids):
            raise GrammarError(self._error())

    def _error(self) -> str:
        return one_line(self._matcher.get_error()) or "no token can follow"


def one_line(message: str) -> str:
    """Returns the beginning of the message, on one line."""
    return " ".join(message.split())[:MAX_REASON_CHARS]
