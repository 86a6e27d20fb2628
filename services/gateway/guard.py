"""Authenticates requests by API key, and checks their host and scopes. Knows no job.

Every path but those in OPEN needs a valid key. A route's signature names the scope that it needs:
SubmitCaller, ReadCaller, CancelCaller or AdminCaller.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from typing import Annotated

from fastapi import Request, Security
from fastapi.openapi.models import HTTPBearer
from fastapi.security import SecurityScopes
from fastapi.security.base import SecurityBase
from starlette.datastructures import Headers

from services.gateway.errors import Forbidden, MisdirectedRequest, Unauthorized
from services.gateway.keyring import Keyring
from shardline.base.errors import Invalid
from shardline.contract.api_key import Scope, parse_key

OPEN = frozenset({"/health", "/ready"})
"""The paths of health checks."""

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
ANY_HOST = "*"
ANTHROPICS_KEY = "x-api-key"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The holder of a valid API key."""

    key_id: str
    key_name: str
    tenant: str
    scopes: frozenset[Scope]


class Guard:
    """Authenticates a request, or raises."""

    def __init__(self, keyring: Keyring, hosts: frozenset[str]) -> None:
        self._keyring = keyring
        self._hosts = hosts

    async def admit(self, path: str, headers: Headers) -> Caller | None:
        """The caller, or None on an open path. Raises Unauthorized, MisdirectedRequest,
        Unavailable, Overload."""
        if path in OPEN:
            return None
        self._check_host(headers.get("host", ""))
        return await self._caller(_authorization(headers))

    async def visitor(self, headers: Headers) -> Caller | None:
        """The caller on an open path, or None without a key. Raises as `admit` does for an invalid
        key."""
        authorization = _authorization(headers)
        if authorization is None:
            return None
        self._check_host(headers.get("host", ""))
        return await self._caller(authorization)

    def _check_host(self, host: str) -> None:
        """Refuse DNS rebinding: a web page with a name that resolves to this machine sends that
        name as its host."""
        name = host_name(host)
        if ANY_HOST not in self._hosts and name not in self._hosts:
            remedy = (
                f"Use one of: {', '.join(sorted(self._hosts))}; "
                "or name it in SHARDLINE_HTTP_ALLOWED_HOSTS"
            )
            raise MisdirectedRequest(
                "host", f"this gateway does not answer to {name[:64]!r}", remedy
            )

    async def _caller(self, authorization: str | None) -> Caller:
        if authorization is None:
            raise Unauthorized(
                "There is no API key. Send Authorization: Bearer sk-shardline-…", had_key=False
            )
        scheme, _, text = authorization.partition(" ")
        try:
            presented = parse_key(text.strip() if scheme.lower() == "bearer" else "")
        except Invalid as error:
            raise Unauthorized(
                f"This is not an API key. {error.remedy}: Authorization: Bearer sk-shardline-…"
            ) from error
        entry = await self._keyring.get(presented.key_id)
        known = entry.known
        if known is None or not presented.matches(known.digest):
            raise Unauthorized(
                "There is no such API key. Check it, or ask its operator for another one"
            )
        if known.is_revoked:
            raise Unauthorized(
                f"The API key {presented.key_id} was revoked. Ask its operator for another one"
            )
        if entry.is_over():
            raise Unauthorized(
                f"The API key {presented.key_id} has expired. Ask its operator for another one"
            )
        self._keyring.note(presented.key_id)
        return Caller(
            key_id=presented.key_id,
            key_name=known.name,
            tenant=known.tenant,
            scopes=known.scopes,
        )


def allowed_hosts(configured: str, bound_to: str) -> frozenset[str]:
    """The hosts that requests may name: the configured ones and this machine's own names. Without
    configuration any host, unless the gateway listens on a loopback address."""
    names = frozenset(name.strip().lower() for name in configured.split(",") if name.strip())
    if names:
        return names | LOCAL_NAMES
    return LOCAL_NAMES if _is_loopback(bound_to) else frozenset({ANY_HOST})


def host_name(host: str) -> str:
    """`example.org:8000` → example.org, `[::1]:8000` → ::1."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _authorization(headers: Headers) -> str | None:
    """The caller's key as a bearer token; Anthropic's clients send it in another header."""
    key = headers.get(ANTHROPICS_KEY)
    given = headers.get("authorization")
    return f"Bearer {key}" if given is None and key is not None else given


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


class KeyScheme(SecurityBase):
    """What a route's signature asks for: the caller, if its key has the scopes of the route."""

    def __init__(self) -> None:
        self.scheme_name = "API key"
        self.model = HTTPBearer(
            description="`Authorization: Bearer sk-shardline-…`, "
            f"or the key alone in `{ANTHROPICS_KEY}`"
        )

    async def __call__(self, request: Request, needed: SecurityScopes) -> Caller:
        """The caller. Raises Forbidden. A coroutine, because FastAPI calls a plain function on a
        thread."""
        caller = request.state.caller
        assert isinstance(caller, Caller)
        for scope in needed.scopes:
            if scope not in caller.scopes:
                raise Forbidden(
                    f"the API key {caller.key_id} lacks the scope '{scope}'", scope=scope
                )
        return caller


SCHEME = KeyScheme()
SubmitCaller = Annotated[Caller, Security(SCHEME, scopes=[Scope.SUBMIT])]
ReadCaller = Annotated[Caller, Security(SCHEME, scopes=[Scope.READ])]
CancelCaller = Annotated[Caller, Security(SCHEME, scopes=[Scope.CANCEL])]
AdminCaller = Annotated[Caller, Security(SCHEME, scopes=[Scope.ADMIN])]
