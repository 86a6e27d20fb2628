"""Anthropic's API: its requests become jobs, and jobs its messages."""
