"""A stage: a Celery worker pinned to one device, with a resident engine that runs one shard."""
