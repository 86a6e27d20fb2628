"""`shardline keys create | list | rotate | revoke`: API keys of the gateway. Holds no logic: the
store does.

Anyone who may connect to Postgres may make keys: SHARDLINE_DATABASE_URL is the right to do so.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from sqlalchemy import Connection

from shardline.base.errors import Invalid
from shardline.cli import show
from shardline.cli.arguments import Json
from shardline.cli.database import transaction
from shardline.contract.api_key import Scope, parse_key, parse_scopes
from shardline.contract.job import DEFAULT_TENANT
from shardline.store import api_keys
from shardline.store.api_keys import Grant

DAY_S = 86_400.0
HOUR_S = 3_600.0

keys = typer.Typer(
    no_args_is_help=True,
    help="API keys of the gateway: who may come in, for which tenant, and for what.",
)

Answer = TypeVar("Answer")
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="Write the key into a new file, for you alone, and do not show it."
    ),
]


@keys.command()
def create(
    name: Annotated[str, typer.Argument(help="What to call it in lists: who uses it, and where.")],
    *,
    tenant: Annotated[
        str, typer.Option(help="The tenant of its jobs; made if there is none.")
    ] = DEFAULT_TENANT,
    scopes: Annotated[
        str, typer.Option(help=f"Some of {', '.join(Scope)}, which acts on all tenants.")
    ] = ",".join(scope for scope in Scope if scope is not Scope.ADMIN),
    days: Annotated[
        float | None, typer.Option(min=0, help="Valid for so long. Default: until it is revoked.")
    ] = None,
    from_file: Annotated[
        Path | None,
        typer.Option(help="Store the key in this file, made elsewhere; again does nothing."),
    ] = None,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="With --from-file: another key of this name stays valid for a day, "
            "instead of refusing.",
        ),
    ] = False,
    output: Output = None,
    json: Json = False,
) -> None:
    """Make a key and print it: it is shown this once, Postgres has its hash only."""
    expires_s = None if days is None else days * DAY_S
    grant = Grant(name=name, tenant=tenant, scopes=parse_scopes(scopes), expires_s=expires_s)
    if from_file is not None:
        given = from_file.read_text(encoding="utf-8").strip()
        grace_s = DAY_S if replace else None
        is_new = _write(lambda rows: api_keys.register(rows, given, grant, grace_s=grace_s))
        typer.echo(f"{parse_key(given).key_id} {'stored' if is_new else 'was there'}")
        return
    with _Destination(output) as destination:
        destination.hand_over(_write(lambda rows: api_keys.create(rows, grant)), json=json)


@keys.command("list")
def list_keys(json: Json = False) -> None:
    """List all keys, also those that are over; no secret is shown."""
    show.each(_write(api_keys.list_keys), json=json, table=show.keys_table)


@keys.command()
def rotate(
    name: Annotated[str, typer.Argument(help="Of the key to replace.")],
    grace_hours: Annotated[
        float, typer.Option(min=0, help="The old one stays valid for so long.")
    ] = 24.0,
    output: Output = None,
    json: Json = False,
) -> None:
    """Make a new key with the name, tenant, scopes and lifetime of an old one, which stays valid
    for a while."""
    with _Destination(output) as destination:
        key = _write(lambda rows: api_keys.rotate(rows, name, grace_s=grace_hours * HOUR_S))
        destination.hand_over(key, json=json)


@keys.command()
def revoke(
    name: Annotated[str, typer.Argument(help="Name, for all of its keys, or one key's id.")],
) -> None:
    """End keys. Gateways refuse them seconds later; what they have submitted goes on."""
    for key_id in _write(lambda rows: api_keys.revoke(rows, name)):
        typer.echo(f"{key_id} revoked")


class _Destination:
    """Tells where a new key goes. The file is made before the key is: a wrong path leaves no key
    behind."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._is_given = False

    def __enter__(self) -> _Destination:
        if self._path is not None:
            try:
                self._handle = os.open(
                    self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600
                )
            except OSError as error:
                remedy = "Name a file that there is not, in a folder that there is"
                raise Invalid("--output", f"{self._path}: {error.strerror}", remedy) from error
        return self

    def __exit__(self, *_error: object) -> None:
        if self._path is not None:
            os.close(self._handle)
            if not self._is_given:
                self._path.unlink()

    def hand_over(self, key: str, *, json: bool) -> None:
        """Print the key, or write it to its file. Call it once."""
        shown = {"id": parse_key(key).key_id}
        if self._path is None:
            show.as_json({**shown, "api_key": key}) if json else typer.echo(key)
        else:
            os.write(self._handle, key.encode())
            show.as_json({**shown, "file": str(self._path)}) if json else typer.echo(
                f"{shown['id']} in {self._path}"
            )
        self._is_given = True


def _write(work: Callable[[Connection], Answer]) -> Answer:
    with transaction() as connection:
        return work(connection)
