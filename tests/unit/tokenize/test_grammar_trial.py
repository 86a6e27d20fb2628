"""Grammars at a door: hostile ones end a child and nothing else, all are refused with a path."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

import pytest

from shardline.base.errors import Invalid
from shardline.contract.structured_output import StructuredOutput
from shardline_server.tokenize.grammars.grammar_judge import Question
from shardline_server.tokenize.grammars.grammar_trial import GrammarBudget, GrammarTrial

GOOD = StructuredOutput(json={"type": "object", "properties": {"a": {"type": "string"}}})
DEEP = 3000
NOT_DEEP = {"type": "array", "items": {"not": {}}}

TRIAL = GrammarTrial()
"""One child for all tests, as a door has one for all requests."""


def check(output: StructuredOutput, special: Mapping[str, int] | None = None) -> None:
    TRIAL.check(Question(output=output, special=special or {}, vocab_size=10 if special else 0))


def rules(name: str) -> str:
    """A grammar of rules that each have the next one twice."""
    each = "\n".join(f"{name}{i}: {name}{i + 1} {name}{i + 1}" for i in range(DEEP))
    return f'start: {name}0\n{each}\n{name}{DEEP}: "a"'


@pytest.mark.parametrize(
    "output",
    [
        GOOD,
        StructuredOutput(json={}),
        StructuredOutput(json_object=True),
        StructuredOutput(choice=("yes", 'a "quoted" né', "a | b \\ c")),
        StructuredOutput(choice=tuple(f"{place:x}{place * 7919:x}" for place in range(4500))),
        StructuredOutput(regex=r"[a-f]{2,5}-\d{3}( é)?"),
        StructuredOutput(regex="(.*a){3000}"),
        StructuredOutput(grammar='root ::= "(" root ")" | "x"'),
        StructuredOutput(
            json={"type": "object", "properties": {f"f{place}": {} for place in range(300)}}
        ),
    ],
)
def test_what_can_be_followed_passes(output: StructuredOutput) -> None:
    check(output)


def test_a_grammar_may_name_special_tokens_of_its_model() -> None:
    check(StructuredOutput(grammar='start: <|call|> "a"'), {"<|call|>": 3})
    with pytest.raises(Invalid, match="unknown special token"):
        check(StructuredOutput(grammar='start: <|call|> "a"'), {"<|other|>": 3})


@pytest.mark.parametrize(
    ("output", "field", "problem"),
    [
        (StructuredOutput(grammar=rules("r")), "grammar", "nested too deeply"),
        (StructuredOutput(grammar=rules("R")), "grammar", "more than 1 s"),
        (
            StructuredOutput(
                json={"allOf": [{"type": "string", "pattern": f"a{i}"} for i in range(100)]}
            ),
            "json",
            "more than 1 s",
        ),
        (StructuredOutput(regex="(([a-z]{1,500}){1,500}){1,500}"), "regex", "too many expr"),
        (StructuredOutput(regex=r"[^\s\S]"), "regex", "no text"),
        (StructuredOutput(json={"$ref": "#"}), "json", "no text"),
        (StructuredOutput(json={"enum": []}), "json", "anyOf is empty"),
        (StructuredOutput(json='{"items":' * 3000 + "{}" + "}" * 3000), "json", "recursion limit"),
        (StructuredOutput(json="nonsense"), "json", "expected ident"),
        (StructuredOutput(json={"type": "string", "pattern": "(?=a)b"}), "json", "look-around"),
        (
            StructuredOutput(
                json={"type": "object", "properties": {f"f{i}": {} for i in range(1500)}}
            ),
            "json",
            "Too many items",
        ),
        (
            StructuredOutput(json={"properties": {"b": {"anyOf": [{}, NOT_DEEP]}}}),
            "json.properties.b.anyOf.1.items",
            'Unimplemented keys: ["not"]',
        ),
        (
            StructuredOutput(
                json={"$defs": {"n": {"uniqueItems": True}}, "items": {"$ref": "#/$defs/n"}}
            ),
            "json.$defs.n",
            "uniqueItems",
        ),
    ],
)
def test_what_cannot_is_refused_where_it_stands(
    output: StructuredOutput, field: str, problem: str
) -> None:
    with pytest.raises(Invalid) as caught:
        check(output)

    assert caught.value.field == f"structured_outputs.{field}"
    assert problem in caught.value.problem
    assert caught.value.remedy
    check(GOOD)


def test_a_child_that_others_kill_costs_no_verdict() -> None:
    trial = GrammarTrial()
    trial.check(Question(output=GOOD))
    child: Any = trial._child
    os.kill(child.pid, signal.SIGKILL)

    trial.check(Question(output=StructuredOutput(choice=("another", "one"))))


def test_the_grammars_of_a_request_have_one_budget_also_when_they_are_known() -> None:
    # Less than nothing: a quick judgment may cost none of the clock's ticks.
    budget = GrammarBudget(left_s=-1e-9)
    for _ in range(2):
        with pytest.raises(Invalid, match="together") as caught:
            TRIAL.check(Question(output=StructuredOutput(regex="a{1,500}b")), budget)
        assert caught.value.field == "structured_outputs.regex"
    TRIAL.check(Question(output=GOOD), GrammarBudget())
