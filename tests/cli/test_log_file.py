"""The log of a server in a file of its own."""

import logging
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

from reprise.cli.log_file import NUM_KEPT, LogFileHandler, kept_file


def line_to(handler: LogFileHandler, text: str) -> None:
    handler.emit(logging.LogRecord("any", logging.INFO, "", 0, text, (), None))
    handler.flush()


def test_a_large_file_is_renamed_and_the_oldest_is_dropped(tmp_path: Path) -> None:
    place = os.open(tmp_path / "standard_error", os.O_WRONLY | os.O_CREAT)
    file = tmp_path / "server.log"
    handler = LogFileHandler(file, max_nbytes=10, descriptor=place)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for number in range(NUM_KEPT + 3):
        line_to(handler, f"line number {number}")
    kept = [kept_file(file, number) for number in range(NUM_KEPT + 1)]
    assert [each.read_text() for each in kept] == [f"line number {5 - number}\n" for number in range(NUM_KEPT + 1)]
    assert not kept_file(file, NUM_KEPT + 1).exists()
    os.close(place)


def test_two_processes_rename_a_file_once(tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    places = [os.open(tmp_path / "e", os.O_WRONLY | os.O_CREAT) for _ in range(2)]
    one, other = (LogFileHandler(file, max_nbytes=10, descriptor=each) for each in places)
    line_to(one, "from the first")
    line_to(one, "after renaming")
    # Its own file has been renamed, and the new one is not.
    line_to(other, "from the second")
    assert file.read_text() == "after renaming\nfrom the second\n"
    assert kept_file(file, 1).read_text() == "from the first\n"
    assert not kept_file(file, 2).exists()
    for place in places:
        os.close(place)


def test_a_refusal_is_in_the_file_too(tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = ["serve", "some/model", "--port", str(taken.getsockname()[1]), "--log-file"]
        command = [sys.executable, "-m", "reprise.cli.main", *words]
        ran = subprocess.run([*command, str(file)], capture_output=True, text=True, check=False)
        refused = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", "")
    assert file.read_text().startswith("reprise: Port ")
    # What cannot be written is said where it was started.
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
