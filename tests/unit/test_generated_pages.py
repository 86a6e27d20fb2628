"""Pages that are written from the code are what the code says now."""

from __future__ import annotations

import pytest

from docs.generated.__main__ import PAGES
from tests.repository import REPOSITORY


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_says(name: str) -> None:
    assert (REPOSITORY / name).read_text(encoding="utf-8") == PAGES[name](), (
        "make documents writes it"
    )
