"""Requests of lines as jobs, by the code of the routes that they name. Knows no row.

A line's request has no id and no idempotency key: the batch and the line determine its job's id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any
from uuid import UUID

import msgspec
import structlog
from msgspec.structs import replace as replace_fields

from services.gateway.context import Gateway
from services.gateway.decisions.answers import encoded_questions
from services.gateway.decisions.requests import decision_request, question_jobs
from services.gateway.encoders.answers import encoded_texts
from services.gateway.encoders.bodies import BASE64, EmbeddingRequest
from services.gateway.encoders.requests import TextOfRequest, embedded_texts, encoder_jobs
from services.gateway.field_names import renaming
from services.gateway.grammar_turns import has_grammar
from services.gateway.http.json_body import Document, check_fields, decoded_bytes, read_object
from services.gateway.openai.bodies import OpenAiRequest
from services.gateway.openai.choice_requests import chat_choices, completion_choices
from services.gateway.openai.service_tier import tier_used
from services.gateway.responses.creation import encode, with_conversation
from services.gateway.responses.requests import ResponseRequest, field_names, response_request
from services.gateway.submit import prepare_all, take_tenant
from shardline.base.errors import Invalid, Overload, ShardlineError, Unavailable
from shardline.contract.batches.batch import line_id
from shardline.contract.encoders.encoder import EncoderTask
from shardline.contract.job import INTERACTIVE, JobRequest
from shardline.contract.request_parsing import parse_fields
from shardline.store.inserts import EncodedRequest, encode_choices
from shardline_server.tokenize import RegisteredModel
from shardline_server.tokenize.encoders.encoder_texts import check_task

log = structlog.get_logger(__name__)

CHATS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
DECISIONS = "/v1/decisions"
EMBEDDINGS = "/v1/embeddings"

PRIORITY = 8
"""Of a line that names none: behind all that did not come in a batch."""

OWN: Mapping[str, str] = MappingProxyType(
    {
        "id": "a line's job has an id that follows from its batch",
        "idempotency_key": "a line is one job however often it is sent",
        "stream": "a line is answered whole",
    }
)
"""Fields that a line has not, and why."""

SHOWN = ("return_token_ids", "echo")
"""Fields of completions, except the tier, that their answers show and their jobs lack."""

FAILED = "the gateway failed on it: see its log"
"""Of a line that met a bug. It asked no server, so it would again, and hold up those behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineRequest:
    """What a line asks for. `num_choices` are those of each prompt."""

    jobs: tuple[JobRequest, ...]
    texts: tuple[TextOfRequest, ...] = ()
    """Of an encoder, one for each job."""
    num_choices: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinePlace:
    """The batch of a line, its tenant, and the seconds that are left."""

    batch_id: UUID
    endpoint: str
    tenant: str
    left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedLine:
    """A line's request as the statements take it."""

    model: str
    request: EncodedRequest
    num_choices: int
    options: Mapping[str, Any]


Outcome = EncodedLine | ShardlineError


def _completion(parse: Callable[[Document], tuple[OpenAiRequest, ...]], fields: Document) -> Any:
    jobs = parse(fields)
    first = jobs[0]
    shown: dict[str, Any] = {name: getattr(first, name, None) for name in SHOWN}
    if first.service_tier is not None:
        shown["service_tier"] = tier_used(first.service_tier)
    options = {name: value for name, value in shown.items() if value}
    return LineRequest(jobs=jobs, num_choices=first.n, options=options)


def _embedding(fields: Document) -> LineRequest:
    asked = parse_fields(fields, EmbeddingRequest)
    pairs = list(encoder_jobs(asked, embedded_texts(asked)))
    options = {} if asked.encoding_format != BASE64 else {"encoding_format": BASE64}
    texts = tuple(text for text, _ in pairs)
    return LineRequest(jobs=tuple(job for _, job in pairs), texts=texts, options=options)


PARSERS: Mapping[str, Callable[[Document], LineRequest]] = MappingProxyType(
    {
        CHATS: lambda fields: _completion(chat_choices, fields),
        COMPLETIONS: lambda fields: _completion(completion_choices, fields),
        RESPONSES: lambda fields: LineRequest(jobs=(response_request(fields),)),
        DECISIONS: lambda fields: LineRequest(jobs=tuple(question_jobs(decision_request(fields)))),
        EMBEDDINGS: _embedding,
    }
)
"""By the routes that a batch may be of."""


async def encoded_lines(
    gateway: Gateway, place: LinePlace, bodies: Sequence[tuple[int, bytes]]
) -> list[Outcome]:
    """Returns the encoded requests of numbered lines, or their errors. Raises errors that no line
    has caused: Overload, Unavailable."""
    parsed = await asyncio.to_thread(_parse_all, gateway, place, bodies)
    models = await _models(gateway, parsed)
    found: list[Outcome | None] = await asyncio.to_thread(_encode_simple, parsed, models)
    outcomes: list[Outcome] = []
    for one, outcome in zip(parsed, found, strict=True):
        if isinstance(one, LineRequest) and outcome is None:
            outcomes.append(await _encode_slowly(gateway, one, models))
        elif outcome is not None:
            outcomes.append(outcome)
    return outcomes


def _parse_all(
    gateway: Gateway, place: LinePlace, bodies: Sequence[tuple[int, bytes]]
) -> list[LineRequest | ShardlineError]:
    found: list[LineRequest | ShardlineError] = []
    for line, body in bodies:
        try:
            check_fields(body)
            gateway.admission.check_decoded(decoded_bytes(body))
            found.append(_parse(place, line, body))
        except RecursionError:
            found.append(Invalid("body", "it is nested too deep", "Nest less"))
        except ShardlineError as error:
            found.append(error)
        except Exception:
            log.exception("a line failed")
            found.append(ShardlineError(FAILED))
    return found


def _parse(place: LinePlace, line: int, body: bytes) -> LineRequest:
    document = read_object(body)
    take_tenant(document, place.tenant)
    for name, why in OWN.items():
        if document.get(name) not in (None, False):
            raise Invalid(name, why, "Leave it out")
    if document.get("priority") is None:
        document["priority"] = PRIORITY
    request = PARSERS[place.endpoint](document)
    if request.jobs[0].priority in INTERACTIVE:
        problem = f"up to {INTERACTIVE[-1]} are for requests that somebody waits for"
        raise Invalid("priority", problem, f"Send {INTERACTIVE[-1] + 1} to 9, or leave it out")
    jobs = tuple(
        replace_fields(
            job,
            id=line_id(place.batch_id, line, choice),
            deadline_s=min(place.left_s, job.deadline_s or place.left_s),
        )
        for choice, job in enumerate(request.jobs)
    )
    return replace(request, jobs=jobs)


async def _models(
    gateway: Gateway, parsed: Sequence[LineRequest | ShardlineError]
) -> dict[str, RegisteredModel | ShardlineError]:
    addresses = {one.jobs[0].address for one in parsed if isinstance(one, LineRequest)}
    found: dict[str, RegisteredModel | ShardlineError] = {}
    for address in addresses:
        try:
            found[address] = await gateway.catalog.get(address)
        except Invalid as error:
            found[address] = error
    return found


def _encode_simple(
    parsed: Sequence[LineRequest | ShardlineError],
    models: Mapping[str, RegisteredModel | ShardlineError],
) -> list[Outcome | None]:
    """Those that need neither a turn nor a row; None for the others."""
    found: list[Outcome | None] = []
    for one in parsed:
        if isinstance(one, ShardlineError):
            found.append(one)
            continue
        first = one.jobs[0]
        model = models[first.address]
        if isinstance(model, ShardlineError):
            found.append(model)
        elif isinstance(first, ResponseRequest) or has_grammar(first.params()):
            found.append(None)
        else:
            found.append(_encode(one, model))
    return found


async def _encode_slowly(
    gateway: Gateway, one: LineRequest, models: Mapping[str, RegisteredModel | ShardlineError]
) -> Outcome:
    """A line with a conversation to read, or a grammar to judge."""
    first = one.jobs[0]
    model = models[first.address]
    assert isinstance(model, RegisteredModel), "a line without a model has its outcome"
    try:
        if isinstance(first, ResponseRequest):
            with renaming(field_names(first.asked)):
                first = await with_conversation(gateway, first)
            one = replace(one, jobs=(first,))
        async with gateway.grammar_turns.take(model, first):
            return await asyncio.to_thread(_encode, one, model)
    except (Overload, Unavailable):
        raise
    except ShardlineError as error:
        return error


def _encode(one: LineRequest, model: RegisteredModel) -> Outcome:
    jobs = tuple(replace_fields(job, model=model.name, adapter=model.adapter) for job in one.jobs)
    first = jobs[0]
    try:
        if one.texts:
            check_task(model.name, model.tokens.encoder, EncoderTask.EMBED)
            request = encoded_texts(model, zip(one.texts, jobs, strict=True))
        elif first.question is not None:
            request = encoded_questions(model, jobs)
        elif isinstance(first, ResponseRequest):
            with renaming(field_names(first.asked)):
                (prepared,) = prepare_all(model, jobs)
                request = encode([first], [(prepared.prompt_ids, prepared.max_tokens)])
        else:
            tokenized = [(each.prompt_ids, each.max_tokens) for each in prepare_all(model, jobs)]
            stored = first.stored if isinstance(first, OpenAiRequest) else None
            request = encode_choices(jobs, tokenized, stored=stored)
    except ShardlineError as error:
        return error
    except Exception:
        log.exception("a line failed", model=model.name)
        return ShardlineError(FAILED)
    # tokenizers panics raise PanicException, which is not an Exception.
    except BaseException:
        log.exception("tokenizer failed", model=model.name)
        return Invalid("body", "the model's tokenizer failed on it", "Look at the gateway's log")
    return EncodedLine(
        model=model.name,
        request=request,
        num_choices=one.num_choices,
        options=msgspec.to_builtins(one.options),
    )
