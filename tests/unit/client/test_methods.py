"""The public clients: one list of methods, the same for threads and for asyncio. No server
needed."""

from __future__ import annotations

import inspect

import pytest

from services.gateway.client import GatewayClient
from shardline.client import AsyncClient, Client

METHODS = {
    "cancel",
    "cancel_where",
    "close",
    "decide",
    "embed",
    "get",
    "get_dead",
    "get_many",
    "list",
    "list_dead",
    "prioritize_where",
    "replay",
    "retry_where",
    "score",
    "stream",
    "submit",
    "submit_many",
    "wait",
}


def public(client: type) -> set[str]:
    """What an editor offers behind the dot."""
    return {name for name in dir(client) if not name.startswith("_")}


def parameters(client: type, method: str) -> list[tuple[str, object, object]]:
    """Name, kind and default of each; types differ where one is for asyncio."""
    found = inspect.signature(getattr(client, method)).parameters.values()
    return [(one.name, one.kind, one.default) for one in found]


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_a_public_client_has_the_methods_of_a_producer_and_no_others(client: type) -> None:
    assert public(client) == METHODS


@pytest.mark.parametrize("method", sorted({*METHODS, "__init__"}))
def test_both_clients_take_the_same_arguments(method: str) -> None:
    assert parameters(Client, method) == parameters(AsyncClient, method)


def test_the_gateways_client_adds_what_only_a_door_needs() -> None:
    assert public(GatewayClient) - METHODS == {
        "act",
        "ask",
        "change_stored",
        "costs",
        "database",
        "delete_response",
        "forget_stored",
        "get_stored",
        "insert",
        "list_stored",
        "pipelines",
        "reader",
        "referenced",
        "response",
        "until_ended",
        "usage",
    }
