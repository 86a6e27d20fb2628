"""The commands top and doctor: what an installation does now, and what is wrong with it."""
