"""The planner: which device computes which layers, from measured times. Knows no torch and starts
nothing."""

from shardline_fleet.planner.device_profile import (
    DeviceProfile,
    LayerTimes,
    Link,
    profile_of,
    read_profiles,
)
from shardline_fleet.planner.model_costs import ModelCosts
from shardline_fleet.planner.plan import PipelinePlan, Plan, Plans, StagePlan
from shardline_fleet.planner.planning import make_plans, make_plans_that_fit
from shardline_fleet.planner.workload import Goal, Workload

__all__ = [
    "DeviceProfile",
    "Goal",
    "LayerTimes",
    "Link",
    "ModelCosts",
    "PipelinePlan",
    "Plan",
    "Plans",
    "StagePlan",
    "Workload",
    "make_plans",
    "make_plans_that_fit",
    "profile_of",
    "read_profiles",
]
