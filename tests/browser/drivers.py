"""Firefox and WebKit, each driven by the protocol that it speaks itself: go to an address, run a script there."""

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

_PATIENCE_S = 60.0


class Browser(ABC):
    """A window of a browser."""

    @abstractmethod
    def go(self, url: str) -> None: ...

    @abstractmethod
    def run(self, script: str) -> Any:
        """What the script returns."""

    def until(self, script: str) -> Any:
        """What the script returns as soon as it is true."""
        until_s = time.monotonic() + _PATIENCE_S
        while not (found := self.run(f"return {script}")):
            assert time.monotonic() < until_s, script
            time.sleep(0.1)
        return found


class Firefox(Browser):
    """Over Marionette: JSON with its length before it, on a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._read()
        self._ask("WebDriver:NewSession", capabilities={})

    def go(self, url: str) -> None:
        self._ask("WebDriver:Navigate", url=url)

    def run(self, script: str) -> Any:
        return self._ask("WebDriver:ExecuteScript", script=script, args=[])["value"]

    def _ask(self, command: str, **given: Any) -> Any:
        text = json.dumps([0, 1, command, given]).encode()
        self._connection.sendall(b"%d:%b" % (len(text), text))
        _, _, error, result = self._read()
        assert error is None, error
        return result

    def _read(self) -> Any:
        length = b""
        while (digit := self._connection.recv(1)) != b":":
            length += digit
        body = b""
        while len(body) < int(length):
            body += self._connection.recv(int(length) - len(body))
        return json.loads(body)


class WebKit(Browser):
    """Over WebDriver, by HTTP."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        made = self._client.post("/session", json={"capabilities": {"alwaysMatch": {}}}).raise_for_status().json()
        self._session = f"/session/{made['value']['sessionId']}"

    def go(self, url: str) -> None:
        self._client.post(f"{self._session}/url", json={"url": url}).raise_for_status()

    def run(self, script: str) -> Any:
        body: dict[str, Any] = {"script": script, "args": []}
        return self._client.post(f"{self._session}/execute/sync", json=body).raise_for_status().json()["value"]


@contextmanager
def firefox() -> Generator[Browser | None]:
    """None where there is none."""
    program = shutil.which("firefox-esr") or shutil.which("firefox")
    if program is None:
        yield None
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, socket.socket() as connection:
        port = _free_port()
        (Path(profile) / "user.js").write_text(f'user_pref("marionette.port", {port});\n')
        with _running(program, "--headless", "--no-remote", "--marionette", "--profile", profile):
            _connect(connection, port)
            yield Firefox(connection)


@contextmanager
def webkit() -> Generator[Browser | None]:
    """None where there is none, or no display for it."""
    if shutil.which("WebKitWebDriver") is None or shutil.which("Xvfb") is None:
        yield None
        return
    reading, writing = os.pipe()
    with _running("Xvfb", "-displayfd", str(writing), "-screen", "0", "1400x1000x24", keeps=writing):
        os.close(writing)
        with os.fdopen(reading) as shown:
            display = f":{shown.readline().strip()}"
        port = _free_port()
        with _running("WebKitWebDriver", f"--port={port}", display=display), socket.socket() as probe:
            _connect(probe, port)
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=_PATIENCE_S) as client:
                yield WebKit(client)


@contextmanager
def _running(*command: str, display: str | None = None, keeps: int | None = None) -> Generator[None]:
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | ({} if display is None else {"DISPLAY": display}),
        pass_fds=() if keeps is None else (keeps,),
        start_new_session=True,
    )
    try:
        yield
    finally:
        # With what it has started itself.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 15)
        process.wait(_PATIENCE_S)


def _connect(connection: socket.socket, port: int) -> None:
    until_s = time.monotonic() + _PATIENCE_S
    connection.settimeout(_PATIENCE_S)
    while True:
        try:
            connection.connect(("127.0.0.1", port))
        except OSError:
            assert time.monotonic() < until_s, "the browser does not answer"
            time.sleep(0.2)
        else:
            return


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
