"""What every process uses: errors, settings, clocks, logs, metrics, traces, Redis, Celery's
broker."""
