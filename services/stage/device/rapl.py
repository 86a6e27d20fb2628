"""Energy of processors from RAPL, as Linux's powercap shows it: `/sys/class/powercap/intel-rapl:*`,
on AMD too.

RAPL counts packages and their memory, not cores: a stage's cores have their share of what the
package draws.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
CPUS = Path("/sys/devices/system/cpu")


class Zone:
    """One counter of microjoules, which begins again at its range."""

    def __init__(self, folder: Path, share: float) -> None:
        """Reads it once. Raises OSError, ValueError."""
        self._file = folder / "energy_uj"
        self._share = share
        self._range_uj = _number(folder / "max_energy_range_uj")
        self._last_uj = _number(self._file)

    def spent_j(self) -> float:
        """Returns the stage's share of the joules since the last call. Between two calls it must
        not wrap twice."""
        now_uj = _number(self._file)
        spent_uj = now_uj - self._last_uj
        if spent_uj < 0:
            spent_uj += self._range_uj
        self._last_uj = now_uj
        return spent_uj * 1e-6 * self._share


class Rapl:
    """The counters of all packages on which the stage has cores."""

    def __init__(
        self, cores: Iterable[int], *, powercap: Path = POWERCAP, cpus: Path = CPUS
    ) -> None:
        """Opens them. Raises OSError, in words for an operator, if there are none or they may not
        be read."""
        try:
            packages = _packages(cpus)
            ours = Counter(packages[core] for core in cores)
            all_cores = Counter(packages.values())
            self._zones = [
                Zone(folder, num / all_cores[package])
                for package, num in ours.items()
                for folder in _zones(powercap, package)
            ]
        except PermissionError as error:
            raise OSError(f"{error.filename} may be read by root only") from error
        except KeyError as error:
            raise OSError(f"{cpus} does not tell the package of core {error}") from error
        except ValueError as error:
            raise OSError(f"a counter cannot be read: {error}") from error

    def spent_j(self, _elapsed_s: float) -> float:
        """Returns the stage's share of the joules since the last call. Raises OSError,
        ValueError."""
        return sum(zone.spent_j() for zone in self._zones)


def _packages(cpus: Path) -> dict[int, int]:
    """The package of each logical core."""
    files = cpus.glob("cpu[0-9]*/topology/physical_package_id")
    return {int(file.parts[-3].removeprefix("cpu")): _number(file) for file in files}


def _zones(powercap: Path, package: int) -> Iterator[Path]:
    """The zones of a package, of several dies too, and those of its memory, which the package's own
    do not count."""
    found = [zone for zone in sorted(powercap.glob("intel-rapl:*")) if _belongs_to(zone, package)]
    if not found:
        raise FileNotFoundError(f"no counter of package {package} in {powercap}")
    for zone in found:
        yield zone
        yield from (
            inner for inner in sorted(zone.glob(f"{zone.name}:*")) if _name(inner) == "dram"
        )


def _belongs_to(zone: Path, package: int) -> bool:
    """`package-0`, or `package-0-die-1`."""
    return _name(zone).split("-")[:2] == ["package", str(package)]


def _name(zone: Path) -> str:
    return (zone / "name").read_text(encoding="ascii").strip()


def _number(file: Path) -> int:
    return int(file.read_text(encoding="ascii"))
