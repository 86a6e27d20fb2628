"""Connections to Postgres: URLs, JSON both ways, notifications, columns of later releases."""
