"""The system's memory: free memory, pressure and cgroup limits on Linux, the pressure level on macOS."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from reprise.core.follow import MemoryReading

_STALLED_PERCENT = 5.0
"""If tasks stall on memory for more than this percentage of ten seconds, the system is about to swap."""

_MACOS_WARNING = 2


def read_machine(root: Path = Path("/")) -> MemoryReading:
    """A reading of the system's memory. `root`: of its file system."""
    memory = psutil.virtual_memory()
    available, total = int(memory.available), int(memory.total)
    for group in _cgroups(root):
        available, total = min(available, group.available), min(total, group.total)
    return MemoryReading(available=available, total=total, is_pressed=_is_pressed(root))


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupFiles:
    """Where a version of control groups has its figures: below `mount`, in the folder named by the line with these
    controllers in `/proc/self/cgroup`."""

    mount: str
    controllers: str
    limits: tuple[str, ...]
    used: str
    idle: str
    """The line of `memory.stat` with inactive file pages, which can be reclaimed at once."""


_VERSIONS = (
    _GroupFiles(
        mount="sys/fs/cgroup",
        controllers="",
        limits=("memory.max", "memory.high"),
        used="memory.current",
        idle="inactive_file",
    ),
    # Version 1, where unlimited is a number larger than any memory. Limits of parent groups are inherited.
    _GroupFiles(
        mount="sys/fs/cgroup/memory",
        controllers="memory",
        limits=("memory.limit_in_bytes",),
        used="memory.usage_in_bytes",
        idle="total_inactive_file",
    ),
)


def _cgroups(root: Path) -> list[MemoryReading]:
    """The memory of the control groups that limit this process: its own and their parents."""
    readings = [_cgroup(folder, files) for files in _VERSIONS for folder in _folders(root, files)]
    return [reading for reading in readings if reading is not None]


def _folders(root: Path, files: _GroupFiles) -> list[Path]:
    mount, own = root / files.mount, ""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if files.controllers in controllers.split(","):
            own = path.strip("/")
    folder = mount / own
    # In a container the path may be the host's, which does not exist: the mount is then the container's own group.
    folders = [folder, *folder.parents] if folder.is_dir() and ".." not in folder.parts else [mount]
    return [each for each in folders if each.is_relative_to(mount)]


def _cgroup(folder: Path, files: _GroupFiles) -> MemoryReading | None:
    """The memory of one control group, or None if it has no limit."""
    used = _text(folder / files.used)
    limits = [int(text) for name in files.limits if (text := _text(folder / name)).isdigit()]
    if not limits or not used.isdigit():
        return None
    lines = [line.split() for line in _text(folder / "memory.stat").splitlines()]
    idle = sum(int(value) for name, value in lines if name == files.idle)
    return MemoryReading(available=max(0, min(limits) - int(used) + idle), total=min(limits))


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
    """1: normal, 2: warning, 4: critical (libdispatch's `DISPATCH_MEMORYPRESSURE_*`); 1 if it cannot be read."""
    command = ["/usr/sbin/sysctl", "-n", "kern.memorystatus_vm_pressure_level"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 1


def macos_footprint() -> int | None:
    """This process's memory on macOS, including compressed pages and Metal buffers; None if it cannot be read.

    It is `ri_phys_footprint` of `rusage_info_v0` (sys/resource.h), which Activity Monitor shows as memory.
    """
    usage = _RusageInfo()
    try:
        status = ctypes.CDLL("/usr/lib/libSystem.dylib").proc_pid_rusage(os.getpid(), 0, ctypes.byref(usage))
    except (OSError, AttributeError):
        return None
    return int(usage.phys_footprint) if status == 0 else None


class _RusageInfo(ctypes.Structure):
    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        ("user_time", ctypes.c_uint64),
        ("system_time", ctypes.c_uint64),
        ("pkg_idle_wkups", ctypes.c_uint64),
        ("interrupt_wkups", ctypes.c_uint64),
        ("pageins", ctypes.c_uint64),
        ("wired_size", ctypes.c_uint64),
        ("resident_size", ctypes.c_uint64),
        ("phys_footprint", ctypes.c_uint64),
        ("proc_start_abstime", ctypes.c_uint64),
        ("proc_exit_abstime", ctypes.c_uint64),
    )


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
