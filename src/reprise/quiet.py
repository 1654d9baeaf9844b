"""Whether the machine is better left alone: on a low battery, in low-power mode, and when it is hot.

Then nothing is computed or written that nobody waits for: next turns are not settled, answers not audited, and prefixes
not written to disk. Heads and draft models do not guess either: much of what they compute is rejected.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import psutil

from reprise.core.clock import repeating
from reprise.core.settings import AUTO, NEVER

log = logging.getLogger(__name__)

LEAST_CHARGE = 20.0
"""Percent: on battery below this, the machine is left alone."""
_EVERY_S = 10.0
_BELOW_CRITICAL = 5000
"""Thousandths of a degree: so close to the temperature at which the system shuts down it is hot."""
_SERIOUS = 2
"""`NSProcessInfoThermalStateSerious`: the system slows down what runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerReading:
    """What the machine says. `charge`: of the battery in percent, while that is all there is; None: plugged in, or no
    battery."""

    charge: float | None = None
    saves_power: bool = False
    is_hot: bool = False


def why_leave_alone(reading: PowerReading) -> str | None:
    """Why a machine of this reading is better left alone, in a few words; None: it need not be."""
    if reading.charge is not None and reading.charge < LEAST_CHARGE:
        return f"on battery below {LEAST_CHARGE:.0f} %"
    if reading.saves_power:
        return "in low-power mode"
    return "hot" if reading.is_hot else None


def read_power(root: Path = Path("/")) -> PowerReading:
    """A reading of the machine. `root`: of its file system."""
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    charge = None if battery is None or battery.power_plugged is not False else float(battery.percent)
    if sys.platform == "darwin":
        saves_power, is_hot = _macos_state()
    else:
        saves_power = _text(root / "sys/firmware/acpi/platform_profile") in ("low-power", "quiet")
        is_hot = any(_is_hot(zone) for zone in sorted(root.glob("sys/class/thermal/thermal_zone*")))
    return PowerReading(charge=charge, saves_power=saves_power, is_hot=is_hot)


class QuietMachine:
    """The reason to leave the machine alone, as of the latest reading. `reason` may be read on any thread."""

    def __init__(self, read: Callable[[], PowerReading] = read_power) -> None:
        self._read = read
        self.reason: str | None = None

    def look(self) -> None:
        """Read the machine once. Each change is logged."""
        before = self.reason
        try:
            self.reason = why_leave_alone(self._read())
        except Exception:
            # A sensor that fails says nothing about the others' reading.
            log.debug("the machine's power cannot be read", exc_info=True)
            return
        if self.reason is not None and self.reason != before:
            log.info("the machine is %s: nothing is computed or written in the background", self.reason)
        elif self.reason is None and before is not None:
            log.info("the machine is no longer %s: background work goes on", before)

    def followed(self, mode: str, *, every_s: float = _EVERY_S) -> AbstractContextManager[None]:
        """Look now and every few seconds until the block ends, if this mode of `--background` asks the machine.

        If it is `never`, that is logged.
        """
        if mode == NEVER:
            log.info("%s", why_quiet(mode))
        if mode != AUTO:
            return nullcontext()
        self.look()
        return repeating(self.look, every_s=every_s, name="reprise-power")


MACHINE = QuietMachine()
"""The machine that this process runs on."""


def why_quiet(mode: str) -> str | None:
    """Why nothing is done in the background in this mode of `--background`, as a sentence; None: it is."""
    if mode == NEVER:
        return "Nothing is done in the background: --background is never."
    reason = MACHINE.reason if mode == AUTO else None
    return None if reason is None else f"The machine is {reason}, so nothing is done in the background."


def _is_hot(zone: Path) -> bool:
    """Whether a thermal zone of Linux has reached its trip point `hot`, or nearly the one at which it shuts down."""
    temperature = _number(zone / "temp")
    if temperature is None:
        return False
    for file in zone.glob("trip_point_*_type"):
        least = _number(file.with_name(file.name.replace("_type", "_temp")))
        kind = _text(file)
        # Zones without such a point say 0 or less.
        if least is not None and least > 0 and kind in ("hot", "critical"):
            margin = _BELOW_CRITICAL if kind == "critical" else 0
            if temperature >= least - margin:
                return True
    return False


def _macos_state() -> tuple[bool, bool]:
    """`NSProcessInfo`: whether Low Power Mode is on, and whether the thermal state is serious or critical."""
    objc = ctypes.CDLL("/usr/lib/libobjc.dylib")
    ctypes.CDLL("/System/Library/Frameworks/Foundation.framework/Foundation")
    objc.objc_getClass.restype = ctypes.c_void_p
    objc.sel_registerName.restype = ctypes.c_void_p

    def send(target: int | None, selector: bytes, kind: type) -> int:
        message = ctypes.CFUNCTYPE(kind, ctypes.c_void_p, ctypes.c_void_p)(("objc_msgSend", objc))
        return message(target, objc.sel_registerName(selector))

    process = send(objc.objc_getClass(b"NSProcessInfo"), b"processInfo", ctypes.c_void_p)
    thermal = send(process, b"thermalState", ctypes.c_long)
    return bool(send(process, b"isLowPowerModeEnabled", ctypes.c_bool)), thermal >= _SERIOUS


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(file: Path) -> int | None:
    text = _text(file)
    return int(text) if text.lstrip("-").isdigit() else None
