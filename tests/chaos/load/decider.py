"""A caller of OpenAI's decisions: several questions about one input, under a key, and once more.
Knows no row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

from tests.chaos.load.chooser import Customer
from tests.chaos.load.users import QUESTIONS

PATH = "/v1/decisions"
INPUTS = ("date: 3 March 2024 =", "sort: 31, 7, 30, 12 =", "漢字と 🙂")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decider(Customer):
    """Its questions are choices of one request: all rows are there, or none."""

    def ask(self, client: httpx.Client) -> None:
        """One request, and its repeat."""
        n = self.rng.randint(1, len(QUESTIONS))
        body: dict[str, Any] = {
            "model": self.rng.choice(self.workload.models),
            "input": self.rng.choice(INPUTS),
            "questions": self.rng.sample(QUESTIONS, n),
            **self.fields(n),
        }
        answers = self.twice(client, PATH, body)
        if answers is None:
            return
        first, again = answers
        names = [one["name"] for one in body["questions"]]
        told = [one["name"] for one in first["answers"]]
        if told != names:
            self.complain("lost", f"{first['id']}: {names} were asked, {told} answered")
        if first["answers"] != again["answers"]:
            self.complain("decision_mismatches", f"{first['id']} asked for again: {again}")
