"""The tenants of the users' load: who they are, and what their actors do. Knows no door."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal

from shardline.store import api_keys
from shardline.store.api_keys import Grant
from shardline.store.connection.database import transaction
from shardline.store.tenants import quotas
from tests.chaos.load.requests import MODEL
from tests.chaos.load.target import Target
from tests.chaos.load.tenants.actor import TenantActor, TenantHome
from tests.chaos.load.tenants.bulk_actor import BulkActor
from tests.chaos.load.tenants.families import FamilySender
from tests.chaos.load.tenants.ledger import LIMITS, PRICE, SPENDER, TEAM, TenantLedger
from tests.chaos.load.tenants.listener import WebhookListener
from tests.chaos.load.tenants.pauser import TenantPauser
from tests.chaos.load.tenants.spender import QuotaSpender
from tests.chaos.load.tenants.timekeeper import ScheduleOwner

ACTORS: Mapping[str, tuple[str, type[TenantActor]]] = {
    "quota spender": (SPENDER, QuotaSpender),
    "pauser": (TEAM, TenantPauser),
    "schedule owner": (TEAM, ScheduleOwner),
    "family sender": (TEAM, FamilySender),
    "bulk actor": (TEAM, BulkActor),
    "webhook listener": (TEAM, WebhookListener),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantParty:
    """Threads of tenants beside the producers, and what they were told."""

    people: Mapping[str, Callable[[], None]] = field(default_factory=dict)
    ledger: TenantLedger = field(default_factory=TenantLedger)


def party(
    target: Target, stopping: threading.Event, drained: threading.Event, *, seed: int
) -> TenantParty:
    """Makes the tenants; nothing is asked for yet."""
    homes = {tenant: _home(target, tenant) for tenant in (TEAM, SPENDER)}
    with transaction(target.database_url) as connection:
        quotas.set_price(connection, MODEL, Decimal(PRICE[0]), Decimal(PRICE[1]))
        quotas.set_quota(connection, SPENDER, {**LIMITS, "budget_period": "ever"})
    ledger = TenantLedger()
    return TenantParty(
        people={
            name: kind(
                home=homes[tenant],
                ledger=ledger,
                journal=target.journal,
                workload=target.workload,
                stopping=stopping,
                drained=drained,
                rng=random.Random(f"{seed} {name}"),
            ).run
            for name, (tenant, kind) in ACTORS.items()
            if kind is not WebhookListener or target.hears_webhooks
        },
        ledger=ledger,
    )


def _home(target: Target, tenant: str) -> TenantHome:
    with transaction(target.database_url) as connection:
        key = api_keys.create(connection, Grant(name=tenant, tenant=tenant))
    return TenantHome(
        tenant=tenant,
        urls={**target.urls, "api_key": key},
        operator_urls=target.urls,
        database_url=target.database_url,
    )
