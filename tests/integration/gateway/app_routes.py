"""The routes of the gateway's app, and what each of them wants by its own signature."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from services.gateway.app import create_app
from services.gateway.guard import OPEN, SCHEME
from services.gateway.settings import GatewaySettings


def scopes_of(dependant: Dependant) -> set[str]:
    """What a route wants, by its own signature."""
    found = set(dependant.own_oauth_scopes or ()) if dependant.call is SCHEME else set()
    return found.union(*(scopes_of(each) for each in dependant.dependencies))


def calls_of(dependant: Dependant) -> Iterator[Callable[..., Any]]:
    """What FastAPI calls for a route: the handler, and everything that it depends on."""
    assert dependant.call is not None
    yield dependant.call
    for each in dependant.dependencies:
        yield from calls_of(each)


def routes() -> list[tuple[str, str, APIRoute]]:
    """Method, path and route of everything that the app answers."""
    found = []
    for route in create_app(GatewaySettings()).routes:
        assert isinstance(route, APIRoute), f"{route} cannot say what it wants"
        found += [(method, route.path, route) for method in sorted(route.methods or ())]
    return found


GUARDED = [(method, path, route) for method, path, route in routes() if path not in OPEN]
