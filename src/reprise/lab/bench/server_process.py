"""Servers as processes of their own, as a user would start them: ours, and mlx-lm's."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import httpx

from reprise.core.errors import RepriseError

_ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")
_START_S = 120.0
_STOP_S = 10.0
_NOT_READY = 503
_SHOWN = 1500
"""The most characters that are shown of the end of a dead server's output."""


class ServerFailed(RepriseError):
    """A server does not start or has died; the sentence says why, in its own words where it had any."""

    code = "server_failed"


def reprise_command(model: str | Path, *options: str) -> tuple[str, ...]:
    """`reprise serve MODEL` on a free port, without the user's own configuration."""
    serve = (sys.executable, "-m", "reprise.cli.main", "serve", str(model), "--port", "0")
    disk = () if "--disk-cache" in options else ("--disk-cache", "off")
    return (*serve, *options, *disk, "--config", os.devnull)


def mlx_lm_command(model: str | Path, port: int) -> tuple[str, ...]:
    """mlx-lm's own server with its defaults."""
    where = ("--model", str(model), "--port", str(port), "--log-level", "WARNING")
    return (sys.executable, "-m", "mlx_lm", "server", *where)


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ServerProcess:
    """One server from its start to its end."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        url: str | None = None,
        start_s: float = _START_S,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it, and wait until it answers. `url`: where it will be, None: it prints that.

        `environment`: variables besides this process's own.

        Raises ServerFailed with its words if it does not start.
        """
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `stop`)
        self._process = subprocess.Popen(
            command,
            stdout=self._words,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            # The user's own configuration is for the user's own servers.
            env={name: value for name, value in os.environ.items() if not name.startswith("REPRISE_")}
            | dict(environment or {}),
        )
        try:
            deadline_s = time.monotonic() + start_s
            self.url = url if url is not None else self._wait_for_address(deadline_s)
            self._wait_until_ready(deadline_s)
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def check_runs(self) -> None:
        """ServerFailed, with its last words, if the process has ended."""
        status = self._process.poll()
        if status is not None:
            words = self._read().strip()[-_SHOWN:]
            raise ServerFailed(f"The server exited with status {status}:\n{words}")

    def stop(self) -> None:
        """As Ctrl-C does; a second time it is killed."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._words.close()

    def kill(self) -> None:
        """As when its machine loses power."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _read(self) -> str:
        """All that the process has written, without moving its write offset, which both share."""
        return os.pread(self._words.fileno(), 1 << 20, 0).decode(errors="replace")

    def _wait_for_address(self, deadline_s: float) -> str:
        while time.monotonic() < deadline_s:
            self._check_starts()
            found = _ADDRESS.search(self._read())
            if found is not None:
                return found.group()
            time.sleep(0.05)
        raise ServerFailed("The server did not start in time.")

    def _wait_until_ready(self, deadline_s: float) -> None:
        with httpx.Client(base_url=self.url, timeout=5.0) as client:
            while time.monotonic() < deadline_s:
                self._check_starts()
                try:
                    if client.get("/health").status_code != _NOT_READY:
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.05)
        raise ServerFailed("The server did not answer in time.")

    def _check_starts(self) -> None:
        # Also with an address it may find no model to load.
        if self._process.poll() is not None:
            raise ServerFailed(f"The server did not start:\n{self._read().strip()[-_SHOWN:]}")


@contextmanager
def server(model: Path, *options: str) -> Generator[httpx.Client]:
    """`reprise serve MODEL` on a free port; gives a client for it, and stops it at the end. Raises ServerFailed."""
    with (
        ServerProcess(reprise_command(model, *options)) as process,
        httpx.Client(base_url=process.url, timeout=httpx.Timeout(60.0)) as client,
    ):
        yield client


class RestartableServer:
    """The same server, which can be stopped and started anew."""

    def __init__(self, model: Path, *options: str) -> None:
        self._command = reprise_command(model, *options)
        self._start()

    def _start(self) -> None:
        self._process = ServerProcess(self._command)
        self.client = httpx.Client(base_url=self._process.url, timeout=httpx.Timeout(60.0))

    def restart(self) -> None:
        """Stop the process and start another, which has nothing but what is on disk."""
        self.stop()
        self._start()

    def stop(self) -> None:
        self.client.close()
        self._process.stop()
