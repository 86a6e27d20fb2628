"""What a model that pools texts makes of them, as `models.encoder` tells doors. Knows no tokenizer
and no weights."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from shardline.base.errors import Invalid
from shardline.contract.job import MAX_DIMENSIONS


class EncoderTask(StrEnum):
    """embed: a text becomes a vector; score: a pair of texts becomes a number."""

    EMBED = "embed"
    SCORE = "score"


GENERATE = "generate"
"""The task of every other model."""


class Encoder(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model with vectors or scores instead of tokens."""

    task: EncoderTask
    num_dimensions: Annotated[int, Meta(ge=1, le=MAX_DIMENSIONS)]
    """Of its vectors; of a score 1."""
    shorter: tuple[int, ...] = ()
    """Dimensions to which its vectors may be cut (Matryoshka)."""
    any_shorter: bool = False
    """They may be cut to any number of dimensions."""
    prompts: dict[str, str] = {}
    """What stands before a text, by the name of the prompt."""
    default_prompt: str | None = None
    lowercases: bool = False
    """Texts are made lower case before they are tokenized."""
    separator: int | None = None
    """The token between the texts of a pair, where those behind it have another type."""

    def check_dimensions(self, num: int) -> None:
        """Raises Invalid for vectors that the model was not trained to be cut to."""
        if num == self.num_dimensions or num in self.shorter:
            return
        if self.any_shorter and num < self.num_dimensions:
            return
        shorter = ", ".join(map(str, self.shorter))
        allowed = f"1 to {self.num_dimensions}" if self.any_shorter else shorter
        remedy = f"Use {allowed}, or leave it out" if allowed else "Leave it out"
        problem = f"{num}: the model's vectors have {self.num_dimensions} and are not cut to that"
        raise Invalid("dimensions", problem, remedy)
