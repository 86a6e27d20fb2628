"""Structured output at the sampler: any logits make a valid text, and the same one after a
restart."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jsonschema_rs
import pytest
import torch
from torch import Tensor

from services.stage.sampling.sampled_sequence import SampledSequence
from services.stage.sampling.sampler import Sampler
from shardline.contract.job import FinishReason, SamplingParams
from shardline.contract.structured_output import StructuredOutput
from shardline_scheduler.step_plan import Open
from shardline_server.tokenize.completion import CompletionText
from shardline_server.tokenize.grammars.grammar import Grammars
from shardline_server.tokenize.vocabulary import Vocabulary
from tests.unit.tokenize.small_tokenizers import END, byte_fallback, byte_level, id_of

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PADDED = 8
"""Places at the end of the vocabulary that have no token."""


class Model:
    """A tokenizer with logits that are a function of the tokens before."""

    def __init__(self, make: Callable[[], Any] = byte_level) -> None:
        self.tokenizer = make()
        self.eos = id_of(self.tokenizer, END)
        self.vocab_size = self.tokenizer.get_vocab_size() + PADDED
        self.sampler = Sampler(
            vocab_size=self.vocab_size,
            eos_ids=[self.eos],
            grammars=cache(
                lambda: Grammars(
                    self.tokenizer.to_str(), vocab_size=self.vocab_size, eos_ids=[self.eos]
                )
            ),
        )

    def open(
        self, params: SamplingParams, ids: Sequence[int] = (), *, seed: int = 1
    ) -> SampledSequence:
        return self.sampler.open(Open(0, (1, 2, *ids), 2, params, seed, 4))

    def row(self, ids: Sequence[int]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((*ids[-3:], len(ids))) % 2**31)
        return torch.randn(self.vocab_size, generator=generator) * 3

    def complete(
        self, params: SamplingParams, ids: Sequence[int] = (), *, seed: int = 1, most: int = 400
    ) -> tuple[int, ...]:
        """The tokens of a completion without the one that ends it, or the first `most`."""
        found = tuple(ids)
        sequence = self.open(params, found, seed=seed)
        while len(found) < most:
            sample = self.sampler.sample(self.row(found).unsqueeze(0), [sequence])
            assert not sample.bad
            assert not sample.refused
            ((token,),) = sample.tokens
            if token == self.eos:
                return found
            sequence.extend((token,))
            found = (*found, token)
        return found

    def text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode([*ids], skip_special_tokens=False))


def held_to(output: StructuredOutput, **params: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=output, **params)


OUTPUTS = {
    "schema": StructuredOutput(json=PERSON),
    "schema as text": StructuredOutput(json=json.dumps(PERSON)),
    "choice": StructuredOutput(choice=("yes", 'a "quoted" né', "nearly no")),
    "regex": StructuredOutput(regex=r"[a-f]{2,5}-[0-9]{3}( é)?"),
    "grammar": StructuredOutput(grammar='root ::= "(" root ")" | "x"'),
    "lark": StructuredOutput(grammar='start: "[" NUMBER "]"\nNUMBER: /[0-9]{1,4}/'),
}


def is_valid(kind: str, text: str) -> bool:
    if kind.startswith("schema"):
        return jsonschema_rs.is_valid(PERSON, json.loads(text))
    if kind == "choice":
        return text in OUTPUTS["choice"].choice
    if kind == "regex":
        return re.fullmatch(r"[a-f]{2,5}-[0-9]{3}( é)?", text) is not None
    if kind == "grammar":
        depth = text.index("x")
        return text == "(" * depth + "x" + ")" * depth
    return re.fullmatch(r"\[[0-9]{1,4}\]", text) is not None


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("kind", OUTPUTS)
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 2.0, "top_p": 0.9},
        {"top_k": 3, "repetition_penalty": 0.5},
        {"temperature": 0.0, "frequency_penalty": 0.7, "logprobs": 2},
        {"min_tokens": 3},
    ],
)
def test_whatever_the_logits_are_the_text_is_valid(
    make: Callable[[], Any], kind: str, params: dict[str, Any]
) -> None:
    model = Model(make)
    for seed in range(3):
        ids = model.complete(held_to(OUTPUTS[kind], **params), seed=seed)

        text = model.text(ids)
        if len(ids) < 400:
            assert is_valid(kind, text), text


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}])
def test_tokens_have_the_probabilities_of_the_allowed_ones(params: dict[str, Any]) -> None:
    model = Model()
    row = torch.full((model.vocab_size,), -8.0)
    wanted = {"a": 0.5, "b": 0.3, "c": 0.2}
    for letter, probability in wanted.items():
        row[id_of(model.tokenizer, letter)] = math.log(probability)
    row[id_of(model.tokenizer, "x")] = math.log(2.0)  # likelier than all that are allowed
    output = StructuredOutput(choice=tuple(wanted))
    found: Counter[str] = Counter()
    for seed in range(2_000):
        sequence = model.open(held_to(output, **params), seed=seed)
        ((token,),) = model.sampler.sample(row.unsqueeze(0), [sequence]).tokens
        found[model.text([token])] += 1
    assert found.keys() == wanted.keys()
    assert {each: found[each] / 2_000 for each in wanted} == pytest.approx(wanted, abs=0.04)


def test_a_free_token_that_is_allowed_stays() -> None:
    model = Model()
    output = StructuredOutput(regex="[a-m]{1,9}")
    allowed = [id_of(model.tokenizer, letter) for letter in "abcdefghijklm"]
    row = model.row(()).unsqueeze(0)
    row[0, allowed] += 4.0
    stayed = 0
    for seed in range(64):
        free = model.sampler.sample(row, [model.open(SamplingParams(), seed=seed)])
        held = model.sampler.sample(row, [model.open(held_to(output), seed=seed)])
        if free.tokens[0][0] in allowed:
            stayed += 1
            assert held.tokens == free.tokens
    assert 0 < stayed < 64, "some draws are of tokens that it does not allow"


@pytest.mark.parametrize("kind", OUTPUTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tail_that_starts_again_goes_on_with_the_same_tokens(
    kind: str, temperature: float
) -> None:
    model = Model()
    params = held_to(OUTPUTS[kind], temperature=temperature)
    whole = model.complete(params, most=60)
    for known in range(len(whole)):
        assert model.complete(params, whole[:known], most=60) == whole


def test_drafts_that_come_true_or_not_change_no_token() -> None:
    model = Model()
    params = held_to(OUTPUTS["schema"])
    whole = model.complete(params, most=60)
    for right in (0, 1, 3):
        drafts = (*whole[:right], *((model.eos,) if right < len(whole) else ()))
        rows = [model.row(drafts[:place]) for place in range(len(drafts) + 1)]
        sample = model.sampler.sample(torch.stack(rows), [model.open(params)], [drafts])

        assert sample.tokens == (whole[: right + 1],)


def test_a_grammar_that_can_only_end_does_so_before_min_tokens() -> None:
    model = Model()
    ids = model.complete(held_to(StructuredOutput(choice=("x",)), min_tokens=50))

    assert model.text(ids) == "x"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_text_ends_before_min_tokens_where_it_can_go_on(temperature: float) -> None:
    model = Model()
    output = StructuredOutput(regex="[ab]*")
    params = held_to(output, min_tokens=12, temperature=temperature)
    for seed in range(8):
        whole = model.complete(params, seed=seed, most=40)
        assert len(whole) >= 12
        assert model.complete(params, whole[:5], seed=seed, most=40) == whole


def test_the_head_ends_where_the_tail_does() -> None:
    model = Model()
    params = held_to(StructuredOutput(choice=("x",)), min_tokens=50)
    rule = CompletionText(Vocabulary(model.tokenizer, [model.eos]), params, room=99)

    found = [rule.push(token) for token in (id_of(model.tokenizer, "x"), model.eos)]

    assert found == [("x", None), ("", FinishReason.STOP)]


@pytest.mark.parametrize("kind", ["schema", "choice"])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"logprobs": 1, "min_tokens": 9}])
def test_forced_tokens_as_drafts_change_no_token(kind: str, params: dict[str, Any]) -> None:
    model = Model()
    for seed in range(4):
        plain = model.complete(held_to(OUTPUTS[kind], **params), seed=seed, most=60)
        sequence = model.open(held_to(OUTPUTS[kind], **params), seed=seed)
        found: tuple[int, ...] = ()
        drafts: tuple[int, ...] = ()
        num_true = num_steps = 0
        while len(found) < len(plain):
            rows = [model.row((*found, *drafts[:place])) for place in range(len(drafts) + 1)]
            sample = model.sampler.sample(torch.stack(rows), [sequence], [drafts])
            (tokens,) = sample.tokens
            found += tokens
            sequence.extend(tokens[-1:])
            num_true += len(tokens) - 1
            num_steps += 1
            drafts = sample.forced[0] if sample.forced else ()
        assert found[: len(plain)] == plain
        assert num_true > 0 or kind == "choice"
        assert num_steps + num_true == len(found)


def test_a_draft_that_ends_the_text_is_the_last_token() -> None:
    model = Model()
    x = id_of(model.tokenizer, "x")
    sequence = model.open(held_to(StructuredOutput(choice=("x",))))
    rows = torch.stack([model.row(()) for _ in range(4)])

    sample = model.sampler.sample(rows, [sequence], [(x, model.eos, x)])

    assert sample.tokens == ((x, model.eos),)
    assert not sample.bad
    assert not sample.refused


def test_a_lexer_that_neighbors_have_filled_fails_no_completion() -> None:
    """Its states are shared by all completions of one grammar, and so is their limit."""
    model = Model()
    params = held_to(StructuredOutput(regex="((.*a.{30})|(.*b.{31})|(.*e.{25}))x"))
    alone = Model().complete(params, seed=99, most=40)
    for seed in range(60):
        model.complete(params, seed=seed, most=60)

    assert model.complete(params, seed=99, most=40) == alone


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (StructuredOutput(regex="(a"), "unclosed group"),
        (StructuredOutput(json={"type": "integer", "minimum": 2, "maximum": 1}), "Unsatisfiable"),
    ],
)
def test_a_grammar_that_does_not_compile_is_refused_alone(
    output: StructuredOutput, reason: str
) -> None:
    model = Model()
    good = model.open(SamplingParams(temperature=0.0))
    bad = model.sampler.open(Open(7, (1, 2), 2, held_to(output), 1, 4))
    rows = torch.stack([model.row(()), model.row(())])

    sample = model.sampler.sample(rows, [good, bad])

    assert sample.tokens[0] == (int(rows[0].argmax()),)
    assert [seq for seq, _ in sample.refused] == [7]
    assert reason in sample.refused[0][1]
    assert sample.bad == ()


def test_tokens_that_do_not_follow_the_grammar_are_refused() -> None:
    model = Model()
    sequence = model.open(held_to(OUTPUTS["choice"]), (id_of(model.tokenizer, "z"),))

    assert "structured_outputs" in sequence.refusal


def test_a_model_without_a_tokenizer_refuses_it() -> None:
    sampler = Sampler(vocab_size=20, eos_ids=[1])
    sequence = sampler.open(Open(0, (1, 2), 2, held_to(OUTPUTS["choice"]), 1, 4))

    assert "no tokenizer" in sampler.sample(torch.zeros(1, 20), [sequence]).refused[0][1]


@pytest.mark.parametrize("text", ["", "{", '{"model": {"type": "BPE"}}'])
def test_a_vocabulary_that_cannot_be_read_is_a_refusal(text: str) -> None:
    sampler = Sampler(
        vocab_size=20, eos_ids=[1], grammars=lambda: Grammars(text, vocab_size=20, eos_ids=[1])
    )
    sequence = sampler.open(Open(0, (1, 2), 2, held_to(OUTPUTS["choice"]), 1, 4))

    assert "its vocabulary cannot be used" in sequence.refusal


def test_a_row_that_is_no_distribution_is_bad_as_without_a_grammar() -> None:
    model = Model()
    row = torch.full((1, model.vocab_size), math.nan)

    assert model.sampler.sample(row, [model.open(held_to(OUTPUTS["schema"]))]).bad == (0,)
