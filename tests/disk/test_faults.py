"""What goes wrong with disks and files is noticed, said once, and stops nobody."""

import errno
import logging
import os
import shutil
import threading
from pathlib import Path

import pytest

from reprise.core.errors import DiskUnusable
from reprise.core.failpoints import ACTIONS, Failpoint
from reprise.disk.folders.model_directory import MAX_QUARANTINED
from reprise.disk.store.cache import DiskCache
from tests.disk.chains import (
    PATIENCE_S,
    DirectoryClock,
    all_files,
    damage,
    find,
    opened,
    position,
    put_path,
    read_all,
    record_files,
    records_for,
)

CHAT = list(range(10))


def broken(code: int):
    def fail(*what: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_a_write_that_fails_is_said_once_and_tried_again_after_a_minute(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = DirectoryClock()
    with opened(tmp_path, clock=clock) as cache:
        kept = put_path(cache, CHAT)
        monkeypatch.setitem(ACTIONS, Failpoint.DISK_FILL, broken(code))
        for num_errors in (1, 2):
            lost = records_for(cache, [7] * 9)
            assert cache.put(lost[0])
            cache.put(lost[1])
            assert cache.flush(PATIENCE_S)
            assert cache.stats().num_errors == num_errors and cache.stats().queued_nbytes == 0
            assert not [path for path in all_files(tmp_path) if path.suffix == ".tmp"]
            assert not cache.can_take(1) and not cache.put(lost[0])
            assert len(read_all(cache, find(cache, CHAT))[0]) == len(kept), "reading goes on"  # type: ignore[arg-type]
            cache.check()
            clock.now_s += 59.0
            assert not cache.put(lost[0])
            clock.now_s += 1.0
        monkeypatch.undo()
        put_path(cache, [7] * 9)
        assert position(find(cache, [7] * 9)) == 9 and cache.stats().num_errors == 2
        cache.check()
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
    assert os.strerror(code) in caplog.text


def test_a_clock_that_is_set_back_ends_the_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = DirectoryClock()
    with opened(tmp_path, clock=clock) as cache:
        with monkeypatch.context() as patch:
            patch.setitem(ACTIONS, Failpoint.DISK_FILL, broken(errno.ENOSPC))
            put_path(cache, [1, 2, 3])
        assert not cache.can_take(1)
        clock.now_s -= 86_400.0
        assert cache.can_take(1)


def test_a_full_disk_gives_up_what_waits_behind_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def fail(directory: object) -> None:
        reached.set()
        assert go_on.wait(PATIENCE_S)
        broken(errno.ENOSPC)()

    monkeypatch.setitem(ACTIONS, Failpoint.DISK_FILL, fail)
    with opened(tmp_path) as cache:
        for record in records_for(cache, CHAT):
            assert cache.put(record)
        assert reached.wait(PATIENCE_S)
        go_on.set()
        assert cache.flush(PATIENCE_S)
        assert cache.stats().queued_nbytes == 0 and cache.stats().num_errors == 1 and record_files(tmp_path) == []
        assert len(records_for(cache, CHAT)) == 3, "it is missing again"


@pytest.mark.parametrize("resumes_anywhere", [False, True])
@pytest.mark.parametrize("damaged", [(1, 2), (1, 4), (2, 3), (3, 1), (4, 1)])
def test_what_is_stored_again_after_damage_is_whole(
    damaged: tuple[int, int], tmp_path: Path, *, resumes_anywhere: bool
) -> None:
    """One is met when opening. The other is not read, since that is missing, and verified as the path is stored."""
    chat, beside = list(range(14)), [*range(8), 77]
    with opened(tmp_path, resumes_anywhere=resumes_anywhere) as cache:
        records = put_path(cache, chat)
        put_path(cache, beside)
        paths = [cache.directory.path_of(record.key) for record in records]
    met, unread = (paths[number - 1] for number in damaged)
    damage(met, 10)
    damage(unread, -1)
    with opened(tmp_path, resumes_anywhere=resumes_anywhere) as cache:
        put_path(cache, chat)
        assert cache.stats().num_quarantined == 2 and records_for(cache, chat) == []
        cache.check()
    with opened(tmp_path, resumes_anywhere=resumes_anywhere) as cache:
        taken, fetch = read_all(cache, find(cache, chat))  # type: ignore[arg-type]
        assert len(taken) == 4 and not fetch.failed
        assert position(find(cache, beside)) == 9, "what others have on the same path is kept"


def test_a_record_that_cannot_be_written_as_json_is_left_out(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        (record,) = records_for(cache, [1, 2, 3])
        object.__setattr__(record, "about", {"x": object()})
        assert cache.put(record) and cache.flush(PATIENCE_S)
        assert cache.stats().num_errors == 1 and find(cache, [1, 2, 3]) is None
        put_path(cache, CHAT)
        assert position(find(cache, CHAT)) == 10, "the writer goes on"


def test_what_cannot_be_removed_stays_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(directory: object, path: Path) -> None:
        if path.suffix == ".kv":
            raise PermissionError(errno.EACCES, "no")

    with opened(tmp_path, max_bytes=4_000) as cache:
        for k in range(5):
            put_path(cache, [k, k, k])
        num = cache.stats().num_files
        with monkeypatch.context() as patch:
            patch.setitem(ACTIONS, Failpoint.DISK_REMOVE, refuse)
            put_path(cache, [9, 9, 9])
        assert cache.stats().num_files == num and cache.stats().num_errors == 1 and find(cache, [9, 9, 9]) is None
        assert sum(all_files(tmp_path).values()) <= 4_000
        cache.check()


@pytest.mark.parametrize("at", [0, 40, -1])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_damaged_file_ends_a_fetch_and_goes_into_quarantine(
    at: int, which: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as cache:
        put = put_path(cache, CHAT)
        path = cache.directory.path_of(put[which].key)
        damage(path, at)
        taken, fetch = read_all(cache, find(cache, CHAT))  # type: ignore[arg-type]
        assert fetch.failed and [r.key for r in taken] == [r.key for r in put[:which]]
        assert cache.stats().num_quarantined == 1 and cache.stats().num_files == 2 and not path.exists()
        assert [p.name.endswith(path.name) for p in (tmp_path / "quarantine").iterdir()] == [True]
        assert len(caplog.records) == 1 and path.name in caplog.text
        cache.check()
        # It is written again, and what stands on it is found again.
        assert [r.key for r in put_path(cache, CHAT)] == [put[which].key]
        assert len(read_all(cache, find(cache, CHAT))[0]) == 3  # type: ignore[arg-type]


def test_damage_to_a_header_is_noticed_when_opening(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        put = put_path(cache, CHAT)
        paths = [cache.directory.path_of(record.key) for record in put]
    damage(paths[0], 100)
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    paths[2].rename(paths[2].with_name(f"{'0' * 64}.kv"))
    with opened(tmp_path) as cache:
        cache.check()
        assert cache.stats().num_quarantined == 3 and cache.stats().num_files == 0
        put_path(cache, CHAT)
        assert position(find(cache, CHAT)) == 10


def test_a_record_under_another_s_name_is_not_taken_for_it(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        (one,) = put_path(cache, [1, 2, 3])
        (two,) = put_path(cache, [1, 2, 4])
        content = cache.directory.path_of(two.key).read_bytes()
        cache.directory.path_of(one.key).write_bytes(content)
        taken, fetch = read_all(cache, find(cache, [1, 2, 3]))  # type: ignore[arg-type]
        assert taken == [] and fetch.failed and cache.stats().num_quarantined == 1


def test_a_bodys_damage_is_found_when_it_is_read_and_not_before(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        put = put_path(cache, CHAT)
        damage(cache.directory.path_of(put[1].key), -1)
    with opened(tmp_path) as cache:
        assert cache.stats().num_quarantined == 0 and position(find(cache, CHAT)) == 10
        assert read_all(cache, find(cache, CHAT))[1].failed  # type: ignore[arg-type]


def test_quarantine_keeps_the_latest_few(tmp_path: Path) -> None:
    with opened(tmp_path, clock=DirectoryClock()) as cache:
        names: list[str] = []
        for k in range(MAX_QUARANTINED + 3):
            (record,) = put_path(cache, [k, k, k])
            path = cache.directory.path_of(record.key)
            damage(path, -1)
            os.utime(path, (1_000_000, 1_000_000))
            assert read_all(cache, find(cache, [k, k, k]))[1].failed  # type: ignore[arg-type]
            names.append(path.name)
            # As if it had happened some time ago, but after the record was written.
            (latest,) = (tmp_path / "quarantine").glob(f"*{path.name}")
            os.utime(latest, (2_000_000 + k, 2_000_000 + k))
        kept = {path.name[-67:] for path in (tmp_path / "quarantine").iterdir()}
        assert kept == set(names[-MAX_QUARANTINED:]) and cache.stats().num_quarantined == len(names)


def test_what_cannot_be_put_into_quarantine_stays_and_counts(tmp_path: Path) -> None:
    (tmp_path / "quarantine").write_text("in the way")
    with opened(tmp_path) as cache:
        (record,) = put_path(cache, [1, 2, 3])
        damage(cache.directory.path_of(record.key), -1)
        assert read_all(cache, find(cache, [1, 2, 3]))[1].failed  # type: ignore[arg-type]
        assert find(cache, [1, 2, 3]) is None and cache.stats().num_errors == 1
        assert cache.stats().nbytes == cache.directory.path_of(record.key).stat().st_size
        put_path(cache, [1, 2, 3])
        assert not read_all(cache, find(cache, [1, 2, 3]))[1].failed, "written over it"  # type: ignore[arg-type]
        cache.check()


def test_a_file_that_somebody_removed_is_forgotten(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        put = put_path(cache, CHAT)
        cache.directory.path_of(put[1].key).unlink()
        taken, fetch = read_all(cache, find(cache, CHAT))  # type: ignore[arg-type]
        assert fetch.failed and len(taken) == 1 and cache.stats().num_quarantined == cache.stats().num_errors == 0
        cache.check()
        assert [r.key for r in put_path(cache, CHAT)] == [put[1].key]
        assert position(find(cache, CHAT)) == 10


def test_a_file_that_is_there_again_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evicted while it was to be read, and written again since."""
    with opened(tmp_path) as cache:
        put = put_path(cache, CHAT)

        def late(directory: object, key: bytes) -> None:
            if key == put[1].key:
                raise FileNotFoundError(errno.ENOENT, "not yet")

        monkeypatch.setitem(ACTIONS, Failpoint.DISK_READ, late)
        assert read_all(cache, find(cache, CHAT))[1].failed  # type: ignore[arg-type]
        cache.check()
        assert position(find(cache, CHAT)) == 10


def test_a_file_that_cannot_be_opened_just_now_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opens, code = Path.open, errno.EMFILE

    def refuse(self: Path, *how, **more):
        if self.suffix == ".kv":
            raise OSError(code, os.strerror(code))
        return opens(self, *how, **more)

    with opened(tmp_path) as cache:
        put_path(cache, CHAT)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", refuse)
            assert read_all(cache, find(cache, CHAT))[1].failed  # type: ignore[arg-type]
            assert cache.stats().num_files == 3 and cache.stats().num_errors == 3
        assert not read_all(cache, find(cache, CHAT))[1].failed  # type: ignore[arg-type]
        code = errno.EIO
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", refuse)
            assert read_all(cache, find(cache, CHAT))[1].failed  # type: ignore[arg-type]
        assert cache.stats().num_files == 0 and cache.stats().num_quarantined == 3, "a bad place on the disk stays bad"


def test_whatever_goes_wrong_while_reading_the_reader_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(directory: object, key: bytes) -> None:
        raise RuntimeError("a bug")

    with opened(tmp_path) as cache:
        put_path(cache, CHAT)
        with monkeypatch.context() as patch:
            patch.setitem(ACTIONS, Failpoint.DISK_READ, fail)
            assert read_all(cache, find(cache, CHAT))[1].failed  # type: ignore[arg-type]
        put_path(cache, CHAT)
        assert len(read_all(cache, find(cache, CHAT))[0]) == 3  # type: ignore[arg-type]


def test_a_directory_that_cannot_be_listed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> None:
        raise PermissionError(errno.EACCES, "no")

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        with pytest.raises(DiskUnusable, match="Cannot use the cache"):
            DiskCache(tmp_path, fingerprint="model", max_bytes=10**6, resumes_anywhere=True)
    with opened(tmp_path):
        pass


def test_a_folder_that_vanished_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path / "kv") as cache:
        put_path(cache, CHAT)
        shutil.rmtree(tmp_path / "kv")
        put_path(cache, [7] * 9)
        assert "creating it again" in caplog.text and cache.stats().num_errors == 0
        assert find(cache, CHAT) is None and position(find(cache, [7] * 9)) == 9
        cache.check()
        put_path(cache, CHAT)
        assert len(read_all(cache, find(cache, CHAT))[0]) == 3  # type: ignore[arg-type]


def test_a_folder_that_vanished_while_it_is_read_is_forgotten(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as cache:
        put_path(cache, CHAT)
        put_path(cache, [7] * 9)
        shutil.rmtree(tmp_path / "kv")
        assert read_all(cache, find(cache, CHAT))[1].failed  # type: ignore[arg-type]
        assert find(cache, [7] * 9) is None and cache.stats().num_files == cache.stats().nbytes == 0


def test_a_vanished_folder_that_another_server_has_made_is_shared_with_it(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as cache:
        put_path(cache, CHAT)
        shutil.rmtree(tmp_path / "kv")
        with opened(tmp_path / "kv") as other:
            put_path(other, [3] * 5)
            put_path(cache, [7] * 9)
            assert cache.stats().num_errors == 0 and find(cache, CHAT) is None
            assert position(find(cache, [3] * 5)) == 5
            cache.check()


def test_a_folder_in_a_record_s_place_is_passed_over(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        lost = records_for(cache, CHAT)[0]
        path = cache.directory.path_of(lost.key)
        path.mkdir(parents=True)
        (path / "note.txt").write_text("mine")
        other = records_for(cache, [7] * 9)[0]
        cache.directory.path_of(other.key).parent.write_text("in the way")
        for record in (lost, other):
            assert cache.put(record) and cache.flush(PATIENCE_S)
            assert cache.can_take(1), "nothing has to wait for it"
        assert cache.stats().num_errors == 1, "a folder is seen before anything is written"
        (last,) = put_path(cache, [1, 2, 3])
        assert len(read_all(cache, find(cache, [1, 2, 3]))[0]) == 1  # type: ignore[arg-type]
        cache.directory.path_of(last.key).unlink()
        cache.directory.path_of(last.key).mkdir()
        assert read_all(cache, find(cache, [1, 2, 3]))[1].failed  # type: ignore[arg-type]
        assert find(cache, [1, 2, 3]) is None
    with opened(tmp_path) as cache:
        assert (path / "note.txt").read_text() == "mine"
        put_path(cache, [5, 6, 7])
        assert position(find(cache, [5, 6, 7])) == 3


def test_what_could_not_be_finished_is_removed_when_opening(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        (record,) = put_path(cache, [1, 2, 3])
        left = cache.directory.path_of(record.key).with_suffix(".0-0.tmp")
    left.write_bytes(bytes(10**4))
    with opened(tmp_path) as cache:
        assert not left.exists() and cache.stats().num_files == 1
        cache.check()
