"""When jobs may run: pauses, schedules with their cron expressions, and the tables of both."""
