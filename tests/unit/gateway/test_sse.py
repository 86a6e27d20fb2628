"""Events of streams, as clients split them into lines."""

from __future__ import annotations

import json

from services.gateway.http.sse import event


def test_no_character_of_a_text_ends_a_line_for_any_reader() -> None:
    document = {"text": "a\x85b\u2028c\u2029d\ne\x0b\x0c\x1ef 漢字"}

    lines = event(document, name="delta").decode().splitlines()

    assert [line.partition(":")[0] for line in lines] == ["event", "data", ""]
    assert json.loads(lines[1].removeprefix("data: ")) == document
