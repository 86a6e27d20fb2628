"""The manifests of Kubernetes: made from compose.yaml, valid, and in keeping with the product's own
times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from docker.kubernetes import workloads
from docker.kubernetes.__main__ import FOLDER, files
from docker.kubernetes.compose import mib, seconds, services
from shardline.base.config import Times

BY_HAND = {"stage-0", "stage-1", "prometheus", "grafana"}
"""A pipeline by hand: a fleet needs none. A cluster has a Prometheus of its own."""
VERSION = "1.31"
"""Of Kubernetes, the oldest that the objects are for."""
OTHERS = ("keda.sh/", "kustomize.config.k8s.io/")
"""Whose schemas are not Kubernetes' own."""


def manifests() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every object of every committed file."""
    for path in sorted(FOLDER.rglob("*.yaml")):
        yield from (
            (path, document) for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
        )


def pods() -> dict[str, dict[str, Any]]:
    """What pods of each workload are made of, by its name."""
    found = {
        each["metadata"]["name"]: each["spec"]
        for _, each in manifests()
        if "template" in each.get("spec", {})
    }
    return {name: spec["template"]["spec"] for name, spec in found.items()}


def test_the_committed_manifests_are_those_that_compose_makes() -> None:
    committed = {
        path.relative_to(FOLDER): path.read_text(encoding="utf-8")
        for path in FOLDER.rglob("*.yaml")
    }
    assert committed == files(), "run `make manifests`"


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(each, id=f"{path.parent.name}-{each['kind']}-{path.stem}")
        for path, each in manifests()
    ],
)
def test_every_object_is_valid(document: dict[str, Any]) -> None:
    if document["apiVersion"].startswith(OTHERS):
        assert document["kind"] in {
            "Kustomization",
            "Component",
            "ScaledObject",
            "TriggerAuthentication",
        }
    else:
        kubernetes_validate.validate(document, VERSION, strict=True)


def test_an_object_that_is_not_valid_is_noticed() -> None:
    (budget,) = [
        each for path, each in manifests() if path.name == "stage.yaml" and "Budget" in each["kind"]
    ]
    budget["spec"]["maxUnavailabel"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(budget, VERSION, strict=True)


def test_every_service_of_compose_runs_or_is_left_out_by_name() -> None:
    assert pods().keys() == services().keys() - BY_HAND


def test_each_pod_gets_its_own_secrets_and_settings_that_exist() -> None:
    (settings,) = [each["data"] for _, each in manifests() if each["kind"] == "ConfigMap"]
    for name, pod in pods().items():
        (container,) = pod["containers"]
        items = [
            item["key"]
            for volume in pod["volumes"]
            for item in volume.get("secret", {}).get("items", [])
        ]
        assert items == services()[name].secrets
        values = {each["name"]: each for each in container["env"]}
        assert values.keys() >= services()[name].environment.keys()
        asked = [
            each["valueFrom"].get("configMapKeyRef")
            for each in values.values()
            if "valueFrom" in each
        ]
        assert {each["key"] for each in asked if each} <= settings.keys()


def test_no_pod_is_root_or_killed_before_its_drain_ends() -> None:
    for name, pod in pods().items():
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] > 0
        if name.startswith(("stage", "gateway", "relay")):
            assert pod["terminationGracePeriodSeconds"] > 4 / 3 * Times().drain_s


def test_probes_ask_what_compose_asks_and_kill_no_stage_that_waits() -> None:
    for name, pod in pods().items():
        (container,), health = pod["containers"], services()[name].health
        kinds = {
            kind
            for kind in ("startupProbe", "readinessProbe", "livenessProbe")
            if kind in container
        }
        if health is None:
            assert kinds == set()
            continue
        assert kinds == ({"readinessProbe"} if name.startswith("stage") else set(kinds)) != set()
        for kind in kinds:
            asked = container[kind].get("httpGet", container[kind].get("exec"))
            assert (asked.get("path"), asked.get("port")) == (health.path, health.port)


def test_each_container_has_bounds_of_memory_but_stages_which_take_what_is_free() -> None:
    for name, pod in pods().items():
        (container,) = pod["containers"]
        resources = container.get("resources", {})
        if name.startswith("stage"):
            assert "memory" not in resources.get("limits", {})
        else:
            asked, most = (
                int(resources[kind]["memory"].removesuffix("Mi")) for kind in ("requests", "limits")
            )
            assert 0 < asked <= most
            assert most <= 1024 or name == "postgres"


def test_a_limit_of_stages_reaches_their_pods() -> None:
    stage = replace(services()["stage"], memory_mib=8192)
    (container,) = workloads.pod_template(stage)["spec"]["containers"]
    assert container["resources"] == {"requests": {"cpu": "1"}, "limits": {"memory": "8192Mi"}}


STAGES = {"stage", "stage-cuda", "stage-rocm"}
REACHED = {
    ("gateway", 8000): {
        "gateway",
        "relay",
        "flower",
        "migrate",
        "redis",
        "postgres",
        *STAGES,
        "monitoring",
        "keda",
        "else",
    },
    ("redis", 6379): {"gateway", "relay", "flower", *STAGES},
    ("postgres", 5432): {"gateway", "relay", "migrate", *STAGES, "keda"},
    ("flower", 5555): set(),
    **{(name, 9100): {"monitoring"} for name in ("gateway", "relay")},
    **{(name, 9100): {"monitoring", *STAGES} for name in STAGES},
    **{(name, 7600): STAGES for name in STAGES},
}
"""Of each pod and port, who reaches it: other pods of ours, and pods of other namespaces by
those."""


@pytest.mark.parametrize(("pod", "port"), sorted(REACHED))
def test_only_those_who_need_it_reach_a_port(pod: str, port: int) -> None:
    policies = [each["spec"] for _, each in manifests() if each["kind"] == "NetworkPolicy"]
    assert all(each["policyTypes"] == ["Ingress"] for each in policies)
    ours = {name: workloads.labels(name) for name in pods()}
    others = {"monitoring", "keda", "else"}
    chosen = [each for each in policies if selects(each["podSelector"], ours[pod])]
    assert chosen
    rules = [
        rule for each in chosen for rule in each["ingress"] if port in numbers(rule, default=port)
    ]
    reached = {
        name for name, labels in ours.items() if any(lets(rule, labels, None) for rule in rules)
    }
    reached |= {name for name in others if any(lets(rule, {}, name) for rule in rules)}
    assert reached == REACHED[pod, port]


def numbers(rule: dict[str, Any], *, default: int) -> list[int]:
    """Ports of a rule; one without any is for all."""
    return [each["port"] for each in rule["ports"]] if "ports" in rule else [default]


def lets(rule: dict[str, Any], labels: dict[str, str], namespace: str | None) -> bool:
    """Whether it lets in a pod of ours (no namespace), or any pod of another namespace."""
    if "from" not in rule:
        return True
    by_name = {"kubernetes.io/metadata.name": namespace or "shardline"}
    return any(
        selects(peer["namespaceSelector"], by_name)
        if "namespaceSelector" in peer
        else namespace is None and selects(peer["podSelector"], labels)
        for peer in rule["from"]
    )


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """As Kubernetes does, for what we write."""
    rest = selector.get("matchExpressions", [])
    assert all(each["operator"] == "In" for each in rest)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in rest
    )


@pytest.mark.parametrize(("text", "expected"), [("0", 0), ("512m", 512), ("1g", 1024)])
def test_amounts_of_memory_are_read(text: str, expected: int) -> None:
    assert mib(text) == expected


@pytest.mark.parametrize(("text", "expected"), [("45s", 45), ("10m", 600)])
def test_durations_are_read(text: str, expected: int) -> None:
    assert seconds(text) == expected
