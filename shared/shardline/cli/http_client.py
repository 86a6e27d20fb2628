"""How commands ask a gateway over HTTP. Knows no route."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address

import httpx


def http_client(
    url: str, *, timeout_s: float, headers: Mapping[str, str] | None = None
) -> httpx.Client:
    """Returns a client of the gateway at `url`. Proxies of the environment are asked for other
    machines alone: none of them reaches this one, and the API key is none of their business. Raises
    httpx.TransportError for an environment that cannot be used: a proxy of an unknown kind, a file
    of certificates that is not there."""
    try:
        return httpx.Client(
            base_url=f"{url.rstrip('/')}/",
            headers=headers,
            timeout=timeout_s,
            trust_env=not is_local(httpx.URL(url).host),
        )
    except (ImportError, OSError, ValueError) as error:
        raise httpx.TransportError(f"its environment cannot be used: {error}") from error


def is_local(host: str) -> bool:
    """Whether a host is this machine by its name."""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"
