"""Prompts of rows become token ids, also those that hold the texts of other jobs."""
