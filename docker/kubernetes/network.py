"""NetworkPolicies: who may open a connection to which pod. Knows no file.

They add up: one closes all of our pods, each other one opens some to somebody. What pods open
themselves is not limited: Postgres, Redis, collectors and series of rates may be anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from docker.kubernetes.workloads import METRICS_PORT, Manifest, manifest

NAME = "app.kubernetes.io/name"
PART = {"app.kubernetes.io/part-of": "shardline"}
"""By these labels pods are found, as `workloads.labels` gives them."""
NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""A label that Kubernetes gives to each namespace."""
PROMETHEUS = "monitoring"
KEDA = "keda"
"""Namespaces in which they usually run."""
STAGES = ("stage", "stage-cuda", "stage-rocm")
CLIENTS = {
    "redis": ("gateway", "relay", "flower", *STAGES),
    "postgres": ("gateway", "relay", "migrate", *STAGES),
}


def of_base(http_port: int) -> list[Manifest]:
    """Anybody reaches gateways, stages reach stages, Prometheus reaches metrics, and none the
    rest."""
    metrics = {"from": [_namespace(PROMETHEUS)], "ports": [_port(METRICS_PORT)]}
    return [
        _policy("closed", {"matchLabels": PART}, []),
        _policy("gateway", _pods("gateway"), [{"ports": [_port(http_port)]}]),
        # They listen on any free ports.
        _policy("stages", _pods(*STAGES), [{"from": [{"podSelector": _pods(*STAGES)}]}]),
        _policy("metrics", _pods("gateway", "relay", *STAGES), [metrics]),
    ]


def of_server(name: str, port: int) -> Manifest:
    """Its clients reach a server of `trial`."""
    rule = {"from": [{"podSelector": _pods(*CLIENTS[name])}], "ports": [_port(port)]}
    return _policy(name, _pods(name), [rule])


def of_keda(postgres_port: int) -> Manifest:
    """KEDA asks the Postgres of `trial`, if there is one."""
    rule = {"from": [_namespace(KEDA)], "ports": [_port(postgres_port)]}
    return _policy("keda", _pods("postgres"), [rule])


def _policy(name: str, pods: Manifest, rules: Sequence[Manifest]) -> Manifest:
    spec = {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": list(rules)}
    return manifest("networking.k8s.io/v1", "NetworkPolicy", name, spec=spec)


def _pods(*names: str) -> Manifest:
    one_of = {"key": NAME, "operator": "In", "values": list(names)}
    return {"matchLabels": PART, "matchExpressions": [one_of]}


def _namespace(name: str) -> Manifest:
    return {"namespaceSelector": {"matchLabels": {NAMESPACE_NAME: name}}}


def _port(number: int) -> Manifest:
    return {"protocol": "TCP", "port": number}
