"""Whether each line of each batch has exactly one outcome, in its rows, its files and its counts.
Plain SQL and files as they were read: knows nothing of the product's code, only its tables."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import dict_row

from tests.chaos.judge.bits import vector_of
from tests.chaos.load.batches.batcher import lines_of
from tests.chaos.load.batches.sent_batch import (
    CHATS,
    COMPLETIONS,
    DECISIONS,
    EMBEDDINGS,
    ENDS,
    MARK,
    RESPONSES,
    BatchKind,
    SentBatch,
    SentLine,
)
from tests.chaos.load.journal import Asked
from tests.chaos.report.finding import Finding

DOOR = "batches"
JOBS = """
SELECT metadata ->> 'batch' AS batch, (metadata ->> 'line')::int AS line,
    (metadata ->> 'number')::int AS number, jobs.id, state, coalesce(choice_index, 0) AS place,
    results.text, results.token_ids, results.embedding,
    jobs.params -> 'tools' IS NOT NULL AS has_tools
FROM jobs LEFT JOIN results ON results.job_id = jobs.id WHERE metadata ->> 'asked_by' = %s
ORDER BY jobs.id
"""
LINES = "SELECT batch_id::text, line, custom_id FROM batch_lines ORDER BY batch_id, line"
STATES: Mapping[BatchKind, frozenset[str]] = {
    BatchKind.CANCELLED: frozenset({"succeeded", "cancelled"}),
    BatchKind.EXPIRING: frozenset({"succeeded", "expired"}),
}
"""In which jobs of a batch may end, where that is not only `succeeded`."""
CUT = frozenset({"batch_cancelled", "batch_expired"})
"""Codes of lines that a batch's end has kept from being executed."""

Row = Mapping[str, Any]


def line_jobs(database_url: str, sent: Sequence[SentBatch]) -> list[Asked]:
    """The first job of each line, as the judge of all jobs takes it."""
    states = {each.name: STATES.get(each.kind, frozenset({"succeeded"})) for each in sent}
    return [
        Asked(
            id=row["id"],
            number=row["number"],
            door=DOOR,
            ends=states[row["batch"]],
            promised=True,
            has_row=True,
        )
        for row in _rows(database_url, JOBS, MARK)
        if row["place"] == 0
    ]


def torn_batches(database_url: str, sent: Sequence[SentBatch]) -> list[Finding]:
    """I2: a line without an outcome, with two, or with another one than its jobs have; counts that
    are not those of the lines; a file that takes back what it had."""
    jobs: dict[str, list[Row]] = defaultdict(list)
    for row in _rows(database_url, JOBS, MARK):
        jobs[row["batch"]].append(row)
    lines: dict[str, list[Row]] = defaultdict(list)
    for row in _rows(database_url, LINES):
        lines[row["batch_id"]].append(row)
    return [
        Finding(invariant="I2", count=count, what=f"{batch.kind} batch {_id(batch)}: {what}")
        for batch in sent
        if batch.document
        for count, what in BatchTrial(
            batch=batch, lines=lines[_id(batch)], jobs=jobs[batch.name]
        ).problems()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTrial:
    """One batch, and its rows."""

    batch: SentBatch
    lines: Sequence[Row]
    jobs: Sequence[Row]

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yields fields of the report, each with what is wrong."""
        batch = self.batch
        status = batch.document["status"]
        if status not in ENDS[batch.kind]:
            yield "lost", f"it is {status}: {batch.document['errors']}"
            return
        if batch.document["in_progress_at"] is None:
            # Its file is none, or it was cancelled before that was known.
            if self.lines or self.jobs or any(batch.files.values()):
                yield "duplicated", "it never began, and has rows or files"
            return
        yield from self._in_rows()
        outcomes = {
            name: [json.loads(line) for line in batch.files.get(name, b"").splitlines()]
            for name in ("output_file_id", "error_file_id")
        }
        yield from self._in_files(*outcomes.values())
        yield from self._in_counts(*outcomes.values())
        for one in outcomes["output_file_id"]:
            yield from self._in_answer(one)
        final = {name: lines_of(content) for name, content in batch.files.items()}
        whole = {place: line for each in final.values() for place, line in each.items()}
        for place, line in batch.early.items():
            if whole.get(place) != line:
                yield "retracted", f"line {place} was {line[:300]!r} while it ran"
        if batch.again and batch.again != batch.files:
            yield "retracted", "its files are others when they are read again"

    def _in_rows(self) -> Iterator[tuple[str, str]]:
        sent = self.batch.lines
        wanted = [(place, line.custom_id) for place, line in enumerate(sent, 1)]
        found = [(row["line"], row["custom_id"]) for row in self.lines]
        if found != wanted:
            count = "duplicated" if len(found) > len(wanted) else "lost"
            yield count, f"{len(found)} of {len(wanted)} lines are rows, or others"
        num_jobs = Counter(row["line"] for row in self.jobs)
        for place, line in enumerate(sent, 1):
            num = num_jobs[place]
            most = line.num_choices if line.number is not None else 0
            # Lines that were read after a cancel or the window have none.
            if num > most:
                yield "duplicated", f"line {place} has {num} jobs, not {most}"
            elif num < most and (num or self.batch.kind not in STATES):
                yield "lost", f"line {place} has {num} jobs, not {most}"

    def _in_files(
        self, output: Sequence[Mapping[str, Any]], errors: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[str, str]]:
        everything = [*output, *errors]
        twice = [name for name, num in Counter(one["id"] for one in everything).items() if num > 1]
        if twice:
            yield "duplicated", f"{len(twice)} lines have two outcomes, such as {twice[0]}"
        wanted = Counter(line.custom_id for line in self.batch.lines)
        found = Counter(one["custom_id"] for one in everything)
        if lost := wanted - found:
            yield "lost", f"{lost.total()} lines have no outcome, such as {next(iter(lost))}"
        if more := found - wanted:
            yield "duplicated", f"{more.total()} outcomes too many, such as {next(iter(more))}"
        good = {line.custom_id for line in self.batch.lines if line.number is not None}
        for one in output:
            if one["custom_id"] not in good:
                yield "mistold", f"{one['custom_id']} is no request, and was answered"
        for one in errors:
            code = (one["error"] or {}).get("code")
            is_cut = code in CUT and self.batch.kind in STATES
            if not is_cut and one["custom_id"] in good:
                yield "lost", f"{one['custom_id']} has failed: {str(one)[:300]}"
            elif not is_cut and (one["response"] or {}).get("status_code") not in (400, 404):
                yield "mistold", f"{one['custom_id']} is no request: {str(one)[:300]}"

    def _in_counts(
        self, output: Sequence[Mapping[str, Any]], errors: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[str, str]]:
        document = self.batch.document
        wanted = {
            "total": len(self.batch.lines),
            "completed": len(output),
            "failed": len(errors),
        }
        if document["request_counts"] != wanted:
            yield "mistold", f"it counts {document['request_counts']}, and has {wanted}"
        if self.batch.endpoint != DECISIONS:
            used = sum(one["response"]["body"]["usage"]["total_tokens"] for one in output)
            if document["usage"]["total_tokens"] != used:
                told = document["usage"]["total_tokens"]
                yield "mistold", f"it counts {told} tokens, its answers have {used}"

    def _in_answer(self, one: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """The text and tokens of a line's first answer are its job's."""
        answered = one["response"]
        place = self._place(one["custom_id"])
        rows = [row for row in self.jobs if row["line"] == place and row["place"] == 0]
        if answered["status_code"] != 200 or len(rows) != 1:
            yield "mistold", f"{one['custom_id']} has {len(rows)} jobs: {str(one)[:300]}"
            return
        (row,) = rows
        if self.batch.endpoint == EMBEDDINGS:
            told = vector_of(answered["body"]["data"][0]["embedding"], None)
            if told != vector_of(row["embedding"], None):
                yield "vector_mismatches", f"{one['custom_id']} has another vector than its job"
        text, tokens = _said(self.batch.endpoint, answered["body"])
        if text is not None and not row["has_tools"] and text != row["text"]:
            yield "text_mismatches", f"{one['custom_id']} says {text!r}, its job {row['text']!r}"
        if tokens is not None and tokens != row["token_ids"]:
            yield "token_mismatches", f"{one['custom_id']} has other tokens than its job"

    def _place(self, custom_id: str | None) -> int:
        names: list[SentLine] = list(self.batch.lines)
        return next(at for at, line in enumerate(names, 1) if line.custom_id == custom_id)


def _said(endpoint: str, body: Mapping[str, Any]) -> tuple[str | None, list[int] | None]:
    """The text and the tokens of a body's first answer, as far as it has them."""
    if endpoint == CHATS:
        first = body["choices"][0]
        return first["message"]["content"] or "", first.get("token_ids")
    if endpoint == COMPLETIONS:
        first = body["choices"][0]
        return first["text"], first.get("token_ids")
    if endpoint == RESPONSES:
        messages = [item for item in body["output"] if item["type"] == "message"]
        return "".join(part["text"] for item in messages for part in item["content"]), None
    return None, None


def _id(batch: SentBatch) -> str:
    return str(batch.document["id"]).removeprefix("batch_")


def _rows(database_url: str, query: str, *values: Any) -> list[Row]:
    with psycopg.connect(database_url, row_factory=dict_row) as connection:
        return list(connection.execute(query, values).fetchall())
