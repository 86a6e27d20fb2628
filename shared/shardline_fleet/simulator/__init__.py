"""The simulator: a fleet of any size on a virtual clock, with the product's own scheduler, planner
and fleet rules."""
