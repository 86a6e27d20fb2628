"""What is paused, and schedules: rows that operators and tenants make, list and delete."""
