"""`python -m docs.generated` writes all pages that come from the code."""

from __future__ import annotations

from pathlib import Path

from docs.generated import structure

PAGES = {"docs/structure.md": structure.page}


def main() -> None:
    """Writes each page."""
    for name, page in PAGES.items():
        Path(name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
