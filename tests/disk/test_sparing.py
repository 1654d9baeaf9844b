"""What is written in a day, on battery, and where nobody has said where: the SSD is spared."""

import logging
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import platformdirs
import pytest

from reprise.cli.engines import disk_line
from reprise.cli.serve import with_disk
from reprise.core.inspection import OnDisk
from reprise.core.settings import Settings
from reprise.core.sizes import Bytes
from reprise.disk import default_place
from reprise.disk.sparing import COUNT, SparedWrites, spared_writes
from tests.disk.chains import PATIENCE_S, DirectoryClock, find, opened, position, put_path, records_for

CHAT = list(range(10))
GB = 10**9


@dataclass
class Machine:
    """Its day, and why it is left alone."""

    day: str = "2026-11-24"
    quiet: str | None = None

    def writes(self, directory: Path, daily: int | None) -> SparedWrites:
        return SparedWrites(directory, daily, day=lambda: self.day, why_quiet=lambda: self.quiet)


def test_no_more_is_written_than_a_day_may_have_and_the_next_day_goes_on(tmp_path: Path) -> None:
    machine, clock = Machine(), DirectoryClock()
    with opened(tmp_path, clock=clock, writes=machine.writes(tmp_path, 3000)) as cache:
        put_path(cache, CHAT)
        told = cache.stats()
        assert 0 < told.written_nbytes <= 3000 and told.daily_nbytes == 3000
        lost = records_for(cache, [7] * 9, nbytes=2000)
        assert cache.put(lost[0]) and cache.flush(PATIENCE_S)
        told = cache.stats()
        assert told.spared is not None and "3 kB" in told.spared and "--disk-daily-writes" in told.spared
        assert (told.num_errors, told.queued_nbytes, cache.can_take(1)) == (0, 0, False)
        assert position(find(cache, CHAT)) == 10, "reading goes on"
        machine.day = "2026-11-25"
        clock.now_s += 60
        assert cache.stats().today_nbytes == 0
        put_path(cache, [7] * 9)
        assert position(find(cache, [7] * 9)) == 9 and cache.stats().spared is None
        cache.check()


def test_a_restart_does_not_forget_what_was_written_today(tmp_path: Path) -> None:
    machine = Machine()
    with opened(tmp_path, writes=machine.writes(tmp_path, GB)) as cache:
        put_path(cache, CHAT)
        written = cache.stats().today_nbytes
    again = machine.writes(tmp_path, GB)
    assert again.today_nbytes == written
    machine.day = "2026-11-25"
    assert again.today_nbytes == machine.writes(tmp_path, GB).today_nbytes == 0
    (tmp_path / COUNT).write_bytes(b"\xff what is this")
    assert machine.writes(tmp_path, GB).today_nbytes == 0


def test_all_servers_of_a_directory_count_together(tmp_path: Path) -> None:
    machine = Machine()
    one, two = machine.writes(tmp_path, 100), machine.writes(tmp_path, 100)
    one.note(60)
    one.save()
    two.note(30)
    assert two.why_not(20) is None, "it has not read of the other yet"
    two.save()
    assert two.today_nbytes == machine.writes(tmp_path, 100).today_nbytes == 90
    assert two.why_not(20) is not None
    one.note(5)
    one.save()
    assert one.today_nbytes == machine.writes(tmp_path, 100).today_nbytes == 95
    (tmp_path / COUNT).unlink()
    one.note(1)
    one.save()
    assert machine.writes(tmp_path, 100).today_nbytes == 96, "whoever removes the file brings no bytes back"
    one.note(1)
    machine.day = "2026-11-25"
    two.note(10)
    one.save()
    assert machine.writes(tmp_path, 100).today_nbytes == 10, "what was written yesterday is not saved today"


def test_nothing_is_written_while_the_machine_is_left_alone(tmp_path: Path) -> None:
    machine, clock = Machine(quiet="The machine is on battery."), DirectoryClock()
    with opened(tmp_path, clock=clock, writes=machine.writes(tmp_path, None)) as cache:
        assert not cache.put(records_for(cache, CHAT)[0]) and cache.is_paused()
        told = cache.stats()
        assert told.spared is not None and "battery" in told.spared and told.written_nbytes == 0
        # The reason is that of this moment, and writing goes on at once.
        machine.quiet = "The machine is hot."
        assert cache.stats().spared == machine.quiet
        machine.quiet = None
        assert cache.stats().spared is None and not cache.is_paused()
        put_path(cache, CHAT)
        assert position(find(cache, CHAT)) == 10


def test_what_waits_to_be_written_is_dropped_when_the_machine_is_to_be_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="reprise.disk")
    asked: list[str] = []

    def why_quiet() -> str | None:
        # Of the writer's thread alone: the record has been queued.
        is_writer = threading.current_thread().name == "reprise-disk-writer"
        asked.extend(["writer"] if is_writer else [])
        return "The machine is on battery." if is_writer else None

    with opened(tmp_path, writes=SparedWrites(tmp_path, None, why_quiet=why_quiet)) as cache:
        assert cache.put(records_for(cache, CHAT)[0]) and cache.flush(PATIENCE_S)
        told = cache.stats()
        assert asked and (told.written_nbytes, told.queued_nbytes, told.num_errors) == (0, 0, 0)
        assert not cache.is_paused()
    assert not caplog.records, "the machine's reason is logged once, where it is seen"


def test_all_models_of_a_directory_count_together(tmp_path: Path) -> None:
    kept = spared_writes(tmp_path, 5)
    kept.note(3)
    assert spared_writes(tmp_path, 5) is kept
    assert spared_writes(tmp_path, 5).today_nbytes == 3
    assert spared_writes(tmp_path / "other", 5).today_nbytes == 0


class _FreeSpace(NamedTuple):
    free: int


def only(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """So much of the disk is free."""

    def usage(place: Path) -> _FreeSpace:
        return _FreeSpace(free)

    monkeypatch.setattr(shutil, "disk_usage", usage)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def cache_path(name: str, *, appauthor: bool) -> Path:
        return tmp_path / "cache" / name

    monkeypatch.setattr(platformdirs, "user_cache_path", cache_path)
    return default_place.default_directory()


@pytest.mark.parametrize(("free", "size"), [(1000 * GB, 20 * GB), (50 * GB, 5 * GB), (9 * GB, None)])
def test_a_server_that_is_not_told_keeps_prefixes_in_the_platforms_cache_directory(
    place: Path, monkeypatch: pytest.MonkeyPatch, free: int, size: int | None
) -> None:
    only(monkeypatch, free)
    settings, line = with_disk(Settings(model="m"), has_size=False)
    if size is None:
        assert settings == Settings(model="m"), "little is free"
        assert line is not None and "nearly full" in line and "--disk-cache" in line
    else:
        assert line is None
        assert (settings.disk_directory, settings.disk_bytes) == (str(place), Bytes(size))
    assert not place.exists(), "it is made with the cache"


def test_what_it_holds_already_counts_as_free(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, 950)
    place.mkdir(parents=True)
    (place / "record.kv").write_bytes(bytes(50))
    assert default_place.default_nbytes(place) == 100


@pytest.mark.parametrize(
    ("given", "directory"),
    [
        ({"disk_directory": "off"}, None),
        ({"disk_directory": "/somewhere"}, "/somewhere"),
        ({"has_prefix_cache": False}, None),
        ({"is_tensor_parallel": True}, None),
    ],
)
@pytest.mark.usefixtures("place")
def test_a_server_that_is_told_does_as_it_is_told(given: dict[str, Any], directory: str | None) -> None:
    settings, line = with_disk(Settings(model="m", **given), has_size=False)
    assert line is None
    assert settings.disk_directory == directory and settings.disk_bytes == Settings(model="m").disk_bytes


def test_a_size_that_was_given_is_kept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, 100 * GB)
    settings, _ = with_disk(Settings(model="m", disk_bytes=Bytes(3 * GB)), has_size=True)
    assert (settings.disk_directory, settings.disk_bytes) == (str(place), Bytes(3 * GB))


def test_the_banner_names_the_place_the_bounds_and_how_to_turn_it_off() -> None:
    assert disk_line(Settings(model="m"), None) is None
    counts = dict.fromkeys(("others_nbytes", "num_files", "queued_nbytes", "written_nbytes", "read_nbytes"), 0)
    more = dict.fromkeys(("num_evicted", "num_quarantined", "num_errors"), 0)
    disk = OnDisk(budget_nbytes=20 * GB, nbytes=0, daily_nbytes=150 * GB, **counts, **more)
    line = disk_line(Settings(model="m", disk_directory="/cache"), disk)
    assert line is not None
    for part in ("/cache", "20 GB", "150 GB", "--disk-cache off"):
        assert part in line
