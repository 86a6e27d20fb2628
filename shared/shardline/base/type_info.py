"""What msgspec knows of a type, made before threads read with it. Knows no type of ours.

msgspec (0.22) makes it at the type's first use and publishes it half made: a second thread that
reads with it meanwhile follows a null pointer, and the process dies of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

OURS = ("shardline", "services")
"""How the names of our packages begin."""


def prepare(*kinds: object) -> None:
    """Makes it for these types and for those inside them."""
    for kind in kinds:
        msgspec.json.Decoder(kind)


def prepare_loaded() -> None:
    """Makes it for every Struct of ours that is loaded. A process calls it before it has
    threads."""
    prepare(*loaded_structs())


def loaded_structs() -> Iterator[type]:
    """Yields each class of ours that msgspec reads."""
    below = [msgspec.Struct]
    while below:
        below += (kind := below.pop()).__subclasses__()
        if kind.__module__.startswith(OURS):
            yield kind
