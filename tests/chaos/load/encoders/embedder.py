"""Callers of `/v1/embeddings`, `/v1/score` and `/v1/rerank`: several texts under a key, and the
same once more. Knows no row."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tests.chaos.load.chooser import Customer
from tests.chaos.load.encoders.texts import SCORER, is_pair, is_text
from tests.chaos.load.journal import TextsHeard
from tests.chaos.load.requests import MODEL

MARK = "chaos, texts"
"""In the metadata of its jobs, which have the numbers of their requests beside it."""
MAX_TEXTS = 24
EMBEDDINGS = "/v1/embeddings"
SCORES = "/v1/score"
RERANK = "/v1/rerank"


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedder(Customer):
    """Wants the vectors of texts, as numbers or in base64."""

    def ask(self, client: httpx.Client) -> None:
        """One request, and its repeat."""
        num = self.rng.randint(1, MAX_TEXTS)
        numbers = [self.workload.draw_number(self.rng, _is_string) for _ in range(num)]
        form = self.rng.choice(("float", "base64"))
        body = {
            "model": MODEL,
            "input": [self.workload.requests[number]["prompt"] for number in numbers],
            "encoding_format": form,
            **texts_fields(self, numbers),
        }
        answers = self.twice(client, EMBEDDINGS, body)
        if answers is None:
            return
        for answer in answers:
            vectors = [_numbers(each["embedding"]) for each in answer["data"]]
            places = [each["index"] for each in answer["data"]]
            if places != list(range(num)):
                self.complain("lost", f"{num} texts were asked for: {places} came")
            self.journal.hear_texts(TextsHeard(numbers=numbers, vectors=vectors))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer(Customer):
    """Wants scores of pairs with one first text."""

    def ask(self, client: httpx.Client) -> None:
        """One request, and its repeat."""
        number = self.workload.draw_number(self.rng, is_pair)
        query = self.workload.requests[number]["prompt"]
        every = [
            place
            for place, one in enumerate(self.workload.requests)
            if is_pair(one) and one["prompt"] == query
        ]
        numbers = self.rng.choices(every, k=self.rng.randint(1, MAX_TEXTS))
        documents = [self.workload.requests[place]["document"] for place in numbers]
        fields = {"model": SCORER, **texts_fields(self, numbers)}
        if self.rng.random() < 0.5:
            body = {**fields, "query": query, "documents": documents}
            answers = self.twice(client, RERANK, body)
        else:
            body = {**fields, "text_1": query, "text_2": documents}
            answers = self.twice(client, SCORES, body)
        for answer in answers or ():
            found = _scores(answer)
            if sorted(found) != list(range(len(numbers))):
                self.complain("lost", f"{len(numbers)} pairs were asked for: {found} came")
            vectors = [[found[place]] for place in sorted(found)]
            self.journal.hear_texts(TextsHeard(numbers=numbers, vectors=vectors))


def texts_fields(customer: Customer, numbers: Sequence[int]) -> dict[str, Any]:
    """Of a request with texts of the set."""
    return {
        "metadata": {"asked_by": MARK, "numbers": list(numbers)},
        "idempotency_key": f"{customer.rng.getrandbits(128):032x}",
    }


def _is_string(request: Mapping[str, Any]) -> bool:
    return is_text(request) and isinstance(request["prompt"], str)


def _scores(answer: Mapping[str, Any]) -> dict[int, float]:
    if "results" in answer:
        return {each["index"]: each["relevance_score"] for each in answer["results"]}
    return {each["index"]: each["score"] for each in answer["data"]}


def _numbers(told: str | Sequence[float]) -> list[float]:
    if isinstance(told, str):
        return array("f", base64.b64decode(told)).tolist()
    return list(told)
