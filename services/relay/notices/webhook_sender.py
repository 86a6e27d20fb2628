"""Sends what webhook endpoints are to hear. Owns when an attempt is made and what follows it; knows
no HTTP.

Relays share the work through Postgres. What one that dies was sending is sent again, under the
same id, once its lease is over. Endpoints are apart from each other: each has few attempts at a
time, one as long as it fails.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from uuid import UUID

import structlog

from services.relay.loop import MIN_PAUSE_S, Loop, LoopContext
from services.relay.notices.webhook_client import WebhookAnswer, WebhookClient
from services.relay.settings import RelaySettings
from shardline_server.store import webhook_attempts
from shardline_server.store.webhook_attempts import AttemptOutcome, WebhookAttempt

log = structlog.get_logger(__name__)

MAX_IN_FLIGHT = 128
"""Attempts of one relay: each has a connection, and a thread while its host is looked up."""

PER_ENDPOINT = 4
"""Of one relay. One endpoint that hangs takes a thirtieth of the room, and after its first failure
one place."""

FIRST_PAUSE_POLLS = 5
PAUSE_GROWTH = 4.0
MAX_PAUSE_POLLS = 6 * 3_600
JITTER = 0.25
"""Pauses are 5 s, 20 s, 80 s, … 6 h (in polls), give or take a quarter, so that those who failed
together do not come back together."""

GONE = 410
LEASES = 3
"""Beyond the time of an attempt, for its look-up and its record."""

STOP_S = 5.0
"""How long attempts under way may take while the relay stops."""

DAY_S = 86_400.0


class WebhookSender(Loop):
    """One event loop, in this thread. A turn lasts until Postgres is away, or the relay stops."""

    def __init__(self, context: LoopContext, settings: RelaySettings) -> None:
        super().__init__("webhooks", context.metrics.errors)
        self._database = context.database
        self._metrics = context.metrics
        self._settings = settings
        self._poll_s = context.times.poll_s
        self._lease_s = settings.webhook_timeout_s + LEASES * context.times.lease_s
        self._ended: list[AttemptOutcome] = []
        """Not yet recorded; at most MAX_IN_FLIGHT."""
        self._random = random.Random()  # noqa: S311 (spreads pauses)

    def turn(self) -> float:
        """Send until stopped."""
        asyncio.run(self._send_all())
        return 0.0

    async def _send_all(self) -> None:
        client: WebhookClient | None = None
        sending: dict[asyncio.Task[None], WebhookAttempt] = {}
        try:
            while not self._stopped.is_set():
                busy = Counter(attempt.endpoint_id for attempt in sending.values())
                for attempt in await asyncio.to_thread(self._exchange, busy):
                    # Not before: certificates take memory, and most relays have no webhooks.
                    client = client or self._client()
                    task = asyncio.create_task(self._send(client, attempt), name="webhook")
                    sending[task] = attempt
                    task.add_done_callback(sending.pop)
                await asyncio.to_thread(self._woken.wait, self._poll_s)
                # What arrives meanwhile is one batch.
                await asyncio.to_thread(self._stopped.wait, MIN_PAUSE_S)
                self._woken.clear()
        finally:
            if sending:
                await asyncio.wait(sending, timeout=STOP_S)
            if client is not None:
                await client.close()
        await asyncio.to_thread(self._record)

    def _client(self) -> WebhookClient:
        return WebhookClient(
            self._settings.webhook_reach,
            timeout_s=self._settings.webhook_timeout_s,
            max_lookups=MAX_IN_FLIGHT,
        )

    def _exchange(self, busy: Counter[UUID]) -> Sequence[WebhookAttempt]:
        """Records what has ended, and claims what is due."""
        self._record()
        with self._database.begin() as connection:
            return webhook_attempts.claim(
                connection,
                busy=busy,
                per_endpoint=PER_ENDPOINT,
                max_rows=MAX_IN_FLIGHT - busy.total(),
                lease_s=self._lease_s,
            )

    def _record(self) -> None:
        outcomes = self._ended[:]
        if not outcomes:
            return
        with self._database.begin() as connection:
            disabled = webhook_attempts.record(
                connection, outcomes, patience_s=self._settings.webhook_patience_days * DAY_S
            )
        # Later ones were appended meanwhile.
        del self._ended[: len(outcomes)]
        for one in outcomes:
            self._metrics.webhooks.labels(outcome=one.state).inc()
        for endpoint in disabled:
            log.warning("webhook endpoint disabled", endpoint=str(endpoint.id), why=endpoint.reason)

    async def _send(self, client: WebhookClient, attempt: WebhookAttempt) -> None:
        """One attempt, which fails alone."""
        try:
            answer = await client.send(attempt)
        except Exception as error:
            log.exception("a webhook cannot be sent", delivery=str(attempt.id))
            answer = WebhookAnswer(error=f"it cannot be sent: {type(error).__name__}")
        self._ended.append(self._outcome(attempt, answer))
        self._woken.set()

    def _outcome(self, attempt: WebhookAttempt, answer: WebhookAnswer) -> AttemptOutcome:
        is_over = attempt.is_test or attempt.attempt >= self._settings.webhook_max_attempts
        return AttemptOutcome(
            attempt=attempt,
            state="delivered" if answer.is_success else "dead" if is_over else "pending",
            status_code=answer.status_code,
            error=answer.error,
            pause_s=self._pause_s(attempt.attempt, answer.retry_after_s or 0.0),
            is_gone=answer.status_code == GONE,
        )

    def _pause_s(self, num_attempts: int, at_least_s: float) -> float:
        polls = min(FIRST_PAUSE_POLLS * PAUSE_GROWTH ** (num_attempts - 1), MAX_PAUSE_POLLS)
        spread = self._random.uniform(1 - JITTER, 1 + JITTER)
        return max(polls * self._poll_s * spread, at_least_s)
