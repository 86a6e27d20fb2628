"""Requests with grammars: known ones pass, new ones of a tenant wait for itself, none for long."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

from services.gateway.grammar_turns import GrammarTurns
from shardline.base.errors import Overload
from shardline.contract.job import JobRequest
from shardline.contract.structured_output import StructuredOutput
from shardline_server.tokenize import RegisteredModel
from tests.unit.gateway.test_openai_responses import tokens_of
from tests.unit.tokenize.small_tokenizers import byte_level

MODEL = RegisteredModel(
    name="m", fingerprint="f", tokens=tokens_of(byte_level()), updated_at=datetime.now(UTC)
)


def job(tenant: str, choice: str | None) -> JobRequest:
    output = None if choice is None else StructuredOutput(choice=(choice,))
    return JobRequest(model="m", prompt="a", tenant=tenant, structured_outputs=output)


async def test_only_a_new_grammar_waits_while_another_is_judged() -> None:
    turns = GrammarTurns()
    async with turns.take(MODEL, job("a", "known")):
        pass
    order: list[str] = []
    asked = asyncio.Semaphore(0)

    async def ask(tenant: str, choice: str | None) -> None:
        asked.release()
        async with turns.take(MODEL, job(tenant, choice)):
            order.append(tenant)

    async with turns.take(MODEL, job("slow", "new")):
        waiting = [asyncio.create_task(ask("slow", f"new{place}")) for place in range(3)]
        waiting.append(asyncio.create_task(ask("other", "new")))
        for _ in waiting:
            await asked.acquire()
        await ask("b", "known")
        await ask("c", None)
        assert order == ["b", "c"]
    await asyncio.gather(*waiting)
    assert order[2:].index("other") < 2, "one of the slow tenant's at most goes before it"


async def test_a_wait_for_others_ends_with_an_error_that_names_it() -> None:
    turns = GrammarTurns(max_wait_s=0.01)
    async with turns.take(MODEL, job("slow", "new")):
        with pytest.raises(Overload, match="new grammars"):
            async with turns.take(MODEL, job("other", "another")):
                pass
    async with turns.take(MODEL, job("other", "another")):
        pass
