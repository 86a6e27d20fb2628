"""What cannot be honored is refused at start: by name, by every service, without its password."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from services.standalone.settings import CLERK
from shardline_server.refusals import REFUSED_STATUS
from tests.repository import REPOSITORY

FLOWER = ("celery", "-A", "services.standalone.flower_app", "flower", "--port=0")
READ_REDIS = {
    "gateway": ("services.gateway",),
    "relay": ("services.relay",),
    "stage": ("services.stage",),
    "flower": FLOWER,
    "celery": ("celery", "-A", "services.relay.app", "inspect", "ping"),
    "standalone": ("services.standalone", "up"),
    "command line": ("shardline.cli", "models"),
    "migration": ("alembic", "upgrade", "head"),
}
READ_POSTGRES = {
    name: READ_REDIS[name] for name in ("gateway", "relay", "stage", "command line", "migration")
}


def refused(argv: Sequence[str], home: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """The process, which has ended by itself."""
    env = {
        **os.environ,
        "SHARDLINE_HTTP_PORT": "0",
        "SHARDLINE_HOME": home,
        "SHARDLINE_CACHE_DIR": home,
    }
    env |= {
        "SHARDLINE_MODEL": str(CLERK),
        "SHARDLINE_LAYERS": "0-7",
        "SHARDLINE_DEVICE": "cpu",
        **settings,
    }
    argv = [sys.executable, "-m", *argv]
    return subprocess.run(
        argv, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.parametrize("service", READ_REDIS)
def test_a_redis_url_that_one_library_cannot_keep_is_refused(
    service: str, tmp_path: os.PathLike[str]
) -> None:
    ran = refused(
        READ_REDIS[service],
        str(tmp_path),
        SHARDLINE_REDIS_URL="rediss://u:secret@h?ssl_cert_reqs=maybe",
    )
    told = ran.stdout + ran.stderr
    assert "ssl_cert_reqs is 'maybe'" in told
    assert "redis_url" in told.lower()
    assert "secret" not in told
    assert ran.returncode == (1 if service == "standalone" else REFUSED_STATUS)


@pytest.mark.parametrize("service", READ_POSTGRES)
def test_a_postgres_url_that_cannot_be_kept_is_refused(
    service: str, tmp_path: os.PathLike[str]
) -> None:
    url = "postgresql://u:secret@h1,h2/d?target_session_attrs=standby"
    ran = refused(READ_POSTGRES[service], str(tmp_path), SHARDLINE_DATABASE_URL=url)
    told = ran.stdout + ran.stderr
    assert "target_session_attrs is 'standby'" in told
    assert "database_url" in told.lower()
    assert "secret" not in told
    assert ran.returncode == REFUSED_STATUS


def test_flower_refuses_what_it_alone_cannot_reach(tmp_path: os.PathLike[str]) -> None:
    ran = refused(FLOWER, str(tmp_path), SHARDLINE_REDIS_URL="unix:///run/redis.sock?db=3")
    assert "SHARDLINE_REDIS_URL: Flower" in ran.stderr
    assert ran.returncode == REFUSED_STATUS
