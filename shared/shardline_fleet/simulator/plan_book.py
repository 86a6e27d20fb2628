"""Plans of cells, by the rules of the product's fleets; each is made once, since equal cells have
equal ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from typing_extensions import override

from shardline.base.errors import Invalid
from shardline.contract.fleet.split import parse_split
from shardline_costs import DeviceProfile, ModelCosts, Workload
from shardline_costs.prediction import Predictor
from shardline_fleet.deployment.fleet_planner import Deployment, FleetPlanner
from shardline_fleet.planner.fleet import share_memory


class PlanBook:
    """Plans for a load that is the coordinator's: the default one."""

    def __init__(self, model: ModelCosts) -> None:
        self._model = model
        self._made: dict[tuple[object, ...], Deployment | None] = {}

    def replan(
        self,
        kind: int,
        profiles: Mapping[str, DeviceProfile],
        now: Deployment | None,
        *,
        may_improve: bool,
    ) -> Deployment | None:
        """Returns what should run in a cell of this kind with present workers of these profiles;
        None: what runs now.

        Raises Invalid if they do not hold the model.
        """
        running = None if now is None else (now.split, frozenset(now.stages.items()))
        key = kind, frozenset(profiles), running, may_improve
        if key not in self._made:
            planner = FleetPlanner(self._model, profiles, Workload())
            self._made[key] = planner.replan(now, may_improve=may_improve)
        return self._made[key]

    def first(self, kind: int, profiles: Mapping[str, DeviceProfile]) -> Deployment:
        """The plan of a cell's first moment. Raises Invalid if its devices do not hold the
        model."""
        try:
            deployment = self.replan(kind, profiles, None, may_improve=False)
        except Invalid as error:
            raise Invalid(f"cells[{kind}].devices", error.problem, error.remedy) from error
        assert deployment is not None
        return deployment


class SplitByHand(PlanBook):
    """One split for all cells. Its stages are dealt to the devices of a cell in their order, as
    often as there are devices: so does `make up`. Who is lost keeps its stage."""

    def __init__(self, model: ModelCosts, split: str) -> None:
        """Raises Invalid if the split does not cover the model."""
        super().__init__(model)
        try:
            self._split = tuple(
                (each.start, each.stop) for each in parse_split(split, len(model.layers))
            )
        except Invalid as error:
            raise Invalid("split", error.problem, error.remedy) from error

    @override
    def replan(
        self,
        kind: int,
        profiles: Mapping[str, DeviceProfile],
        now: Deployment | None,
        *,
        may_improve: bool,
    ) -> Deployment | None:
        stages = {name: int(name) % len(self._split) for name in profiles}
        if now is None:
            self._check(profiles, stages)
            return Deployment(split=self._split, stages=stages)
        if stages.keys() <= now.stages.keys():
            return None
        return Deployment(split=self._split, stages={**now.stages, **stages})

    def _check(self, profiles: Mapping[str, DeviceProfile], stages: Mapping[str, int]) -> None:
        num_stages = len(self._split)
        if len(set(stages.values())) < num_stages:
            problem = f"{len(profiles)} devices for {num_stages} stages"
            raise Invalid(
                "split", problem, "Give each cell more devices, or the split fewer stages"
            )
        one = Predictor(self._model, replace(Workload(), concurrency=1))
        for profile in share_memory(list(profiles.values())):
            first, stop = self._split[stages[profile.device]]
            if not one.cost(profile, num_stages).fits(first, stop):
                problem = (
                    f"the memory of {profile.hardware} does not hold layers {first}-{stop - 1}"
                )
                raise Invalid("split", problem, "Give that stage fewer layers")
