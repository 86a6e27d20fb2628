"""Callers of OpenAI's routes who stream under a key, hang up in the middle and call again: they get
the same job, which nobody has cancelled. Knows no row."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import httpx

from tests.chaos.load.doors import gateway_client, is_refusal, with_header
from tests.chaos.load.journal import Asked, Journal, Watched
from tests.chaos.load.requests import Request
from tests.chaos.load.workload import MARK, Dress, Workload, is_completion
from tests.chaos.report.finding import Finding

DOOR = "caller"
ALL_THAT_FIT = -1
SILENCE_S = 15.0
LEAVES = 0.1
"""Share of a stream's events after which the caller hangs up."""
BACK_S = (0.0, 1.0)
"""After so long the same request comes again."""
PAUSE_S = 0.5
ENDED = frozenset({"job_failed", "job_cancelled", "job_expired"})


def openai_form(request: Request) -> tuple[str, dict[str, Any]]:
    """Route and body of a request of ours."""
    if "messages" not in request:
        # The other doors let it run as far as fits; this one has a default, as OpenAI's.
        return "/v1/completions", {"max_tokens": ALL_THAT_FIT, **request}
    body = dict(request)
    if (top := body.pop("logprobs", None)) is not None:
        body |= {"logprobs": True, "top_logprobs": top}
    return "/v1/chat/completions", body


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """One thread's."""

    urls: Mapping[str, str]
    journal: Journal
    workload: Workload
    stopping: threading.Event
    drained: threading.Event
    rng: random.Random

    def run(self) -> None:
        """Call after call until the load stops; the last one is brought to its end."""
        with gateway_client(self.urls, SILENCE_S) as client:
            while not self.drained.wait(PAUSE_S):
                if not self.stopping.is_set():
                    self._call(client)

    def _call(self, client: httpx.Client) -> None:
        fields = {"metadata": MARK, "idempotency_key": f"{self.rng.getrandbits(128):032x}"}
        number = self.workload.draw_number(self.rng, is_completion)
        asked = self.journal.ask(
            Asked(id=uuid4(), number=number, door=DOOR, dress=Dress(fields=fields))
        )
        while not self._is_answered(client, asked) and not self.drained.is_set():
            self.drained.wait(self.rng.uniform(*BACK_S))

    def _is_answered(self, client: httpx.Client, asked: Asked) -> bool:
        """One connection. Whether the caller has all of it, or knows that there is none."""
        route, document = openai_form(self.workload.dressed(asked.number, asked.dress))
        body, headers = with_header({**document, "stream": True, "return_token_ids": True})
        asked.num_sends += 1
        try:
            with client.stream("POST", route, json=body, headers=headers) as answer:
                if answer.is_error:
                    answer.read()
                    return self._is_over(asked, answer)
                return self._listen(asked, answer)
        except httpx.HTTPError:
            return False

    def _is_over(self, asked: Asked, answer: httpx.Response) -> bool:
        """The job has ended without a completion. Whether it may have, the judge knows."""
        code = code_of(answer)
        if code in ENDED:
            return True
        if answer.status_code == httpx.codes.CONFLICT:
            self._complain(asked, "conflicts", f"an equal call was refused: {answer.text[:300]}")
            return True
        try:
            answer.raise_for_status()
        except httpx.HTTPStatusError as error:
            if is_refusal(error):
                self._complain(
                    asked, "refused", f"a good call got {answer.status_code}: {answer.text[:300]}"
                )
        return False

    def _listen(self, asked: Asked, answer: httpx.Response) -> bool:
        watched: Watched | None = None
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                return watched is not None and watched.end_state is not None
            document = json.loads(line.removeprefix("data: "))
            if "error" in document:
                return document["error"].get("code") in ENDED
            if watched is None:
                watched = self._begin(asked, document["id"])
            hear(watched, document)
            self.journal.streamed()
            if self.rng.random() < LEAVES:
                return False
        return False

    def _begin(self, asked: Asked, public_id: str) -> Watched:
        job_id = UUID(public_id.removeprefix("chatcmpl-").removeprefix("cmpl-"))
        if asked.promised and job_id != asked.id:
            self._complain(
                asked, "duplicated", f"a call again was answered by another job, {job_id}"
            )
        asked.promised = True
        self.journal.known(asked, job_id)
        watched = self.journal.watch(job_id)
        watched.num_joins = asked.num_sends
        watched.hears_calls = True
        return watched

    def _complain(self, asked: Asked, count: str, what: str) -> None:
        self.journal.complain(Finding(invariant="I11", count=count, what=what, job_id=asked.id))


def hear(watched: Watched, chunk: Mapping[str, Any]) -> None:
    """What a caller keeps of one chunk."""
    for choice in chunk["choices"]:
        watched.tokens += choice.get("token_ids") or ()
        for call in choice.get("delta", {}).get("tool_calls") or ():
            watched.hear_call(call["index"], call["function"])
        watched.text += (
            choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
        )
        if choice.get("finish_reason"):
            watched.end_state = "succeeded"
            watched.end_tokens = list(watched.tokens)


def code_of(answer: httpx.Response) -> str:
    """Returns the code of an error; empty for what is none of the gateway's."""
    try:
        return str(answer.json()["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""
