"""Shardline: durable LLM inference over Celery, Redis and Postgres. This package is the client and the contracts."""

__version__ = "0.1.0"
