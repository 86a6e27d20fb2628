"""The client alone: a producer installs it without any service's libraries."""

from __future__ import annotations

import subprocess
import sys

from tests.repository import REPOSITORY

SHARED = REPOSITORY / "shared"
FOREIGN = (
    "celery",
    "kombu",
    "torch",
    "transformers",
    "tokenizers",
    "jinja2",
    "fastapi",
    "prometheus_client",
    "opentelemetry",
)


def test_the_client_loads_with_only_the_librarys_own_needs() -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(SHARED)!r}); "
        f"sys.modules.update(dict.fromkeys({FOREIGN!r})); "
        "from shardline.client import AsyncClient, Client; "
        "import shardline.base.log, shardline.contract.queues"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_importing_the_gateway_imports_neither_torch_nor_celery() -> None:
    program = (
        "import services.gateway.app, sys; "
        "print(*{'torch', 'transformers', 'celery', 'kombu'} & set(sys.modules))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": f"{SHARED.parent}:{SHARED}", "PATH": ""},
    )
    assert (ran.returncode, ran.stdout.strip()) == (0, ""), ran.stderr
