"""The relay: a Celery worker that sends jobs to heads, takes requests in, and repairs. Touches no
tensor."""
