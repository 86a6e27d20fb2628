"""Jobs that others wait for, and their table."""
