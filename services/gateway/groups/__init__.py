"""Requests that stand for several jobs."""
