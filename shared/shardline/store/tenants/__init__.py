"""Tenants as rows: their quotas, weights, prices and roles of Postgres."""
