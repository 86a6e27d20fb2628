"""What devices measured, what a model asks of them, what pipelines would do. Knows no search."""

from shardline_costs.device_profile import (
    DeviceProfile,
    LayerTimes,
    Link,
    profile_of,
    read_profiles,
)
from shardline_costs.model_costs import ModelCosts
from shardline_costs.plan import PipelinePlan, Plan, Plans, StagePlan
from shardline_costs.workload import Goal, Workload

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
