"""The events of a job, for a reader who may leave and join again. Knows no route and checks no
permission."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from uuid import UUID

import structlog
from msgspec import UNSET

from services.gateway.bodies import JobDelta, JobDocument, StreamInterruption
from services.gateway.context import Gateway
from services.gateway.errors import Stopping, body_of
from services.gateway.http.sse import KEEP_ALIVE, event
from services.gateway.openai.completion_response import merged
from services.gateway.patient_reading import read_patiently
from shardline.base.errors import Diverged, ShardlineError, UnknownModel
from shardline.client.job_stream import TextRule
from shardline.contract.job import Job
from shardline.streams import Place

log = structlog.get_logger(__name__)

RETRY = b"retry: 1000\n\n"


async def job_events(gateway: Gateway, job: Job, after: Place) -> AsyncGenerator[bytes, None]:
    """Events `delta` for tokens, then one event: `end` with the whole job, or `interrupted` with
    the reason.

    After `interrupted` a reader joins again, as EventSource does by itself: every event's id is the
    position so far. After Diverged it is the beginning, because the tokens that were sent are no
    longer part of the job.
    """
    keep_alive_s = gateway.settings.http_keep_alive_s
    sent_s = time.monotonic()
    place = after
    yield RETRY
    try:
        text_rule = await _text_rule(gateway, job)
        follow = gateway.client.reader.follow
        async for deltas in follow(job.id, after=after, text_rule=text_rule, tick_s=keep_alive_s):
            now_s = time.monotonic()
            if gateway.stopping.is_set() and not any(delta.state for delta in deltas):
                raise Stopping(job.id)
            if deltas:
                sent_s = now_s
                delta = merged(deltas)
                then = place.then(delta.ids)
                if delta.ids or delta.text:
                    logprobs = UNSET if delta.logprobs is None else delta.logprobs
                    new = JobDelta(
                        start=delta.start, token_ids=delta.ids, text=delta.text, logprobs=logprobs
                    )
                    yield event(new, name="delta", event_id=str(then))
                # Only now: what could not be sent is asked for again.
                place = then
                if delta.state is not None:
                    async for chunk in _end(gateway, job.id, place):
                        yield chunk
            elif now_s - sent_s >= keep_alive_s:
                sent_s = now_s
                yield KEEP_ALIVE
    except ShardlineError as error:
        log.warning("event stream interrupted", job_id=str(job.id), error=str(error))
        place = Place() if isinstance(error, Diverged) else place
        why = StreamInterruption(error=body_of(error).error, after=str(place))
        yield event(why, name="interrupted", event_id=why.after)


async def _end(gateway: Gateway, job_id: UUID, place: Place) -> AsyncIterator[bytes]:
    """The event `end` with the whole job."""
    path = f"/v1/jobs/{job_id}"
    failure = f"The job has ended; join again: GET {path}/events?after={place}, or GET {path}"
    read = partial(gateway.client.get, job_id)
    async for job in read_patiently(gateway.settings, read, failure=failure):
        if job is None:
            yield KEEP_ALIVE
        else:
            yield event(JobDocument.of(job), name="end", event_id=str(place))


async def _text_rule(gateway: Gateway, job: Job) -> TextRule | None:
    try:
        return (await gateway.catalog.get(job.model)).tokens.text_rule
    except UnknownModel:
        return None
