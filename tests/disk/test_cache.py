"""The face: what is put is found and read again, also after a restart; what is refused changes nothing."""

import os
import stat
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from reprise.core.errors import DiskUnusable, RepriseError
from reprise.core.failpoints import ACTIONS, Failpoint
from reprise.core.tokens import Span, as_tokens
from reprise.disk.folders.model_directory import ModelDirectory
from reprise.disk.records.record import DiskMatch, DiskRecord
from reprise.disk.store.cache import DiskCache
from tests.disk.chains import (
    BLOCK,
    PATIENCE_S,
    all_files,
    cleared,
    content_of,
    find,
    opened,
    position,
    put_path,
    read_all,
    record_files,
    records_for,
    same,
)

CHAT = list(range(10))


class WriterGate:
    """Holds the writer up between two records until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

        def held(directory: object) -> None:
            self.reached.set()
            assert self.open.wait(PATIENCE_S)

        monkeypatch.setitem(ACTIONS, Failpoint.DISK_FILL, held)


@pytest.mark.parametrize("resumes_anywhere", [False, True])
def test_what_was_put_is_read_again_also_after_a_restart(tmp_path: Path, *, resumes_anywhere: bool) -> None:
    with opened(tmp_path / "kv", resumes_anywhere=resumes_anywhere) as cache:
        put = put_path(cache, CHAT)
        assert [record.position for record in put] == [4, 8, 10]
        for _ in range(2):
            found = find(cache, [*CHAT, 99])
            assert found is not None and found.position == 10 and found.nbytes == sum(r.nbytes for r in put)
            taken, fetch = read_all(cache, found)
            assert [content_of(r) for r in taken] == [content_of(r) for r in put] and not fetch.failed
        cache.check()
    with opened(tmp_path / "kv", resumes_anywhere=resumes_anywhere) as cache:
        cache.check()
        taken, fetch = read_all(cache, find(cache, [*CHAT, 99]))  # type: ignore[arg-type]
        assert [content_of(r) for r in taken] == [content_of(r) for r in put] and not fetch.failed
        stats = cache.stats()
        assert (stats.num_files, stats.nbytes) == (3, sum(all_files(tmp_path).values()))
        assert stats.read_nbytes == sum(r.nbytes for r in put) and stats.written_nbytes == 0


def test_a_position_inside_a_block_is_resumed_where_every_position_is(tmp_path: Path) -> None:
    with opened(tmp_path / "kv", resumes_anywhere=True) as cache:
        put = put_path(cache, CHAT)
        found = find(cache, CHAT, limit=7)
        assert found is not None and found.position == 7 and found.keys == (put[0].key, put[1].key)
    with opened(tmp_path / "kv", resumes_anywhere=False) as cache:
        assert find(cache, CHAT, limit=9) is None


@pytest.mark.parametrize(("resumes_anywhere", "expected"), [(True, 5), (False, 4)])
def test_nothing_is_read_up_to_the_middle_of_an_image(tmp_path: Path, expected: int, *, resumes_anywhere: bool) -> None:
    with opened(tmp_path / "kv", resumes_anywhere=resumes_anywhere) as cache:
        put_path(cache, CHAT[:4])
        put_path(cache, CHAT)
        found = cache.find(as_tokens(CHAT), namespace="", limit=10, spans=[Span(1, 3), Span(5, 11)])
        assert position(found) == expected
        assert cache.find(as_tokens(CHAT), namespace="", limit=10, spans=[Span(0, 11)]) is None


def test_what_is_there_or_queued_is_not_put_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = WriterGate(monkeypatch)
    with opened(tmp_path / "kv") as cache:
        records = records_for(cache, CHAT)
        assert [cache.put(record) for record in records] == [True] * 3
        assert records_for(cache, CHAT) == [], "what is queued counts as there"
        assert find(cache, CHAT) is None, "and is not found before it is written"
        assert [cache.put(record) for record in records] == [False] * 3
        assert cache.stats().queued_nbytes == sum(r.nbytes for r in records)
        assert not cache.flush(0.01)
        gate.open.set()
        assert cache.flush(PATIENCE_S)
        assert [cache.put(record) for record in records] == [False] * 3
        assert cache.stats().queued_nbytes == 0 and cache.stats().num_files == 3


def test_what_stands_on_nothing_is_not_taken(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as cache:
        first, second, mark = records_for(cache, CHAT)
        assert not cache.put(second) and not cache.put(mark)
        assert cache.put(first) and cache.put(second) and cache.put(mark)
        assert cache.flush(PATIENCE_S) and cache.stats().num_files == 3


def test_a_full_queue_takes_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = WriterGate(monkeypatch)
    with opened(tmp_path / "kv", queue_bytes=250) as cache:
        first, second, mark = records_for(cache, CHAT)
        assert first.nbytes == second.nbytes == 116
        assert cache.put(first) and cache.can_take(134) and not cache.can_take(135)
        assert cache.put(second) and not cache.put(mark)
        assert cache.stats().queued_nbytes == 232
        gate.open.set()
        assert cache.flush(PATIENCE_S) and cache.can_take(250) and cache.put(mark)


def test_a_record_that_is_larger_than_the_queue_is_taken_when_nothing_else_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = WriterGate(monkeypatch)
    with opened(tmp_path / "kv", queue_bytes=10) as cache:
        first, second, _ = records_for(cache, CHAT)
        assert cache.can_take(first.nbytes) and cache.put(first)
        assert not cache.can_take(1) and not cache.put(second)
        gate.open.set()
        assert cache.flush(PATIENCE_S) and cache.put(second) and cache.flush(PATIENCE_S)
        assert cache.stats().num_files == 2


def test_a_record_that_is_larger_than_all_is_not_taken(tmp_path: Path) -> None:
    with opened(tmp_path / "kv", max_bytes=2000) as cache:
        assert not cache.can_take(2001) and cache.can_take(2000)
        assert not any(cache.put(record) for record in records_for(cache, CHAT, nbytes=3000))


def test_only_what_is_needed_is_read_ahead(tmp_path: Path) -> None:
    with opened(tmp_path / "kv", read_ahead_bytes=250) as cache:
        put = put_path(cache, [0] * 40, nbytes=100)
        woken = threading.Semaphore(0)
        fetch = cache.fetch(find(cache, [0] * 40), woken.release)  # type: ignore[arg-type]
        other = find(cache, [0] * 40)
        assert other is not None
        taken: list[DiskRecord] = []
        while not fetch.is_done:
            assert woken.acquire(timeout=PATIENCE_S)
            for _ in range(3):
                # A fetch that is full does not keep others waiting; and meanwhile this one could read too much.
                assert len(read_all(cache, DiskMatch(position=4, namespace="", keys=other.keys[:1], nbytes=1))[0]) == 1
            some = fetch.take()
            assert len(some) <= 2
            taken += some
        taken += fetch.take()
        assert [same(a, b) for a, b in zip(taken, put, strict=True)] == [True] * len(put)


def test_a_record_larger_than_what_may_be_read_ahead_is_read_alone(tmp_path: Path) -> None:
    with opened(tmp_path / "kv", read_ahead_bytes=10) as cache:
        put_path(cache, CHAT)
        taken, fetch = read_all(cache, find(cache, CHAT))  # type: ignore[arg-type]
        assert len(taken) == 3 and not fetch.failed


def test_a_cancelled_fetch_gives_nothing_and_holds_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "kv", read_ahead_bytes=10) as cache:
        put_path(cache, CHAT)
        woken = threading.Event()
        fetch = cache.fetch(find(cache, CHAT), woken.set)  # type: ignore[arg-type]
        assert woken.wait(PATIENCE_S)
        fetch.cancel()
        fetch.cancel()
        assert fetch.is_done and fetch.take() == [] and not fetch.failed
        cleared(cache.clear(None))
        cache.check()
        assert cache.stats().num_files == 0


def test_who_cannot_be_woken_stops_nobody(tmp_path: Path) -> None:
    def wake() -> None:
        raise RuntimeError("not there")

    with opened(tmp_path / "kv") as cache:
        put_path(cache, CHAT)
        cache.fetch(find(cache, CHAT), wake)  # type: ignore[arg-type]
        assert len(read_all(cache, find(cache, CHAT))[0]) == 3  # type: ignore[arg-type]


def test_a_closed_cache_writes_and_reads_nothing_more(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as cache:
        records = records_for(cache, CHAT)
        for record in records:
            assert cache.put(record)
        cache.close(PATIENCE_S)
        found = find(cache, CHAT)
        assert found is not None, "closing writes what is queued"
        assert read_all(cache, found)[1].failed
        assert not cache.put(records_for(cache, [7] * 5)[0])
        cache.touch(found)
        assert cache.flush(0), "nothing is left that nobody will do"
        cache.close(PATIENCE_S)
        with opened(tmp_path / "kv"):
            pass


def test_a_closing_cache_ends_what_is_being_fetched(tmp_path: Path) -> None:
    with opened(tmp_path / "kv", read_ahead_bytes=10) as cache:
        put_path(cache, CHAT)
        woken = threading.Semaphore(0)
        fetch = cache.fetch(find(cache, CHAT), woken.release)  # type: ignore[arg-type]
        assert woken.acquire(timeout=PATIENCE_S)
        cache.close(PATIENCE_S)
        assert woken.acquire(timeout=PATIENCE_S)
        assert fetch.is_done and fetch.failed and len(fetch.take()) == 1


def test_nobody_else_can_read(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with opened(tmp_path / "new" / "kv") as cache:
            put_path(cache, CHAT)
            record_files(tmp_path)[0].write_bytes(b"damaged")
            read_all(cache, find(cache, CHAT))  # type: ignore[arg-type]
            assert cache.stats().num_quarantined == 1
    finally:
        os.umask(before)
    top = tmp_path / "new" / "kv"
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (top, *top.rglob("*"))}
    assert {modes[path] for path in modes if path.is_dir()} == {0o700}
    assert {modes[path] for path in modes if path.is_file()} == {0o600}
    assert (top / "quarantine").is_dir()


def test_a_folder_of_ours_that_is_open_to_others_is_closed_and_the_directory_left_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with opened(tmp_path) as cache:
        folder = cache.directory.folder
    folder.chmod(0o777)
    with opened(tmp_path):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_a_directory_that_cannot_be_used_is_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DiskUnusable, match="Cannot use the cache"):
            DiskCache(place, fingerprint="model", max_bytes=10**6, resumes_anywhere=True)
    assert issubclass(DiskUnusable, RepriseError)


def test_a_server_that_makes_room_is_waited_for(tmp_path: Path) -> None:
    done = threading.Event()

    def open_it() -> None:
        with opened(tmp_path):
            done.set()

    with FileLock(tmp_path / "lock"):
        thread = threading.Thread(target=open_it)
        thread.start()
        assert not done.wait(0.1)
    thread.join(PATIENCE_S)
    assert done.is_set()


def test_a_file_is_complete_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, int]] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: events.append(("synced", os.fstat(descriptor).st_size)))
    replace = Path.replace

    def noted(self: Path, target: Path) -> Path:
        # The temporary name is in the same folder: else the file would be copied, not renamed.
        assert self.parent == target.parent and self.suffix == ".tmp"
        events.append(("named", self.stat().st_size))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", noted)
    with opened(tmp_path / "kv") as cache:
        put_path(cache, [1, 2, 3, 4], has_tail=False)
        (path,) = record_files(tmp_path)
    size = path.stat().st_size
    assert events == [("synced", size), ("named", size)] and path.parent.name == path.name[:2]


def test_prompts_that_are_views_of_others_are_found_too(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as cache:
        put_path(cache, CHAT)
        strided = np.repeat(np.array(CHAT, dtype=np.int32), 2)[::2]
        assert position(cache.find(strided, namespace="", limit=10)) == 10


def test_a_directory_is_read_by_several_cores_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelDirectory, "reads_at_once", 3)
    ids = list(range(3 * BLOCK))
    with opened(tmp_path) as cache:
        put_path(cache, ids)
    together = threading.Barrier(3)
    monkeypatch.setitem(ACTIONS, Failpoint.DISK_READ, lambda directory, key: together.wait(PATIENCE_S))
    with opened(tmp_path) as cache:
        found = find(cache, ids)
        assert found is not None
        records, fetch = read_all(cache, replace(found, keys=found.keys[:3]))
        assert not fetch.failed and [record.start for record in records] == [0, BLOCK, 2 * BLOCK]
