"""Structured output as grammars of llguidance, and the matchers that hold a completion to one.

Owns the limits of a grammar: what is compiled or matched beyond them is an error of that grammar.
Knows no logits and no job.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from shardline.base.errors import Invalid
from shardline.contract.structured_output import FIELD, StructuredOutput

MAX_COMPILED = 32
"""Grammars of a model that stay compiled, those used last."""

MAX_REASON_CHARS = 300

REMEDIES = {
    "json": "See docs/jobs.md for the keywords of JSON Schema",
    "regex": "Use the syntax of Rust's regex, without look-around",
    "choice": "Send texts",
    "grammar": "Use Lark's or GBNF's syntax",
    "json_object": "Send a json schema instead",
}


def _limits() -> LLParserLimits:
    """Lower than llguidance's own, because a tail compiles and masks between the steps of others:
    what a hundred alternatives of up to a hundred fields reached took a quarter of a second."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=20_000,
        step_max_items=10_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


class GrammarError(Exception):
    """A grammar, or a completion by it, is beyond the limits. The message says which."""


def grammar_of(output: StructuredOutput) -> str:
    """Returns the grammar as llguidance reads it. Raises Invalid for one that cannot be read."""
    kind = output.kind
    try:
        if kind == "json_object":
            return grammar_from("json_schema", '{"type": "object"}')
        if kind == "json":
            schema = output.json if isinstance(output.json, str) else json.dumps(output.json)
            return grammar_from("json_schema", schema)
        if kind == "choice":
            return grammar_from("choice", json.dumps(output.choice))
        return grammar_from("regex" if kind == "regex" else "grammar", getattr(output, kind))
    except (ValueError, RecursionError) as error:
        raise _invalid(kind, str(error)) from error


def check_grammar(output: StructuredOutput) -> None:
    """Raises Invalid for what no completion can be held to, with the library's reason."""
    is_error, messages = LLMatcher.validate_grammar_with_warnings(
        grammar_of(output), limits=_limits()
    )
    if is_error:
        raise _invalid(output.kind, messages[0])


def _invalid(kind: str, problem: str) -> Invalid:
    return Invalid(f"{FIELD}.{kind}", _short(problem), REMEDIES[kind])


class Grammars:
    """The grammars of one model's vocabulary. Used by one thread."""

    def __init__(self, tokenizer_json: str, *, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """Reads the vocabulary, which takes some 0.1 s for each 10,000 tokens. Raises GrammarError
        for one that no grammar can be matched with."""
        try:
            self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=[*eos_ids])
        except Exception as error:  # whatever its parser says of a file, other jobs go on
            raise GrammarError(f"its vocabulary cannot be used: {_short(str(error))}") from error
        self._compiled = lru_cache(maxsize=MAX_COMPILED)(self._compile)

    def matcher(self, output: StructuredOutput) -> GrammarMatcher:
        """Returns a matcher at the beginning of a completion. Raises Invalid or GrammarError."""
        return GrammarMatcher(self._compiled(grammar_of(output)).deep_copy())

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_limits())
        if matcher.is_error():
            raise GrammarError(_short(matcher.get_error()))
        return matcher


class GrammarMatcher:
    """Follows a completion through its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def take(self, ids: Sequence[int]) -> None:
        """Goes on by these tokens. Raises GrammarError when they do not follow."""
        if ids and not self._matcher.consume_tokens([*ids]):
            raise GrammarError(self._error())

    def allows(self, token_id: int) -> bool:
        """Whether this token may be next."""
        return self._matcher.validate_tokens([token_id]) == 1

    def allowed(self) -> bytes:
        """Returns the tokens that may be next: a bit each, the lowest first. Raises GrammarError
        when they take too long to find."""
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise GrammarError(self._error())
        return mask

    def _error(self) -> str:
        return _short(self._matcher.get_error()) or "no token can follow"


def _short(message: str) -> str:
    """Returns the message on one line."""
    return " ".join(message.split())[:MAX_REASON_CHARS]
