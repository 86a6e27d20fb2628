"""Limits of tenants, and their broker users."""
