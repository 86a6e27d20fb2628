"""The batch: its states, its ids and its tables."""
