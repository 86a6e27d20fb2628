"""Notices of ended jobs: webhooks, and a stream in Redis. Touches no job."""
