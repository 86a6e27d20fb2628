"""What the relay writes down about all jobs together: counts, sizes of tables, rates."""
