"""The tokenizers of registered models, each loaded once per fingerprint. Knows no database: rows arrive as mappings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from shardline.errors import UnknownModel
from shardline.tokenize.tokens import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredModel:
    """One row of `models`, with its tokenizer loaded."""

    name: str
    fingerprint: str
    tokens: Tokens
    updated_at: datetime

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> RegisteredModel:
        """Load the tokenizer, which may take seconds. Raises Invalid when it cannot be read."""
        return cls(
            name=row["name"],
            fingerprint=row["fingerprint"],
            tokens=Tokens.from_row(row),
            updated_at=row["updated_at"],
        )


class TokenizerCache:
    """Bounded by the number of registered models. For one thread; a reader on an event loop sees whole updates."""

    def __init__(self) -> None:
        self._models: dict[str, RegisteredModel] = {}
        self._fingerprints: Mapping[str, str] = {}
        self._max_tokens: Mapping[str, int] = {}

    def refresh(self, fingerprints: Mapping[str, str], max_tokens: Mapping[str, int]) -> None:
        """Adopt the registered models by name, and the longest sequence that each one's pipelines hold.

        Drops every model that is gone or has another fingerprint.
        """
        self._fingerprints, self._max_tokens = fingerprints, max_tokens
        self._models = {
            name: model for name, model in self._models.items() if fingerprints.get(name) == model.fingerprint
        }

    def has(self, name: str) -> bool:
        """Whether the model is registered and loaded."""
        return name in self._models

    def lacks(self, name: str) -> bool:
        """Whether the model is registered and not loaded: `add` it from its row."""
        return name in self._fingerprints and name not in self._models

    def add(self, model: RegisteredModel) -> None:
        """Keep a loaded model until `refresh` drops it."""
        self._models[model.name] = model

    def get(self, name: str) -> RegisteredModel:
        """The model, limited to what its pipelines hold. Raises UnknownModel, naming the registered ones."""
        model = self._models.get(name)
        if model is None:
            raise UnknownModel(name, list(self._fingerprints))
        return replace(model, tokens=model.tokens.within(self._max_tokens.get(name)))
