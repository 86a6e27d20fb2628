"""OpenAI's `system_fingerprint`, which changes with the backend: ours changes with the weights,
those of an adapter included. Knows no answer."""

from __future__ import annotations

from shardline.contract.job import Result
from shardline_server.tokenize import RegisteredModel


def system_fingerprint(model: RegisteredModel) -> str:
    """Returns that of a model as it is registered now."""
    return _fingerprint(model.fingerprint, model.adapter_fingerprint)


def fingerprint_of(result: Result) -> str | None:
    """Returns that of the weights which made a result, whatever its model has by now; None where
    the provenance names none."""
    weights = result.provenance.get("weights")
    adapter = result.provenance.get("adapter", {}).get("fingerprint")
    return None if weights is None else _fingerprint(weights, adapter)


def _fingerprint(weights: str, adapter: str | None) -> str:
    return "_".join(["fp", *(each[:16] for each in (weights, adapter) if each is not None)])
