"""The socket that a service manager opened for the server."""

import os
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import closing

import pytest

from reprise.api.http.activation import inherited_listener
from reprise.api.http.listening import CannotListen, listen


@pytest.fixture
def listener() -> Generator[socket.socket]:
    with closing(listen("127.0.0.1", 0)) as made:
        yield made


STARTED = """
import os
from reprise.api.http.activation import inherited_listener
listener = inherited_listener(os.environ)
print(None if listener is None else listener.getsockname()[1], os.get_inheritable(3), "LISTEN_FDS" in os.environ)
"""


@pytest.mark.parametrize("pid", ["$$", "1"])
def test_the_socket_of_systemd_is_of_the_process_that_it_names(pid: str, listener: socket.socket) -> None:
    os.set_inheritable(listener.fileno(), True)
    shell = f'exec 3<&{listener.fileno()}; export LISTEN_PID={pid} LISTEN_FDS=1; exec "$0" -c "$1"'
    words = ["/bin/bash", "-c", shell, sys.executable, STARTED]
    ran = subprocess.run(words, capture_output=True, text=True, check=True, pass_fds=[listener.fileno()])
    is_ours = pid == "$$"
    port = listener.getsockname()[1] if is_ours else None
    assert ran.stdout.split() == [str(port), str(not is_ours), "False"]


def test_the_socket_of_launchd_has_a_name(listener: socket.socket) -> None:
    environment = {"LAUNCHD_SOCKET": "server", "HOME": "/"}
    asked: list[str] = []

    def activate(name: str) -> int:
        asked.append(name)
        return listener.detach()

    address = listener.getsockname()
    found = inherited_listener(environment, activate=activate)
    assert found is not None
    with found:
        assert (asked, found.getsockname(), environment) == (["server"], address, {"HOME": "/"})


def test_a_process_that_was_started_by_hand_has_none() -> None:
    assert inherited_listener({}) is None
    # Of the shell's parent, that is.
    assert inherited_listener({"LISTEN_PID": "1", "LISTEN_FDS": "1"}) is None


def test_what_is_no_socket_for_a_server_is_refused() -> None:
    pid = str(os.getpid())
    with pytest.raises(CannotListen, match="2 sockets"):
        inherited_listener({"LISTEN_PID": pid, "LISTEN_FDS": "2"})
    with pytest.raises(CannotListen, match="cannot be used"), socket.socket() as silent:
        inherited_listener({"LAUNCHD_SOCKET": "server"}, activate=lambda name: silent.detach())
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(CannotListen, match="cannot be used"):
        inherited_listener({"LAUNCHD_SOCKET": "server"}, activate=lambda name: ours.detach())
    if sys.platform != "darwin":
        with pytest.raises(CannotListen, match="no launchd"):
            inherited_listener({"LAUNCHD_SOCKET": "server"})
