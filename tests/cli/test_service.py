"""`reprise service`: the files of launchd and systemd, and what their managers are told."""

import os
import plistlib
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner, Result

import reprise.cli.service.command
from reprise.api.http.listening import listen
from reprise.cli.log_file import kept_file
from reprise.cli.main import app
from reprise.cli.service.command import last_lines
from reprise.cli.service.managers import Launchd, Ran, ServiceManager, Systemd
from reprise.cli.service.units import Service, launchd_plist, systemd_units
from tests.models.tiny import tiny_model

GOLDENS = Path(__file__).parent / "service"
AT_LOGIN = Service(
    words=[
        "/opt/reprise/bin/reprise",
        "serve",
        "org/model",
        "--api-key",
        'a$b%c"d e',
        "--log-file",
        "/logs/service.log",
    ],
    folder=Path("/home/ann/50% mine"),
    log=Path("/logs/log"),
    variables={"REPRISE_CONFIG": "/home/ann/my reprise.toml", "HF_HOME": "/models"},
    grace_s=30,
    listens_at=None,
)
ON_DEMAND = replace(AT_LOGIN, listens_at=("127.0.0.1", 8080))
SERVICES = {"login": AT_LOGIN, "demand": ON_DEMAND}


def assert_as_reviewed(name: str, text: str) -> None:
    """With UPDATE_GOLDENS set, the file is written instead: look at the difference."""
    file = GOLDENS / name
    if "UPDATE_GOLDENS" in os.environ:
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.parametrize("when", SERVICES)
def test_the_units_of_systemd(when: str) -> None:
    for name, text in systemd_units(SERVICES[when]).items():
        assert_as_reviewed(f"{when}.{name}", text)


@pytest.mark.parametrize("when", SERVICES)
def test_the_property_list_of_launchd(when: str) -> None:
    assert_as_reviewed(f"{when}.plist", launchd_plist(SERVICES[when]).decode())


def test_an_address_of_ip_6_is_written_in_brackets() -> None:
    assert "ListenStream=[::1]:80\n" in systemd_units(replace(ON_DEMAND, listens_at=("::1", 80)))["mlx-reprise.socket"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("when", SERVICES)
def test_systemd_reads_its_units(when: str, tmp_path: Path) -> None:
    service = replace(SERVICES[when], words=[sys.executable, *SERVICES[when].words[1:]], folder=tmp_path)
    for name, text in systemd_units(service).items():
        (tmp_path / name).write_text(text)
    words = ["systemd-analyze", "verify", "--user", *(str(tmp_path / name) for name in systemd_units(service))]
    environment = {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    checked = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert "mlx-reprise" not in checked.stderr, checked.stderr


class NotedMachine:
    """A machine whose manager notes what it is told, and runs what it was told to start."""

    def __init__(self) -> None:
        self.commands: list[str] = []
        self.is_active = False
        self.failure: Ran | None = None

    def run(self, words: Sequence[str]) -> Ran:
        self.commands.append(" ".join(words))
        if self.failure is not None:
            return self.failure
        if {"is-active", "print"} & {*words}:
            return Ran(status=0 if self.is_active else 3, output="")
        self.is_active = bool({"restart", "bootstrap"} & {*words}) or ("daemon-reload" in words and self.is_active)
        return Ran(status=0, output="")


@pytest.fixture
def told() -> NotedMachine:
    return NotedMachine()


@pytest.fixture(params=["launchd", "systemd"])
def manager(
    request: pytest.FixtureRequest, told: NotedMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ServiceManager:
    made = Launchd(told.run, tmp_path, user=501) if request.param == "launchd" else Systemd(told.run, {}, tmp_path)
    monkeypatch.setattr(reprise.cli.service.command, "this_manager", lambda: made)
    monkeypatch.setattr(reprise.cli.service.command, "log_file", lambda: tmp_path / "logs" / "service.log")
    monkeypatch.setenv("HF_HOME", "/models")
    return made


def service(*words: str) -> Result:
    return CliRunner().invoke(app, ["service", *words])


def test_a_service_is_installed_replaced_and_removed(
    manager: ServiceManager, told: NotedMachine, tmp_path: Path
) -> None:
    assert service("status").exit_code == 1
    assert service("uninstall").exit_code == 2
    assert service("logs").exit_code == 2
    model = str(tiny_model("llama"))
    done = service("install", model, "--temp", "0", "--on-demand")
    assert done.exit_code == 0, done.output
    assert "waits for its first request at http://127.0.0.1:8080" in done.output
    files = manager.installed()
    assert len(files) == (1 if isinstance(manager, Launchd) else 2)
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    assert service("status").exit_code == 0
    told.commands.clear()
    assert service("install", model, "--decode-concurrency", "2").exit_code == 0
    # The port is no longer the manager's.
    (file,) = manager.installed()
    content = file.read_text()
    assert "--decode-concurrency" in content and "--temp" not in content and "/models" in content
    if isinstance(manager, Launchd):
        plist = plistlib.loads(file.read_bytes())
        assert plist["ProgramArguments"][1:3] == ["serve", model]
        home = f"{tmp_path}/Library/LaunchAgents/mlx-reprise.plist"
        changing = [each for each in told.commands if " print " not in each]
        assert changing == ["launchctl bootout gui/501/mlx-reprise", f"launchctl bootstrap gui/501 {home}"]
    else:
        assert told.commands == [
            "systemctl --user disable --now mlx-reprise.service mlx-reprise.socket",
            "systemctl --user daemon-reload",
            "systemctl --user enable mlx-reprise.service",
            "systemctl --user restart mlx-reprise.service",
        ]
    assert service("uninstall").exit_code == 0
    assert manager.installed() == () and not told.is_active
    assert service("status").exit_code == 1


def test_what_cannot_be_installed_is_a_sentence(manager: ServiceManager, told: NotedMachine) -> None:
    model = str(tiny_model("llama"))
    assert service("install", model, "--temp", "hot").exit_code == 2
    assert "needs a port" in service("install", model, "--on-demand", "--port", "0").output
    told.failure = Ran(status=1, output="Failed to connect to bus:\n no medium\n")
    failed = service("install", model)
    assert (failed.exit_code, failed.stderr.count("\n")) == (2, 1)
    assert "failed: Failed to connect to bus: no medium" in failed.stderr
    # It leaves nothing that would be started at the next login, or that keeps the next try from replacing it.
    assert manager.installed() == ()
    told.failure = None
    assert service("install", model).exit_code == 0
    assert service("uninstall").exit_code == 0
    printed = service("install", model, "--print")
    assert manager.installed() == ()
    assert printed.exit_code == 0 and "# " in printed.output and "serve" in printed.output


def test_the_end_of_the_log_reaches_into_the_renamed_file(manager: ServiceManager, tmp_path: Path) -> None:
    assert manager.installed() == ()
    log = tmp_path / "logs" / "service.log"
    log.parent.mkdir()
    log.write_text("three\nfour\n")
    assert service("logs", "-n", "1").output == "four\n"
    kept_file(log, 1).write_text("one\ntwo\n")
    assert service("logs", "-n", "3").output == "two\nthree\nfour\n"
    assert list(last_lines([tmp_path / "none"], 3)) == []


@pytest.mark.matrix
@pytest.mark.skipif(shutil.which("systemd-socket-activate") is None, reason="no systemd here")
def test_the_first_request_starts_the_server_and_waits_for_it() -> None:
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    model = str(tiny_model("llama"))
    serve = [sys.executable, "-m", "reprise.cli.main", "serve", model, "--disk-cache", "off", "--log-level", "error"]
    with subprocess.Popen(
        ["systemd-socket-activate", "-l", f"127.0.0.1:{port}", *serve], stderr=subprocess.PIPE
    ) as server:
        assert server.stderr is not None
        assert b"Listening on" in server.stderr.readline()
        threading.Thread(target=server.stderr.read, daemon=True).start()
        try:
            body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2}
            answered = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=120)
            assert answered.status_code == 200
        finally:
            server.terminate()
