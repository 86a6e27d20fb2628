"""The host's memory for weights that an accelerator's does not hold: filled once, copied from ahead
of use. Knows no layer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from services.stage.device.uploads import Uploads
from shardline.base.errors import Invalid
from shardline.base.rounding import ceil_div

CHUNK_BYTES = 64 << 20
"""Memory is taken in pieces of a power of two, to which torch rounds up each that it pins."""
FIELD = "SHARDLINE_STREAMED_LAYERS"


class LayerMemory:
    """Used by one thread."""

    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads
        self._chunks: list[Tensor] = []
        """Each int8 [CHUNK_BYTES]."""
        # A copy that has begun writes into a buffer, which goes when this does.
        weakref.finalize(self, uploads.finish)

    def write(self, pieces: list[tuple[int, Tensor]], begin: int, num_bytes: int) -> None:
        """Copies tensors, int8 [bytes], each to its place behind `begin`.

        Raises Invalid if the host's memory has no room for `num_bytes`.
        """
        while len(self._chunks) * CHUNK_BYTES < begin + num_bytes:
            self._chunks.append(self._new_chunk())
        for place, tensor in pieces:
            for first, part in self._parts(begin + place, len(tensor)):
                part.copy_(tensor[first : first + len(part)])

    def buffer(self, num_bytes: int) -> Tensor:
        """Returns int8 [num_bytes] of the device's memory."""
        return torch.empty(num_bytes, dtype=torch.int8, device=self._uploads.device)

    def fetch(self, target: Tensor, begin: int) -> Callable[[], object]:
        """Begins to fill `target`, int8 [bytes] on the device, from `begin` on, once the device has
        computed what it was given. Returns what has it wait for that."""
        parts = self._parts(begin, len(target))
        return self._uploads.begin(
            (target[first : first + len(part)], part) for first, part in parts
        )

    def _new_chunk(self) -> Tensor:
        try:
            return self._uploads.host_memory(CHUNK_BYTES)
        except RuntimeError as error:
            taken_mib = len(self._chunks) * CHUNK_BYTES >> 20
            problem = (
                f"the host's memory has no room for more of them than {taken_mib:,} MiB: {error}"
            )
            raise Invalid(
                FIELD, problem, "Stream fewer layers here, or raise the limit of locked memory"
            ) from error

    def _parts(self, begin: int, num_bytes: int) -> Iterator[tuple[int, Tensor]]:
        """Yields the parts of chunks that hold these bytes, each with its place behind `begin`."""
        end = begin + num_bytes
        for number in range(begin // CHUNK_BYTES, ceil_div(end, CHUNK_BYTES)):
            start = number * CHUNK_BYTES
            first = max(begin, start)
            last = min(end, start + CHUNK_BYTES)
            yield first - begin, self._chunks[number][first - start : last - start]
