"""Pauses and schedules: bodies of their routes."""
