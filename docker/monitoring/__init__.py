"""Grafana's dashboards, one line a panel: `python -m docker.monitoring` writes them. Prometheus's
files are by hand."""
