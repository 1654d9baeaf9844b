"""What the system says of its memory: Linux's pressure and cgroup, macOS's pressure level, and what is free."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from reprise.core.follow import MemoryReading

_STALLED_PERCENT = 5.0
"""Tasks that wait for memory for more than this share of ten seconds: the system is about to swap."""

_MACOS_WARNING = 2


def read_machine(root: Path = Path("/")) -> MemoryReading:
    """One reading. `root`: where the system's files are."""
    memory = psutil.virtual_memory()
    available, total = int(memory.available), int(memory.total)
    for group in _cgroups(root):
        available, total = min(available, group.available), min(total, group.total)
    return MemoryReading(available=available, total=total, is_pressed=_is_pressed(root))


def _cgroups(root: Path) -> list[MemoryReading]:
    """The memory of the control groups (version 2) that bound this process: its own and those around it."""
    mount = root / "sys/fs/cgroup"
    lines = _text(root / "proc/self/cgroup").splitlines()
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/").strip("/")
    folder = mount / own
    # In a container the path may be the host's, which is not there: the mount is then the container's own group.
    folders = [folder, *folder.parents] if folder.is_dir() and ".." not in folder.parts else [mount]
    readings = [_cgroup(each) for each in folders if each.is_relative_to(mount)]
    return [reading for reading in readings if reading is not None]


def _cgroup(folder: Path) -> MemoryReading | None:
    """What one control group says; None where it bounds nothing."""
    used = _text(folder / "memory.current")
    limits = [int(text) for name in ("memory.max", "memory.high") if (text := _text(folder / name)).isdigit()]
    if not limits or not used.isdigit():
        return None
    # Pages of files that nobody uses go at once.
    idle = sum(int(line.split()[1]) for line in _text(folder / "memory.stat").splitlines() if _is_idle(line))
    return MemoryReading(available=max(0, min(limits) - int(used) + idle), total=min(limits))


def _is_idle(line: str) -> bool:
    return line.startswith("inactive_file ")


def _is_pressed(root: Path) -> bool:
    if sys.platform == "darwin":
        return _macos_level() >= _MACOS_WARNING
    for line in _text(root / "proc/pressure/memory").splitlines():
        kind, _, figures = line.partition(" ")
        if kind == "some":
            values = dict(figure.split("=", 1) for figure in figures.split())
            return float(values.get("avg10", 0)) > _STALLED_PERCENT
    return False


def _macos_level() -> int:
    """1: normal, 2: warning, 4: critical."""
    command = ["/usr/sbin/sysctl", "-n", "kern.memorystatus_vm_pressure_level"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 1


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
