"""A caller of OpenAI's responses who reads their numbered events, is cut off or leaves, and joins
again behind the last number; and who reads all of them once more after the end. Knows no row."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import httpx

from tests.chaos.load.chooser import Customer
from tests.chaos.load.doors import is_refusal, with_header
from tests.chaos.load.journal import Asked, EventHeard, ResponseHeard
from tests.chaos.load.reader import events
from tests.chaos.load.requests import Request
from tests.chaos.load.workload import MARK, Dress, is_completion
from tests.chaos.report.finding import Finding

DOOR = "responder"
PATH = "/v1/responses"
PREFIX = "resp_"
LEAVES = 0.05
"""Share of events after which the caller leaves by itself."""
BACK_S = (0.0, 1.0)
BEFORE_ALL = -1
DELTAS = ("response.output_text.delta", "response.function_call_arguments.delta")
ENDS = ("response.completed", "response.incomplete", "response.failed")
ERROR = "error"
DIVERGED = "stream_diverged"


def is_chat(request: Request) -> bool:
    """Whether a response can be asked for the same: it is no question, and has messages."""
    return is_completion(request) and "messages" in request


def response_form(request: Request) -> dict[str, Any]:
    """The body of a request of ours."""
    body = {name: value for name, value in request.items() if name != "messages"}
    body["input"] = request["messages"]
    if (limit := body.pop("max_tokens", None)) is not None:
        body["max_output_tokens"] = limit
    if (top := body.pop("logprobs", None)) is not None:
        body |= {"top_logprobs": top, "include": ["message.output_text.logprobs"]}
    if "tools" in body:
        body["tools"] = [{"type": "function", **tool["function"]} for tool in body["tools"]]
    if isinstance(choice := body.get("tool_choice"), dict):
        body["tool_choice"] = {"type": "function", **choice["function"]}
    return body


@dataclass(frozen=True, slots=True, kw_only=True)
class Responder(Customer):
    """One thread's."""

    def ask(self, client: httpx.Client) -> None:
        """One response, in the background or not, to its end."""
        fields = {"metadata": MARK, "idempotency_key": f"{self.rng.getrandbits(128):032x}"}
        number = self.workload.draw_number(self.rng, is_chat)
        asked = Asked(id=uuid4(), number=number, door=DOOR, dress=Dress(fields=fields))
        self.journal.ask(asked)
        request = {**self.workload.requests[number], **fields}
        is_background = self.rng.random() < 0.5
        body = {**response_form(request), "stream": True, "background": is_background}
        heard: ResponseHeard | None = None
        while not self.drained.is_set() and (heard is None or heard.document is None):
            try:
                if heard is None:
                    heard = self._begin(client, asked, body)
                else:
                    self._join(client, heard)
            except httpx.HTTPError as error:
                if is_refusal(error):
                    return self._complain_of(asked, "refused", f"a response: {error}")
            self.drained.wait(self.rng.uniform(*BACK_S))
        if heard is not None and heard.document is not None:
            self._read_again(client, heard)
        return None

    def _begin(
        self, client: httpx.Client, asked: Asked, body: Mapping[str, Any]
    ) -> ResponseHeard | None:
        """Asks. None: nothing was heard; the same request again finds the same response."""
        document, headers = with_header(body)
        asked.num_sends += 1
        heard: ResponseHeard | None = None
        with client.stream("POST", PATH, json=document, headers=headers) as answer:
            if answer.status_code == httpx.codes.CONFLICT:
                answer.read()
                self._complain_of(asked, "conflicts", f"an equal response: {answer.text[:300]}")
            answer.raise_for_status()
            try:
                for event in events(answer.iter_lines()):
                    if heard is None and "response" in event.document:
                        job_id = UUID(event.document["response"]["id"].removeprefix(PREFIX))
                        asked.promised = True
                        self.journal.known(asked, job_id)
                        heard = ResponseHeard(job_id=job_id, num_joins=1)
                        self.journal.hear(heard)
                    if heard is None or self._is_enough(heard, event.document):
                        break
            except httpx.HTTPError:
                pass
        return heard

    def _join(self, client: httpx.Client, heard: ResponseHeard) -> None:
        heard.num_joins += 1
        last = heard.events[-1].number if heard.events else BEFORE_ALL
        query = {"stream": "true"} if last == BEFORE_ALL else _behind(last)
        route = f"{PATH}/{PREFIX}{heard.job_id}"
        with client.stream("GET", route, params=query) as answer:
            answer.raise_for_status()
            for event in events(answer.iter_lines()):
                if self._is_enough(heard, event.document):
                    return

    def _is_enough(self, heard: ResponseHeard, document: Mapping[str, Any]) -> bool:
        """Notes one event. Whether the caller has all, or leaves."""
        if document["type"] == ERROR:
            heard.is_diverged |= document.get("code") == DIVERGED
            return True
        heard.events.append(_heard(document))
        self.journal.streamed()
        if document["type"] in ENDS:
            heard.document = document["response"]
            return True
        return self.rng.random() < LEAVES

    def _read_again(self, client: httpx.Client, heard: ResponseHeard) -> None:
        """All from the beginning, without a break."""
        route = f"{PATH}/{PREFIX}{heard.job_id}"
        while not self.drained.wait(self.rng.uniform(*BACK_S)):
            again: list[EventHeard] = []
            try:
                with client.stream("GET", route, params={"stream": "true"}) as answer:
                    answer.raise_for_status()
                    for event in events(answer.iter_lines()):
                        if event.document["type"] == ERROR:
                            break
                        again.append(_heard(event.document))
                        if event.document["type"] in ENDS:
                            heard.again = again
                            return
            except httpx.HTTPError as error:
                if is_refusal(error):
                    self.complain("refused", f"{PREFIX}{heard.job_id} once more: {error}")
                    return

    def _complain_of(self, asked: Asked, count: str, what: str) -> None:
        self.journal.complain(Finding(invariant="I11", count=count, what=what, job_id=asked.id))


def _behind(number: int) -> dict[str, str]:
    return {"stream": "true", "starting_after": str(number)}


def _heard(document: Mapping[str, Any]) -> EventHeard:
    kind = document["type"]
    return EventHeard(
        number=document["sequence_number"],
        kind=kind,
        text=document["delta"] if kind in DELTAS else "",
        digest=zlib.crc32(repr(document).encode()),
    )
