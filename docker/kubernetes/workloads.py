"""Turns a service of compose.yaml into the objects of Kubernetes that run it. Knows no file."""

from __future__ import annotations

import math
from typing import Any

from docker.kubernetes.compose import SECRETS, HealthCheck, Service

Manifest = dict[str, Any]
CONFIG = "shardline"
"""Name of the ConfigMap with all settings, and of the Secret with a key for each of Compose's
files."""
MODEL_CLAIM = "shardline-model"
APP_USER = 10001
"""As docker/Dockerfile makes it."""
SERVER_USERS = {"redis": 999, "postgres": 999}
"""In their official images."""
SECRET_MODE = 0o444
TWINS = {"gateway": 2, "relay": 2}
"""Where Compose starts one: a node may be drained without a pause."""
ACCELERATORS = {"stage-cuda": "nvidia.com/gpu", "stage-rocm": "amd.com/gpu"}
METRICS_PORT = 9100


def deployment(service: Service) -> Manifest:
    """A service that keeps nothing."""
    spec: Manifest = {
        "replicas": max(service.replicas, TWINS.get(service.name, 1)),
        "selector": {"matchLabels": labels(service.name)},
        "template": pod_template(service),
    }
    if is_stage(service):
        # A device is free for the next one only when the one before has gone.
        spec["strategy"] = {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
        }
    return manifest("apps/v1", "Deployment", service.name, spec=spec)


def job(service: Service) -> Manifest:
    """A service that runs once."""
    template = pod_template(service)
    template["spec"]["restartPolicy"] = "OnFailure"
    spec = {"backoffLimit": 10, "ttlSecondsAfterFinished": 600, "template": template}
    return manifest("batch/v1", "Job", service.name, spec=spec)


def database(service: Service) -> Manifest:
    """A Postgres for trials: one pod with its own volume."""
    (source, path, _), *_ = service.mounts
    template = pod_template(service)
    (container,) = template["spec"]["containers"]
    # A new volume may not be empty: the data lies in a folder of it.
    container["env"].append({"name": "PGDATA", "value": f"{path}/pgdata"})
    template["spec"]["volumes"] = [
        each for each in template["spec"]["volumes"] if each["name"] != source
    ]
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "10Gi"}}}
    spec = {
        "serviceName": service.name,
        "replicas": 1,
        "selector": {"matchLabels": labels(service.name)},
        "template": template,
        "volumeClaimTemplates": [{"metadata": {"name": source}, "spec": claim}],
    }
    return manifest("apps/v1", "StatefulSet", service.name, spec=spec)


def network_service(name: str, port: int) -> Manifest:
    """The name under which others reach a service."""
    spec = {"selector": labels(name), "ports": [{"name": "main", "port": port, "targetPort": port}]}
    return manifest("v1", "Service", name, spec=spec)


def disruption_budget(service: Service) -> Manifest:
    """One pod at a time leaves when nodes are drained; one that is not ready is in no one's way."""
    spec = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": labels(service.name)},
    }
    return manifest("policy/v1", "PodDisruptionBudget", service.name, spec=spec)


def pod_template(service: Service) -> Manifest:
    """Its only container, as compose.yaml describes it."""
    user = SERVER_USERS.get(service.name, APP_USER)
    spec: Manifest = {
        "automountServiceAccountToken": False,
        # Else a service named after one of ours would set SHARDLINE_* variables.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": service.stop_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(service)],
        "volumes": list(_volumes(service)),
    }
    if is_stage(service) and service.name not in ACCELERATORS:
        # Two pods on a node would take the same cores: they see no locks of each other.
        rule = {
            "labelSelector": {"matchLabels": labels(service.name)},
            "topologyKey": "kubernetes.io/hostname",
        }
        spec["affinity"] = {
            "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [rule]}
        }
    return {"metadata": {"labels": labels(service.name)}, "spec": spec}


def settings_of(services: list[Service]) -> dict[str, str]:
    """All settings that are no paths of secrets, for the ConfigMap."""
    found: dict[str, str] = {}
    for service in services:
        for name, value in service.environment.items():
            if _is_common(name, value):
                assert found.setdefault(name, value) == value, f"{name} has two values"
    return found


def is_stage(service: Service) -> bool:
    """Whether it computes."""
    return service.name.startswith("stage")


def labels(name: str) -> dict[str, str]:
    """Returns the labels by which its pods are found."""
    return {"app.kubernetes.io/name": name, "app.kubernetes.io/part-of": "shardline"}


def manifest(api: str, kind: str, name: str, **rest: Any) -> Manifest:
    """An object of Kubernetes."""
    return {
        "apiVersion": api,
        "kind": kind,
        "metadata": {"name": name, "labels": labels(name)},
        **rest,
    }


def _container(service: Service) -> Manifest:
    container: Manifest = {
        "name": service.name,
        "image": service.image,
        "env": [_variable(name, value) for name, value in service.environment.items()],
        "ports": [{"containerPort": port} for port in service.ports],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": service.is_read_only,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": list(_mounts(service)),
        **_probes(service),
    }
    if resources := _resources(service):
        container["resources"] = resources
    if service.args:
        container["args"] = service.args
    if "SHARDLINE_METRICS_PORT" in service.environment:
        container["ports"].append({"name": "metrics", "containerPort": METRICS_PORT})
    if is_stage(service):
        address = {"fieldRef": {"fieldPath": "status.podIP"}}
        container["env"].append({"name": "SHARDLINE_HOP_HOST", "valueFrom": address})
    return container


def _resources(service: Service) -> Manifest:
    """Memory as under Compose, and of a stage its device."""
    device = ACCELERATORS.get(service.name)
    limits: Manifest = {device: 1} if device else {}
    requests: Manifest = {}
    if is_stage(service) and not device:
        requests["cpu"] = service.environment["SHARDLINE_STAGE_CORES"]
    if service.memory_mib:
        limits["memory"] = f"{service.memory_mib}Mi"
    if service.reserved_mib:
        requests["memory"] = f"{service.reserved_mib}Mi"
    return {
        kind: amounts for kind, amounts in (("requests", requests), ("limits", limits)) if amounts
    }


def _variable(name: str, value: str) -> Manifest:
    if not _is_common(name, value):
        return {"name": name, "value": value}
    return {"name": name, "valueFrom": {"configMapKeyRef": {"name": CONFIG, "key": name}}}


def _is_common(name: str, value: str) -> bool:
    """Whether it stands in the ConfigMap: a setting that is no secret's path and no kind of
    worker's own."""
    return (
        name.startswith(("SHARDLINE_", "OTEL_"))
        and name != "SHARDLINE_DEVICE"
        and not value.startswith(f"{SECRETS}/")
    )


def _probes(service: Service) -> Manifest:
    health = service.health
    if health is None:
        return {}
    probe = _probe(health)
    if is_stage(service):
        # Not ready until its shard is loaded, and never killed: a worker may wait for layers as
        # long as it takes, and a stage that hangs ends by itself.
        return {"readinessProbe": probe}
    start = {**probe, "failureThreshold": math.ceil(health.start_s / health.interval_s)}
    return {"startupProbe": start, "readinessProbe": probe, "livenessProbe": probe}


def _probe(health: HealthCheck) -> Manifest:
    # A gateway that is given its hosts lets localhost in as well.
    header = {"name": "Host", "value": "localhost"}
    http = {"httpGet": {"path": health.path, "port": health.port, "httpHeaders": [header]}}
    asks = http if health.path else {"exec": {"command": health.command}}
    times = {"periodSeconds": health.interval_s, "timeoutSeconds": health.timeout_s}
    return {**asks, **times, "failureThreshold": health.retries}


def _volumes(service: Service) -> list[Manifest]:
    found: list[Manifest] = [
        {"name": name, "persistentVolumeClaim": {"claimName": MODEL_CLAIM, "readOnly": True}}
        if read_only
        else {"name": name, "emptyDir": {}}
        for name, _, read_only in map(_named, service.mounts)
    ]
    found += [{"name": _slug(path), "emptyDir": {}} for path in service.tmpfs]
    if service.shm_mib:
        found.append(
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{service.shm_mib}Mi"}}
        )
    if service.secrets:
        items = [{"key": name, "path": name} for name in service.secrets]
        found.append(
            {
                "name": "secrets",
                "secret": {"secretName": CONFIG, "defaultMode": SECRET_MODE, "items": items},
            }
        )
    return found


def _mounts(service: Service) -> list[Manifest]:
    found: list[Manifest] = [
        {"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})}
        for name, path, read_only in map(_named, service.mounts)
    ]
    found += [{"name": _slug(path), "mountPath": path} for path in service.tmpfs]
    if service.shm_mib:
        found.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108 (Postgres shares it)
    if service.secrets:
        found.append({"name": "secrets", "mountPath": SECRETS, "readOnly": True})
    return found


def _named(mount: tuple[str, str, bool]) -> tuple[str, str, bool]:
    """A folder of the host is the model's."""
    source, path, read_only = mount
    return _slug(path) if source.startswith(("/", ".")) else source, path, read_only


def _slug(path: str) -> str:
    return path.strip("/").replace("/", "-")
