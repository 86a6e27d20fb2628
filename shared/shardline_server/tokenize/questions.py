"""A question as a prompt that ends where its answer begins, and the tokens that answers begin with.

Each option has a label that is one token, so that one row of logits has all their probabilities.
The labels depend on nothing but the tokenizer and the question: a door renders them, a head finds
their ids again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import product
from string import ascii_lowercase, ascii_uppercase, digits
from typing import NamedTuple

import msgspec
from tokenizers import Tokenizer

from shardline.base.errors import Invalid
from shardline.contract.chat import Message
from shardline.contract.decision import FIELD, MAX_CHOICES, Predicate, Question, Score
from shardline.contract.job import Prompt
from shardline_server.tokenize.vocabulary import Vocabulary

WORDS = (("Yes", "No"), ("Y", "N"))
"""Of a predicate: the first pair that a tokenizer has as single tokens."""

LINE = "\n"
"""What stands before an answer in most chat templates, and at the end of a plain prompt."""

USER = "user"


class Label(NamedTuple):
    """What an answer begins with: one token."""

    text: str
    token_id: int


class QuestionLabels:
    """The labels of one model's tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size

    def of(self, question: Question) -> tuple[Label, ...]:
        """One for each option, in their order. Raises Invalid where the tokenizer has too few."""
        num_options = len(question.options)
        if isinstance(question, Predicate) and self._words:
            return self._words
        if isinstance(question, Score) and len(self._digits) >= num_options:
            return self._digits[:num_options]
        if len(self._letters) < num_options:
            raise Invalid(
                FIELD,
                f"it has {num_options} options; this model's tokenizer has "
                f"{len(self._letters)} labels of one token",
                f"Use at most {len(self._letters)}" if self._letters else "Use another model",
            )
        return self._letters[:num_options]

    def ask(
        self,
        question: Question,
        prompt: Prompt | None,
        messages: Sequence[Message] | None,
        *,
        as_chat: bool,
    ) -> tuple[Prompt | None, Sequence[Message] | None]:
        """The input with the question behind it: questions of one input share its KV. A text is a
        message where the model has a chat template (`as_chat`). Raises Invalid."""
        text = question_text(question, self.of(question))
        if messages:
            return None, asked_messages(messages, text)
        if not isinstance(prompt, str):
            problem = "a question cannot stand behind token ids"
            raise Invalid("prompt", problem, "Send the prompt as text, or messages")
        if not as_chat:
            return asked_prompt(prompt, text), None
        return None, asked_messages([Message(USER, prompt)], text)

    @cached_property
    def _words(self) -> tuple[Label, ...]:
        pairs = (self._labels(pair) for pair in WORDS)
        return next((pair for pair in pairs if len(pair) == len(WORDS[0])), ())

    @cached_property
    def _digits(self) -> tuple[Label, ...]:
        found = self._labels(digits)
        return found if len(found) == len(digits) else ()

    @cached_property
    def _letters(self) -> tuple[Label, ...]:
        pairs = map("".join, product(ascii_uppercase, repeat=2))
        return self._labels([*ascii_uppercase, *pairs, *ascii_lowercase])

    def _labels(self, texts: Iterable[str]) -> tuple[Label, ...]:
        """Those that are one token behind a line break, MAX_CHOICES at most."""
        before = self._ids(LINE)
        found: list[Label] = []
        for text in texts:
            *others, token_id = self._ids(LINE + text) or [-1]
            is_its_own = others == before and 0 <= token_id < self._vocab_size
            if is_its_own and self._has_text(token_id, text):
                found.append(Label(text, token_id))
            if len(found) == MAX_CHOICES:
                break
        return tuple(found)

    def _has_text(self, token_id: int, text: str) -> bool:
        return self._vocabulary.has_text(token_id) and self._vocabulary.name(token_id) == text

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def question_text(question: Question, labels: Sequence[Label]) -> str:
    """The question as a model reads it, behind the input that it is about."""
    if isinstance(question, Predicate):
        yes, no = (label.text for label in labels)
        return (
            f"Is this true of the above?\n{question.instructions}\n"
            f"Answer {yes} if it is, {no} if it is not, and nothing else."
        )
    lines = [
        f"{label.text}. {option.text}" + (f": {option.description}" if option.description else "")
        for label, option in zip(labels, question.options, strict=True)
    ]
    kind = "level" if isinstance(question, Score) else "option"
    ending = f"Answer with the label of the {kind} that fits best, and nothing else."
    return "\n".join((question.instructions, *lines, ending))


def asked_messages(messages: Sequence[Message], text: str) -> tuple[Message, ...]:
    """A conversation that ends with the question. It is in the last message of the user, if that is
    the last one: many templates refuse two of one role."""
    *others, last = messages
    if last.role != USER:
        return (*messages, Message(USER, text))
    return (*others, msgspec.structs.replace(last, content=f"{last.text}\n\n{text}"))


def asked_prompt(prompt: str, text: str) -> str:
    """A text that ends with the question, for a model without chat template."""
    return f"{prompt}\n\n{text}\nAnswer:{LINE}"
