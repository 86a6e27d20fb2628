"""Shardline's processes: gateway, relay, stage, standalone; and their simulator. README.md follows
a prompt through."""
