"""Writes the manifests from compose.yaml and .env.example, each folder with its kustomization."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from docker.kubernetes import autoscaling, network, workloads
from docker.kubernetes.compose import Service, services
from docker.kubernetes.workloads import ACCELERATORS, Manifest

FOLDER = Path(__file__).parent
NAMESPACE = "shardline"
BASE = ("gateway", "relay", "flower", "stage")
"""Services that keep nothing; with `migrate` they are what every installation runs."""
TRIAL = {"redis": 6379, "postgres": 5432}
"""Servers that a real installation has elsewhere, with their ports."""
AUTOSCALED = "keda"
KUSTOMIZE = "kustomize.config.k8s.io"
HEAD = (
    "# Made from compose.yaml and .env.example by `python -m docker.kubernetes`: change those, "
    "or add an overlay.\n"
)


class _Dumper(yaml.SafeDumper):
    """Writes lists as people do, and long texts as they are."""

    def increase_indent(
        self,
        flow: bool = False,
        indentless: bool = False,  # noqa: ARG002 (PyYAML's)
    ) -> None:
        super().increase_indent(flow, indentless=False)

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 (PyYAML's)
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    )


_Dumper.add_representer(str, _text)


def files() -> dict[Path, str]:
    """The text of each file, by its path below this folder."""
    found = services()
    manifests = {
        **_base(found),
        **{Path(f"trial/{name}.yaml"): _server(found[name]) for name in TRIAL},
        **{Path(f"{_kind(name)}/{name}.yaml"): _stateless(found[name]) for name in ACCELERATORS},
        Path(AUTOSCALED, "stage.yaml"): [
            autoscaling.authentication(),
            autoscaling.scaled_object(found["stage"].replicas),
            network.of_keda(TRIAL["postgres"]),
        ],
    }
    folders = sorted({path.parent for path in manifests})
    texts = {path: _dump(objects) for path, objects in manifests.items()}
    return texts | {
        folder / "kustomization.yaml": _kustomization(folder, manifests) for folder in folders
    }


def write() -> None:
    """Replaces what differs."""
    for path, text in files().items():
        (FOLDER / path).parent.mkdir(exist_ok=True)
        (FOLDER / path).write_text(text, encoding="utf-8")


def _base(found: dict[str, Service]) -> dict[Path, list[Manifest]]:
    everything = [found[name] for name in (*BASE, "migrate", *ACCELERATORS)]
    settings = workloads.manifest(
        "v1", "ConfigMap", workloads.CONFIG, data=workloads.settings_of(everything)
    )
    return {
        Path("base/namespace.yaml"): [workloads.manifest("v1", "Namespace", NAMESPACE)],
        Path("base/settings.yaml"): [settings],
        Path("base/migrate.yaml"): [workloads.job(found["migrate"])],
        Path("base/network.yaml"): network.of_base(*found["gateway"].ports),
        **{Path(f"base/{name}.yaml"): _stateless(found[name]) for name in BASE},
    }


def _stateless(service: Service) -> list[Manifest]:
    reached = [workloads.network_service(service.name, port) for port in service.ports]
    deployment = workloads.deployment(service)
    budget = [workloads.disruption_budget(service)] if deployment["spec"]["replicas"] > 1 else []
    return [deployment, *reached, *budget]


def _server(service: Service) -> list[Manifest]:
    server = workloads.database(service) if service.mounts else workloads.deployment(service)
    port = TRIAL[service.name]
    return [
        server,
        workloads.network_service(service.name, port),
        network.of_server(service.name, port),
    ]


def _kind(name: str) -> str:
    return name.removeprefix("stage-")


def _kustomization(folder: Path, manifests: dict[Path, list[Manifest]]) -> str:
    own = sorted(path.name for path in manifests if path.parent == folder)
    document: Manifest = {"apiVersion": f"{KUSTOMIZE}/v1beta1", "kind": "Kustomization"}
    if folder.name == AUTOSCALED:
        document = {"apiVersion": f"{KUSTOMIZE}/v1alpha1", "kind": "Component"}
    document |= {"namespace": NAMESPACE, "resources": own}
    if folder.name == AUTOSCALED:
        # Else each `kubectl apply` would bring back the number of compose.yaml.
        remove = yaml.dump([{"op": "remove", "path": "/spec/replicas"}])
        document["patches"] = [{"target": {"kind": "Deployment", "name": "stage"}, "patch": remove}]
    return _dump([document])


def _dump(objects: list[Manifest]) -> str:
    texts = [
        yaml.dump(each, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
        for each in objects
    ]
    return HEAD + "---\n".join(texts)


if __name__ == "__main__":
    write()
