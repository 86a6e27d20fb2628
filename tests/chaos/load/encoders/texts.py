"""The encoders' load: texts of one token to all that fit, and pairs of texts. Any tokenizer reads
them. Knows no door."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

from tests.chaos.load.requests import MODEL, Request
from tests.chaos.load.users import SCRIBE
from tests.chaos.load.workload import LoadName, Workload, dress_of_user

SCORER = SCRIBE.name
"""Of the second stack, which scores pairs."""
LENGTHS = (3, 1, 2, 5, 9, 15, 16, 17, 33, 60, 100)
"""Words. The longer ones are cut to what the model reads."""
LONG = (150, 200, 300, 500)
TIMES = 2
FIRST_WORD, LAST_WORD = 5, 95
SHORT_IDS = (1, 12, 40)
FIRST_ID, LAST_ID = 5, 90
QUERIES = ("w5 w9", "w17 w18 w19 w20 w21", "w33")
DOCUMENTS = ("w6", "w9 w5", "w40 w41 w42 w43 w44 w45 w46 w47", "w50 " * 60)


def of_encoders() -> Workload:
    """For a stack that embeds, and a second one that scores pairs."""
    requests = tuple({"seed": number, **one} for number, one in enumerate(_requests()))
    return Workload(
        name=LoadName.ENCODERS, requests=requests, models=(MODEL, SCORER), dress=dress_of_user
    )


def is_text(request: Request) -> bool:
    """Whether it asks for the vector of a text that is not cut."""
    return "document" not in request and "truncate_prompt_tokens" not in request


def is_pair(request: Request) -> bool:
    """Whether it asks for a score."""
    return "document" in request


def _requests() -> Iterator[Request]:
    rng = random.Random(7)
    for length in LENGTHS * TIMES:
        yield {"model": MODEL, "prompt": _words(rng, length)}
    for length in LONG * TIMES:
        yield {"model": MODEL, "prompt": _words(rng, length), "truncate_prompt_tokens": -1}
    for length in SHORT_IDS:
        yield {"model": MODEL, "prompt": rng.choices(range(FIRST_ID, LAST_ID), k=length)}
    for query, document in product(QUERIES, DOCUMENTS):
        yield {"model": SCORER, "prompt": query, "document": document}


def _words(rng: random.Random, num: int) -> str:
    return " ".join(f"w{rng.randint(FIRST_WORD, LAST_WORD)}" for _ in range(num))
