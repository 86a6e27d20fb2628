"""Judges grammars in a separate process, which a door starts: compiling a hostile one takes hours
or overflows the stack, and no limit of llguidance prevents either.

Each line of the standard input is a question, each line of the output its verdict. A grammar that
takes too long ends the process. Knows no job.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import msgspec
from llguidance import LLMatcher, LLTokenizer
from msgspec.structs import replace

from shardline.base.errors import Invalid
from shardline.contract.structured_output import MAX_SCHEMA_DEPTH, StructuredOutput
from shardline_server.tokenize.grammars.grammar import (
    DOOR_STEP_FUEL,
    EMPTY,
    grammar_of,
    invalid,
    json_grammar,
    limits,
)

MAX_CPU_S = 1.0
"""Six times what the largest useful grammars took."""
MAX_MEMORY_BYTES = 2 << 30
"""Of addresses; it has 0.2 GiB when it begins."""

NUM_BYTES = 256
WALK_BYTES = 64
"""Where nested repetitions exceed the limits of a stage."""
STRIDE = 7919

PLACES = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords with schemas by name."""


class Question(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A grammar, and what it may name of a vocabulary."""

    output: StructuredOutput
    special: Mapping[str, int] = {}
    vocab_size: int = 0


class Verdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a grammar is refused; nothing: it is not. And the CPU seconds that this took."""

    field: str = ""
    problem: str = ""
    remedy: str = ""
    cpu_s: float = 0.0


def main() -> None:
    """Answers until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(sys.stdin.buffer, sys.stdout.buffer)


def serve(questions: BinaryIO, verdicts: BinaryIO) -> None:
    """Answers each line. The timer counts CPU and has no handler: it ends the process."""
    for line in questions:
        signal.setitimer(signal.ITIMER_VIRTUAL, MAX_CPU_S)
        began_s = time.process_time()
        verdict = judge(msgspec.json.decode(line, type=Question))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        verdict = replace(verdict, cpu_s=time.process_time() - began_s)
        verdicts.write(msgspec.json.encode(verdict) + b"\n")
        verdicts.flush()


def judge(question: Question) -> Verdict:
    """Returns why no completion can be held to a grammar, if so."""
    output = question.output
    try:
        grammar = grammar_of(output)
    except Invalid as error:
        return Verdict(field=error.field, problem=error.problem, remedy=error.remedy)
    problem = _problem(grammar, question)
    if not problem:
        return Verdict()
    path = _path(output, problem) if output.kind == "json" else []
    refusal = invalid(".".join((output.kind, *path)), problem)
    return Verdict(field=refusal.field, problem=refusal.problem, remedy=refusal.remedy)


def _problem(grammar: str, question: Question) -> str:
    """Returns what is wrong with it as a whole, or behind the first bytes of a text by it."""
    bytes_at = question.vocab_size
    tokenizer = LLTokenizer.from_tiktoken(  # type: ignore[attr-defined] # its types lack it
        encoder={bytes([byte]): bytes_at + byte for byte in range(NUM_BYTES)},
        special_tokens=dict(question.special),
        pattern="(?s:.)",
        eos_token=[bytes_at + NUM_BYTES],
        n_vocab=bytes_at + NUM_BYTES + 1,
    )
    compiled = LLMatcher(tokenizer, grammar, log_level=0, limits=limits(DOOR_STEP_FUEL))
    for choice in range(3):
        matcher = compiled.deep_copy()
        for place in range(WALK_BYTES):
            mask = int.from_bytes(matcher.compute_bitmask(), "little") >> bytes_at
            if matcher.is_error():
                return str(matcher.get_error())
            allowed = [byte for byte in range(NUM_BYTES) if mask >> byte & 1]
            if not allowed:
                break
            # The first, the last, and any.
            index = (0, -1, place * STRIDE % len(allowed))[choice]
            matcher.consume_token(bytes_at + allowed[index])
    return ""


def _path(output: StructuredOutput, problem: str) -> list[str]:
    """Returns the keys to the smallest part of a schema that has this problem, too."""
    path: list[str] = []
    try:
        schema = json.loads(output.json) if isinstance(output.json, str) else output.json
    except ValueError:
        return path
    assert schema is not None
    root = schema
    while len(path) < MAX_SCHEMA_DEPTH:
        for keys, part in _parts(schema):
            if _fails(part, root, problem):
                path += keys
                schema = part
                break
        else:
            return path
    return path


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    for keyword, value in schema.items():
        if isinstance(value, dict) and keyword in PLACES:
            yield from (((keyword, name), one) for name, one in value.items() if _is_schema(one))
        elif _is_schema(value):
            yield (keyword,), value
        elif isinstance(value, list):
            yield from (
                ((keyword, str(place)), one) for place, one in enumerate(value) if _is_schema(one)
            )


def _is_schema(value: object) -> bool:
    return isinstance(value, dict) and bool(value)


def _fails(part: dict[str, Any], root: Mapping[str, Any], problem: str) -> bool:
    shared = {name: root[name] for name in ("$defs", "definitions", "x-guidance") if name in root}
    try:
        grammar = json_grammar(shared | part)
    except ValueError:
        return False
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits())
    return bool(is_error) and messages[0] == problem and problem != EMPTY
