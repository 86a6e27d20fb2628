"""`python -m docs.generated` writes all pages that come from the code."""

from __future__ import annotations

from pathlib import Path

from docs.generated import commands, failpoints, metrics, settings, structure

PAGES = {
    "docs/structure.md": structure.page,
    "docs/reference/settings.md": settings.page,
    "docs/reference/metrics.md": metrics.page,
    "docs/reference/commands.md": commands.page,
    "docs/reference/failpoints.md": failpoints.page,
}


def main() -> None:
    """Writes each page."""
    for name, page in PAGES.items():
        Path(name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
