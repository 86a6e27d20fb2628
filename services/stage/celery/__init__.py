"""Celery's side of a stage: its pool, its messages, the commands that it takes by remote control.
Knows no job's life."""
