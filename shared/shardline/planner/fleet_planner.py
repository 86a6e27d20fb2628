"""When a fleet gets another plan, and which: workers come, go and return. Pure; knows no clock and no server.

A plan cuts the model into stages and gives each worker the place of one. Workers of equal places are in pipelines of
their own, or spares: a head takes whoever is free. A new cut makes every stage load other layers, so it must pay.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from shardline.planner.device_profile import DeviceProfile
from shardline.planner.fleet import Fleet, share_memory
from shardline.planner.model_costs import ModelCosts
from shardline.planner.planning import make_plans_that_fit, smaller_loads
from shardline.planner.prediction import Assigned, Predictor
from shardline.planner.workload import Workload
from shardline.rounding import ceil_div

LEAST_GAIN = 1.1
"""A new cut must make the fleet this many times as fast as it is."""
Split = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Layers [first, stop) of each stage, and the place of each worker's stage."""

    split: Split
    stages: Mapping[str, int]
    tokens_per_s: float | None = None

    def workers(self, place: int) -> list[str]:
        """Those that hold this stage, by name."""
        return sorted(worker for worker, its in self.stages.items() if its == place)


@dataclass(frozen=True, slots=True)
class FleetPlanner:
    """A model, the workers that are here with their profiles, and the load to plan for."""

    model: ModelCosts
    profiles: Mapping[str, DeviceProfile]
    workload: Workload

    def replan(self, now: Deployment | None, *, may_improve: bool) -> Deployment | None:
        """What should run instead of what runs now, or None if that should stay.

        A fleet that misses a stage gets a new cut at once, if its workers hold the model. Else, if `may_improve`, it
        gets one that pays: workers have come or gone, or their devices have drifted. Else new workers become spares.
        Raises Invalid if the workers do not hold the model.
        """
        if now is None or not self._is_whole(now):
            return self._best(now)
        if may_improve:
            best = self._best(now)
            pays = best.tokens_per_s is not None and best.tokens_per_s >= LEAST_GAIN * self._tokens_per_s(now)
            if pays and (best.split, best.stages) != (now.split, now.stages):
                return best
        then = self._with_spares(now, now.tokens_per_s)
        return then if set(then.stages) - set(now.stages) else None

    def _best(self, now: Deployment | None) -> Deployment:
        best = make_plans_that_fit(self.model, self._named(), self.workload).best
        split = tuple((stage.first, stage.stop) for stage in best.stages)
        stages = {device.device: place for place, stage in enumerate(best.stages) for device in stage.devices}
        deployment = Deployment(split=split, stages=self._unmoved(split, stages, now), tokens_per_s=best.tokens_per_s)
        return self._with_spares(deployment, best.tokens_per_s)

    def _named(self) -> list[DeviceProfile]:
        """Profiles whose devices bear the names of their workers."""
        return [msgspec.structs.replace(profile, device=worker) for worker, profile in sorted(self.profiles.items())]

    def _unmoved(self, split: Split, stages: Mapping[str, int], now: Deployment | None) -> dict[str, int]:
        """The same places, dealt among equal devices so that as many workers as can be keep their layers."""
        if now is None:
            return dict(stages)
        kinds, open_places = self._kinds(), defaultdict[object, Counter[int]](Counter)
        for worker, place in stages.items():
            open_places[kinds[worker]][place] += 1
        dealt: dict[str, int] = {}
        for worker in [each for each in sorted(self.profiles) if each in now.stages]:
            held, places = now.split[now.stages[worker]], open_places[kinds[worker]]
            if held in split and places[split.index(held)] > 0:
                dealt[worker] = split.index(held)
                places[dealt[worker]] -= 1
        # Those that the plan uses come before those that it leaves out.
        for worker in sorted(set(self.profiles) - set(dealt), key=lambda each: (each not in stages, each)):
            left = +open_places[kinds[worker]]
            if left:
                dealt[worker] = min(left)
                open_places[kinds[worker]][dealt[worker]] -= 1
        return dealt

    def _kinds(self) -> dict[str, object]:
        """By worker: those of one value may change places. Equal hardware is not enough: a device may have drifted."""
        groups = Fleet.of(Predictor(self.model, self.workload), share_memory(self._named())).groups
        return {
            profile.device: (number, profile.machine)
            for number, group in enumerate(groups)
            for device in group
            for profile in device
        }

    def _with_spares(self, deployment: Deployment, tokens_per_s: float | None) -> Deployment:
        """Workers without a stage get one of which there are fewest, if their memory holds it."""
        stages = {worker: place for worker, place in deployment.stages.items() if worker in self.profiles}
        held = Counter(stages.values())
        for worker in sorted(set(self.profiles) - set(stages)):
            places = [place for place in range(len(deployment.split)) if self._fits(worker, deployment.split[place])]
            if places:
                stages[worker] = min(places, key=lambda place: (held[place], place))
                held[stages[worker]] += 1
        return Deployment(split=deployment.split, stages=stages, tokens_per_s=tokens_per_s)

    def _fits(self, worker: str, layers: tuple[int, int]) -> bool:
        least = replace(self.workload, concurrency=1)
        (profile,) = [each for each in share_memory(self._named()) if each.device == worker]
        return Predictor(self.model, least).cost(profile, 1, least.steps(1)).fits(*layers)

    def _is_whole(self, deployment: Deployment) -> bool:
        """Whether a pipeline can still be formed."""
        here = {place for worker, place in deployment.stages.items() if worker in self.profiles}
        is_cut_of_it = deployment.split[-1][1] == len(self.model.layers)
        return is_cut_of_it and len(here) == len(deployment.split)

    def _tokens_per_s(self, deployment: Deployment) -> float:
        """Predicted of as many pipelines as its workers that are here can form, each by its own devices."""
        profiles = {profile.device: profile for profile in share_memory(self._named())}
        here = [
            [profiles[worker] for worker in deployment.workers(place) if worker in profiles]
            for place in range(len(deployment.split))
        ]
        pipelines = [
            [Assigned((device,), *layers) for device, layers in zip(devices, deployment.split, strict=True)]
            for devices in zip(*here, strict=False)
        ]
        share = replace(self.workload, concurrency=ceil_div(self.workload.concurrency, len(pipelines)))
        return sum(self._pipeline_tokens_per_s(stages, share) for stages in pipelines)

    def _pipeline_tokens_per_s(self, stages: Sequence[Assigned], load: Workload) -> float:
        """With as many requests of the load as its devices hold."""
        predictors = [Predictor(self.model, each) for each in smaller_loads(load)]
        predictor = next((each for each in predictors if each.fits(stages)), predictors[-1])
        return predictor.predict(stages).tokens_per_s
