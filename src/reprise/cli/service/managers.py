"""launchd and systemd: where their files are, and the commands that control them."""

import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reprise.cli.service.units import NAME, Service, launchd_plist, systemd_units
from reprise.core.errors import RepriseError

Run = Callable[[Sequence[str]], "Ran"]
"""Runs a command to its end."""


class ServiceFailed(RepriseError):
    """The service manager refused a command; the message quotes it."""

    code = "service_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """How a command ended, and what it wrote."""

    status: int
    output: str


class ServiceManager(ABC):
    """What runs programs for a user whether or not a terminal is open. `command` controls it, `paths` are its files."""

    def __init__(self, run: Run, command: Sequence[str], paths: Sequence[Path]) -> None:
        self._run = run
        self._command = command
        self._paths = paths

    @abstractmethod
    def files(self, service: Service) -> Mapping[Path, bytes]:
        """The files that it needs, by place."""

    def installed(self) -> tuple[Path, ...]:
        """Those of them that are there."""
        return tuple(path for path in self._paths if path.exists())

    @abstractmethod
    def start(self, service: Service) -> None:
        """Run what the files say, from now on. Raises ServiceFailed."""

    @abstractmethod
    def stop(self) -> None:
        """End it, and run it no more. Raises ServiceFailed."""

    @abstractmethod
    def is_active(self) -> bool:
        """Whether the server runs, or the port waits for the first connection."""

    def advice(self) -> str | None:
        """What the user may want to know after installing; None: nothing."""
        return None

    def _tell(self, *words: str) -> None:
        ran = self._run([*self._command, *words])
        if ran.status != 0:
            raise ServiceFailed(f"`{' '.join((*self._command, *words))}` failed: {' '.join(ran.output.split())}")


class Systemd(ServiceManager):
    """The user's manager of systemd."""

    def __init__(self, run: Run, environment: Mapping[str, str], home: Path) -> None:
        configured = environment.get("XDG_CONFIG_HOME")
        self._folder = (Path(configured) if configured else home / ".config") / "systemd" / "user"
        paths = [self._folder / f"{NAME}{ending}" for ending in (".service", ".socket")]
        super().__init__(run, ("systemctl", "--user"), paths)

    def files(self, service: Service) -> Mapping[Path, bytes]:
        return {self._folder / name: text.encode() for name, text in systemd_units(service).items()}

    def start(self, service: Service) -> None:
        self._tell("daemon-reload")
        unit = f"{NAME}.service" if service.listens_at is None else f"{NAME}.socket"
        self._tell("enable", unit)
        # A server that runs with an earlier file is started again.
        self._tell("restart", unit)

    def stop(self) -> None:
        units = [path.name for path in self.installed()]
        if units:
            self._tell("disable", "--now", *units)

    def is_active(self) -> bool:
        return any(self._run([*self._command, "is-active", path.name]).status == 0 for path in self.installed())

    def advice(self) -> str | None:
        return "It ends when you log out; `loginctl enable-linger` keeps it running, and starts it at boot."


class Launchd(ServiceManager):
    """The agents of a user who is logged in to macOS."""

    def __init__(self, run: Run, home: Path, *, user: int) -> None:
        self._file = home / "Library" / "LaunchAgents" / f"{NAME}.plist"
        self._domain = f"gui/{user}"
        super().__init__(run, ("launchctl",), [self._file])

    def files(self, service: Service) -> Mapping[Path, bytes]:
        return {self._file: launchd_plist(service)}

    def start(self, service: Service) -> None:
        if self.is_active():
            self._tell("bootout", f"{self._domain}/{NAME}")
        self._tell("bootstrap", self._domain, str(self._file))

    def stop(self) -> None:
        if self.is_active():
            self._tell("bootout", f"{self._domain}/{NAME}")

    def is_active(self) -> bool:
        return self._run([*self._command, "print", f"{self._domain}/{NAME}"]).status == 0


def this_manager() -> ServiceManager:
    """That of this machine."""
    if sys.platform == "darwin":
        return Launchd(run, Path.home(), user=os.getuid())
    return Systemd(run, os.environ, Path.home())


def run(words: Sequence[str]) -> Ran:
    """See `Run`. Raises ServiceFailed where the command does not exist."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ServiceFailed(f"This machine has no {words[0]}, so it runs no services for users.") from error
    return Ran(status=done.returncode, output=done.stdout + done.stderr)
