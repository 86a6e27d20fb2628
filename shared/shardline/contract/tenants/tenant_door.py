"""A tenant's own keys in Redis: what its user of the broker may write and read, and nothing else
there. Imports no Redis.

A request's tenant follows from the key that it was taken from, never from its content.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote, unquote

from shardline.base.errors import Invalid
from shardline.contract.keys import DOOR

TASKS = ":tasks"
MAX_CHARS = 128
"""Of a tenant's name as keys have it."""

CONNECTING = ("+ping", "+hello", "+select", "+multi", "+exec", "+client|setinfo", "+client|setname")
"""Commands of clients that use no key."""


@dataclass(frozen=True, slots=True, order=True)
class TenantDoor:
    """Names a tenant's keys. No two tenants have one in common: quoted names hold no colon."""

    tenant: str

    @classmethod
    def of(cls, tenant: str) -> TenantDoor:
        """Raises Invalid for a name that is too long for keys."""
        door = cls(tenant)
        if len(door.name) > MAX_CHARS:
            problem = f"as a part of keys it has {len(door.name)} characters, over {MAX_CHARS}"
            raise Invalid("tenant", problem, "Name one with a shorter name of plain letters")
        return door

    @classmethod
    def of_queue(cls, queue: object) -> TenantDoor | None:
        """The door with this queue of Celery; None for any other queue."""
        if not isinstance(queue, str) or not queue.startswith(DOOR) or not queue.endswith(TASKS):
            return None
        door = cls(unquote(queue[len(DOOR) : -len(TASKS)]))
        return door if door.tasks == queue else None

    @property
    def name(self) -> str:
        """The tenant's, without what patterns of keys and their parts are made of."""
        return quote(self.tenant, safe="")

    @property
    def requests(self) -> str:
        """Stream: as INTAKE, of this tenant alone."""
        return f"{DOOR}{self.name}:requests"

    @property
    def tasks(self) -> str:
        """Celery's queue: as INTAKE_QUEUE, of this tenant alone."""
        return f"{DOOR}{self.name}{TASKS}"

    @property
    def results(self) -> str:
        """What Celery's keys of this tenant's results begin with: its `global_keyprefix`."""
        return f"{DOOR}{self.name}:results:"

    def rules(self, secret: str) -> tuple[str, ...]:
        """Arguments of ACL SETUSER. `secret`: a password as such rules have it, with its sign.

        A key may be written by the commands of its type alone: a list in place of the stream would
        stop relays. kombu declares a queue before it sends, and notes it under its exchange; relays
        read no such note.
        """
        bindings = " ".join(
            f"~_kombu.{kind}.{self.tasks}" for kind in ("binding", "binding_permanent")
        )
        return (
            *("reset", "on", secret, *CONNECTING),
            *(f"&{self.results}*", "+subscribe", "+unsubscribe"),
            f"(+xadd ~{self.requests})",
            # A priority's list has three more characters.
            f"(+lpush +llen ~{self.tasks} ~{self.tasks}???)",
            f"(+sadd +smembers {bindings})",
            f"(+get +mget +del ~{self.results}*)",
        )
