"""API keys as rows: made, registered, rotated, revoked, listed, found. Knows no secret but the one
it has just made.

Locks: one row of `api_keys` to rotate it; with SKIP LOCKED to note uses.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import msgspec
from sqlalchemy import (
    ARRAY,
    ColumnElement,
    Connection,
    Interval,
    Text,
    Update,
    any_,
    cast,
    func,
    literal,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import insert

from shardline.base.errors import Conflict, Invalid, NotFound
from shardline.contract.api_key import PresentedKey, Scope, new_key, parse_key
from shardline.contract.job import DEFAULT_TENANT
from shardline.contract.tables import MAX_NAME_CHARS, api_keys
from shardline.store.tenants.quotas import add_tenant

SHOWN = (
    "id",
    "name",
    "tenant_id",
    "scopes",
    "created_at",
    "expires_at",
    "replaced_at",
    "revoked_at",
    "last_used_at",
)
USES_APART_S = 30
"""Several gateways note the same use once."""


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key without its secret."""

    id: str
    name: str
    tenant: str
    scopes: tuple[Scope, ...]
    created_at: datetime
    expires_at: datetime | None
    replaced_at: datetime | None
    """When a rotation made another key of this name."""
    revoked_at: datetime | None
    last_used_at: datetime | None
    """About a minute behind."""


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """Who gets a key, and for what."""

    name: str
    tenant: str = DEFAULT_TENANT
    scopes: tuple[Scope, ...] = tuple(Scope)
    expires_s: float | None = None
    """From now; None is for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """What a door must know to let somebody in."""

    tenant: str
    name: str
    scopes: frozenset[Scope]
    digest: bytes
    expires_in_s: float | None
    """By Postgres's clock at the time of reading; negative once it is over."""
    is_revoked: bool


def create(connection: Connection, grant: Grant) -> str:
    """The new key, whole: it is never to be had again. A tenant that there is not is made. Raises
    Invalid, Conflict."""
    key = new_key()
    if not _insert(connection, parse_key(key), grant):
        raise Conflict(
            f"a key named {grant.name!r} exists; rotate it, revoke it, or choose another name"
        )
    return key


def register(
    connection: Connection, key: str, grant: Grant, *, grace_s: float | None = None
) -> bool:
    """Store a key that was made elsewhere, such as a secret file; False if it is there, also if it
    was revoked. With `grace_s` it replaces another one of the name, which stays valid for so long
    at most. Raises Invalid, and Conflict when another key has the name or another secret has the
    id."""
    presented = parse_key(key)
    if _insert(connection, presented, grant):
        return True
    known = find(connection, [presented.key_id]).get(presented.key_id)
    if known is None and grace_s is not None:
        connection.execute(_replace(grant.name, grace_s))
        return _insert(connection, presented, grant)
    if known is None or not presented.matches(known.digest):
        raise Conflict(f"another key is named {grant.name!r}; revoke it, or choose another name")
    return False


def rotate(connection: Connection, name: str, *, grace_s: float) -> str:
    """A new key with the name, tenant, scopes and lifetime of the old one, which stays valid for
    `grace_s` at the longest. Raises NotFound."""
    lifetime = func.extract("epoch", api_keys.c.expires_at - api_keys.c.created_at)
    wanted = select(api_keys.c.tenant_id, api_keys.c.scopes, lifetime.label("lifetime_s"))
    old = connection.execute(wanted.where(_is_current(name)).with_for_update()).one_or_none()
    if old is None:
        raise NotFound(f"no valid key is named {name!r}")
    connection.execute(_replace(name, grace_s))
    lifetime_s = None if old.lifetime_s is None else float(old.lifetime_s)
    grant = Grant(name=name, tenant=old.tenant_id, scopes=_scopes(old.scopes), expires_s=lifetime_s)
    return create(connection, grant)


def revoke(connection: Connection, name: str) -> list[str]:
    """All keys of this name, or the one of this id; returns the ids. Doors hear of it seconds
    later. Raises NotFound."""
    named = or_(api_keys.c.name == name, api_keys.c.id == name)
    ended = (
        update(api_keys).where(named, api_keys.c.revoked_at.is_(None)).values(revoked_at=func.now())
    )
    ids = list(connection.scalars(ended.returning(api_keys.c.id)))
    if not ids:
        raise NotFound(f"no key that is not revoked has the name or id {name!r}")
    return sorted(ids)


def list_keys(connection: Connection) -> list[ApiKey]:
    """All keys, also those that are over, by name; of one name the newest first."""
    query = select(*(api_keys.c[name] for name in SHOWN)).order_by(
        api_keys.c.name, api_keys.c.created_at.desc()
    )
    return [_load(dict(row)) for row in connection.execute(query).mappings()]


def find(connection: Connection, ids: Collection[str]) -> dict[str, KeyRecord]:
    """Those that exist, by id."""
    left_s = func.extract("epoch", api_keys.c.expires_at - func.now())
    columns = (
        api_keys.c[name] for name in ("id", "tenant_id", "name", "scopes", "digest", "revoked_at")
    )
    query = select(*columns, left_s.label("left_s")).where(_one_of(ids))
    return {
        row.id: KeyRecord(
            tenant=row.tenant_id,
            name=row.name,
            scopes=frozenset(_scopes(row.scopes)),
            digest=bytes(row.digest),
            expires_in_s=None if row.left_s is None else float(row.left_s),
            is_revoked=row.revoked_at is not None,
        )
        for row in connection.execute(query)
    }


def note_use(connection: Connection, ids: Collection[str]) -> None:
    """Notes that these were used a moment ago. Skips rows that are locked: it may be noted
    later."""
    apart = func.now() - cast(timedelta(seconds=USES_APART_S), Interval)
    is_due = or_(api_keys.c.last_used_at.is_(None), api_keys.c.last_used_at < apart)
    due = select(api_keys.c.id).where(_one_of(ids), is_due).with_for_update(skip_locked=True)
    connection.execute(
        update(api_keys).where(api_keys.c.id.in_(due)).values(last_used_at=func.now())
    )


def _is_current(name: str) -> ColumnElement[bool]:
    return (
        (api_keys.c.name == name)
        & api_keys.c.replaced_at.is_(None)
        & api_keys.c.revoked_at.is_(None)
    )


def _replace(name: str, grace_s: float) -> Update:
    """The current key of this name is no longer the current one, and ends soon."""
    ends = func.least(
        api_keys.c.expires_at, func.now() + cast(timedelta(seconds=grace_s), Interval)
    )
    return update(api_keys).where(_is_current(name)).values(replaced_at=func.now(), expires_at=ends)


def _insert(connection: Connection, presented: PresentedKey, grant: Grant) -> bool:
    """False if the id or the name is taken."""
    for field, text in (("name", grant.name), ("tenant", grant.tenant)):
        if not 1 <= len(text) <= MAX_NAME_CHARS or not text.isprintable():
            remedy = f"Write 1 to {MAX_NAME_CHARS} characters, all of them printable"
            raise Invalid(field, f"{text[:32]!r} cannot be one", remedy)
    if not grant.scopes:
        raise Invalid("scopes", "there are none", f"Use some of: {', '.join(Scope)}")
    add_tenant(connection, grant.tenant)
    lifetime = (
        None if grant.expires_s is None else cast(timedelta(seconds=grant.expires_s), Interval)
    )
    row = insert(api_keys).values(
        id=presented.key_id,
        name=grant.name,
        tenant_id=grant.tenant,
        digest=presented.digest,
        scopes=[scope.value for scope in Scope if scope in grant.scopes],
        expires_at=None if lifetime is None else func.now() + lifetime,
    )
    return (
        connection.execute(row.on_conflict_do_nothing().returning(api_keys.c.id)).one_or_none()
        is not None
    )


def _one_of(ids: Collection[str]) -> ColumnElement[bool]:
    """Matches them as one parameter: any number of them."""
    return api_keys.c.id == any_(literal(list(ids), ARRAY(Text())))


def _load(row: dict[str, Any]) -> ApiKey:
    return ApiKey(tenant=row.pop("tenant_id"), scopes=_scopes(row.pop("scopes")), **row)


def _scopes(names: Collection[str]) -> tuple[Scope, ...]:
    """A scope of a later release allows nothing here."""
    return tuple(scope for scope in Scope if scope in names)
