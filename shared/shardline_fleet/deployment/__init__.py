"""When a fleet gets another plan, which model has its workers, and how many it needs."""
