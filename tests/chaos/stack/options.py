"""What one chaos run is asked to do, and how much room its stacks get. Knows no stack."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tests.chaos.load.undisturbed import Compared
from tests.chaos.load.workload import LoadName

TIME_SCALE = 0.25
KV_MIB = 64
"""Of each stage: more than the lab's load ever needs."""
SMALL_KV_MIB: Mapping[str, int] = MappingProxyType(
    {"float32": 6, "bfloat16": 4, "int8": 4, "int4": 4}
)
"""Of each stage by dtype, for users: a fraction of what the open jobs could use. Half of it holds
the longest twice."""
FLEET_MIB: Mapping[str, int] = MappingProxyType(
    {"float32": 21, "bfloat16": 12, "int8": 12, "int4": 12}
)
"""Of each worker by dtype, for users: no worker holds the model with the KV of several jobs, any
two do at any cut."""
KV_OFFLOAD_MIB = 2
"""Of each stage: less than its preempted jobs could use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What stack to hurt, and for how long."""

    seed: int
    minutes: float
    faults: str = "all"
    load: LoadName = LoadName.USERS
    dtype: str = "float32"
    more_dtypes: tuple[str, ...] = ()
    """Of a fleet: one worker more for each, of this dtype."""
    stages: int = 2
    replicas: int = 1
    workers: int | None = None
    """So many stages that get their layers from a plan, in place of numbered ones."""
    time_scale: float = TIME_SCALE
    """Of the protocol's times: a larger one where the machine is busy with other things."""
    devices: str | None = None
    """Of the stages, in place of cores: SHARDLINE_DEVICES. May name the test accelerator,
    `toy:0`."""
    streamed_layers: int = 0
    """Of each stage, whose weights it reads in every step."""
    tp: int = 1
    """Ranks of each stage of the first stack, which all share the cores."""
    adapters: int = 0
    """Of each model, of which a stage holds half."""
    canvas: bool = True
    """Of the users' load: a result backend, and a Celery app whose tasks follow jobs."""
    exact: bool = True
    """False: attention without our kernel, so that a resume may give other tokens."""
    patience_s: float = 180.0
    """Everything must end so soon after the last fault."""
    model: Path | None = None
    """Another one than the demo model, under its name."""
    insecure: bool = False
    """Hops without CURVE: frames can be lost and repeated then."""
    redis_lasts: bool = False
    """No fault harms what Redis holds: what it has taken is never sent again."""

    @property
    def keeps_states(self) -> bool:
        """Whether the model has recurrent layers: what they keep is not offloaded."""
        if self.model is None:
            return False
        config = json.loads((self.model / "config.json").read_text())
        return "linear_attention" in config.get("layer_types", ())

    @property
    def num_started(self) -> int:
        """Workers of the fleet, or stages of a pipeline."""
        if self.workers is not None:
            return self.workers + len(self.more_dtypes)
        return self.stages if self.devices is None else len(self.devices.split())

    @property
    def compared(self) -> Compared:
        """What of a job must be the same as undisturbed. Accelerators promise no bits, but their
        tokens hold."""
        if self.devices is not None:
            return Compared.TOKENS
        if self.more_dtypes:
            # Which dtype a layer has is for the plan to say, and changes: the judge compares what
            # is of one exactness.
            return Compared.NOTHING
        return Compared.BITS if self.exact else Compared.NOTHING
