"""Plans of cells, by the rules of the product's fleets; each is made once, since equal cells have equal ones."""

from __future__ import annotations

from collections.abc import Mapping

from shardline.errors import Invalid
from shardline.planner import DeviceProfile, ModelCosts, Workload
from shardline.planner.fleet_planner import Deployment, FleetPlanner


class PlanBook:
    """Plans for a load that is the coordinator's: the default one."""

    def __init__(self, model: ModelCosts) -> None:
        self._model = model
        self._made: dict[tuple[object, ...], Deployment | None] = {}

    def replan(
        self, kind: int, profiles: Mapping[str, DeviceProfile], now: Deployment | None, *, may_improve: bool
    ) -> Deployment | None:
        """What should run in a cell of this kind whose present workers have these profiles; None: what runs now.

        Raises Invalid if they do not hold the model.
        """
        running = None if now is None else (now.split, frozenset(now.stages.items()))
        key = kind, frozenset(profiles), running, may_improve
        if key not in self._made:
            planner = FleetPlanner(self._model, profiles, Workload())
            self._made[key] = planner.replan(now, may_improve=may_improve)
        return self._made[key]

    def first(self, kind: int, profiles: Mapping[str, DeviceProfile]) -> Deployment:
        """The plan of a cell's first moment. Raises Invalid if its devices do not hold the model."""
        try:
            deployment = self.replan(kind, profiles, None, may_improve=False)
        except Invalid as error:
            raise Invalid(f"cells[{kind}].devices", error.problem, error.remedy) from error
        assert deployment is not None
        return deployment
