"""The tokenizers of registered models, each loaded once per fingerprint. Knows no database: rows
arrive as mappings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from shardline.base.errors import UnknownModel
from shardline.contract.job import address_of
from shardline_server.tokenize.tokens import Tokens

Adapters = Mapping[str, Mapping[str, str]]
"""Fingerprints of adapters by name, by the name of their model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredModel:
    """One row of `models`, with its tokenizer loaded; or one of its adapters."""

    name: str
    fingerprint: str
    tokens: Tokens
    updated_at: datetime
    adapter: str | None = None
    adapter_fingerprint: str | None = None

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> RegisteredModel:
        """Load the tokenizer, which may take seconds. Raises Invalid when it cannot be read."""
        return cls(
            name=row["name"],
            fingerprint=row["fingerprint"],
            tokens=Tokens.from_row(row),
            updated_at=row["updated_at"],
        )

    @property
    def address(self) -> str:
        """Returns it as requests name it."""
        return address_of(self.name, self.adapter)


class TokenizerCache:
    """Bounded by the number of registered models. For one thread; a reader on an event loop sees
    whole updates."""

    def __init__(self) -> None:
        self._models: dict[str, RegisteredModel] = {}
        self._fingerprints: Mapping[str, str] = {}
        self._max_tokens: Mapping[str, int] = {}
        self._adapters: Adapters = {}

    def refresh(
        self, fingerprints: Mapping[str, str], max_tokens: Mapping[str, int], adapters: Adapters
    ) -> None:
        """Adopt the registered models by name, the longest sequence that each one's pipelines hold,
        and its adapters.

        Drops every model that is gone or has another fingerprint.
        """
        self._fingerprints = fingerprints
        self._max_tokens = max_tokens
        self._adapters = adapters
        self._models = {
            name: model
            for name, model in self._models.items()
            if fingerprints.get(name) == model.fingerprint
        }

    def split(self, address: str) -> tuple[str, str | None]:
        """The model and the adapter that a request names. What is neither is returned as it is."""
        model, _, adapter = address.rpartition(":")
        if address not in self._fingerprints and adapter in self._adapters.get(model, ()):
            return model, adapter
        return address, None

    def has(self, address: str) -> bool:
        """Whether the model is registered and loaded."""
        return self.split(address)[0] in self._models

    def lacks(self, address: str) -> bool:
        """Whether the model is registered and not loaded: `add` it from its row."""
        name = self.split(address)[0]
        return name in self._fingerprints and name not in self._models

    def add(self, model: RegisteredModel) -> None:
        """Keep a loaded model until `refresh` drops it."""
        self._models[model.name] = model

    def get(self, address: str) -> RegisteredModel:
        """The model, limited to what its pipelines hold. Raises UnknownModel, naming the registered
        ones."""
        name, adapter = self.split(address)
        model = self._models.get(name)
        if model is None:
            raise UnknownModel(address, addresses(self._fingerprints, self._adapters))
        fingerprint = None if adapter is None else self._adapters[name][adapter]
        tokens = model.tokens.within(self._max_tokens.get(name))
        return replace(model, tokens=tokens, adapter=adapter, adapter_fingerprint=fingerprint)


def addresses(models: Iterable[str], adapters: Adapters) -> list[str]:
    """What requests may name: each model, and behind it its adapters."""
    return [
        address_of(model, adapter)
        for model in sorted(models)
        for adapter in (None, *sorted(adapters.get(model, ())))
    ]
