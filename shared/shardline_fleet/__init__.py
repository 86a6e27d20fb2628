"""Plans for fleets of unlike devices: the planner, the simulator, and their commands."""
