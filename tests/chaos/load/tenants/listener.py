"""Who listens to webhooks: a server that hears them, fails now and then, and checks each signature;
and the owner of its endpoint. Knows no row but whether deliveries are left."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from uuid import UUID

import httpx
from standardwebhooks import Webhook

from services.standalone.ports import LOOPBACK
from tests.chaos.load.tenants.actor import TenantActor
from tests.chaos.load.tenants.ledger import DeliveryHeard, HeardEndpoint

ROUTE = "/v1/webhook_endpoints"
FAILS_EVERY = 6
"""Of so many deliveries the first one's first attempt is answered 503."""
LOOK_S = 0.5
NUM_PENDING = """
SELECT count(*) FROM webhook_deliveries WHERE endpoint_id = %s AND state = 'pending'
"""


@dataclass(slots=True, kw_only=True)
class WebhookEar:
    """Hears what is posted to it. Several threads ask it at once."""

    path: str = ""
    """Of its endpoint."""
    secret: str = ""
    """Empty: it is not known yet."""
    heard: list[DeliveryHeard] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def hear(self, path: str, headers: Mapping[str, str], body: bytes) -> int:
        """Keeps what is for its endpoint, and returns the status of the answer."""
        if not self.secret:
            return 503
        if path != self.path:
            return 410
        delivery = headers.get("webhook-id", "")
        event_type, job_id = _read(body)
        with self.lock:
            fails = delivery not in self.seen and len(self.seen) % FAILS_EVERY == 0
            self.seen.add(delivery)
            status = 503 if fails else 200
            self.heard.append(
                DeliveryHeard(
                    delivery=delivery,
                    event_type=event_type,
                    job_id=job_id,
                    is_signed=self.is_signed(headers, body),
                    status_code=status,
                )
            )
        return status

    def is_signed(self, headers: Mapping[str, str], body: bytes) -> bool:
        """Whether the signature is the secret's. How old it is does not count: faults move a
        relay's clock by hours."""
        try:
            at = datetime.fromtimestamp(int(headers.get("webhook-timestamp", "")), UTC)
            wanted = Webhook(self.secret).sign(headers.get("webhook-id", ""), at, body.decode())
        except (ValueError, OverflowError):
            return False
        return wanted in headers.get("webhook-signature", "").split()


def _read(body: bytes) -> tuple[str, UUID | None]:
    try:
        event = json.loads(body)
        return str(event["type"]), UUID(event["data"]["id"])
    except (ValueError, KeyError, TypeError):
        return "", None


def served(ear: WebhookEar) -> ThreadingHTTPServer:
    """A server on a free port of this machine that asks the ear."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", "0"))
            body = self.rfile.read(length)
            # A relay that died in between has heard no answer, and this one nothing.
            headers = {name.lower(): value for name, value in self.headers.items()}
            status = ear.hear(self.path, headers, body)
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Nothing: a run tells of faults."""

    server = ThreadingHTTPServer((LOOPBACK, 0), Handler)
    server.daemon_threads = True
    return server


@dataclass(slots=True, kw_only=True)
class WebhookListener(TenantActor):
    """Owns one endpoint. It waits until all of its tenant has ended, and no delivery is left."""

    def act(self, http: httpx.Client) -> None:
        """Has an endpoint, and listens until the load is over."""
        ear = WebhookEar(heard=self.ledger.deliveries)
        server = served(ear)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            self._listen(http, ear, server.server_address[1])
        finally:
            server.shutdown()
            server.server_close()

    def _listen(self, http: httpx.Client, ear: WebhookEar, port: int) -> None:
        made: Mapping[str, Any] | None = None
        while not made and not self.drained.is_set():
            # One whose answer was lost has told its secret to nobody: the next has another path.
            ear.path = f"/{self.rng.getrandbits(48):012x}"
            made = self.until_answered(lambda: self._made(http, f"{LOOPBACK}:{port}{ear.path}"))
        now = self.moment()
        if not made or now is None:
            return
        ear.secret = made["signing_secret"]
        endpoint_id = UUID(made["id"].removeprefix("we_"))
        self.ledger.endpoint = HeardEndpoint(id=endpoint_id, secret=ear.secret, acknowledged_at=now)
        self.stopping.wait()
        others = [end for end in self.ledger.ends if end is not self.has_ended]
        for end in others:
            while not end.wait(LOOK_S) and not self.drained.is_set():
                pass
        while (rows := self.rows(NUM_PENDING, endpoint_id)) and rows[0][0]:
            self.drained.wait(LOOK_S)

    def _made(self, http: httpx.Client, place: str) -> Mapping[str, Any]:
        """Empty: the answer was lost."""
        asked = {"url": f"http://{place}", "name": "chaos", "event_types": ["job.*"]}
        try:
            answer = http.post(ROUTE, json=asked)
            answer.raise_for_status()
        except httpx.HTTPStatusError:
            raise
        except httpx.HTTPError:
            return {}
        return dict(answer.json())
