"""What must be the same to the last bit: tokens, text and log-probabilities of rows and streams,
against those of the undisturbed run. Knows no server.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import UUID

from tests.chaos.load.journal import Watched
from tests.chaos.load.undisturbed import Expected
from tests.chaos.report.finding import Finding

PARTIAL = frozenset({"cancelled", "expired"})

Row = Mapping[str, Any]


def changed(
    rows: Mapping[UUID, Row], attempts: Sequence[Row], wanted: Mapping[UUID, Expected]
) -> list[Finding]:
    """I2: tokens, text, log-probabilities, numbers of an answer or an adapter that the undisturbed
    run does not have, in results or checkpoints."""
    return [
        *(
            finding
            for job_id, row in rows.items()
            for finding in _in_result(job_id, row, wanted[job_id])
        ),
        *(
            finding
            for attempt in attempts
            for finding in _in_checkpoint(attempt, wanted[attempt["job_id"]])
        ),
    ]


def _in_result(job_id: UUID, row: Row, expected: Expected) -> Iterator[Finding]:
    if row["token_ids"] is None:
        return
    is_partial = row["state"] in PARTIAL
    end = len(row["token_ids"]) if is_partial else None
    tokens = list(expected.tokens)[:end]
    if row["token_ids"] != tokens:
        place = first_difference(row["token_ids"], tokens)
        yield _changed("token", f"tokens differ from place {place} (exact: {row['exact']})", job_id)
    elif expected.text is not None and not is_partial and row["text"] != expected.text:
        yield _changed("text", f"{_of_text(row['text'], expected.text)} in the result", job_id)
    if row["exact"] and expected.logprobs is not None:
        yield from _logprobs(job_id, row["logprobs"], list(expected.logprobs)[:end], "the result")
    if row["exact"] and expected.decision is not None and not is_partial:
        yield from _decision(job_id, row["decision"], expected.decision)
    if row["exact"] and expected.vector is not None and not is_partial:
        vector = vector_of(row["embedding"], row["score"])
        if vector != expected.vector:
            yield _changed("vector", "its vector is not that of the undisturbed pass", job_id)
    if not is_partial and row["adapter"] != expected.adapter:
        yield _changed(
            "adapter", f"its adapter was {row['adapter']}, not {expected.adapter}", job_id
        )


def _in_checkpoint(attempt: Row, expected: Expected) -> Iterator[Finding]:
    job_id = attempt["job_id"]
    size = len(attempt["tokens"])
    tokens = list(expected.tokens)[:size]
    where = f"the checkpoint of fence {attempt['fence']}"
    if attempt["tokens"] != tokens:
        place = first_difference(attempt["tokens"], tokens)
        yield _changed("token", f"{where} differs from place {place}", job_id)
    elif expected.logprobs is not None and attempt["logprobs"] is not None:
        yield from _logprobs(job_id, attempt["logprobs"], list(expected.logprobs)[:size], where)


def _logprobs(job_id: UUID, got: Any, wanted: Sequence[Any], where: str) -> Iterator[Finding]:
    if got != list(wanted):
        place = first_difference(got or (), wanted)
        yield _changed("logprob", f"log-probabilities of {where} differ from place {place}", job_id)


def _decision(job_id: UUID, got: Any, wanted: Sequence[Any]) -> Iterator[Finding]:
    if got != list(wanted):
        yield _changed("decision", f"its numbers are {got}, not {list(wanted)}", job_id)


def vector_of(embedding: Sequence[float] | None, score: float | None) -> Sequence[float] | None:
    """What a row or an answer has of a text or a pair; each bit of a float32 counts."""
    if embedding is not None:
        return tuple(array("f", embedding))
    return None if score is None else (score,)


def _changed(what: str, how: str, job_id: UUID) -> Finding:
    return Finding(invariant="I2", count=f"{what}_mismatches", what=how, job_id=job_id)


def unequal(rows: Sequence[tuple[int, Row]]) -> Iterator[Finding]:
    """I2: two results of one request that are both exact, of one exactness, and differ. With each
    row the request's number."""
    firsts: dict[tuple[int, str], Row] = {}
    for number, row in rows:
        if row["state"] != "succeeded" or not row["exact"]:
            continue
        first = firsts.setdefault((number, row["exactness"]), row)
        for what, name in (
            ("token", "token_ids"),
            ("text", "text"),
            ("logprob", "logprobs"),
            ("vector", "embedding"),
        ):
            if row[name] != first[name]:
                place = first_difference(row[name] or (), first[name] or ())
                yield _changed(
                    what,
                    f"{name} differ from place {place} from those of job {first['id']}",
                    row["id"],
                )
                break


def moved(attempts: Sequence[Row]) -> frozenset[UUID]:
    """Jobs that went on under another exactness: what a reader had of them before may come out
    differently."""
    seen: dict[UUID, set[str]] = {}
    for attempt in attempts:
        seen.setdefault(attempt["job_id"], set()).add(attempt["exactness"])
    return frozenset(job_id for job_id, all_of_them in seen.items() if len(all_of_them) > 1)


def retracted(
    watched: Sequence[Watched], rows: Mapping[UUID, Row], wanted: Mapping[UUID, Expected]
) -> Iterator[Finding]:
    """I9: a stream that skipped, repeated, or said something else than the result."""
    for reader in watched:
        job_id = reader.job_id
        row = rows.get(reader.job_id)
        expected = wanted.get(job_id, Expected(tokens=()))
        for what in _in_tokens(reader, row, list(expected.tokens)):
            yield Finding(invariant="I9", count="retracted", what=what, job_id=job_id)
        if row is None or row["state"] != "succeeded":
            continue
        is_whole = reader.end_state == "succeeded"
        if reader.hears_calls and row["has_tools"]:
            yield from _calls(reader, row)
        elif not (reader.text == row["text"] if is_whole else row["text"].startswith(reader.text)):
            differs = _of_text(reader.text, row["text"])
            what = f"{differs} in a stream of {reader.num_joins} connections"
            yield Finding(invariant="I9", count="text_mismatches", what=what, job_id=job_id)
        if (
            row["exact"]
            and reader.logprobs
            and reader.logprobs != (row["logprobs"] or [])[: len(reader.logprobs)]
        ):
            place = first_difference(reader.logprobs, row["logprobs"] or ())
            what = f"streamed log-probabilities differ from place {place}"
            yield Finding(invariant="I9", count="logprob_mismatches", what=what, job_id=job_id)


def _in_tokens(reader: Watched, row: Row | None, wanted: Sequence[int]) -> Iterator[str]:
    yield from reader.gaps
    if reader.tokens != wanted[: len(reader.tokens)]:
        yield f"streamed tokens differ from place {first_difference(reader.tokens, wanted)}"
    if row is None or reader.end_state is None:
        return
    if reader.end_state == "succeeded" and reader.tokens != row["token_ids"]:
        num_stored = len(row["token_ids"] or ())
        yield f"{len(reader.tokens)} tokens were streamed, the result has {num_stored}"
    if reader.end_state != row["state"]:
        yield f"the stream ended {reader.end_state}, the job is {row['state']}"
    is_told = reader.hears_partials or reader.end_state == "succeeded"
    if is_told and reader.end_tokens != row["token_ids"]:
        yield "the result that was streamed is not the one that is stored"


def _calls(reader: Watched, row: Row) -> Iterator[Finding]:
    functions = [call["function"] for call in row["tool_calls"] or ()]
    wanted = [(one["name"], one["arguments"]) for one in functions]
    # The limit of tokens may cut the last call, which the row has not then.
    told = reader.calls[: len(wanted)] if row["finish_reason"] == "length" else reader.calls
    if reader.end_state == "succeeded" and told != wanted:
        what = f"{reader.calls} were called in a stream, {wanted} in the result"
        yield Finding(invariant="I9", count="text_mismatches", what=what, job_id=reader.job_id)


def _of_text(got: str, wanted: str) -> str:
    place = first_difference(got, wanted)
    near = slice(place, place + 8)
    return f"text differs from place {place} ({got[near]!r}, not {wanted[near]!r})"


def first_difference(some: Sequence[Any], others: Sequence[Any]) -> int:
    """The first place at which they differ, or the length of the shorter."""
    pairs = enumerate(zip(some, others, strict=False))
    return next(
        (place for place, (one, other) in pairs if one != other), min(len(some), len(others))
    )
