"""`make release`: everything of one version in dist/, built from the commit and nothing else, and
tried.

Wheels and sources of both distributions, the build context of the images, and checksums. It
publishes nothing.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from pathlib import Path

FLEET = "shared/shardline_fleet"
IMAGES = (
    *("compose.yaml", ".env.example", "pyproject.toml", "constraints.txt", "LICENSE", "README.md"),
    *("docker", "migrations", "services", "shared"),
)
"""What Compose, Kubernetes and the Dockerfile read."""


class NotReleasable(Exception):
    """What of the commit keeps it from being a release, and what to do."""


def release(repository: Path, output: Path) -> list[Path]:
    """Builds and tries the files of a release. Returns them. Raises NotReleasable, before anything
    is built."""
    version = _checked_version(repository)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="shardline-release-") as folder:
        source = Path(folder) / "source"
        _export(repository, source)
        for part in (source, source / FLEET):
            _run(
                sys.executable,
                "-m",
                "build",
                "--no-isolation",
                "--wheel",
                "--outdir",
                str(output),
                str(part),
            )
        _run(
            sys.executable,
            "-m",
            "build",
            "--no-isolation",
            "--sdist",
            "--outdir",
            str(output),
            str(source),
        )
        images = output / f"shardline-{version}-images.tar.gz"
        with tarfile.open(images, "w:gz") as archive:
            for name in IMAGES:
                archive.add(source / name, f"shardline-{version}/{name}")
        made = [
            images,
            *sorted(output.glob(f"shardline*-{version}*.whl")),
            output / f"shardline-{version}.tar.gz",
        ]
        _try_wheels(Path(folder) / "venv", made, repository / "constraints.txt", version)
    sums = "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in made
    )
    (output / "SHA256SUMS").write_text(sums, encoding="ascii")
    return [*made, output / "SHA256SUMS"]


def _checked_version(repository: Path) -> str:
    """The version that pyproject.toml, the fleet's package and the changelog agree on."""
    if changed := _run("git", "-C", str(repository), "status", "--porcelain"):
        raise NotReleasable(
            f"the working tree differs from the commit: commit or remove\n{changed}"
        )
    version = _version_of(repository / "pyproject.toml")
    if (other := _version_of(repository / FLEET / "pyproject.toml")) != version:
        raise NotReleasable(
            f"shardline is {version} and shardline-fleet {other}: "
            "give both pyproject.toml one version"
        )
    changelog = (repository / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(
        rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE
    ):
        raise NotReleasable(f"CHANGELOG.md has no section `## [{version}] - YYYY-MM-DD`: write it")
    return version


def _version_of(path: Path) -> str:
    return str(tomllib.loads(path.read_text(encoding="utf-8"))["project"]["version"])


def _export(repository: Path, source: Path) -> None:
    """The files of the commit, without what else the working tree holds."""
    archive = source.with_suffix(".tar")
    _run("git", "-C", str(repository), "archive", "--output", str(archive), "HEAD")
    with tarfile.open(archive) as tar:
        tar.extractall(source, filter="data")


def _try_wheels(home: Path, made: list[Path], constraints: Path, version: str) -> None:
    """Installs the wheels in an empty environment, and asks the command for its help."""
    venv.create(home, with_pip=True)
    wheels = [
        f"{path}[cli]" if path.name.startswith("shardline-") else str(path)
        for path in made
        if path.suffix == ".whl"
    ]
    _run(str(home / "bin" / "pip"), "install", "--quiet", "--constraint", str(constraints), *wheels)
    listed = _run(str(home / "bin" / "shardline"), "--help")
    if not {"submit", "plan"} <= set(listed.split()):
        raise NotReleasable(f"the command of {version} lacks commands: {listed}")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotReleasable(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> int:
    """Prints the files, or why there are none; returns the exit status."""
    try:
        made = release(Path.cwd(), Path("dist"))
    except NotReleasable as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write("".join(f"{path}\n" for path in made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
