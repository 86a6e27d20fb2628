"""What a device draws: RAPL's counters in folders of a test, meters that fail, figures, and which
of them counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from services.stage.device import power as power_module
from services.stage.device import rapl as rapl_module
from services.stage.device.device import Meter
from services.stage.device.power import SAMPLE_S, MeasuredPower, NominalPower, Power, power_of
from services.stage.device.rapl import Rapl
from services.stage.device.watts import Watts

RANGE_UJ = 262_143_328_850


@pytest.fixture
def powercap(tmp_path: Path) -> Path:
    """Two packages of four logical cores each. Beside their zones there are those of cores and of
    the whole system."""
    for core in range(8):
        write(tmp_path / f"cpu/cpu{core}/topology/physical_package_id", core // 4)
    zones = {
        "intel-rapl:0": "package-0",
        "intel-rapl:0/intel-rapl:0:0": "core",
        "intel-rapl:0/intel-rapl:0:1": "dram",
        "intel-rapl:1": "package-1",
        "intel-rapl:2": "psys",
    }
    for zone, name in zones.items():
        write(tmp_path / "powercap" / zone / "name", name)
        write(tmp_path / "powercap" / zone / "max_energy_range_uj", RANGE_UJ)
        write(tmp_path / "powercap" / zone / "energy_uj", 1_000_000)
    return tmp_path / "powercap"


def write(file: Path, value: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{value}\n", encoding="ascii")


def opened(powercap: Path, *cores: int) -> Rapl:
    return Rapl(cores, powercap=powercap, cpus=powercap.parent / "cpu")


def test_cores_have_their_share_of_their_package_and_of_its_memory(powercap: Path) -> None:
    rapl = opened(powercap, 0, 1)
    for zone, joules in (
        ("intel-rapl:0", 8),
        ("intel-rapl:0/intel-rapl:0:1", 4),
        ("intel-rapl:1", 100),
    ):
        write(powercap / zone / "energy_uj", 1_000_000 + joules * 1_000_000)
    write(powercap / "intel-rapl:2/energy_uj", 900_000_000)

    assert rapl.spent_j(1.0) == pytest.approx((8 + 4) / 2)
    assert rapl.spent_j(1.0) == 0.0


def test_cores_of_two_packages_have_a_share_of_each(powercap: Path) -> None:
    rapl = opened(powercap, 3, 4, 5)
    write(powercap / "intel-rapl:0/energy_uj", 9_000_000)
    write(powercap / "intel-rapl:1/energy_uj", 5_000_000)

    assert rapl.spent_j(1.0) == pytest.approx(8 / 4 + 4 / 2)


def test_a_counter_that_begins_anew_has_counted_on(powercap: Path) -> None:
    write(powercap / "intel-rapl:1/energy_uj", RANGE_UJ - 3_000_000)
    rapl = opened(powercap, 4, 5, 6, 7)
    write(powercap / "intel-rapl:1/energy_uj", 2_000_000)

    assert rapl.spent_j(1.0) == pytest.approx(5.0)


def test_a_package_of_two_dies_has_two_counters(powercap: Path) -> None:
    for zone, die in (("intel-rapl:1", 0), ("intel-rapl:2", 1)):
        write(powercap / zone / "name", f"package-1-die-{die}")
    rapl = opened(powercap, 4, 5, 6, 7)
    for zone in ("intel-rapl:1", "intel-rapl:2"):
        write(powercap / zone / "energy_uj", 3_000_000)

    assert rapl.spent_j(1.0) == pytest.approx(4.0)


def test_a_machine_without_counters_says_where_none_is(tmp_path: Path) -> None:
    write(tmp_path / "cpu/cpu0/topology/physical_package_id", 0)

    with pytest.raises(OSError, match=f"no counter of package 0 in {tmp_path}/powercap"):
        opened(tmp_path / "powercap", 0)


def test_counters_that_may_not_be_read_say_whose_they_are(
    powercap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: Path) -> int:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(rapl_module, "_packages", lambda _: {0: 0})
    monkeypatch.setattr(rapl_module, "_number", refuse)

    with pytest.raises(OSError, match=r"intel-rapl:0/max_energy_range_uj may be read by root only"):
        opened(powercap, 0)


def test_a_core_of_no_package_is_named(powercap: Path) -> None:
    with pytest.raises(OSError, match="does not tell the package of core 8"):
        opened(powercap, 8)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The seconds that a test lets pass."""
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(power_module, "monotonic_s", lambda: clock.now_s)
    return clock


def measured(spent_j: Callable[[float], float]) -> Power:
    return MeasuredPower(Meter("nvml", spent_j))


def test_a_step_takes_the_mean_power_since_the_last_reading(clock: SimpleNamespace) -> None:
    power = measured(lambda elapsed_s: 50.0 * elapsed_s)
    clock.now_s += 2.0

    power.add(0.5)
    assert power.drawn_j() == pytest.approx(100.0)
    assert power.computed_j == pytest.approx(25.0)


def test_a_device_draws_the_mean_of_its_steps_by_their_time(clock: SimpleNamespace) -> None:
    answers = [60.0, 20.0]
    power = measured(lambda _: answers.pop())
    assert power.watts == 0.0
    for compute_s in (0.9, 0.3):
        clock.now_s += 1.0
        power.add(compute_s)

    assert power.watts == pytest.approx((20.0 * 0.9 + 60.0 * 0.3) / 1.2)


def test_a_meter_is_not_read_at_every_step(clock: SimpleNamespace) -> None:
    readings = list[float]()

    def note(elapsed_s: float) -> float:
        readings.append(elapsed_s)
        return 1.0

    power = measured(note)
    for _ in range(9):
        clock.now_s += SAMPLE_S * 0.4
        power.add(SAMPLE_S * 0.4)

    assert readings == pytest.approx([SAMPLE_S * 1.2] * 3)


def test_a_meter_that_is_slow_is_read_seldom(clock: SimpleNamespace) -> None:
    # Given a driver that takes longer than the time between two readings
    readings = 0

    def wait(_elapsed_s: float) -> float:
        nonlocal readings
        readings += 1
        clock.now_s += 3 * SAMPLE_S
        return 1.0

    power = measured(wait)
    began_s = clock.now_s
    while clock.now_s < began_s + 100 * SAMPLE_S:
        clock.now_s += SAMPLE_S / 10
        power.add(SAMPLE_S / 10)

    # Then steps do not wait for it again and again
    assert readings == 1


def test_a_meter_that_fails_is_told_once_and_its_last_power_counts_on(
    clock: SimpleNamespace,
) -> None:
    answers = [30.0]
    power = measured(lambda _: answers.pop())
    clock.now_s += 1.0
    power.add(1.0)
    with capture_logs() as logs:
        for _ in range(3):
            clock.now_s += 1.0
            power.add(1.0)

    assert [line["log_level"] for line in logs] == ["warning"]
    assert power.computed_j == power.drawn_j() == pytest.approx(120.0)


def test_figures_count_idle_time_apart_from_steps(clock: SimpleNamespace) -> None:
    power = NominalPower("table", Watts(busy=100.0, idle=10.0))
    clock.now_s += 5.0

    power.add(2.0)
    assert (power.computed_j, power.watts) == (200.0, 100.0)
    assert power.drawn_j() == pytest.approx(200.0 + 3.0 * 10.0)


@pytest.mark.parametrize(
    ("model", "busy"),
    [
        ("NVIDIA H100 80GB HBM3", 700.0),
        ("NVIDIA H100 PCIe", 350.0),
        ("NVIDIA A100-SXM4-40GB", 400.0),
        ("NVIDIA A100-PCIE-40GB", 250.0),
        ("NVIDIA L40S", 350.0),
        ("NVIDIA L4", 72.0),
        ("Tesla T4", 70.0),
        ("NVIDIA GeForce RTX 4090", 450.0),
        ("AMD Instinct MI300X", 750.0),
    ],
)
def test_the_table_knows_an_accelerator_by_words_of_its_name(model: str, busy: float) -> None:
    watts = Watts.of_accelerator(model)
    assert watts is not None
    assert watts.busy == busy
    assert watts.idle == pytest.approx(0.115 * busy)


@pytest.mark.parametrize("model", ["NVIDIA L400", "toy", ""])
def test_the_table_guesses_nothing(model: str) -> None:
    assert Watts.of_accelerator(model) is None


def device(meter: Meter | OSError | None, watts: Watts | None) -> Any:
    """One with such a meter and such figures."""

    def answer() -> Meter | None:
        if isinstance(meter, OSError):
            raise meter
        return meter

    return cast(Any, SimpleNamespace(name="toy:0", meter=answer, watts=lambda: watts))


METER = Meter("rapl", lambda _: 0.0)
FIGURES = Watts(busy=7.0, idle=1.0)


@pytest.mark.parametrize(
    ("meter", "figures", "said", "source"),
    [
        (METER, FIGURES, None, "rapl"),
        (METER, FIGURES, 12.0, "setting"),
        (OSError("root only"), FIGURES, None, "table"),
        (None, FIGURES, None, "table"),
        (None, None, 12.0, "setting"),
    ],
)
def test_the_best_source_counts_and_is_named(
    meter: Meter | OSError | None, figures: Watts | None, said: float | None, source: str
) -> None:
    with capture_logs() as logs:
        power = power_of(device(meter, figures), said)

    assert power is not None
    assert power.source == source
    assert [line["source"] for line in logs] == [source]
    if isinstance(meter, OSError):
        assert logs[0]["not_measured"] == "root only"


def test_a_device_that_nobody_knows_asks_for_a_setting() -> None:
    with capture_logs() as logs:
        assert power_of(device(None, None), None) is None

    assert "SHARDLINE_DEVICE_WATTS" in logs[0]["event"]
