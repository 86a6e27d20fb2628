"""Lines of a batch's output and errors in OpenAI's form, from rows alone: whenever they are read
they are the same. Knows no route."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any
from uuid import UUID

import msgspec
from msgspec import UNSET
from msgspec.structs import asdict

from services.gateway.batches.line_requests import CHATS, COMPLETIONS, EMBEDDINGS, RESPONSES
from services.gateway.context import Gateway
from services.gateway.decisions.answers import decision_document
from services.gateway.encoders.answers import vector_list
from services.gateway.encoders.bodies import BASE64
from services.gateway.errors import body_of, status_of
from services.gateway.files.bodies import file_name
from services.gateway.openai.bodies import (
    AnswerHead,
    ChatCompletionRequest,
    CompletionRequest,
    OpenAiRequest,
)
from services.gateway.openai.choice_answers import whole_choices
from services.gateway.openai.completion_response import result_of, whole
from services.gateway.openai.responses import ChatResponses, CompletionResponses
from services.gateway.openai.stored_answers import UNKNOWN, as_written
from services.gateway.openai.system_fingerprint import system_fingerprint
from services.gateway.responses.answers import ResponseAnswers, response_id
from shardline.base.errors import (
    Invalid,
    JobCancelled,
    JobExpired,
    NotFound,
    ShardlineError,
    Unavailable,
)
from shardline.contract.batches.batch import line_id
from shardline.contract.decision import Question
from shardline.contract.job import Job, address_of
from shardline.store.batch_lines import LineRow, ended_lines
from shardline.store.batches import BatchRow, read_batch
from shardline.store.choices import other_choices
from shardline.store.files import FileRow
from shardline.store.jobs import get_jobs
from shardline.store.responses import ResponseRow, read_responses
from shardline_server.tokenize import RegisteredModel

LINES_PER_PAGE = 16
JOBS_PER_PAGE = 128
"""Read from Postgres at a time, and one line at least: each may have megabytes."""

EXPIRED = (
    "batch_expired",
    "This request could not be executed before the completion window expired",
)
CANCELLED = ("batch_cancelled", "This batch was cancelled before this request was executed")


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a line was not executed."""

    code: str
    message: str


class LineResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What the line's route answers: the body is that of the route, an error's too."""

    status_code: int
    request_id: str
    body: Any


class OutputLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of an output file."""

    id: str
    custom_id: str | None
    response: LineResponse | None
    error: LineError | None


Model = RegisteredModel | ShardlineError


def over(code_and_message: tuple[str, str]) -> Mapping[str, str]:
    """What the row of a line has that was not executed."""
    code, message = code_and_message
    return {"code": code, "message": message}


def refusal(error: ShardlineError) -> Mapping[str, Any]:
    """Returns the answer for a line that is no valid request."""
    return {"status_code": status_of(error), "body": msgspec.to_builtins(body_of(error))}


async def output_lines(gateway: Gateway, file: FileRow) -> AsyncIterator[bytes]:
    """The lines of a batch's file that have ended, in their order. Raises NotFound where the batch
    is gone meanwhile."""
    assert file.batch_id is not None, "a part is of a batch"
    after = 0
    while True:
        batch = await gateway.client.ask(partial(read_batch, batch_id=file.batch_id))
        if batch is None:
            raise NotFound(f"the file {file_name(file.id)} was deleted while it was read")
        page = await answered_page(gateway, batch, after=after, has_succeeded=file.part == "output")
        if page is None:
            return
        after = page.last_line
        yield page.content


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredPage:
    """Some lines in OpenAI's form, and the number of the last one."""

    last_line: int
    content: bytes


async def answered_page(
    gateway: Gateway, batch: BatchRow, *, after: int, has_succeeded: bool
) -> AnsweredPage | None:
    """The next lines behind one that have ended; None where there are none."""
    page = partial(
        ended_lines,
        batch_id=batch.id,
        after=after,
        limit=LINES_PER_PAGE,
        has_succeeded=has_succeeded,
    )
    lines = await gateway.client.ask(page)
    if not lines:
        return None
    sums = accumulate(line.num_jobs for line in lines)
    lines = lines[: max(1, sum(num <= JOBS_PER_PAGE for num in sums))]
    return AnsweredPage(last_line=lines[-1].line, content=await _rendered(gateway, batch, lines))


async def _rendered(gateway: Gateway, batch: BatchRow, lines: Sequence[LineRow]) -> bytes:
    firsts = [line.job_id for line in lines if line.job_id is not None]
    jobs = await gateway.client.ask(partial(_jobs, firsts=firsts))
    responses: dict[UUID, ResponseRow | None] = {}
    if batch.endpoint == RESPONSES:
        rows = await gateway.client.ask(partial(read_responses, ids=firsts))
        responses = dict(zip(firsts, rows, strict=True))
    models: dict[str, Model] = {}
    for each in jobs.values():
        address = address_of(each[0].model, each[0].params.adapter)
        if address not in models:
            models[address] = await _model(gateway, address)

    def render() -> bytes:
        found = []
        for line in lines:
            each = jobs.get(line.job_id, ()) if line.job_id is not None else ()
            response = None if line.job_id is None else responses.get(line.job_id)
            found.append(msgspec.json.encode(_line(batch, line, each, response, models)) + b"\n")
        return b"".join(found)

    return await asyncio.to_thread(render)


def _jobs(connection: Any, firsts: Sequence[UUID]) -> dict[UUID, tuple[Job, ...]]:
    """The jobs of each line, in their order."""
    others = other_choices(connection, firsts)
    wanted = {first: (first, *others.get(first, ())) for first in firsts}
    ids = [job_id for each in wanted.values() for job_id in each]
    found = {job.id: job for job in get_jobs(connection, ids)}
    return {
        first: tuple(found[job_id] for job_id in each if job_id in found)
        for first, each in wanted.items()
        if first in found
    }


async def _model(gateway: Gateway, address: str) -> Model:
    try:
        return await gateway.catalog.get(address)
    except Invalid as error:
        return error


def _line(
    batch: BatchRow,
    line: LineRow,
    jobs: Sequence[Job],
    response: ResponseRow | None,
    models: Mapping[str, Model],
) -> OutputLine:
    name = f"batch_req_{line_id(batch.id, line.line)}"
    answered: LineResponse | None = None
    error: LineError | None = None
    if line.error is not None:
        if "code" in line.error:
            error = msgspec.convert(line.error, LineError)
        else:
            answered = msgspec.convert({**line.error, "request_id": name}, LineResponse)
    else:
        try:
            answered = _answer(batch, line, jobs, response, models)
        except JobExpired:
            error = LineError(**over(EXPIRED))
        except JobCancelled as ended:
            if batch.moments["cancelling_at"] is not None:
                error = LineError(**over(CANCELLED))
            else:
                answered = _refused(name, ended)
        except Unavailable:
            raise
        except ShardlineError as refused:
            answered = _refused(name, refused)
    return OutputLine(id=name, custom_id=line.custom_id, response=answered, error=error)


def _refused(name: str, error: ShardlineError) -> LineResponse:
    return LineResponse(status_code=status_of(error), request_id=name, body=body_of(error))


def _answer(
    batch: BatchRow,
    line: LineRow,
    jobs: Sequence[Job],
    response: ResponseRow | None,
    models: Mapping[str, Model],
) -> LineResponse:
    """The answer of the line's route. Raises the reason of an end without a completion."""
    if len(jobs) < max(1, line.num_jobs):
        raise NotFound(f"job {line.job_id} was deleted")
    results = [result_of(job) for job in jobs]
    first = jobs[0]
    address = address_of(first.model, first.params.adapter)
    model = models[address]
    if batch.endpoint == RESPONSES:
        if response is None:
            raise NotFound(f"{response_id(first.id)} was deleted")
        if isinstance(model, ShardlineError):
            raise model
        whole_response = ResponseAnswers(row=response, tokens=model.tokens).whole()
        return _answered(response_id(first.id), whole_response)
    if batch.endpoint == EMBEDDINGS:
        name = f"embd-{first.id}"
        is_packed = line.options.get("encoding_format") == BASE64
        return _answered(name, vector_list(name, address, results, is_packed=is_packed))
    if batch.endpoint not in (CHATS, COMPLETIONS):
        name = f"decision-{first.id}"
        questions: list[Question] = [
            job.params.question for job in jobs if job.params.question is not None
        ]
        return _answered(name, decision_document(name, address, questions, jobs))
    return _completion(batch.endpoint == CHATS, line, jobs, model)


def _completion(is_chat: bool, line: LineRow, jobs: Sequence[Job], model: Model) -> LineResponse:
    kind = ChatResponses if is_chat else CompletionResponses
    first = jobs[0]
    head = AnswerHead(
        id=f"{kind.prefix}-{first.id}",
        created=int(first.created_at.timestamp()),
        model=address_of(first.model, first.params.adapter),
        system_fingerprint=UNKNOWN
        if isinstance(model, ShardlineError)
        else system_fingerprint(model),
        service_tier=line.options.get("service_tier", UNSET),
    )
    if isinstance(model, ShardlineError):
        if not is_chat:
            raise model
        return _answered(head.id, as_written(head, jobs))
    builders = [
        kind(
            head=head,
            request=_request(is_chat, line, job),
            tokens=model.tokens,
            prompt_ids=job.prompt_token_ids or (),
            job_id=job.id,
            index=index,
        )
        for index, job in enumerate(jobs)
    ]
    if len(jobs) == 1:
        return _answered(head.id, whole(builders[0], first))
    return _answered(head.id, whole_choices(builders, jobs, line.num_choices))


def _request(is_chat: bool, line: LineRow, job: Job) -> OpenAiRequest:
    """What was asked, as far as its answer hangs on it."""
    fields: dict[str, Any] = {**asdict(job.params), "model": job.model}
    if (wants_ids := line.options.get("return_token_ids")) is not None:
        fields["return_token_ids"] = wants_ids
    if is_chat:
        fields["logprobs"] = job.params.logprobs is not None
        return ChatCompletionRequest(messages=(), **fields)
    prompt = job.prompt if job.prompt is not None else job.prompt_token_ids or ()
    return CompletionRequest(prompt=prompt, echo=bool(line.options.get("echo")), **fields)


def _answered(name: str, body: Any) -> LineResponse:
    return LineResponse(status_code=200, request_id=name, body=body)
