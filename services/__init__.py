"""Shardline's processes: gateway, relay, stage, standalone. README.md beside this file follows a prompt through."""
