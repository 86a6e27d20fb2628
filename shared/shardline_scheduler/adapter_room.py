"""Which adapters the stages hold for open sequences: no more at once than each of them has places
for. Pure."""

from __future__ import annotations

from collections.abc import Iterable


class AdapterRoom:
    """Adapters by their fingerprints; empty: a sequence has none."""

    def __init__(self, max_adapters: int) -> None:
        self._max_adapters = max_adapters
        self._by_number: dict[int, str] = {}

    def has(self, adapter: str) -> bool:
        """Whether a sequence with this adapter may open in the next step, which closes others only
        after it."""
        if not adapter:
            return True
        held = set(self._by_number.values())
        return adapter in held or len(held) < self._max_adapters

    def open(self, number: int, adapter: str) -> None:
        """A sequence opens."""
        if adapter:
            self._by_number[number] = adapter

    def close(self, numbers: Iterable[int]) -> None:
        """The plan that closes these sequences is made: later ones may use their places."""
        for number in numbers:
            self._by_number.pop(number, None)
