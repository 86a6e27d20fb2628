"""Queries over many jobs: costs, demand, growth, reports."""
