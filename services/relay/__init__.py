"""The relay: outbox, sweep and intake around the rows."""
