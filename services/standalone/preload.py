"""Which allocator stages preload. Knows the machine's libraries and no stage."""

from __future__ import annotations

import ctypes.util

from services.standalone.settings import StandaloneSettings

ALLOCATORS = ("tcmalloc_minimal", "tcmalloc")
"""A stage allocates the same few shapes for ever: tcmalloc hands them back where glibc maps and faults pages anew."""


def preload(settings: StandaloneSettings) -> str:
    """The value of LD_PRELOAD for stages: what the settings say, else an allocator that is installed, else nothing."""
    if settings.stage_preload is not None:
        return settings.stage_preload
    return next((found for name in ALLOCATORS if (found := ctypes.util.find_library(name))), "")
