"""`shardline webhooks add | list | change | rotate | remove | test | deliveries | replay`: URLs
that get events of ended jobs. Holds no logic: the store does.

Like `shardline keys`, it asks Postgres itself, and sees every tenant's endpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import datetime
from enum import StrEnum
from functools import partial
from typing import Annotated, TypeVar
from urllib.parse import urlsplit
from uuid import UUID

import typer
from rich.text import Text
from sqlalchemy import Connection

from shardline.base.errors import Unavailable
from shardline.cli import show
from shardline.cli.arguments import Json
from shardline.cli.database import transaction
from shardline.contract.job import DEFAULT_TENANT
from shardline.contract.webhooks.event import ALL, DELIVERY, ENDPOINT, EventType
from shardline.contract.webhooks.targets import WebhookReach
from shardline.contract.webhooks.webhook_settings import WebhookSettings
from shardline.store.webhooks import deliveries as webhook_deliveries
from shardline.store.webhooks import endpoints
from shardline.store.webhooks.deliveries import WebhookDelivery, delivery_id_of
from shardline.store.webhooks.endpoints import (
    EndpointChange,
    EndpointSecret,
    NewEndpoint,
    WebhookEndpoint,
    endpoint_id_of,
)

HOUR_S = 3_600.0
TEST_S = 30.0
LOOK_S = 0.25

webhooks = typer.Typer(
    no_args_is_help=True, help="Webhooks: URLs for events of ended jobs, responses and batches."
)

Answer = TypeVar("Answer")
EndpointName = Annotated[str, typer.Argument(metavar="ENDPOINT", help="The endpoint's id.")]
EventNames = Annotated[
    list[str] | None,
    typer.Option("--event", "-e", help=f"One of {', '.join(EventType)}; or job.*, or *."),
]


class DeliveryFilter(StrEnum):
    """States of deliveries."""

    PENDING = "pending"
    DELIVERED = "delivered"
    DEAD = "dead"


@webhooks.command()
def add(
    url: Annotated[str, typer.Argument(help="Where to POST.")],
    *,
    event: EventNames = None,
    name: Annotated[str | None, typer.Option(help="Default: the URL's host.")] = None,
    tenant: Annotated[str, typer.Option(help="The tenant of the jobs.")] = DEFAULT_TENANT,
    json: Json = False,
) -> None:
    """Add an endpoint and print its id and secret: the secret is shown this once. Default: all
    events."""
    chosen = NewEndpoint(
        url=url,
        name=_host(url) if name is None else name,
        event_types=event or [ALL],
        tenant=tenant,
    )
    _show_secret(_ask(partial(endpoints.create, new=chosen, reach=_reach())), json=json)


@webhooks.command("list")
def list_endpoints(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    json: Json = False,
) -> None:
    """List endpoints, and whether they take what they are sent; no secret is shown."""
    found = _ask(partial(endpoints.list_endpoints, tenant=tenant))
    show.each(found, json=json, table=_endpoints_table)


@webhooks.command()
def change(
    endpoint: EndpointName,
    *,
    url: Annotated[str | None, typer.Option(help="Where to POST from now on.")] = None,
    name: Annotated[str | None, typer.Option(help="What to call it.")] = None,
    event: EventNames = None,
    enable: Annotated[
        bool | None,
        typer.Option("--enable/--disable", help="Tell it of nothing more, or again."),
    ] = None,
    json: Json = False,
) -> None:
    """Change an endpoint, disable it, or enable it again."""
    wanted = EndpointChange(url=url, name=name, event_types=event, enabled=enable)
    work = partial(
        endpoints.change,
        endpoint_id=endpoint_id_of(endpoint),
        wanted=wanted,
        tenant=None,
        reach=_reach(),
    )
    show.each([_ask(work)], json=json, table=_endpoints_table)


@webhooks.command()
def rotate(
    endpoint: EndpointName,
    grace_hours: Annotated[
        float, typer.Option(min=0, max=8_760, help="The old secret signs too for so long.")
    ] = 24.0,
    json: Json = False,
) -> None:
    """Give an endpoint a new secret and print it: it is shown this once."""
    work = partial(
        endpoints.rotate,
        endpoint_id=endpoint_id_of(endpoint),
        grace_s=grace_hours * HOUR_S,
        tenant=None,
    )
    _show_secret(_ask(work), json=json)


@webhooks.command()
def remove(endpoint: EndpointName) -> None:
    """Delete an endpoint. What waits for it is never sent."""
    endpoint_id = endpoint_id_of(endpoint)
    _ask(partial(endpoints.delete, endpoint_id=endpoint_id, tenant=None))
    typer.echo(f"{ENDPOINT}{endpoint_id} removed")


@webhooks.command("test")
def try_out(
    endpoint: EndpointName,
    event: Annotated[
        EventType, typer.Option("--event", "-e", help="Of which to send a sample.")
    ] = EventType.JOB_SUCCEEDED,
    json: Json = False,
) -> None:
    """Have a relay send a sample now, once, and print what the endpoint answered."""
    begin = partial(
        webhook_deliveries.begin_test,
        endpoint_id=endpoint_id_of(endpoint),
        event_type=event,
        tenant=None,
    )
    sent = _sent_test(_ask(begin))
    if json:
        show.as_json(sent)
    else:
        typer.echo(sent.error or f"it answered {sent.status_code}")
    if sent.state != "delivered":
        raise typer.Exit(1)


@webhooks.command()
def deliveries(
    endpoint: EndpointName,
    state: Annotated[DeliveryFilter | None, typer.Option(help="Only those.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="The maximum number.")] = 20,
    after: Annotated[str | None, typer.Option(help="The last id of the page before.")] = None,
    json: Json = False,
) -> None:
    """List what an endpoint was sent, or is to be, newest first."""
    page = partial(
        webhook_deliveries.list_deliveries,
        endpoint_id=endpoint_id_of(endpoint),
        tenant=None,
        state=None if state is None else state.value,
        limit=limit,
        after=None if after is None else delivery_id_of(after, "--after"),
    )
    found, _ = _ask(page)
    show.each(found, json=json, table=_deliveries_table)


@webhooks.command()
def replay(
    endpoint: EndpointName,
    deliveries: Annotated[
        list[str] | None,
        typer.Argument(metavar="DELIVERY...", help="Default: the oldest 1,000 that are dead."),
    ] = None,
    json: Json = False,
) -> None:
    """Send deliveries again that have ended, under the same ids; print how many."""
    work = partial(
        webhook_deliveries.replay,
        endpoint_id=endpoint_id_of(endpoint),
        ids=[delivery_id_of(name, "delivery") for name in deliveries] if deliveries else None,
        tenant=None,
    )
    num_replayed = _ask(work)
    show.as_json({"replayed": num_replayed}) if json else typer.echo(f"{num_replayed} sent again")


def _ask(work: Callable[[Connection], Answer]) -> Answer:
    with transaction() as connection:
        return work(connection)


def _reach() -> WebhookReach:
    return WebhookSettings().webhook_reach


def _host(url: str) -> str:
    """A name for it; a URL that is none is refused as such."""
    try:
        return urlsplit(url).hostname or "webhook"
    except ValueError:
        return "webhook"


def _sent_test(delivery_id: UUID) -> WebhookDelivery:
    """Raises Unavailable where no relay has sent it in time."""
    deadline_s = time.monotonic() + TEST_S
    while True:
        is_last = time.monotonic() >= deadline_s
        look = partial(webhook_deliveries.end_test, delivery_id=delivery_id, is_last=is_last)
        sent = _ask(look)
        if sent is not None:
            return sent
        if is_last:
            raise Unavailable("no relay has sent the sample in time: does one run?")
        time.sleep(LOOK_S)


def _show_secret(made: EndpointSecret, *, json: bool) -> None:
    name = f"{ENDPOINT}{made.endpoint.id}"
    if json:
        show.as_json({"id": name, "signing_secret": made.secret})
    else:
        typer.echo(f"{name}\n{made.secret}")


def _endpoints_table(found: Iterable[WebhookEndpoint]) -> None:
    table = show.new_table("endpoint", "tenant", "name", "state", "events", "url")
    for one in found:
        state = Text("enabled", style="green")
        if one.disabled_reason is not None:
            state = Text(f"disabled: {one.disabled_reason}", style="red")
        elif one.failing_since is not None:
            state = Text(f"failing since {_time(one.failing_since)}", style="yellow")
        events = "\n".join(one.event_types)
        table.add_row(f"{ENDPOINT}{one.id}", one.tenant, one.name, state, events, one.url)
    show.print_table(table)


def _deliveries_table(found: Iterable[WebhookDelivery]) -> None:
    table = show.new_table("delivery", "event", "of", "state", "attempts", "created", "last answer")
    for one in found:
        answer = one.error or ("" if one.status_code is None else str(one.status_code))
        table.add_row(
            f"{DELIVERY}{one.id}",
            one.event_type,
            str(one.object_id),
            one.state,
            str(one.num_attempts),
            _time(one.created_at),
            answer,
        )
    show.print_table(table)


def _time(moment: datetime) -> str:
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")
