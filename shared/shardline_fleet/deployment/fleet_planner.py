"""When a fleet gets another plan, and which: workers come, go and return. Pure; knows no clock and
no server.

A plan cuts the model into stages, for each of its pipelines in another way, and gives each worker
the place of one. Workers of equal places are in replicas of a pipeline, or spares: a head takes any
that is free. A new cut makes every stage load other layers, so it must pay.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import msgspec

from shardline_costs.device_profile import DeviceProfile, check_profiles
from shardline_costs.model_costs import ModelCosts
from shardline_costs.plan import Plan
from shardline_costs.prediction import Predictor, StageAssignment
from shardline_costs.workload import Workload
from shardline_fleet.planner.fleet import Fleet, share_memory
from shardline_fleet.planner.load_sharing import LoadSharing
from shardline_fleet.planner.planning import make_plans_that_fit, smaller_loads

LEAST_GAIN = 1.1
"""A new cut must make the fleet this many times as fast as it is."""
Split = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Layers [first, stop) of each stage, one pipeline after the other, and the place of each
    worker's stage.

    No two entries are equal: workers that hold the whole model all have the place of one.
    """

    split: Split
    stages: Mapping[str, int]
    tokens_per_s: float | None = None

    @property
    def pipelines(self) -> list[range]:
        """The places of each pipeline: one begins where layers begin again."""
        begins = [place for place, (first, _) in enumerate(self.split) if first == 0]
        return [range(begin, end) for begin, end in pairwise([*begins, len(self.split)])]

    def workers(self, place: int) -> list[str]:
        """Those that hold this stage, by name."""
        return sorted(worker for worker, its in self.stages.items() if its == place)

    def __str__(self) -> str:
        """Layers as SHARDLINE_SPLIT has them, of each pipeline."""
        shown = [f"{first}-{stop - 1}" for first, stop in self.split]
        return " + ".join(",".join(shown[place] for place in places) for places in self.pipelines)


@dataclass(frozen=True, slots=True)
class FleetPlanner:
    """A model, the workers that are here with their profiles, and the load to plan for."""

    model: ModelCosts
    profiles: Mapping[str, DeviceProfile]
    workload: Workload

    def replan(self, now: Deployment | None, *, may_improve: bool) -> Deployment | None:
        """What should run instead of what runs now, or None if that should stay.

        A fleet that misses a stage gets a new cut at once, if its workers hold the model. Else, if
        `may_improve`, it gets one that pays: workers have come or gone, or their devices have
        drifted. Else new workers become spares. Raises Invalid if the workers do not hold the
        model, or the profile of one is none that a device has.
        """
        check_profiles(self._named())
        if now is None or not self._is_whole(now):
            return self._best(now)
        if may_improve:
            best = self._best(now)
            pays = (
                best.tokens_per_s is not None
                and best.tokens_per_s >= LEAST_GAIN * self._tokens_per_s(now)
            )
            if pays and (best.split, best.stages) != (now.split, now.stages):
                return best
        then = self._with_spares(now, now.tokens_per_s)
        return then if set(then.stages) - set(now.stages) else None

    def _best(self, now: Deployment | None) -> Deployment:
        best = make_plans_that_fit(self.model, self._named(), self.workload).best
        places: dict[tuple[int, int], int] = {}
        stages: dict[str, int] = {}
        for stage in (stage for pipeline in best.pipelines for stage in pipeline.stages):
            place = places.setdefault((stage.first, stage.stop), len(places))
            stages |= {device.device: place for device in stage.devices}
        split = tuple(places)
        deployment = Deployment(
            split=split, stages=self._unmoved(split, stages, now), tokens_per_s=best.tokens_per_s
        )
        return self._with_spares(deployment, best.tokens_per_s)

    def _named(self) -> list[DeviceProfile]:
        """Returns profiles with their workers' names as devices."""
        return [
            msgspec.structs.replace(profile, device=worker)
            for worker, profile in sorted(self.profiles.items())
        ]

    def _unmoved(
        self, split: Split, stages: Mapping[str, int], now: Deployment | None
    ) -> dict[str, int]:
        """The same places, dealt among equal devices so that as many workers as can be keep their
        layers."""
        if now is None:
            return dict(stages)
        kinds = self._kinds()
        open_places = defaultdict[object, Counter[int]](Counter)
        for worker, place in stages.items():
            open_places[kinds[worker]][place] += 1
        dealt: dict[str, int] = {}
        for worker in [each for each in sorted(self.profiles) if each in now.stages]:
            held = now.split[now.stages[worker]]
            places = open_places[kinds[worker]]
            if held in split and places[split.index(held)] > 0:
                dealt[worker] = split.index(held)
                places[dealt[worker]] -= 1
        # Those that the plan uses come before those that it leaves out.
        for worker in sorted(
            set(self.profiles) - set(dealt), key=lambda each: (each not in stages, each)
        ):
            left = +open_places[kinds[worker]]
            if left:
                dealt[worker] = min(left)
                open_places[kinds[worker]][dealt[worker]] -= 1
        return dealt

    def _kinds(self) -> dict[str, object]:
        """Returns values by worker: those of one value may change places. Equal hardware is not
        enough: a device may have drifted."""
        groups = Fleet.of(share_memory(self._named())).groups
        return {
            profile.device: (number, profile.machine)
            for number, group in enumerate(groups)
            for device in group
            for profile in device
        }

    def _with_spares(self, deployment: Deployment, tokens_per_s: float | None) -> Deployment:
        """Workers without a stage get one that their memory holds: with which there is one more
        pipeline, or of which there are fewest."""
        stages = {
            worker: place for worker, place in deployment.stages.items() if worker in self.profiles
        }
        held = Counter(stages.values())

        def rank(place: int) -> tuple[bool, int, int]:
            (own,) = [places for places in deployment.pipelines if place in places]
            completes = all(held[place] < held[other] for other in own if other != place)
            return not completes, held[place], place

        for worker in sorted(set(self.profiles) - set(stages)):
            places = [
                place
                for place in range(len(deployment.split))
                if self._fits(worker, deployment.split[place])
            ]
            if places:
                stages[worker] = min(places, key=rank)
                held[stages[worker]] += 1
        return Deployment(split=deployment.split, stages=stages, tokens_per_s=tokens_per_s)

    def _fits(self, worker: str, layers: tuple[int, int]) -> bool:
        least = replace(self.workload, concurrency=1)
        (profile,) = [each for each in share_memory(self._named()) if each.device == worker]
        return Predictor(self.model, least).cost(profile, 1).fits(*layers)

    def _is_whole(self, deployment: Deployment) -> bool:
        """Whether a pipeline can still be formed."""
        is_cut_of_it = deployment.split[-1][1] == len(self.model.layers)
        return is_cut_of_it and bool(self._formed(deployment))

    def _formed(self, deployment: Deployment) -> list[list[StageAssignment]]:
        """Returns all pipelines that its workers that are here can form, each by separate
        devices."""
        profiles = {profile.device: profile for profile in share_memory(self._named())}
        formed = []
        for places in deployment.pipelines:
            here = [
                [profiles[each] for each in deployment.workers(place) if each in profiles]
                for place in places
            ]
            layers = [deployment.split[place] for place in places]
            formed += [
                [
                    StageAssignment((device,), *part)
                    for device, part in zip(devices, layers, strict=True)
                ]
                for devices in zip(*here, strict=False)
            ]
        return formed

    def _tokens_per_s(self, deployment: Deployment) -> float:
        """Predicted of all pipelines that can be formed, with as many requests of the load as they
        hold."""
        pipelines = self._formed(deployment)
        least = LoadSharing(self.model, self.workload).predictor(1)
        able = [stages for stages in pipelines if least.fits(stages)]
        for load in smaller_loads(self.workload):
            if able and (plan := LoadSharing(self.model, load).predict(able)) is not None:
                return plan.tokens_per_s
        return Plan.of(map(least.predict, pipelines), 1).tokens_per_s
