"""Objects of KEDA: workers by the queue, asked of Postgres with the relay's own statements. Knows
no file."""

from __future__ import annotations

from docker.kubernetes.workloads import CONFIG, Manifest, manifest
from shardline.store.statistics.demand import OLDEST_QUEUED
from shardline_server.store.sweeps import COUNTS

OLDEST_S = 60
"""While the oldest job has waited for longer, workers are added: twice as many at twice the
wait."""
JOBS_PER_WORKER = 32
"""Running: workers that these ask for are not taken away, though nothing waits. Half of the seats
of a pipeline, for pipelines of two."""
MAX_REPLICAS = 8
SLOW_DOWN = {
    "stabilizationWindowSeconds": 600,
    "policies": [{"type": "Pods", "value": 1, "periodSeconds": 120}],
}
"""A worker that goes costs its pipeline its KV, perhaps a new cut: one in two minutes, and not for
a short pause."""

_WAITING = OLDEST_QUEUED.text.strip()
_COUNTED = COUNTS.text.strip()
OLDEST = f"SELECT coalesce(max(seconds), 0) FROM ({_WAITING}) AS waiting"  # noqa: S608 (ours)
RUNNING = (
    f"SELECT coalesce(sum(number), 0) FROM ({_COUNTED}) AS counted "  # noqa: S608 (ours)
    "WHERE state = 'running'"
)
"""Both of all models together: the workers are one fleet."""


def authentication() -> Manifest:
    """KEDA reads the URL of Postgres from the Secret that heads read it from."""
    target = {"parameter": "connection", "name": CONFIG, "key": "database_url"}
    return manifest(
        "keda.sh/v1alpha1", "TriggerAuthentication", "stage", spec={"secretTargetRef": [target]}
    )


def scaled_object(min_replicas: int) -> Manifest:
    """The number of stages."""
    spec = {
        "scaleTargetRef": {"name": "stage"},
        "minReplicaCount": min_replicas,
        "maxReplicaCount": MAX_REPLICAS,
        "pollingInterval": 15,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": {"scaleDown": SLOW_DOWN}}},
        "triggers": [
            _trigger(OLDEST, OLDEST_S, "Value"),
            _trigger(RUNNING, JOBS_PER_WORKER, "AverageValue"),
        ],
    }
    return manifest("keda.sh/v1alpha1", "ScaledObject", "stage", spec=spec)


def _trigger(query: str, target: int, kind: str) -> Manifest:
    return {
        "type": "postgresql",
        "metricType": kind,
        "metadata": {"query": query, "targetQueryValue": str(target)},
        "authenticationRef": {"name": "stage"},
    }
