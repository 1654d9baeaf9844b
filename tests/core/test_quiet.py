"""Whether the machine is left alone: what it says of its power and heat, and what that means."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import reprise.quiet
from reprise.quiet import MACHINE, PowerReading, QuietMachine, read_power, why_leave_alone, why_quiet


@pytest.mark.parametrize(
    ("reading", "reason"),
    [
        (PowerReading(), None),
        (PowerReading(charge=20.0), None),
        (PowerReading(charge=19.9), "on battery below 20 %"),
        (PowerReading(charge=90.0, saves_power=True), "in low-power mode"),
        (PowerReading(is_hot=True), "hot"),
    ],
)
def test_a_reading_is_a_reason_or_none(reading: PowerReading, reason: str | None) -> None:
    assert why_leave_alone(reading) == reason


@pytest.fixture
def battery(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    battery = SimpleNamespace(percent=50, power_plugged=False)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)
    return battery


@pytest.mark.skipif(sys.platform == "darwin", reason="reads Linux's files")
def test_the_machine_is_read(battery: SimpleNamespace, tmp_path: Path) -> None:
    assert read_power(tmp_path) == PowerReading(charge=50.0)
    battery.power_plugged = True
    assert read_power(tmp_path).charge is None
    profile = tmp_path / "sys/firmware/acpi/platform_profile"
    profile.parent.mkdir(parents=True)
    profile.write_text("low-power\n")
    assert read_power(tmp_path).saves_power
    profile.write_text("balanced\n")
    zone = tmp_path / "sys/class/thermal/thermal_zone0"
    zone.mkdir(parents=True)
    points = {"passive": 70000, "hot": 95000, "critical": 100000, "active": -273000}
    for number, (kind, at) in enumerate(points.items()):
        (zone / f"trip_point_{number}_type").write_text(f"{kind}\n")
        (zone / f"trip_point_{number}_temp").write_text(f"{at}\n")
    for temperature, is_hot in ((80000, False), (94999, False), (95000, True)):
        (zone / "temp").write_text(f"{temperature}\n")
        assert read_power(tmp_path) == PowerReading(is_hot=is_hot)
    # Where no point is called hot, near the one at which the system shuts down.
    (zone / "trip_point_1_type").write_text("passive\n")
    (zone / "trip_point_2_temp").write_text("99000\n")
    for temperature, is_hot in ((93999, False), (94000, True)):
        (zone / "temp").write_text(f"{temperature}\n")
        assert read_power(tmp_path).is_hot is is_hot
    (zone / "temp").write_text("unknown\n")
    assert read_power(tmp_path) == PowerReading()


def read_in_turn(readings: Sequence[PowerReading | Exception]) -> QuietMachine:
    left = iter(readings)

    def read() -> PowerReading:
        reading = next(left)
        if isinstance(reading, Exception):
            raise reading
        return reading

    return QuietMachine(read)


def test_each_change_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="reprise.quiet")
    hot, low = PowerReading(is_hot=True), PowerReading(charge=1.0)
    machine = read_in_turn([PowerReading(), hot, hot, OSError("no sensor"), low, PowerReading(), PowerReading()])
    reasons: list[str | None] = []
    for _ in range(7):
        machine.look()
        reasons.append(machine.reason)
    assert reasons == [None, "hot", "hot", "hot", "on battery below 20 %", None, None]
    assert [record.getMessage() for record in caplog.records] == [
        "the machine is hot: nothing is computed or written in the background",
        "the machine is on battery below 20 %: nothing is computed or written in the background",
        "the machine is no longer on battery below 20 %: background work goes on",
    ]


def test_the_mode_says_whether_the_machine_is_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="reprise.quiet")
    assert why_quiet("auto") is why_quiet("always") is None
    assert why_quiet("never") == "Nothing is done in the background: --background is never."
    monkeypatch.setattr(MACHINE, "reason", "hot")
    assert why_quiet("auto") == "The machine is hot, so nothing is done in the background."
    assert why_quiet("always") is None
    unread = read_in_turn([])
    with unread.followed("always"), unread.followed("never"):
        assert unread.reason is None
    assert [record.getMessage() for record in caplog.records] == [why_quiet("never")]
    with read_in_turn([PowerReading(is_hot=True)]).followed("auto", every_s=60) as _:
        pass
    assert reprise.quiet.MACHINE is MACHINE
