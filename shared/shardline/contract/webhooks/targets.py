"""Where a webhook may go: public addresses, and those networks that an operator has named. Knows no
resolver and no connection.

An address is judged as the one that a packet reaches in the end: IPv4 in IPv6 (mapped, or through
NAT64) as IPv4. Tunnels of old (6to4, Teredo) are refused.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from urllib.parse import SplitResult, urlsplit

from shardline.base.errors import Invalid
from shardline.contract.request_parsing import shown

SETTING = "SHARDLINE_WEBHOOK_NETWORKS"
MAX_URL_CHARS = 2_048
MAX_NETWORKS = 64
SCHEMES = ("https", "http")
LOCALHOST = "localhost"

GLOBAL_6 = IPv6Network("2000::/3")
"""All of IPv6 that is routed on the internet."""

NAT64 = IPv6Network("64:ff9b::/96")
"""An IPv4 address in the last 32 bits: how hosts without IPv4 reach it (RFC 6052)."""

REFUSED: tuple[IPv4Network | IPv6Network, ...] = (
    # Ranges that some releases of Python call global: RFC 6890's registries, and 6to4 relays.
    *map(IPv4Network, ("192.0.0.0/24", "192.88.99.0/24", "198.18.0.0/15", "240.0.0.0/4")),
    # Azure's own service on each host, in a public range.
    IPv4Network("168.63.129.16/32"),
    # Teredo, ORCHID and the like; documentation; 6to4.
    *map(IPv6Network, ("2001::/23", "2001:db8::/32", "3fff::/20", "2002::/16")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookReach:
    """The addresses that webhooks may go to: public ones, and those in `networks`."""

    networks: tuple[IPv4Network | IPv6Network, ...] = ()

    @classmethod
    def parse(cls, text: str) -> WebhookReach:
        """`10.0.0.0/8, ::1` → reach. Raises Invalid."""
        names = [name.strip() for name in text.split(",") if name.strip()]
        if len(names) > MAX_NETWORKS:
            problem = f"it has {len(names)} networks; {MAX_NETWORKS} is the limit"
            raise Invalid(SETTING, problem, "Name larger ones")
        try:
            return cls(networks=tuple(map(ip_network, names)))
        except ValueError as error:
            remedy = "Write networks as 10.0.0.0/8 or fd00::/8, with commas"
            raise Invalid(SETTING, str(error), remedy) from error

    def allows(self, address: str) -> bool:
        """Whether a connection may be made to this address, in any form that a resolver gives."""
        try:
            found = ip_address(address)
        except ValueError:
            return False
        if isinstance(found, IPv6Address):
            if found.scope_id is not None:
                return False
            found = _reached(found)
        return _is_public(found) or any(found in network for network in self.networks)


def check_url(url: str, reach: WebhookReach) -> None:
    """Raises Invalid for what can be no endpoint, whatever its name resolves to. A name is resolved
    and judged when it is connected to, each time."""
    if not 1 <= len(url) <= MAX_URL_CHARS:
        problem = f"it has {len(url)} characters; 1 to {MAX_URL_CHARS} are allowed"
        raise Invalid("url", problem, "Send a shorter one")
    if not url.isascii() or not url.isprintable() or set(url) & {" ", "\\"}:
        remedy = "Percent-encode them, and write a host's name in its ASCII form"
        raise Invalid("url", "it has other characters than those of a URL", remedy)
    host = _checked(url).hostname or ""
    literal = _literal(host)
    if literal is None and (host == LOCALHOST or host.endswith(f".{LOCALHOST}")):
        literal = "127.0.0.1"
    if literal is not None and not reach.allows(literal):
        remedy = f"Use a public one; an operator may allow others by {SETTING}"
        raise Invalid("url", f"{shown(host)} is no public address", remedy)


def _checked(url: str) -> SplitResult:
    """Its parts. Raises Invalid."""
    remedy = "Send a URL such as https://example.org/hooks"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise Invalid("url", str(error)[:200], remedy) from error
    if parts.scheme not in SCHEMES:
        raise Invalid("url", f"{shown(repr(parts.scheme))} is no scheme of webhooks", remedy)
    if not parts.hostname or port == 0:
        raise Invalid("url", "it names no host, or port 0", remedy)
    if "@" in parts.netloc:
        remedy = "Leave them out: the signature proves the sender"
        raise Invalid("url", "it holds a user's name or password", remedy)
    if "%" in parts.netloc:
        raise Invalid("url", "its host is percent-encoded, or has a zone", remedy)
    if "#" in url:
        raise Invalid("url", "it has a fragment", "Leave it out: no server sees it")
    return parts


def _literal(host: str) -> str | None:
    """The address that the host is written as, if it is one: also in the forms of old, where
    2130706433, 0x7f.1 and 0177.0.0.1 are 127.0.0.1. None for a name."""
    try:
        return str(ip_address(host))
    except ValueError:
        pass
    try:
        return socket.inet_ntoa(socket.inet_aton(host.rstrip(".")))
    except OSError:
        return None


def _reached(address: IPv6Address) -> IPv4Address | IPv6Address:
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address in NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    if isinstance(address, IPv6Address) and address not in GLOBAL_6:
        return False
    is_refused = any(address in network for network in REFUSED)
    return address.is_global and not address.is_multicast and not is_refused
