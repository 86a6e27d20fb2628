"""Webhook endpoints of tenants, and what each of them is to hear."""
