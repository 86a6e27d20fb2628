"""Celery's side of a stage: its pool, its messages, what it may be told by remote control. Knows no job's life."""
