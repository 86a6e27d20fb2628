"""Turns a body into committed rows: read, parse, tokenize, insert. One path for all doors that take
jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar
from uuid import UUID

from fastapi import Request
from msgspec.structs import replace as replace_fields
from opentelemetry.trace import SpanKind

from services.gateway.context import Gateway
from services.gateway.errors import Forbidden
from services.gateway.field_names import renaming
from services.gateway.grammar_turns import has_grammar
from services.gateway.guard import Caller
from services.gateway.http.json_body import Document, read_object
from services.gateway.openai.bodies import (
    DEFAULT_COMPLETION_TOKENS,
    CompletionRequest,
    OpenAiRequest,
)
from services.gateway.request_body import RequestBody, request_body
from shardline.base.clock import monotonic_s
from shardline.base.errors import Invalid
from shardline.base.trace_context import is_traceparent
from shardline.contract.ids import new_id
from shardline.contract.job import ALL_THAT_FIT, JobRequest
from shardline.store.inserts import EncodedRequest, Tokenized, encode_choices
from shardline_server import genai
from shardline_server.failpoints import Point, failpoint
from shardline_server.tokenize import PreparedPrompt, RegisteredModel
from shardline_server.tokenize.encoders.encoder_texts import check_task
from shardline_server.tracing import JobTrace, TracedPhase, Tracer

RequestT_co = TypeVar("RequestT_co", bound=JobRequest, covariant=True)
Parse = Callable[[Document], RequestT_co]
ParseChoices = Callable[[Document], tuple[RequestT_co, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedJob(Generic[RequestT_co]):
    """A job that is committed. `is_new` is True only for the request that inserted it, False for
    its repeats."""

    job_id: UUID
    is_new: bool
    is_repeatable: bool
    """The caller chose its id or key, and can ask for it again."""
    request: RequestT_co
    prepared: PreparedPrompt
    model: RegisteredModel


async def submit(
    gateway: Gateway, request: Request, caller: Caller, parse: Parse[RequestT_co]
) -> AcceptedJob[RequestT_co]:
    """Store a job of the caller's tenant. Raises Invalid, Forbidden, Conflict, Overload,
    Unavailable; then either nothing was stored or a repeat with the same id is safe."""
    async with request_body(gateway, request) as body:
        jobs = await read_jobs(body, request, caller, lambda document: (parse(document),))
        (accepted,) = await store_jobs(gateway, body, jobs, _encode_choices)
    return accepted


async def submit_choices(
    gateway: Gateway, request: Request, caller: Caller, parse: ParseChoices[RequestT_co]
) -> tuple[AcceptedJob[RequestT_co], ...]:
    """Store a request's choices, all of them or none, each as a job: as `submit`."""
    async with request_body(gateway, request) as body:
        jobs = await read_jobs(body, request, caller, parse)
        first = jobs[0]
        field = "n" if isinstance(first, OpenAiRequest) and first.n > 1 else "prompt"
        gateway.admission.take_places(request, caller.tenant, len(jobs), field=field)
        return await store_jobs(gateway, body, jobs, _encode_choices)


async def read_jobs(
    body: RequestBody, request: Request, caller: Caller, parse: ParseChoices[RequestT_co]
) -> tuple[RequestT_co, ...]:
    """Parse a body as jobs of the caller's tenant. Raises Invalid, Forbidden."""
    body.key_name = caller.key_name
    return await body.run(_parse, body.data, request, caller, parse)


async def store_jobs(
    gateway: Gateway,
    body: RequestBody,
    jobs: tuple[RequestT_co, ...],
    encode: Callable[[Sequence[RequestT_co], Sequence[Tokenized]], EncodedRequest],
) -> tuple[AcceptedJob[RequestT_co], ...]:
    """Store jobs of one model, all of them or none. Raises what `submit` raises."""
    is_named = jobs[0].id is not None or jobs[0].idempotency_key is not None
    model = await gateway.catalog.get(jobs[0].address)
    jobs = tuple(
        replace_fields(job, id=job.id or new_id(), model=model.name, adapter=model.adapter)
        for job in jobs
    )
    # A grammar may take a second to judge, and several prompts add up.
    body.is_large |= len(jobs) > 1 or has_grammar(jobs[0].params())
    async with gateway.grammar_turns.take(model, jobs[0]):
        prepared = await body.run(prepare_all, model, jobs)
    encoded = await body.run(encode, jobs, [(one.prompt_ids, one.max_tokens) for one in prepared])
    if len(jobs) > 1:
        body.room.add_decoded(encoded.num_bytes)
    encoded = replace(encoded, key_name=body.key_name)
    stored = await gateway.insert_batcher.insert(model.name, encoded, is_named=is_named)
    failpoint(Point.GATEWAY_INSERTED)
    accepted = tuple(
        AcceptedJob(
            job_id=job_id,
            is_new=stored.is_new,
            is_repeatable=is_named,
            request=job,
            prepared=one,
            model=model,
        )
        for job_id, job, one in zip((stored.job_id, *stored.others), jobs, prepared, strict=True)
    )
    _trace(gateway.tracer, accepted, body.began_s)
    return accepted


def _encode_choices(jobs: Sequence[JobRequest], tokenized: Sequence[Tokenized]) -> EncodedRequest:
    stored = jobs[0].stored if isinstance(jobs[0], OpenAiRequest) else None
    return encode_choices(jobs, tokenized, stored=stored)


def _trace(tracer: Tracer, accepted: Sequence[AcceptedJob[JobRequest]], began_s: float) -> None:
    """The door's span in each job's trace. A repeat of a request has none: the job's row knows its
    first caller only."""
    for one in accepted:
        if not (tracer.is_on and one.is_new):
            continue
        about = {genai.JOB_ID: str(one.job_id), genai.REQUEST_MODEL: one.request.model}
        phase = TracedPhase(
            name="accept",
            began_s=began_s,
            ended_s=monotonic_s(),
            attributes=about,
            kind=SpanKind.SERVER,
        )
        tracer.phase(JobTrace.of(one.job_id, one.request.traceparent), phase)


def _parse(
    body: bytes, request: Request, caller: Caller, parse: ParseChoices[RequestT_co]
) -> tuple[RequestT_co, ...]:
    document = read_object(body)
    take_tenant(document, caller.tenant)
    _take_header(document, "idempotency_key", request.headers.get("idempotency-key"))
    try:
        jobs = parse(document)
    except RecursionError as error:
        raise Invalid("body", "it is nested too deep", "Nest less") from error
    header = request.headers.get("traceparent")
    if jobs[0].traceparent is None and is_traceparent(header):
        return tuple(replace_fields(job, traceparent=header) for job in jobs)
    return jobs


def prepare_all(model: RegisteredModel, jobs: Sequence[JobRequest]) -> tuple[PreparedPrompt, ...]:
    """Prepares each prompt once: its choices stand side by side."""
    found: list[PreparedPrompt] = []
    for before, job in zip((None, *jobs), jobs, strict=False):
        is_same = before is not None and before.prompt is job.prompt
        found.append(found[-1] if is_same else _prepared(model, job))
    return tuple(found)


def _prepared(model: RegisteredModel, job: JobRequest) -> PreparedPrompt:
    """Prepares a prompt. What is wrong with it has the name that the request gave it."""
    with renaming(job.field_names if isinstance(job, OpenAiRequest) else {}):
        return _prepare(model, job)


def _prepare(model: RegisteredModel, job: JobRequest) -> PreparedPrompt:
    if isinstance(job, OpenAiRequest):
        check_task(model.name, model.tokens.encoder, None)
    params = job.params()
    most: int | None = None
    if isinstance(job, CompletionRequest) and job.length is None:
        most = max(DEFAULT_COMPLETION_TOKENS, job.min_tokens)
        if job.truncate_prompt_tokens == ALL_THAT_FIT:
            # What fits leaves room for the usual length.
            params = replace_fields(params, max_tokens=most)
    elif isinstance(job, OpenAiRequest) and job.takes_what_fits:
        most = params.max_tokens
        params = replace_fields(params, max_tokens=None)
    prepared = model.tokens.prepare(prompt=job.prompt, messages=job.messages, params=params)
    if most is None:
        return prepared
    return replace(prepared, max_tokens=min(prepared.max_tokens, most))


def take_tenant(document: Document, tenant: str) -> None:
    """Set the key's tenant, and refuse any other. A tenant that is not text is refused with the
    other fields."""
    named = document.get("tenant")
    if isinstance(named, str) and named != tenant:
        raise Forbidden("tenant: it is not the one of your API key. Leave it out", field="tenant")
    if named is None:
        document["tenant"] = tenant


def _take_header(document: Document, name: str, value: str | None) -> None:
    if value is None:
        return
    if document.get(name) is None:
        document[name] = value
    elif document[name] != value:
        raise Invalid(name, "it differs from the Idempotency-Key header", "Send one of the two")
