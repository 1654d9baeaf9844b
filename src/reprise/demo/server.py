"""The real server as a process of its own, as a user would start it."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import httpx

from reprise.demo.client import DemoFailed

_ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")
_START_S = 120.0
_STOP_S = 10.0


@contextmanager
def server(model: Path, *options: str) -> Generator[httpx.Client]:
    """`reprise serve MODEL` on a free port; gives a client for it, and stops it at the end.

    Raises DemoFailed with the server's own words if it does not start.
    """
    command = [sys.executable, "-m", "reprise.cli.main", "serve", str(model), "--port", "0", *options]
    # The user's own configuration is for the user's own servers.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REPRISE_")}
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(
            [*command, "--config", os.devnull],
            stdout=words,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        try:
            address = _wait_for_address(process, words.fileno())
            with httpx.Client(base_url=address, timeout=httpx.Timeout(60.0)) as client:
                _wait_until_ready(client, process, words.fileno())
                yield client
        finally:
            _stop(process)


class RestartableServer:
    """The same server, which can be stopped and started anew."""

    def __init__(self, model: Path, *options: str) -> None:
        self._start = partial(server, model, *options)
        self._running = ExitStack()
        self.client = self._running.enter_context(self._start())

    def restart(self) -> None:
        """Stop the process and start another, which has nothing but what is on disk."""
        self._running.close()
        self.client = self._running.enter_context(self._start())

    def stop(self) -> None:
        self._running.close()


def _wait_for_address(process: "subprocess.Popen[bytes]", words: int) -> str:
    """The address that the server prints."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        _check_runs(process, words)
        found = _ADDRESS.search(_read(words))
        if found is not None:
            return found.group()
        time.sleep(0.05)
    raise DemoFailed(f"The server did not start within {_START_S:.0f} seconds.")


def _check_runs(process: "subprocess.Popen[bytes]", words: int) -> None:
    """DemoFailed, with its words, if the server has ended: also with an address, it may find no model to load."""
    if process.poll() is not None:
        raise DemoFailed(f"The server did not start. It said:\n{_read(words).strip()}")


def _read(words: int) -> str:
    """All that the process has written, without moving the place where it writes on (both share one file offset)."""
    return os.pread(words, 1 << 20, 0).decode(errors="replace")


def _wait_until_ready(client: httpx.Client, process: "subprocess.Popen[bytes]", words: int) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        _check_runs(process, words)
        try:
            if client.get("/health").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise DemoFailed("The server printed its address and then did not answer.")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
