"""A relay's turn to send, which one relay has at a time, and what has to be done in it, as one
statement tells. Knows no message.

Locks: the advisory lock STAMP_LOCK, until the transaction ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, text

STAMP_LOCK = 7_305_793_412
"""Advisory lock: relays stamp one after the other, so that together they keep to the window."""

# What is planned for thousands of tenants is not worth compiling for those that there are.
TAKE_TURN = text(f"""
SELECT pg_try_advisory_xact_lock({STAMP_LOCK}) AS is_ours,
    (SELECT count(*) > 1 FROM (SELECT FROM tenants LIMIT 2) AS few) AS has_rivals,
    EXISTS (SELECT FROM pauses) AS is_paused,
    EXISTS (SELECT FROM jobs WHERE state = 'queued' AND paused_by IS NOT NULL) AS is_held,
    set_config('jit', 'off', true)
""")  # noqa: S608 (a constant of ours)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayTurn:
    """What a transaction of a relay has found at its beginning."""

    is_ours: bool
    """No other relay is stamping, nor will before this transaction ends."""
    has_rivals: bool
    """There are several tenants."""
    is_paused: bool
    """Something is paused."""
    is_held: bool
    """Jobs wait for the end of a pause."""


def take_turn(connection: Connection) -> RelayTurn:
    """Takes this transaction's turn, if no other relay has it. A later statement looks for what is
    to be stamped: it sees what the last turn did."""
    row = connection.execute(TAKE_TURN).one()
    return RelayTurn(
        is_ours=row.is_ours,
        has_rivals=row.has_rivals,
        is_paused=row.is_paused,
        is_held=row.is_held,
    )
