"""A caller who has a chat's completion kept, reads it back, finds it in the list, and deletes it.
Knows no row."""

from __future__ import annotations

from dataclasses import dataclass

import httpx

from tests.chaos.load.callers import openai_form
from tests.chaos.load.chooser import BACK_S, Customer
from tests.chaos.load.doors import is_refusal
from tests.chaos.load.responder import is_chat

PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeper(Customer):
    """What it reads back is what it was answered."""

    def ask(self, client: httpx.Client) -> None:
        """One completion, until it is gone."""
        number = self.workload.draw_number(self.rng, is_chat)
        fields = self.fields(1)
        name = f"{self.rng.getrandbits(64):016x}"
        metadata = {**fields["metadata"], "kept": name}
        request = {**self.workload.requests[number], **fields, "metadata": metadata, "store": True}
        _, document = openai_form(request)
        first = self.answer(client, PATH, document)
        if first is None:
            return
        found = self.answer(client, f"{PATH}/{first['id']}")
        if found is not None and found["choices"] != first["choices"]:
            self.complain("text_mismatches", f"{first['id']} is kept as {found['choices']}")
        listed = self.answer(client, f"{PATH}?metadata[kept]={name}")
        if listed is not None:
            ids = [one["id"] for one in listed["data"]]
            if ids != [first["id"]]:
                count = "lost" if not ids else "duplicated"
                self.complain(count, f"{first['id']} is kept, the list has {ids}")
        self._delete(client, f"{PATH}/{first['id']}")

    def _delete(self, client: httpx.Client, route: str) -> None:
        """Until it is gone: a lost answer may have been the deletion's."""
        while not self.drained.is_set():
            try:
                answer = client.delete(route)
                if answer.status_code == httpx.codes.NOT_FOUND:
                    return
                answer.raise_for_status()
                continue
            except httpx.HTTPError as error:
                if is_refusal(error):
                    self.complain("refused", f"DELETE {route}: {error}")
                    return
            self.drained.wait(self.rng.uniform(*BACK_S))
