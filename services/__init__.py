"""Shardline's processes: gateway, relay, stage and standalone. README.md beside this file follows a prompt through them."""
