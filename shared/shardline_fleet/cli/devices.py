"""`shardline devices`: what the workers of fleets have measured of their devices and of the links
between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer

from shardline.base.errors import Invalid
from shardline.cli import show
from shardline.cli.arguments import Json
from shardline.cli.database import transaction
from shardline.store import fleets
from shardline.store.fleets import FleetPlan, FleetWorker
from shardline_costs import Link, ModelCosts
from shardline_costs.device_profile import profile_of
from shardline_costs.rates import Rates

GIB = 1 << 30


class FleetDevice(msgspec.Struct, frozen=True, kw_only=True):
    """The device of one worker, as it measured it with one model."""

    worker: str
    model: str
    device: str
    """As SHARDLINE_DEVICE names it."""
    host: str
    machine: str
    """Devices with the same value are one machine: links lead from machine to machine."""
    dtype: str
    memory_bytes: int
    """Free when it was measured."""
    layers: tuple[int, int] | None
    """[first, stop) by the plan; None if the plan gives it none."""
    rates: Rates
    links: dict[str, Link]


def devices(
    *,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Default: all that fleets serve.")
    ] = None,
    json: Json = False,
) -> None:
    """Show the devices of all fleets: memory, speed, layers, and the links between their
    machines."""
    with transaction() as connection:
        names = [model] if model else fleets.fleets(connection)
        plans = fleets.all_plans(connection)
        workers = [
            (name, worker) for name in names for worker in fleets.workers_of(connection, name)
        ]
    found = []
    for name, worker in workers:
        try:
            found.append(_device(worker, name, plans.get(name, fleets.NO_PLAN)))
        except (Invalid, msgspec.MsgspecError) as error:
            typer.echo(f"{worker.worker} is in no plan: {error}", err=True)
    show.each(found, json=json, table=_draw)


def _device(worker: FleetWorker, model: str, plan: FleetPlan) -> FleetDevice:
    profile = profile_of(worker.profile, "profile")
    place = plan.stages.get(worker.worker)
    return FleetDevice(
        worker=worker.worker,
        model=model,
        device=profile.device,
        host=profile.host,
        machine=profile.machine,
        dtype=profile.dtype,
        memory_bytes=profile.memory_bytes,
        layers=None if place is None else plan.split[place],
        rates=Rates.of(profile, msgspec.convert(worker.shapes, ModelCosts)),
        links=profile.links,
    )


def _draw(found: Sequence[FleetDevice]) -> None:
    if not found:
        typer.echo("no worker of a fleet is here: stages with SHARDLINE_LAYERS=planned join one")
        return
    table = show.new_table(
        "worker",
        "device",
        "host",
        "model",
        "dtype",
        "memory",
        "weights",
        "KV",
        "products",
        "layers",
    )
    for each in found:
        rows, flops = each.rates.flops[-1]
        kv = each.rates.kv_bytes_per_s
        table.add_row(
            *(each.worker, each.device, each.host, each.model, each.dtype),
            f"{each.memory_bytes / GIB:.1f} GiB",
            f"{each.rates.weight_bytes_per_s / 1e9:.1f} GB/s",
            "" if kv is None else f"{kv / 1e9:.1f} GB/s",
            f"{flops / 1e9:,.0f} GFLOP/s at {rows:.0f} rows",
            "" if each.layers is None else f"{each.layers[0]}-{each.layers[1] - 1}",
        )
    show.print_table(table)
    for one, other, link in _links(found):
        typer.echo(
            f"{one} to {other}: {link.latency_s * 1e3:.2f} ms, {link.bytes_per_s / 1e6:,.0f} MB/s"
        )


def _links(found: Sequence[FleetDevice]) -> list[tuple[str, str, Link]]:
    """Between machines, by the names of their hosts, each direction once."""
    hosts = {each.machine: each.host for each in found}
    measured = {
        (each.machine, to): link for each in found for to, link in each.links.items() if to in hosts
    }
    return [(hosts[one], hosts[to], link) for (one, to), link in sorted(measured.items())]
