"""Which allocator stages preload. Knows the machine's libraries and no stage."""

from __future__ import annotations

import ctypes.util
from importlib import metadata
from pathlib import Path

from services.standalone.settings import StandaloneSettings

PACKAGE = "cmeel-mimalloc"
LIBRARY = "libmimalloc.so"
"""A stage allocates the same few shapes for ever: mimalloc hands them back where glibc maps and
faults pages again."""

ELSE = ("tcmalloc_minimal", "tcmalloc")


def preload(settings: StandaloneSettings) -> str:
    """Returns the value of LD_PRELOAD for stages: what the settings give, else an allocator that is
    installed, else nothing."""
    if settings.stage_preload is not None:
        return settings.stage_preload
    return mimalloc() or next(
        (found for name in ELSE if (found := ctypes.util.find_library(name))), ""
    )


def mimalloc() -> str:
    """The path of mimalloc where its wheel is installed, else nothing."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return ""
    places = (Path(str(file.locate())) for file in files if file.name == LIBRARY)
    return next((str(place) for place in places if place.exists()), "")
