"""The form of an API key, what it may do, and what is stored of it. Knows no database and no
server.

A key reads `sk-shardline-<id>-<secret>`. The id is public: lists and logs name a key by it. The
secret has 256 random bits, and only its SHA-256 is stored: a slow hash protects passwords, which
people choose and others can guess; no attacker guesses 256 bits, however fast the hash is, and a
slow one would only cost time on every request.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from enum import StrEnum

from shardline.base.errors import Invalid

PREFIX = "sk-shardline-"
_ID_BYTES = 8
_SECRET_BYTES = 32
_FORM = re.compile(rf"{PREFIX}([0-9a-f]{{16}})-([A-Za-z0-9_-]{{43}})")


class Scope(StrEnum):
    """What a key allows, each by itself: none of them includes another one."""

    SUBMIT = "submit"
    """New jobs, and the completions of one's own requests."""
    READ = "read"
    """Jobs, results and event streams of its tenant; models; the API's description."""
    CANCEL = "cancel"
    """The end of its tenant's jobs."""
    ADMIN = "admin"
    """Figures and pauses of all tenants together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PresentedKey:
    """A key as a caller has sent it: the id it claims, and the digest of its secret."""

    key_id: str
    digest: bytes

    def matches(self, digest: bytes) -> bool:
        """Compares in constant time: how long it takes tells nothing about the stored one."""
        return hmac.compare_digest(self.digest, digest)


def new_key() -> str:
    """Returns a key that no other caller has."""
    return f"{PREFIX}{secrets.token_hex(_ID_BYTES)}-{secrets.token_urlsafe(_SECRET_BYTES)}"


def parse_key(text: str) -> PresentedKey:
    """Raises Invalid, which does not repeat what was sent: it may hold most of a secret."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise Invalid(
            "api_key",
            f"it has not the form {PREFIX}<id>-<secret>",
            "Send the whole key as it was printed",
        )
    return PresentedKey(key_id=match[1], digest=hashlib.sha256(match[2].encode()).digest())


def bearer(key: str) -> dict[str, str]:
    """The HTTP header that carries it."""
    return {"Authorization": f"Bearer {key}"}


def parse_scopes(names: str) -> tuple[Scope, ...]:
    """`submit,read` → scopes in their order. Raises Invalid."""
    given = {name.strip() for name in names.split(",")}
    unknown = sorted(given - set(Scope))
    if unknown:
        raise Invalid("scopes", f"{unknown[0][:32]!r} is none", f"Use some of: {', '.join(Scope)}")
    return tuple(scope for scope in Scope if scope in given)
