"""What is cleared is gone, and does not come back."""

import errno
import threading
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest

from reprise.core.failpoints import ACTIONS, Failpoint
from reprise.disk.folders.lease import file_lock
from reprise.disk.records.record import DiskMatch
from tests.disk.chains import (
    PATIENCE_S,
    all_files,
    cleared,
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


def test_a_namespace_is_cleared_and_the_others_stay(tmp_path: Path) -> None:
    with opened(tmp_path) as cache, opened(tmp_path, fingerprint="other") as other:
        for namespace in ("", "a", "b"):
            put_path(cache, CHAT, namespace=namespace)
        put_path(other, CHAT, namespace="a")
        cleared(cache.clear("a"))
        cache.check()
        assert find(cache, CHAT, namespace="a") is None
        assert position(find(cache, CHAT)) == position(find(cache, CHAT, namespace="b")) == 10
        assert position(find(other, CHAT, namespace="a")) == 10
        cleared(cache.clear(None))
        assert cache.stats().num_files == cache.stats().nbytes == 0
        assert position(find(other, CHAT, namespace="a")) == 10
        other.check()
    with opened(tmp_path) as cache:
        assert cache.stats().num_files == 0


def test_the_files_are_gone_when_clearing_returns(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        put_path(cache, CHAT)
        cleared(cache.clear(""))
        assert record_files(tmp_path) == []


def test_the_beginning_of_a_path_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the process dies halfway, nothing that is left can be found."""
    removed: list[Path] = []
    with opened(tmp_path) as cache:
        put = put_path(cache, CHAT)
        put += put_path(cache, [*CHAT[:8], 7])
        monkeypatch.setitem(ACTIONS, Failpoint.DISK_REMOVE, lambda directory, path: removed.append(path))
        cleared(cache.clear(""))
        assert removed[:2] == [cache.directory.path_of(record.key) for record in put[:2]] and len(removed) == 4


@pytest.mark.parametrize("is_put_again", [False, True])
def test_what_is_queued_or_being_written_does_not_appear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_put_again: bool
) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def hold(directory: object) -> None:
        reached.set()
        assert go_on.wait(PATIENCE_S)

    monkeypatch.setitem(ACTIONS, Failpoint.DISK_FILLED, hold)
    with opened(tmp_path) as cache:
        for record in (*records_for(cache, CHAT), *records_for(cache, CHAT, namespace="b")):
            assert cache.put(record)
        assert reached.wait(PATIENCE_S)
        cleared(cache.clear(""))
        assert len(records_for(cache, CHAT)) == 3 and records_for(cache, CHAT, namespace="b") == []
        again = [replace(record, about={"again": True}) for record in records_for(cache, CHAT)[:is_put_again]]
        for record in again:
            assert cache.put(record)
        go_on.set()
        assert cache.flush(PATIENCE_S)
        cache.check()
        assert find(cache, CHAT) is None and position(find(cache, CHAT, namespace="b")) == 10
        assert cache.stats().num_files == 3 + len(again) and cache.stats().num_errors == 0
        # Of two writes of one key only the one that was asked for after the clearing counts.
        for record in again:
            found = DiskMatch(position=4, namespace="", keys=(record.key,), nbytes=1)
            assert [read.about for read in read_all(cache, found)[0]] == [{"again": True}]
        assert not [path for path in all_files(tmp_path) if path.suffix == ".tmp"]


def test_what_is_being_fetched_is_not_read_on(tmp_path: Path) -> None:
    with opened(tmp_path, read_ahead_bytes=10) as cache:
        put_path(cache, CHAT)
        woken = threading.Semaphore(0)
        fetch = cache.fetch(find(cache, CHAT), woken.release)  # type: ignore[arg-type]
        assert woken.acquire(timeout=PATIENCE_S)
        cleared(cache.clear(""))
        assert len(fetch.take()) == 1
        assert woken.acquire(timeout=PATIENCE_S)
        assert fetch.failed and fetch.take() == []
        assert cache.stats().num_quarantined == cache.stats().num_errors == 0
        cache.check()


def test_quarantine_and_what_cannot_be_told_apart_go_too(tmp_path: Path) -> None:
    with opened(tmp_path, block=8) as cache:
        put_path(cache, list(range(13)), namespace="b")
        put_path(cache, list(range(13)))
        folder = cache.directory.folder
        other_block = [cache.directory.path_of(k) for k in find(cache, list(range(13))).keys]  # type: ignore[union-attr]
    content = b"REPRIS\r\n" + bytes(500)  # As version 1 began.
    future = folder / "ab" / f"{'ab' * 32}.kv"
    future.parent.mkdir(exist_ok=True)
    future.write_bytes(content)
    with opened(tmp_path) as cache, opened(tmp_path, fingerprint="other") as other:
        for each in (cache, other):
            (record,) = put_path(each, [1, 2, 3], namespace="c")
            damage(each.directory.path_of(record.key), -1)
            assert read_all(each, find(each, [1, 2, 3], namespace="c"))[1].failed  # type: ignore[arg-type]
        assert len(list((tmp_path / "quarantine").iterdir())) == 2
        cleared(cache.clear(""))
        cache.check()
        assert not future.exists() and not any(path.exists() for path in other_block)
        assert cache.stats().nbytes > 0, "the other namespace's files of another block size"
        assert len(list((tmp_path / "quarantine").iterdir())) == 1, "the other model's"
        cleared(cache.clear(None))
        cache.check()
        assert cache.stats().nbytes == 0


def test_what_cannot_be_removed_is_said_and_never_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(directory: object, path: Path) -> None:
        raise PermissionError(errno.EACCES, "no", str(path))

    with opened(tmp_path) as cache:
        (record,) = put_path(cache, [1, 2, 3])
        with monkeypatch.context() as patch:
            patch.setitem(ACTIONS, Failpoint.DISK_REMOVE, refuse)
            with pytest.raises(PermissionError):
                cleared(cache.clear(""))
        assert find(cache, [1, 2, 3]) is None and cache.stats().num_errors == 1 and record.key.hex() in caplog.text
        cache.check()
        cleared(cache.clear(""))
        cache.check()
        assert cache.stats().nbytes == 0


def test_what_was_cleared_may_be_put_again(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        put_path(cache, CHAT)
        cleared(cache.clear(""))
        put_path(cache, CHAT)
        assert position(find(cache, CHAT)) == 10
        cache.check()


def test_nothing_is_found_while_files_wait_for_a_lock_that_another_holds(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        put_path(cache, CHAT)
        put_path(cache, CHAT, namespace="b")
        cache.keep_note("", "learnt")
        found = find(cache, CHAT)
        assert found is not None
        (late,) = records_for(cache, [1, 2, 3])
        with file_lock(tmp_path / "lock"):
            clearing = cache.clear("")
            assert find(cache, CHAT) is None and cache.read_note("") is None and cache.runs("") == []
            assert cache.newest_texts("", most=9) == []
            assert read_all(cache, found) == ([], ANY), "what was found before"
            assert not cache.put(late) and not cache.can_take(1)
            assert position(find(cache, CHAT, namespace="b")) == 10
            assert not clearing.done() and len(record_files(tmp_path)) == 6
        cleared(clearing)
        assert len(record_files(tmp_path)) == 3 and cache.can_take(1) and cache.put(late)
        assert cache.flush(PATIENCE_S)
        cache.check()


def test_who_closes_meanwhile_has_cleared(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        put_path(cache, CHAT)
        held = file_lock(tmp_path / "lock")
        held.acquire()
        clearing = cache.clear("")
        closing = threading.Thread(target=cache.close, args=(PATIENCE_S,))
        closing.start()
        held.release()
        closing.join(PATIENCE_S)
        cleared(clearing)
    with opened(tmp_path) as cache:
        assert cache.stats().num_files == 0
