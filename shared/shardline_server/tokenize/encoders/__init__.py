"""Prompts of encoders."""
