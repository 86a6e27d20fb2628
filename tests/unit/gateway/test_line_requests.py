"""Lines of a batch as jobs: one that meets a bug is an error, and holds up no other."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from services.gateway.batches import line_requests
from services.gateway.batches.line_requests import EncodedLine, LinePlace, encoded_lines
from services.gateway.errors import status_of
from services.gateway.grammar_turns import GrammarTurns
from shardline.base.errors import ShardlineError
from shardline_server.tokenize import PreparedPrompt, RegisteredModel, Tokens
from tests.unit.gateway.test_openai_responses import tokens_of
from tests.unit.tokenize.small_tokenizers import byte_level

PLACE = LinePlace(batch_id=UUID(int=7), endpoint="/v1/completions", tenant="t", left_s=60)
BUG = "meets a bug"


class TokensWithABug(Tokens):
    """Raises for one prompt what nobody foresaw."""

    def prepare(self, **fields: Any) -> PreparedPrompt:
        """Prepare the others."""
        if fields["prompt"] == BUG:
            raise KeyError(BUG)
        return super().prepare(**fields)


class OneModel:
    """As much of a gateway as lines need: without Postgres, and with one model."""

    def __init__(self) -> None:
        tokens = tokens_of(byte_level())
        tokens.__class__ = TokensWithABug
        self.model = RegisteredModel(
            name="m", fingerprint="f", tokens=tokens, updated_at=datetime.now(UTC)
        )
        self.grammar_turns = GrammarTurns()
        self.catalog = self.admission = self

    async def get(self, address: str) -> RegisteredModel:
        """Find the model."""
        assert address == self.model.name
        return self.model

    def check_decoded(self, num_bytes: int) -> None:
        """Have room for all."""


async def outcomes_of(*bodies: dict[str, Any]) -> list[int | None]:
    """The status of each line that is an error; None: it is a job."""
    gateway: Any = OneModel()
    lines = [(number, json.dumps(body).encode()) for number, body in enumerate(bodies)]
    found = await encoded_lines(gateway, PLACE, lines)
    for one in found:
        assert isinstance(one, EncodedLine | ShardlineError)
    return [status_of(one) if isinstance(one, ShardlineError) else None for one in found]


@pytest.mark.parametrize("held", [{}, {"structured_outputs": {"choice": ["a"]}}])
async def test_a_line_that_meets_a_bug_is_an_error_and_the_others_are_jobs(
    held: dict[str, Any],
) -> None:
    good = {"model": "m", "prompt": "a"}
    assert await outcomes_of(good, {**good, "prompt": BUG, **held}, good) == [None, 500, None]


async def test_a_line_whose_reading_meets_a_bug_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def parse(document: dict[str, Any]) -> Any:
        raise KeyError(BUG)

    parsers = {**line_requests.PARSERS, PLACE.endpoint: parse}
    monkeypatch.setattr(line_requests, "PARSERS", parsers)
    assert await outcomes_of({"model": "m", "prompt": "a"}) == [500]
