"""The random numbers of the sampler: a keyed hash, the same on every device and in every version of
torch."""

from __future__ import annotations

import hashlib
import struct


def uniform(seed: int, index: int, proposal: int) -> float:
    """Returns a number in [0, 1) that is a function of its key: 53 bits of BLAKE2b."""
    digest = hashlib.blake2b(struct.pack("<QQQ", seed, index, proposal), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53
