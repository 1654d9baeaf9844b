"""Several processes on one directory, and processes that die."""

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from reprise.disk.records.format import read_record
from tests.disk.chains import all_files, find, look, opened, put_path, read_all, record_files
from tests.matrix import now_and_later


@contextmanager
def served(directory: Path, *, fingerprint: str = "model", max_bytes: int = 10**9) -> Generator[subprocess.Popen[str]]:
    script = Path(__file__).with_name("server.py")
    with subprocess.Popen(
        [sys.executable, str(script), str(directory), fingerprint, str(max_bytes)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("num_paths", now_and_later([4], [1, 9]))
def test_a_process_that_is_killed_leaves_nothing_half(num_paths: int, tmp_path: Path) -> None:
    with served(tmp_path) as process:
        assert line(process) == "open"
        for _ in range(num_paths):
            assert line(process) == "written"
        process.send_signal(signal.SIGKILL)
        process.wait()
    with opened(tmp_path) as cache:
        assert {path.suffix for path in all_files(tmp_path)} == {".kv", ""}
        cache.check()
        assert cache.stats().num_files >= 4 * num_paths and cache.stats().num_quarantined == 0
        for path in record_files(tmp_path):
            with path.open("rb") as file:
                read_record(file, path.stat().st_size)
        found = find(cache, [0, *range(11)])
        assert found is not None and found.position == 12
        assert len(read_all(cache, found)[0]) == 4


@pytest.mark.matrix
@pytest.mark.parametrize("fingerprint", now_and_later(["model"], ["other"]))
def test_two_processes_that_write_at_once_keep_the_bound_together(fingerprint: str, tmp_path: Path) -> None:
    bound = 1_500_000
    with (
        served(tmp_path, fingerprint=fingerprint, max_bytes=bound) as process,
        opened(tmp_path, max_bytes=bound) as cache,
    ):
        assert line(process) == "open"
        for number in range(25):
            put_path(cache, [number, 1, 2], nbytes=30_000)
            assert line(process) == "written"
            # It stands still while files are counted: one that is renamed meanwhile could be seen twice.
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            assert sum(all_files(tmp_path).values()) <= bound
            process.send_signal(signal.SIGCONT)
        assert cache.stats().num_files > 0 and cache.stats().num_errors == 0
        process.kill()
        process.wait()
        look(cache)
        cache.check()
        assert not cache.is_shared
