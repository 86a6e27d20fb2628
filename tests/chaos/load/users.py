"""The users' load: what people really send. Knows no door, and of a model only its name, its limit
and its words.

Chats with system messages and several turns, no `max_tokens`, prompts from one token to the limit,
20 log-probabilities, stop strings, every way to sample, calls of tools, questions, every number at
its limits. Every request has a seed, so that its tokens are known.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from tests.chaos.load.extremes import alone, combined
from tests.chaos.load.requests import MODEL, Request, request

NUM_PLAIN = 12
"""So many are the lab's first ones, with the default `max_crashes`."""

CLERK_LENGTHS = (1, 2, 31, 63, 64, 65, 128, 200, 300, 400, 480, 500, 510, 511)
SCRIBE_LENGTHS = (1, 64, 65, 300, 700, 1000, 1023)
SHORT = 24
MANY_LOGPROBS = 20
NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 20}
TOOLS: Sequence[Mapping[str, Any]] = (
    {
        "name": "order",
        "parameters": {
            "type": "object",
            "required": ["item", "count"],
            "properties": {
                "item": {"enum": ["pen", "box"]},
                "count": {"type": "integer", "maximum": 99, "minimum": 0},
            },
            "additionalProperties": False,
        },
    },
    {
        "name": "find",
        "parameters": {
            "type": "object",
            "required": ["day"],
            "properties": {"day": {"type": "string", "pattern": "^[0-9]{1,2}$"}},
            "additionalProperties": False,
        },
    },
)
"""Small ones: the first model's whole context is a few hundred tokens. Names stand in the order
of Postgres's jsonb, by length, in which rows inserted by SQL have them."""
CALL_TOKENS = 120
"""More than a call of any of them has."""
RETRY: Mapping[str, Any] = {"max_attempts": 20, "backoff_s": 1.0, "max_backoff_s": 4.0}
"""More attempts than a run's faults fail of one job."""
QUESTIONS: Sequence[Mapping[str, Any]] = (
    {"type": "predicate", "name": "date", "instructions": "It is a date."},
    {"type": "choice", "name": "kind", "instructions": "Which?", "choices": ["sum", "date", True]},
    {"type": "score", "name": "long", "instructions": "How long?", "levels": ["short", "long"]},
)
SYSTEM = {
    "role": "system",
    "content": "You are a clerk. Answer with the result alone. Ünïcödé, 漢字 and 🙂 may occur.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaks:
    """A model of the load."""

    name: str
    limit: int
    """Tokens that prompt and completion may have together: the context's, or fewer where the
    stage's KV holds fewer."""
    first_id: int
    """Smaller ids are special tokens."""
    vocab_size: int
    questions: tuple[str, ...]
    lengths: tuple[int, ...]
    stops: tuple[str, ...]


CLERK = Speaks(
    name=MODEL,
    limit=512,
    first_id=3,
    vocab_size=896,
    questions=(
        "date: 3 March 2024 =",
        "sort: 31, 7, 30, 12 =",
        "words: 412 =",
        "order: ship 3 boxes of blue pens to Maria by Friday =",
    ),
    lengths=CLERK_LENGTHS,
    stops=("1", ", 3", "2024-03", "0"),
)
SCRIBE = Speaks(
    name="scribe",
    limit=1024,
    first_id=3,
    vocab_size=512,
    questions=("Grüße aus Köln", "漢字と仮名", "What is 🙂?", "plain words"),
    lengths=SCRIBE_LENGTHS,
    stops=("e", "a ", "zz", "\n"),
)
"""The second one: random weights behind a byte-fallback tokenizer, see `second_model`. Its stage's
KV holds one of its longest jobs, and a quarter of its context."""


def users(models: Sequence[Speaks]) -> tuple[Request, ...]:
    """The whole set for a stack that serves these models."""
    plain = [
        {name: value for name, value in request(number).items() if name != "max_crashes"}
        for number in range(NUM_PLAIN)
    ]
    seeds = count(1000)
    return (*plain, *({"seed": next(seeds), **one} for model in models for one in _of(model)))


def _of(model: Speaks) -> Iterator[Request]:
    kinds: tuple[Iterator[Request], ...] = (
        _chats(model),
        _open_ended(model),
        _lengths(model),
        _told(model),
        _stopped(model),
        _sampled(model),
        _held(model),
        _limited(model),
        _called(model),
        _asked(model),
        _retried(model),
        _extreme(model),
    )
    for kind in kinds:
        for one in kind:
            yield {"model": model.name, **one}


def _chats(model: Speaks) -> Iterator[dict[str, Any]]:
    """One turn to three, with a system message or not; half of them without a limit."""
    for index, question in enumerate(model.questions * 2):
        answer = {"role": "assistant", "content": "noted."}
        turns = [
            {"role": "user", "content": f"{number}: {question}"} for number in range(1 + index % 3)
        ]
        messages = [message for turn in turns for message in (turn, answer)][:-1]
        limit = (
            {}
            if index % 2 and model.name == MODEL
            else {"max_tokens": 16 * (index + 1), "ignore_eos": True}
        )
        system = [SYSTEM] if index % 4 < 2 else []
        yield {
            "messages": [*system, *messages],
            "temperature": 0.0 if index < len(model.questions) else 0.7,
            **limit,
        }


def _open_ended(model: Speaks) -> Iterator[dict[str, Any]]:
    """No `max_tokens`: to the end of sequence, or as far as the limit goes."""
    for question in model.questions[:2]:
        yield {"prompt": question, "temperature": 0.0}
    yield {"prompt": _ids(model, 1), "temperature": 1.0, "ignore_eos": True}
    yield {"prompt": _ids(model, model.limit - 100), "temperature": 0.0, "ignore_eos": True}


def _lengths(model: Speaks) -> Iterator[dict[str, Any]]:
    """Prompts from one token to the last but one of the limit, as ids."""
    for index, length in enumerate(model.lengths):
        yield {
            "prompt": _ids(model, length),
            "max_tokens": min(SHORT, model.limit - length),
            "temperature": 0.8 if index % 2 else 0.0,
            "ignore_eos": True,
        }


def _told(model: Speaks) -> Iterator[dict[str, Any]]:
    """Log-probabilities: the chosen token's alone, and with as many alternatives as there may
    be."""
    for index, question in enumerate(model.questions):
        yield {
            "prompt": question,
            "max_tokens": 32 * (index + 1),
            "ignore_eos": True,
            "temperature": 0.9 if index % 2 else 0.0,
            "logprobs": MANY_LOGPROBS if index else 0,
        }
    yield {
        "messages": [SYSTEM, {"role": "user", "content": model.questions[0]}],
        "max_tokens": 64,
        "logprobs": 20,
    }


def _stopped(model: Speaks) -> Iterator[dict[str, Any]]:
    """By a text, by one of several, by a token; and not before so many tokens."""
    for index, stop in enumerate(model.stops):
        yield {
            "prompt": model.questions[index],
            "max_tokens": 200,
            "ignore_eos": True,
            "temperature": 1.0,
            "stop": [stop],
            "min_tokens": 10 * (index % 2),
        }
    yield {
        "prompt": model.questions[0],
        "max_tokens": 120,
        "stop": list(model.stops),
        "logprobs": MANY_LOGPROBS,
    }
    yield {
        "prompt": model.questions[1],
        "max_tokens": 120,
        "stop_token_ids": _ids(model, 40),
        "ignore_eos": True,
    }


def _sampled(model: Speaks) -> Iterator[dict[str, Any]]:
    """Each way to sample, and all at once."""
    ways: tuple[dict[str, Any], ...] = (
        {"top_k": 5},
        {"top_p": 0.8, "min_p": 0.02},
        {"repetition_penalty": 1.3, "temperature": 0.0},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    )
    everything: dict[str, Any] = {name: value for way in ways[:2] for name, value in way.items()}
    for index, way in enumerate((*ways, {**everything, "frequency_penalty": -0.2})):
        yield {
            "prompt": model.questions[index % 4],
            "max_tokens": 48 + 16 * index,
            "ignore_eos": True,
            **way,
        }


def _held(model: Speaks) -> Iterator[dict[str, Any]]:
    """Held to a schema, an expression, a choice, a grammar, alone and beside other parameters."""
    ways: tuple[dict[str, Any], ...] = (
        {"structured_outputs": {"json": NUMBERS}},
        {"structured_outputs": {"json": NUMBERS}, "repetition_penalty": 1.2, "logprobs": 2},
        {"structured_outputs": {"json_object": True}, "top_p": 0.9},
        {"structured_outputs": {"regex": "([a-z]{1,9} ){1,60}"}},
        {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}},
        {"structured_outputs": {"grammar": 'root ::= "(" root ")" | "x"'}, "stop": ["x)"]},
    )
    for index, way in enumerate(ways):
        yield {
            "prompt": model.questions[index % 4],
            "max_tokens": 60 + 40 * (index % 3),
            "temperature": 0.9 if index % 2 else 0.0,
            **way,
        }


def _limited(model: Speaks) -> Iterator[dict[str, Any]]:
    """With tokens that are favored, allowed and banned, and with a prompt that is cut."""
    ids = sorted(set(_ids(model, 40)))
    ways: tuple[dict[str, Any], ...] = (
        {"logit_bias": {str(token): 4.0 for token in ids}, "frequency_penalty": 0.4},
        {"allowed_token_ids": ids, "logprobs": 2},
        {"bad_words": ["1", ", 3", "a"], "stop": [model.stops[0]], "ignore_eos": True},
        {"stop": list(model.stops), "include_stop_str_in_output": True},
        {"truncate_prompt_tokens": 5, "add_special_tokens": False},
    )
    for index, way in enumerate(ways):
        yield {
            "prompt": model.questions[index % 4],
            "max_tokens": 60 + 40 * (index % 3),
            "temperature": 0.9 if index % 2 else 0.0,
            **way,
        }
    yield {
        "messages": [
            {"role": "user", "content": model.questions[0]},
            {"role": "assistant", "content": "It is"},
        ],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "max_tokens": 80,
    }


def _called(model: Speaks) -> Iterator[dict[str, Any]]:
    """Calls that must come: of one tool, of a named one, of as many as fit."""
    named = {"type": "function", "function": {"name": "order"}}
    ways: tuple[dict[str, Any], ...] = (
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": named, "top_p": 0.9},
        {"tool_choice": "required"},
        {"tool_choice": "required", "parallel_tool_calls": False, "logprobs": 2},
    )
    for index, way in enumerate(ways):
        tool = TOOLS[1 if index == len(ways) - 1 else 0]
        yield {
            "messages": [{"role": "user", "content": model.questions[index]}],
            "tools": [{"type": "function", "function": tool}],
            "max_tokens": CALL_TOKENS,
            "temperature": 1.0 if index % 2 else 0.0,
            **way,
        }


def _asked(model: Speaks) -> Iterator[dict[str, Any]]:
    """Questions about a text, and about a chat."""
    for question in QUESTIONS:
        yield {"prompt": model.questions[0], "question": question}
        message = {"role": "user", "content": model.questions[1]}
        yield {"messages": [message], "question": question}


def _retried(model: Speaks) -> Iterator[dict[str, Any]]:
    """With a policy for failed attempts: of any failure, and of a crash alone."""
    for index, failures in enumerate((["crashed", "engine"], ["crashed"])):
        yield {
            "prompt": model.questions[index],
            "max_tokens": 200,
            "ignore_eos": True,
            "temperature": 0.9 * index,
            "retry": {**RETRY, "on": failures},
        }


def _extreme(model: Speaks) -> Iterator[Request]:
    """Numbers at their limits, of the first model each alone too: they are fields' limits, not a
    model's."""
    prompt = _ids(model, 5)
    base = {"prompt": prompt, "max_tokens": SHORT // 2, "ignore_eos": True}
    room = model.limit - len(prompt)
    yield from combined(base, room)
    if model.name == MODEL:
        yield from alone(base, room)


def _ids(model: Speaks, length: int) -> list[int]:
    """So many token ids, the same every time."""
    return random.Random(length).choices(range(model.first_id, model.vocab_size), k=length)
