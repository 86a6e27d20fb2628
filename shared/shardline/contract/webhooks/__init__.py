"""Webhooks: their events and secrets, the addresses that they may go to, and their tables."""
