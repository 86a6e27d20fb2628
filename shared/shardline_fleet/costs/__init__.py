"""What devices measured, what a model asks of them, what pipelines would do. Knows no search."""

from shardline_fleet.costs.device_profile import (
    DeviceProfile,
    LayerTimes,
    Link,
    profile_of,
    read_profiles,
)
from shardline_fleet.costs.model_costs import ModelCosts
from shardline_fleet.costs.plan import PipelinePlan, Plan, Plans, StagePlan
from shardline_fleet.costs.workload import Goal, Workload

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
    "profile_of",
    "read_profiles",
]
