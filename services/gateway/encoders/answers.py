"""Stores the jobs of a request to an encoder, waits for all of them and answers. Knows no route."""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import msgspec
from fastapi import Request, Response

from services.gateway.context import Gateway
from services.gateway.encoders.bodies import (
    BASE64,
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    EncoderRequest,
    PairScore,
    RankedDocument,
    Ranking,
    RerankDocument,
    RerankRequest,
    ScoreList,
    ScoreRequest,
    TextUsage,
)
from services.gateway.encoders.requests import TextOfRequest, encoder_jobs
from services.gateway.errors import CLIENT_CLOSED_REQUEST, json_response, respond
from services.gateway.field_names import renaming
from services.gateway.groups.group_rows import MAX_PROMPT_TOKENS, encoded_group
from services.gateway.groups.job_group import JobGroup, result_of, wait_for_group
from services.gateway.guard import Caller
from services.gateway.http.json_body import Document
from services.gateway.request_body import request_body
from services.gateway.submit import read_jobs
from shardline.base.clock import wall_clock_s
from shardline.base.errors import Invalid, ShardlineError
from shardline.contract.encoders.encoder import EncoderTask
from shardline.contract.job import JobRequest, Result
from shardline.contract.request_parsing import parse_fields
from shardline.store.inserts import EncodedRequest
from shardline_server.failpoints import Point, failpoint
from shardline_server.tokenize import RegisteredModel
from shardline_server.tokenize.encoders.encoder_texts import check_task

RequestT = TypeVar("RequestT", bound=EncoderRequest)

TEXTS_PER_PLACE = 16
"""A text is one step of one stage: it takes a place among requests for so much less time than a
completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDoor(Generic[RequestT]):
    """One of the routes: its body, what of it are texts, and its answer."""

    name: str
    """Begins the ids of answers."""
    kind: type[RequestT]
    task: EncoderTask
    field: str
    """Of the body: what can be too many texts."""
    texts: Callable[[RequestT], list[TextOfRequest]]
    document: Callable[[AnsweredTexts[RequestT]], msgspec.Struct]

    async def answer(self, gateway: Gateway, request: Request, caller: Caller) -> Response:
        """The answer once the last text is there. Raises what `submit` raises."""
        accepted = await self._store(gateway, request, caller)
        try:
            jobs = await wait_for_group(gateway, request, accepted.group)
            if jobs is None:
                response = Response(status_code=CLIENT_CLOSED_REQUEST)
            else:
                results = [result_of(job) for job in jobs]
                answered = AnsweredTexts(accepted=accepted, results=results)
                response = json_response(await asyncio.to_thread(self.document, answered))
        except ShardlineError as error:
            response = respond(error)
        response.headers["x-request-id"] = accepted.name
        return response

    async def _store(
        self, gateway: Gateway, request: Request, caller: Caller
    ) -> AcceptedTexts[RequestT]:
        """One row for each text, all of them or none: they are choices of one request."""
        async with request_body(gateway, request) as body:
            (asked,) = await read_jobs(body, request, caller, self._parse)
            texts = self.texts(asked)
            num_places = 1 + (len(texts) - 1) // TEXTS_PER_PLACE
            gateway.admission.take_places(request, caller.tenant, num_places, field=self.field)
            model = await gateway.catalog.get(asked.address)
            check_task(model.name, model.tokens.encoder, self.task)
            encoded = await asyncio.to_thread(encoded_texts, model, encoder_jobs(asked, texts))
            body.room.add_decoded(encoded.num_bytes)
            encoded = replace(encoded, key_name=caller.key_name)
            stored = await gateway.insert_batcher.insert(model.name, encoded)
            failpoint(Point.GATEWAY_INSERTED)
        return AcceptedTexts(
            name=f"{self.name}-{stored.job_id}",
            request=asked,
            model=model,
            group=JobGroup.of(stored, asked),
        )

    def _parse(self, document: Document) -> tuple[RequestT]:
        return (parse_fields(document, self.kind),)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedTexts(Generic[RequestT]):
    """Texts with committed jobs, in their order."""

    name: str
    request: RequestT
    model: RegisteredModel
    group: JobGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredTexts(Generic[RequestT]):
    """The same with the results of their jobs."""

    accepted: AcceptedTexts[RequestT]
    results: Sequence[Result]

    @property
    def usage(self) -> TextUsage:
        """Counts the tokens of all texts."""
        return usage_of(self.results)

    @property
    def scores(self) -> list[float]:
        """Returns those of the pairs, in their order."""
        return [one.score if one.score is not None else 0.0 for one in self.results]


def embedding_list(answered: AnsweredTexts[EmbeddingRequest]) -> EmbeddingList:
    """The vectors in the form that was asked for."""
    accepted = answered.accepted
    is_packed = accepted.request.encoding_format == BASE64
    return vector_list(accepted.name, accepted.model.address, answered.results, is_packed=is_packed)


def vector_list(
    name: str, address: str, results: Sequence[Result], *, is_packed: bool
) -> EmbeddingList:
    """The vectors of results in their order, as numbers or in base64."""
    vectors = [one.embedding or () for one in results]
    return EmbeddingList(
        id=name,
        data=tuple(
            Embedding(index=place, embedding=_base64(each) if is_packed else each)
            for place, each in enumerate(vectors)
        ),
        model=address,
        usage=usage_of(results),
    )


def usage_of(results: Sequence[Result]) -> TextUsage:
    """Counts the tokens of all texts."""
    num = sum(one.usage.prompt_tokens for one in results)
    return TextUsage(prompt_tokens=num, total_tokens=num)


def ranking(answered: AnsweredTexts[RerankRequest]) -> Ranking:
    """The documents, the best first; of equal ones the earlier."""
    accepted = answered.accepted
    asked = accepted.request
    order = sorted(enumerate(answered.scores), key=lambda pair: -pair[1])
    texts = [each.text if isinstance(each, RerankDocument) else each for each in asked.documents]
    return Ranking(
        id=accepted.name,
        model=accepted.model.address,
        results=tuple(
            RankedDocument(
                index=place,
                relevance_score=score,
                **({"document": RerankDocument(texts[place])} if asked.return_documents else {}),
            )
            for place, score in order[: asked.top_n]
        ),
        usage=answered.usage,
    )


def score_list(answered: AnsweredTexts[ScoreRequest]) -> ScoreList:
    """The scores in the order of the pairs."""
    accepted = answered.accepted
    return ScoreList(
        id=accepted.name,
        created=int(wall_clock_s()),
        model=accepted.model.address,
        data=tuple(PairScore(index=at, score=each) for at, each in enumerate(answered.scores)),
        usage=answered.usage,
    )


def encoded_texts(
    model: RegisteredModel, jobs: Iterable[tuple[TextOfRequest, JobRequest]]
) -> EncodedRequest:
    """Returns the rows of prepared jobs. Raises Invalid, naming the text."""
    named = ((renaming(text.names), job) for text, job in jobs)
    return encoded_group(model, named, _too_many_tokens)


def _too_many_tokens(_num_texts: int) -> Invalid:
    problem = f"the texts have over {MAX_PROMPT_TOKENS} tokens together"
    return Invalid("request", problem, "Send them in several requests")


def _base64(vector: Sequence[float]) -> str:
    numbers = array("f", vector)
    if array("H", [1]).tobytes() != b"\x01\x00":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
