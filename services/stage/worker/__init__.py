"""The Celery side of a stage: pool, claims, registry, control."""
