"""The memory budget gives way to other programs, and comes back; readings are given, and so is the clock."""

import ctypes
import logging
import os
import struct
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.core.errors import LoadFailed
from reprise.core.events import Event, Finished
from reprise.core.follow import Budget, MemoryReading, bound_for, budget_within, free_buffers, within_bound
from reprise.core.job import Job, Purpose
from reprise.core.prompt import Prompt
from reprise.core.settings import Settings
from reprise.core.sizes import Bytes
from reprise.core.tokens import as_tokens
from reprise.engine.machine import macos_footprint, read_machine
from reprise.engine.memory import process_nbytes
from reprise.loop import EngineClient
from reprise.loop.watch import following_machine
from tests.models.shared import loaded

GB = 10**9
TIGHT = MemoryReading(available=GB // 10, total=16 * GB)
ROOMY = MemoryReading(available=8 * GB, total=16 * GB)


def test_buffers_go_first_then_the_budget_then_nothing_for_a_while() -> None:
    budget = Budget(nbytes=8 * GB, least=GB, most=8 * GB)
    first = budget.after(TIGHT, now_s=10)
    assert (first.nbytes, first.returns_buffers) == (8 * GB, True)
    second = first.after(TIGHT, now_s=11)
    assert second.nbytes == 8 * GB - (TIGHT.reserve - TIGHT.available)
    assert second.after(ROOMY, now_s=12).nbytes == second.nbytes
    grown = second.after(ROOMY, now_s=72)
    assert second.nbytes < grown.nbytes <= 8 * GB
    assert not grown.returns_buffers


def test_pressure_takes_a_tenth_at_a_time_and_not_more_than_all() -> None:
    pressed = MemoryReading(available=8 * GB, total=16 * GB, is_pressed=True)
    budget = Budget(nbytes=8 * GB, least=GB, most=8 * GB, returns_buffers=True)
    assert budget.after(pressed, now_s=1).nbytes == 8 * GB * 9 // 10
    for second in range(100):
        budget = budget.after(pressed, now_s=second)
    assert budget.nbytes == GB


def test_between_tight_and_roomy_nothing_changes() -> None:
    budget = Budget(nbytes=4 * GB, least=GB, most=8 * GB)
    between = MemoryReading(available=ROOMY.reserve * 3 // 2, total=16 * GB)
    assert budget.after(between, now_s=1000) == budget


def test_what_linux_says(tmp_path: Path) -> None:
    pressure, group = tmp_path / "proc/pressure", tmp_path / "sys/fs/cgroup"
    assert not read_machine(tmp_path).is_pressed
    pressure.mkdir(parents=True)
    for figure, is_pressed in (("0.00", False), ("4.99", False), ("12.50", True)):
        (pressure / "memory").write_text(
            f"some avg10={figure} avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00 total=0\n"
        )
        assert read_machine(tmp_path).is_pressed is is_pressed
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("900\n")
    assert read_machine(tmp_path).total > 10**6
    (group / "memory.max").write_text("1000\n")
    (group / "memory.stat").write_text("anon 500\ninactive_file 50\n")
    reading = read_machine(tmp_path)
    assert (reading.available, reading.total) == (150, 1000)
    # The groups around it bound it as well, and so does `memory.high`; a group beside it does not.
    own = group / "user.slice/server.scope"
    own.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text("1:name=systemd:/other\n0::/user.slice/server.scope\n")
    assert read_machine(tmp_path).total == 1000
    for folder, name, limit, used in ((own, "memory.max", 700, 600), (own.parent, "memory.high", 900, 860)):
        (folder / name).write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
    beside = group / "other"
    beside.mkdir()
    (beside / "memory.max").write_text("10\n")
    (beside / "memory.current").write_text("10\n")
    reading = read_machine(tmp_path)
    assert (reading.available, reading.total) == (40, 700)
    # A path of the host that a container does not see.
    (tmp_path / "proc/self/cgroup").write_text("0::/../../elsewhere\n")
    assert read_machine(tmp_path).total == 1000


def test_what_linux_says_with_control_groups_of_version_1(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/memory/docker/it"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("5:cpu,cpuacct:/docker/it\n4:memory:/docker/it\n0::/other\n")
    (group / "memory.usage_in_bytes").write_text("700\n")
    (group / "memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")
    assert read_machine(tmp_path).total > 10**6
    (group / "memory.limit_in_bytes").write_text("1000\n")
    (group / "memory.stat").write_text("inactive_file 50\ntotal_inactive_file 100\n")
    reading = read_machine(tmp_path)
    assert (reading.total, reading.available) == (1000, 400)
    # A container sees its own group at the mount, under the path that the host knows.
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/docker/elsewhere\n")
    assert read_machine(tmp_path).total > 10**6
    for file in ("memory.usage_in_bytes", "memory.limit_in_bytes", "memory.stat"):
        (group / file).rename(tmp_path / "sys/fs/cgroup/memory" / file)
    assert read_machine(tmp_path).total == 1000


@pytest.mark.parametrize(
    ("said", "is_pressed"), [("1\n", False), ("2\n", True), ("4\n", True), ("", False), ("unknown\n", False)]
)
def test_what_macos_says(said: str, is_pressed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, stdout=said)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert read_machine(tmp_path).is_pressed is is_pressed
    assert asked == [["/usr/sbin/sysctl", "-n", "kern.memorystatus_vm_pressure_level"]]


@pytest.mark.parametrize(
    "error", [FileNotFoundError("sysctl"), subprocess.TimeoutExpired("sysctl", 5), subprocess.CalledProcessError(1, "")]
)
def test_a_macos_that_does_not_say_is_not_pressed(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(command: list[str], **options: object) -> None:
        raise error

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not read_machine(tmp_path).is_pressed


class LibSystem:
    """Answers as macOS does: `struct rusage_info_v0` is 16 bytes and ten 64-bit words, of which the eighth counts."""

    def __init__(self, status: int) -> None:
        self._status = status

    def proc_pid_rusage(self, pid: int, flavor: int, usage: Any) -> int:
        assert (pid, flavor) == (os.getpid(), 0)
        words = struct.pack("=16x10Q", *range(1, 8), 3 * 10**12, 9, 10)
        assert ctypes.sizeof(usage._obj) == len(words)
        ctypes.memmove(usage, words, len(words))
        return self._status


@pytest.mark.parametrize(("status", "says"), [(0, 3 * 10**12), (-1, None)])
def test_the_footprint_that_macos_counts(status: int, says: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def library(path: str) -> LibSystem:
        return LibSystem(status)

    monkeypatch.setattr(ctypes, "CDLL", library)
    assert macos_footprint() == says
    monkeypatch.setattr(sys, "platform", "darwin")

    # Where it does not say, what belongs to the process alone.
    def unique(process: psutil.Process) -> SimpleNamespace:
        return SimpleNamespace(uss=5 * 10**12)

    monkeypatch.setattr(psutil.Process, "memory_full_info", unique)
    assert process_nbytes() == (says if says is not None else 5 * 10**12)


@pytest.mark.skipif(sys.platform == "darwin", reason="where there is no such library")
def test_elsewhere_there_is_no_footprint() -> None:
    assert macos_footprint() is None


def test_an_engine_follows_its_machine(caplog: pytest.LogCaptureFixture) -> None:
    engine = EngineClient(Settings(model="llama", cache_bytes=None), load=lambda: loaded("llama"))
    engine.start()
    most = engine.status().held.budget_nbytes
    # A machine in which so much is missing that the least is reached at once.
    tight = MemoryReading(available=0, total=100 * most)
    was_read, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def read() -> MemoryReading:
        was_read.release()
        assert go_on.acquire(timeout=60)
        return tight

    try:
        with caplog.at_level(logging.WARNING), following_machine(engine, read=read, every_s=0.001):
            for _ in range(5):
                go_on.release()
                assert was_read.acquire(timeout=60)
            go_on.release(10**6)
        engine.pins("").result(60)
        assert engine.status().held.budget_nbytes < most
    finally:
        engine.close(now=True, timeout_s=60)
    assert len([record for record in caplog.records if "other programs" in record.getMessage()]) == 1


def test_freed_memory_is_returned_once_the_engine_has_been_idle() -> None:
    engine = EngineClient(Settings(model="llama"), load=lambda: loaded("llama"))
    engine.start()
    is_over, was_read, go_on = threading.Event(), threading.Semaphore(0), threading.Semaphore(0)
    trims: list[int] = []
    readings = iter([ROOMY] * 40 + [TIGHT] + [ROOMY] * 10**6)

    def read() -> MemoryReading:
        was_read.release()
        assert go_on.acquire(timeout=60)
        return next(readings)

    def look(num: int) -> int:
        for _ in range(num):
            go_on.release()
            assert was_read.acquire(timeout=60)
        return len(trims)

    try:
        with following_machine(engine, read=read, trim=lambda: trims.append(1), every_s=0.001):
            assert was_read.acquire(timeout=60)
            assert [look(3), look(1), look(10)] == [0, 1, 1]
            job = Job(id="one", prompt=Prompt(tokens=as_tokens(range(10, 60))), purpose=Purpose.PREFILL)
            engine.submit(job, lambda event: is_over.set() if isinstance(event, Finished) else None)
            assert is_over.wait(60)
            while not engine.status().is_idle:
                pass
            assert [look(4), look(10)] == [1, 2]
            # Again, as there is more to return.
            engine.clear().result(60)
            assert [look(4), look(3), look(3)] == [2, 3, 3]
            # Without waiting for idle time where the machine is short of it.
            assert [look(1), look(3), look(1)] == [3, 4, 4]
            go_on.release(10**6)
    finally:
        engine.close(now=True, timeout_s=60)


def test_a_smaller_budget_evicts_and_a_larger_one_is_used() -> None:
    engine = EngineClient(Settings(model="llama"), load=lambda: loaded("llama"))
    engine.start()

    def prefill(name: str, first: int) -> int:
        """Bytes of KV that are held when a prompt of 200 tokens is computed."""
        is_over = threading.Event()
        prompt = Prompt(tokens=as_tokens([first, *range(10, 209)]))
        job = Job(id=name, prompt=prompt, purpose=Purpose.PREFILL)
        engine.submit(job, lambda event: is_over.set() if isinstance(event, Finished) else None)
        assert is_over.wait(60)
        engine.pins("").result(60)
        return engine.status().held.kv_nbytes

    try:
        most = engine.status().held.budget_nbytes
        one = prefill("first", 1)
        assert prefill("second", 2) > 1.5 * one
        engine.set_budget(one + one // 4, returns_buffers=True)
        engine.pins("").result(60)
        held = engine.status().held
        assert held.budget_nbytes == one + one // 4
        assert 0 < held.kv_nbytes <= held.budget_nbytes
        engine.set_budget(most)
        engine.pins("").result(60)
        assert prefill("third", 3) + prefill("fourth", 4) > 2 * one
        engine.call(lambda worker: worker.cache.check())
    finally:
        engine.close(now=True, timeout_s=60)


def test_a_reduced_budget_refuses_nobody_and_ends_no_answer() -> None:
    engine = EngineClient(Settings(model="llama"), load=lambda: loaded("llama"))
    engine.start()
    ends: list[Finished] = []
    is_over = threading.Event()

    def listen(event: Event) -> None:
        if isinstance(event, Finished):
            ends.append(event)
            is_over.set()

    try:
        # Far less than its prompt takes.
        engine.set_budget(1000)
        prompt = Prompt(tokens=as_tokens(range(10, 210)))
        engine.submit(Job(id="one", prompt=prompt, max_tokens=100), listen)
        assert is_over.wait(60)
        assert ends[0].error is None
        assert ends[0].outcome.num_generated == 100
    finally:
        engine.close(now=True, timeout_s=60)


@given(st.integers(0, 200 * GB), st.integers(0, 200 * GB))
def test_a_bound_that_is_asked_for_suffices(process: int, budget: int) -> None:
    bound = bound_for(process, budget)
    given_to_layers = budget_within(bound, process)
    assert given_to_layers >= budget
    # With freed buffers and the reserve beside it.
    most = process + given_to_layers + free_buffers(given_to_layers) + MemoryReading(available=0, total=bound).reserve
    assert most <= bound + 1
    assert budget_within(process, process) == 0


def test_a_bound_takes_what_is_held_and_not_what_nobody_uses() -> None:
    budget = Budget(nbytes=8 * GB, least=0, most=8 * GB, returns_buffers=True)
    over = within_bound(10 * GB, 10 * GB)
    assert budget.after(over, now_s=1, held=3 * GB).nbytes == 3 * GB - over.reserve
    assert budget.after(over, now_s=1, held=0).nbytes == 0


def test_a_process_keeps_its_bound(caplog: pytest.LogCaptureFixture) -> None:
    engine = EngineClient(Settings(model="llama"), load=lambda: loaded("llama"))
    engine.start()
    most, bound = engine.status().held.budget_nbytes, 10 * GB
    was_measured, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def measure() -> int:
        was_measured.release()
        assert go_on.acquire(timeout=60)
        return bound

    try:
        with (
            caplog.at_level(logging.WARNING),
            following_machine(engine, bound=bound, read=lambda: ROOMY, measure=measure, every_s=0.001),
        ):
            for _ in range(4):
                go_on.release()
                assert was_measured.acquire(timeout=60)
            go_on.release(10**6)
        engine.pins("").result(60)
        # Nothing is held, so nothing is left; and what is configured is still served.
        assert engine.status().held.budget_nbytes == 0 < most
        prompt = Prompt(tokens=as_tokens(range(10, 60)))
        ends: list[Finished] = []
        is_over = threading.Event()

        def listen(event: Event) -> None:
            if isinstance(event, Finished):
                ends.append(event)
                is_over.set()

        engine.submit(Job(id="one", prompt=prompt, max_tokens=2), listen)
        assert is_over.wait(60)
        assert ends[0].error is None
    finally:
        engine.close(now=True, timeout_s=60)
    assert len([record for record in caplog.records if "--memory" in record.getMessage()]) == 1


def test_a_server_starts_within_its_bound_or_says_what_it_needs() -> None:
    room = 200 * 2**20
    fitting = Settings(model="llama", memory=Bytes(bound_for(process_nbytes(), room)))
    engine = EngineClient(fitting, load=lambda: loaded("llama"))
    engine.start()
    try:
        # Loading takes some of it.
        assert room // 2 < engine.status().held.budget_nbytes < room + 2**25
    finally:
        engine.close(now=True, timeout_s=60)
    engine = EngineClient(replace(fitting, memory=Bytes(process_nbytes())), load=lambda: loaded("llama"))
    with pytest.raises(LoadFailed, match=r"--memory is [\d.]+ .B, and .* needs at least [\d.]+ .B"):
        engine.start()
