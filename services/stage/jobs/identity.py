"""Who this head is in the present epoch: what claims, results and rows name. Knows no transport."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.stage.hop.wiring import UNKNOWN, Member, Wiring
from shardline_scheduler.kv_blocks import BLOCK_TOKENS
from shardline_server.store.claims import Claimant


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Written into attempts and results: the provenance of a completion."""

    model: str
    worker: str
    pipeline: str
    epoch: int
    fingerprint: str
    """Of the weights."""
    revision: str | None
    """The commit of a model of the hub."""
    exactness: str
    exact: bool
    kv_tokens: int
    """The longest sequence that its KV holds."""
    stages: tuple[dict[str, Any], ...]
    software: dict[str, str]
    processes: frozenset[str] = frozenset()
    """Incarnations of the stages, this head's with them."""

    def claimant(self, adapters: Mapping[str, str]) -> Claimant:
        """Returns it as a claim names it, with its adapters' fingerprints by name."""
        return Claimant(
            worker=self.worker,
            pipeline=self.pipeline,
            epoch=self.epoch,
            fingerprint=self.fingerprint,
            exactness=self.exactness,
            adapters=adapters,
        )

    def provenance(self) -> dict[str, Any]:
        """Returns it as stored with a result."""
        return {
            "worker": self.worker,
            "pipeline": self.pipeline,
            "epoch": self.epoch,
            "weights": self.fingerprint,
            "revision": self.revision,
            "exactness": self.exactness,
            "stages": list(self.stages),
            **self.software,
        }


def identity_of(
    wiring: Wiring,
    *,
    pipeline: str,
    revision: str | None,
    software: dict[str, str],
) -> Identity:
    """Returns the head's identity for one epoch."""
    head = wiring.members[0].card
    return Identity(
        model=head.model,
        worker=head.worker,
        pipeline=pipeline,
        epoch=wiring.epoch,
        fingerprint=head.fingerprint,
        revision=revision,
        exactness=wiring.exactness,
        exact=wiring.exact,
        kv_tokens=wiring.num_blocks * BLOCK_TOKENS,
        stages=tuple(map(_facts, wiring.members)),
        software=software,
        processes=frozenset(member.card.incarnation for member in wiring.members),
    )


def _facts(member: Member) -> dict[str, Any]:
    card = member.card
    return {
        "worker": card.worker,
        "layers": [card.first_layer, card.last_layer],
        "device": card.device,
        "dtype": card.weights_dtype,
        "kv_blocks": card.capacity.num_blocks,
        "states": card.capacity.num_states,
        "sends": "int8" if member.sends_int8 else "same",
        "power": card.capacity.power or UNKNOWN,
    }
