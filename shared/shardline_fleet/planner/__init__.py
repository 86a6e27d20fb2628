"""The planner: which device computes which layers, by what they cost. Starts nothing."""

from shardline_fleet.planner.planning import make_plans, make_plans_that_fit

__all__ = ["make_plans", "make_plans_that_fit"]
