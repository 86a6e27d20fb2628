"""Sends one webhook: resolves, judges the addresses, connects to what was judged, signs, reads a
status. Knows no database.

A name is resolved once for each attempt, and the connection goes to the addresses of that answer:
none can change in between. Redirects are not followed, connections not kept, for another host may
share an address.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

import httpx
from standardwebhooks import Webhook

from shardline import __version__
from shardline.contract.webhooks.event import DELIVERY, encode_event
from shardline.contract.webhooks.targets import SCHEMES, SETTING, WebhookReach
from shardline_server.store.webhook_attempts import WebhookAttempt

MAX_ADDRESSES = 4
"""Of a name that are tried, one after the other, within the time of the attempt."""

MAX_READ_BYTES = 16 << 10
"""Of an answer, so that a server which writes one does not see its connection reset."""

MAX_WAIT_S = 3_600.0
"""Of a `Retry-After` that is heeded."""

NOT_PUBLIC = f"its host is no public address, and {SETTING} does not allow it"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookAnswer:
    """What came back: a status, or the reason why none did."""

    status_code: int | None = None
    error: str | None = None
    retry_after_s: float | None = None

    @property
    def is_success(self) -> bool:
        """Whether the endpoint has taken the webhook."""
        return self.status_code is not None and 200 <= self.status_code < 300


class Refusal(Exception):
    """An attempt that is not made: where it would go is not allowed, or is nowhere."""


class WebhookClient:
    """Made and used in one event loop. `max_lookups` names are resolved at a time, on threads: a
    resolver that hangs holds up its own endpoint only."""

    def __init__(self, reach: WebhookReach, *, timeout_s: float, max_lookups: int) -> None:
        self._reach = reach
        self._timeout_s = timeout_s
        self._resolving = ThreadPoolExecutor(max_lookups, thread_name_prefix="webhook-lookup")
        # No proxy and no netrc of the environment: the address that was judged is connected to.
        self._http = httpx.AsyncClient(
            verify=httpx.create_ssl_context(trust_env=True),
            trust_env=False,
            follow_redirects=False,
            timeout=timeout_s,
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    async def close(self) -> None:
        """Close what is open. Look-ups that hang are left behind."""
        self._resolving.shutdown(wait=False, cancel_futures=True)
        await self._http.aclose()

    async def send(self, attempt: WebhookAttempt) -> WebhookAnswer:
        """Returns what came of it; raises nothing for what the endpoint does."""
        try:
            url = httpx.URL(attempt.url)
            addresses = await self._addresses(url)
            async with asyncio.timeout(self._timeout_s):
                return await self._first_answer(attempt, url, addresses)
        except TimeoutError:
            return WebhookAnswer(error=f"it did not answer within {self._timeout_s:g} s")
        except Refusal as refusal:
            return WebhookAnswer(error=str(refusal))
        except httpx.InvalidURL:
            return WebhookAnswer(error="its URL is none")
        except httpx.HTTPError as error:
            return WebhookAnswer(error=_told(error))

    async def _addresses(self, url: httpx.URL) -> Sequence[str]:
        """Raises Refusal where one of them is not allowed: a name that has others too is played
        with."""
        host = url.raw_host.decode("ascii")
        if url.scheme not in SCHEMES or not host or "%" in host or url.userinfo:
            raise Refusal("its URL is no webhook's")
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._resolving, _look_up, host)
        except (OSError, UnicodeError):
            raise Refusal("its host has no address") from None
        if not found or not all(map(self._reach.allows, found)):
            raise Refusal(NOT_PUBLIC if found else "its host has no address")
        return found[:MAX_ADDRESSES]

    async def _first_answer(
        self, attempt: WebhookAttempt, url: httpx.URL, addresses: Sequence[str]
    ) -> WebhookAnswer:
        """Returns that of the first address that takes a connection."""
        for address in addresses[:-1]:
            with suppress(httpx.ConnectError):
                return await self._ask(attempt, url, address)
        return await self._ask(attempt, url, addresses[-1])

    async def _ask(self, attempt: WebhookAttempt, url: httpx.URL, address: str) -> WebhookAnswer:
        body = encode_event(attempt.event_type, attempt.object_id, attempt.created_at)
        headers = {
            **signed_headers(attempt, body, datetime.now(UTC)),
            "Host": url.netloc.decode("ascii"),
            "Content-Type": "application/json",
            "Accept": "*/*",
            "Accept-Encoding": "identity",
            "User-Agent": f"Shardline/{__version__}",
        }
        request = self._http.build_request(
            "POST",
            url.copy_with(host=address),
            content=body,
            headers=headers,
            extensions={"sni_hostname": url.raw_host.decode("ascii")},
        )
        reply = await self._http.send(request, stream=True)
        try:
            num_bytes = 0
            async for piece in reply.aiter_raw():
                num_bytes += len(piece)
                if num_bytes > MAX_READ_BYTES:
                    break
        finally:
            await reply.aclose()
        return _answer(reply)


def signed_headers(attempt: WebhookAttempt, body: bytes, now: datetime) -> Mapping[str, str]:
    """Returns Standard Webhooks' headers, with a signature by each secret that is valid. The id is
    that of the delivery, in each attempt; the time is that of the attempt."""
    name = f"{DELIVERY}{attempt.id}"
    text = body.decode()
    signatures = [Webhook(secret).sign(name, now, text) for secret in attempt.secrets]
    return {
        "webhook-id": name,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": " ".join(signatures),
    }


def _look_up(host: str) -> list[str]:
    """Addresses in the resolver's order, each once; with a zone, if they have one."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _answer(reply: httpx.Response) -> WebhookAnswer:
    status = reply.status_code
    wait = reply.headers.get("retry-after", "")
    # Dates are rare here, and a wrong clock would make them hours.
    retry_after_s = float(wait) if wait.isascii() and wait.isdecimal() else None
    if 200 <= status < 300:
        return WebhookAnswer(status_code=status)
    error = "redirects are not followed" if 300 <= status < 400 else None
    return WebhookAnswer(
        status_code=status,
        error=error or f"it answered {status}",
        retry_after_s=None if retry_after_s is None else min(retry_after_s, MAX_WAIT_S),
    )


def _told(error: httpx.HTTPError) -> str:
    """Without addresses, which may be of a network that the endpoint's owner does not see."""
    if isinstance(error, httpx.ConnectError):
        is_tls = "certificate" in str(error).lower() or "ssl" in str(error).lower()
        return "its certificate was refused" if is_tls else "it takes no connection"
    if isinstance(error, httpx.TimeoutException):
        return "it did not answer in time"
    return "its answer is not HTTP, or broke off"
