"""Turns a body into a committed row: read, parse, tokenize, insert. One path for all three doors
that take jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar
from uuid import UUID

import msgspec
from fastapi import Request
from opentelemetry.trace import SpanKind

from services.gateway.context import Gateway
from services.gateway.errors import Forbidden, NotJson
from services.gateway.guard import Caller
from services.gateway.http.json_body import Document, check_fields, decoded_bytes, read_object
from services.gateway.openai.bodies import DEFAULT_COMPLETION_TOKENS, CompletionRequest
from shardline.base import genai
from shardline.base.clock import monotonic_s
from shardline.base.errors import Invalid
from shardline.base.failpoints import Point, failpoint
from shardline.base.trace_context import is_traceparent
from shardline.base.tracing import JobTrace, TracedPhase, Tracer
from shardline.contract.ids import new_id
from shardline.contract.job import JobRequest
from shardline.store.inserts import encode_request
from shardline.tokenize import PreparedPrompt, RegisteredModel

RequestT_co = TypeVar("RequestT_co", bound=JobRequest, covariant=True)
Parse = Callable[[Document], RequestT_co]

JSON = "application/json"
LARGE_BYTES = 8 << 10
"""Bodies of at least this size are parsed and tokenized on a thread, off the event loop: at 0.35 s
for each MB smaller ones hold others up for 3 ms at most, about what a turn of the loop costs with
many streams."""


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
    """Store a job of the caller's tenant. Raises Invalid, Forbidden, Conflict, Overloaded,
    Unavailable; then either nothing was stored or a repeat with the same id is safe."""
    began_s = monotonic_s()
    _check_is_json(request)
    with gateway.admission.reading() as room:
        body = await gateway.admission.read(request, room)
        await _run_off_loop_if_large(len(body), check_fields, body)
        room.add_decoded(await _run_off_loop_if_large(len(body), decoded_bytes, body))
        job = await _run_off_loop_if_large(len(body), _parse, body, request, caller, parse)
        is_named = job.id is not None or job.idempotency_key is not None
        job = msgspec.structs.replace(job, id=job.id or new_id())
        model = await gateway.catalog.get(job.address)
        job = msgspec.structs.replace(job, model=model.name, adapter=model.adapter)
        prepared = await _run_off_loop_if_large(len(body), _prepare, model, job)
        tokenized = prepared.prompt_ids, prepared.max_tokens
        encoded = await _run_off_loop_if_large(len(body), encode_request, job, tokenized)
        stored = await gateway.insert_batcher.insert(job.model, encoded)
        failpoint(Point.GATEWAY_INSERTED)
    if stored.is_new:
        _trace(gateway.tracer, job, began_s)
    return AcceptedJob(
        job_id=stored.job_id,
        is_new=stored.is_new,
        is_repeatable=is_named,
        request=job,
        prepared=prepared,
        model=model,
    )


def _trace(tracer: Tracer, job: JobRequest, began_s: float) -> None:
    """The door's span in the job's trace. A repeat of a request has none: the job's row knows its
    first caller only."""
    if tracer.is_on and job.id is not None:
        about = {genai.JOB_ID: str(job.id), genai.REQUEST_MODEL: job.model}
        phase = TracedPhase(
            name="accept",
            began_s=began_s,
            ended_s=monotonic_s(),
            attributes=about,
            kind=SpanKind.SERVER,
        )
        tracer.phase(JobTrace.of(job.id, job.traceparent), phase)


def _check_is_json(request: Request) -> None:
    """Refuse a body that any web page could make its reader's browser send."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != JSON:
        raise NotJson("content-type", f"{kind[:64]!r} is not {JSON}", f"Send Content-Type: {JSON}")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise NotJson(
            "content-encoding", f"{encoding[:64]!r} is not supported", "Send the body unpacked"
        )


def _parse(body: bytes, request: Request, caller: Caller, parse: Parse[RequestT_co]) -> RequestT_co:
    document = read_object(body)
    _take_tenant(document, caller)
    _take_header(document, "idempotency_key", request.headers.get("idempotency-key"))
    try:
        job = parse(document)
    except RecursionError as error:
        raise Invalid("body", "it is nested too deep", "Nest less") from error
    header = request.headers.get("traceparent")
    if job.traceparent is None and is_traceparent(header):
        job = msgspec.structs.replace(job, traceparent=header)
    return job


def _prepare(model: RegisteredModel, job: JobRequest) -> PreparedPrompt:
    prepared = model.tokens.prepare(prompt=job.prompt, messages=job.messages, params=job.params())
    if not isinstance(job, CompletionRequest) or job.length is not None:
        return prepared
    max_tokens = min(prepared.max_tokens, max(DEFAULT_COMPLETION_TOKENS, job.min_tokens))
    return replace(prepared, max_tokens=max_tokens)


def _take_tenant(document: Document, caller: Caller) -> None:
    """Set the key's tenant, and refuse any other. A tenant that is not text is refused with the
    other fields."""
    named = document.get("tenant")
    if isinstance(named, str) and named != caller.tenant:
        raise Forbidden("tenant: it is not the one of your API key. Leave it out", field="tenant")
    if named is None:
        document["tenant"] = caller.tenant


def _take_header(document: Document, name: str, value: str | None) -> None:
    if value is not None and document.setdefault(name, value) != value:
        raise Invalid(name, "it differs from the Idempotency-Key header", "Send one of the two")


async def _run_off_loop_if_large(num_bytes: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """Run short work at once, and long work on a thread, so that other requests proceed."""
    return (
        await asyncio.to_thread(work, *arguments) if num_bytes >= LARGE_BYTES else work(*arguments)
    )
