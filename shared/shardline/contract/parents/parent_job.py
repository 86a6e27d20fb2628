"""Jobs that a job waits for, and how their texts come into its own: a placeholder is replaced, and
nothing is evaluated. Knows no row."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Literal
from uuid import UUID

import msgspec
from msgspec import Meta

from shardline.base.errors import Invalid
from shardline.contract.chat import Message

FIELD = "depends_on"
MAX_PARENTS = 64
MAX_FILLED_CHARS = 16 << 20
"""Of all texts of a job together, with those of its parents."""
ON_PARENT_FAILURE = ("fail", "run")
OnParentFailure = Literal["fail", "run"]

Placeholder = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=64)]


class ParentJob(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    rename={"name": "as"},
):
    """A job that must have ended before. Where it has a name, its text takes the place of
    `{{name}}` in the prompt or in the contents of messages."""

    job: UUID
    name: Placeholder | None = None


Parents = Annotated[tuple[ParentJob, ...], Meta(max_length=MAX_PARENTS)]
AnyPrompt = str | tuple[int, ...] | None


def check_parents(
    parents: Sequence[ParentJob], prompt: AnyPrompt, messages: Iterable[Message] | None
) -> None:
    """Raises Invalid for two parents of one name, and for a name that no text has."""
    names = [parent.name for parent in parents if parent.name is not None]
    texts = list(_texts(prompt, messages))
    for place, name in enumerate(names):
        if name in names[:place]:
            raise Invalid(FIELD, f"two parents are called {name!r}", "Give each its own name")
        mark = f"{{{{{name}}}}}"
        if not any(mark in one for one in texts):
            problem = f"no text has {mark}"
            raise Invalid(FIELD, problem, "Write it where the text shall stand, or leave out `as`")


def filled(
    prompt: AnyPrompt, messages: Sequence[Message] | None, texts: Mapping[str, str]
) -> tuple[AnyPrompt, tuple[Message, ...] | None]:
    """Returns both with each `{{name}}` replaced by its text. A backslash before it keeps it as it
    is, other names are no placeholders, and what a parent wrote is not looked at again. Raises
    Invalid for more than MAX_FILLED_CHARS."""
    kept = None if messages is None else tuple(messages)
    if not texts:
        return prompt, kept
    mark = re.compile(rf"\\?\{{\{{({'|'.join(map(re.escape, texts))})\}}\}}")

    def text_at(found: re.Match[str]) -> str:
        return found[0][1:] if found[0].startswith("\\") else texts[found[1]]

    num_chars = sum(
        len(one) + sum(len(text_at(found)) for found in mark.finditer(one))
        for one in _texts(prompt, messages)
    )
    if num_chars > MAX_FILLED_CHARS:
        problem = f"with its parents' texts it has over {MAX_FILLED_CHARS} characters"
        raise Invalid(FIELD, problem, "Bound their max_tokens, or use fewer of their texts")
    if isinstance(prompt, str):
        prompt = mark.sub(text_at, prompt)
    return prompt, kept and tuple(
        msgspec.structs.replace(one, content=mark.sub(text_at, one.content))
        if isinstance(one.content, str)
        else one
        for one in kept
    )


def _texts(prompt: AnyPrompt, messages: Iterable[Message] | None) -> Iterator[str]:
    """Yields the texts that may hold placeholders."""
    if isinstance(prompt, str):
        yield prompt
    for message in messages or ():
        yield message.text
