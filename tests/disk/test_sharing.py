"""Several servers on one folder at once: what one writes the others read, and nothing that one does harms another."""

import errno
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.core.failpoints import ACTIONS, Failpoint
from reprise.disk.folders import model_directory as directory_module
from reprise.disk.folders.lease import EXPIRED_S
from reprise.disk.records.record import DiskRecord
from reprise.disk.store.cache import DiskCache
from tests.disk.chains import (
    PATIENCE_S,
    DirectoryClock,
    all_files,
    cleared,
    content_of,
    damage,
    find,
    look,
    opened,
    position,
    put_path,
    read_all,
    record_files,
    records_for,
)
from tests.matrix import examples

CHAT = list(range(10))
NUM_SERVERS = 3

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple)
steps = st.tuples(
    st.integers(0, NUM_SERVERS - 1),
    st.sampled_from(["put", "put", "put at once", "read", "read", "use", "look", "clear", "restart"]),
    prompts,
)


class SharedDirectory:
    """Servers on one directory, and everything that any of them was given."""

    def __init__(self, max_bytes: int) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kv"))
        self.max_bytes = max_bytes
        self.clock = DirectoryClock()
        self.content: dict[bytes, tuple[object, ...]] = {}
        self.caches = [self.open() for _ in range(NUM_SERVERS)]

    def open(self) -> DiskCache:
        options = {"fingerprint": "model", "max_bytes": self.max_bytes, "block": 4, "resumes_anywhere": False}
        return DiskCache(self.directory, clock=self.clock, **options)

    def put(self, cache: DiskCache, ids: tuple[int, ...]) -> list[DiskRecord]:
        records = records_for(cache, ids)
        for record in records:
            cache.put(record)
            self.content[record.key] = content_of(record)
        return records

    def flush(self) -> None:
        for cache in self.caches:
            assert cache.flush(PATIENCE_S)

    def read(self, cache: DiskCache, ids: tuple[int, ...]) -> None:
        """Whatever is given is right, and where something is missing that is all that happens."""
        found = find(cache, ids)
        if found is not None:
            taken, fetch = read_all(cache, found)
            assert [record.key for record in taken] == list(found.keys)[: len(taken)]
            assert fetch.failed == (len(taken) < len(found.keys))
            for record in taken:
                assert content_of(record) == self.content[record.key]

    def step(self, number: int, verb: str, ids: tuple[int, ...]) -> None:
        cache = self.caches[number]
        self.clock.now_s += 1.0
        if verb == "put":
            self.put(cache, ids)
        elif verb == "put at once":
            for each in self.caches:
                self.put(each, ids)
        elif verb == "read":
            self.read(cache, ids)
        elif verb == "use" and (found := find(cache, ids)) is not None:
            cache.touch(found)
        elif verb == "look":
            look(cache)
        elif verb == "clear":
            cleared(cache.clear(""))
        elif verb == "restart":
            cache.close(PATIENCE_S)
            self.caches[number] = self.open()

    def check(self) -> None:
        """Once all have looked they know the same, and the folder has it."""
        self.flush()
        assert sum(all_files(self.directory).values()) <= self.max_bytes
        for cache in self.caches:
            look(cache)
            cache.check()
            stats = cache.stats()
            assert stats.num_errors == stats.num_quarantined == 0
            assert stats.nbytes + stats.others_nbytes <= self.max_bytes
        assert {path.suffix for path in all_files(self.directory)} <= {".kv", ""}

    def close(self) -> None:
        for cache in self.caches:
            cache.close(PATIENCE_S)
        shutil.rmtree(self.directory)


@given(steps=st.lists(steps, max_size=25), max_bytes=st.sampled_from([6_000, 20_000, 10**6]), asked=prompts)
@settings(max_examples=examples(40), deadline=None)
def test_nothing_is_read_wrong_and_the_bound_holds_whatever_servers_do(steps, max_bytes: int, asked) -> None:
    cluster = SharedDirectory(max_bytes)
    try:
        for step in steps:
            cluster.step(*step)
        cluster.check()
        assert len({position(find(cache, asked)) for cache in cluster.caches}) == 1, "all know the same"
        for cache in cluster.caches:
            cluster.read(cache, asked)
    finally:
        cluster.close()


def test_what_one_writes_another_reads_and_does_not_write_again(tmp_path: Path) -> None:
    with opened(tmp_path) as a, opened(tmp_path) as b:
        put = put_path(a, CHAT)
        look(b)
        assert b.is_shared and records_for(b, CHAT) == []
        taken, fetch = read_all(b, find(b, CHAT))  # type: ignore[arg-type]
        assert [content_of(r) for r in taken] == [content_of(r) for r in put] and not fetch.failed
        look(a)
        assert a.is_shared, "the first learns of the second"
        put_path(b, [*CHAT, 10])
        look(a)
        assert position(find(a, [*CHAT, 10])) == 11
        a.check()
        b.check()


def test_what_another_removes_leaves_nothing_that_nobody_writes(tmp_path: Path) -> None:
    """Its parent takes over its time of use, which the writer has to write although nothing else wakes it."""
    with opened(tmp_path) as a, opened(tmp_path):
        _, block, tail = put_path(a, CHAT)
        a.directory.path_of(tail.key).unlink()
        assert a.read(bytes(32)) is None, "so it looks for what others have written"
        assert a.stats().num_files == 2
        assert a.flush(PATIENCE_S)
        a.check()
    with opened(tmp_path) as alone:
        # It does not look for what others have done.
        alone.directory.path_of(block.key).unlink()
        assert alone.read(block.key) is None
        assert alone.flush(PATIENCE_S)
        alone.check()


def test_two_that_write_the_same_at_once_leave_it_once(tmp_path: Path) -> None:
    with opened(tmp_path) as a, opened(tmp_path) as b:
        for cache in (a, b):
            for record in records_for(cache, CHAT):
                assert cache.put(record)
        for cache in (a, b):
            assert cache.flush(PATIENCE_S)
            look(cache)
            cache.check()
            assert cache.stats().num_files == len(record_files(tmp_path)) == 3


def test_what_another_finishes_first_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as a, opened(tmp_path) as b:

        def overtaken(directory: object) -> None:
            if directory is a.directory:
                put_path(b, [1, 2, 3])
                look(a)

        monkeypatch.setitem(ACTIONS, Failpoint.DISK_FILLED, overtaken)
        put_path(a, [1, 2, 3])
        assert a.stats().num_errors == a.stats().written_nbytes == 0 and position(find(a, [1, 2, 3])) == 3
        a.check()


def test_what_two_write_at_once_is_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as a, opened(tmp_path) as b:
        (record,) = records_for(a, [1, 2, 3])

        def disturb(directory: object) -> None:
            b.directory.begin(record.key, record.nbytes)

        monkeypatch.setitem(ACTIONS, Failpoint.DISK_FILLED, disturb)
        put_path(a, [1, 2, 3])
        assert len(read_all(a, find(a, [1, 2, 3]))[0]) == 1  # type: ignore[arg-type]


def test_what_another_removes_while_it_is_to_be_read_is_a_miss(tmp_path: Path) -> None:
    with opened(tmp_path) as a, opened(tmp_path) as b:
        put_path(a, CHAT)
        look(b)
        found = find(b, CHAT)
        assert found is not None
        cleared(a.clear(""))
        taken, fetch = read_all(b, found)
        assert taken == [] and fetch.failed and find(b, CHAT) is None
        assert b.stats().num_errors == b.stats().num_quarantined == 0
        look(b)
        b.check()


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESTALE])
def test_a_file_that_goes_while_it_is_open_is_a_miss(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(directory: object, key: bytes) -> None:
        raise OSError(code, os.strerror(code))

    with opened(tmp_path) as cache:
        put_path(cache, CHAT)
        monkeypatch.setitem(ACTIONS, Failpoint.DISK_READ, gone)
        assert read_all(cache, find(cache, CHAT))[1].failed  # type: ignore[arg-type]
        assert cache.stats().num_errors == cache.stats().num_quarantined == 0


def test_what_another_uses_stays_before_what_nobody_does(tmp_path: Path) -> None:
    clock = DirectoryClock()
    with opened(tmp_path, clock=clock) as a:
        for k in range(4):
            put_path(a, [k, k, k])
        nbytes = a.stats().nbytes
        with opened(tmp_path, clock=clock, max_bytes=nbytes) as b:
            clock.now_s += 10.0
            a.touch(find(a, [0, 0, 0]))  # type: ignore[arg-type]
            assert a.flush(PATIENCE_S)
            put_path(b, [9, 9, 9])
            assert position(find(b, [0, 0, 0])) == 3 and find(b, [1, 1, 1]) is None


def test_what_was_damaged_and_written_again_by_another_is_found_again(tmp_path: Path) -> None:
    with opened(tmp_path) as a, opened(tmp_path) as b:
        (record,) = put_path(a, [1, 2, 3])
        look(b)
        damage(a.directory.path_of(record.key), -1)
        assert read_all(a, find(a, [1, 2, 3]))[1].failed  # type: ignore[arg-type]
        look(b)
        assert find(b, [1, 2, 3]) is None and b.stats().num_quarantined == 0
        put_path(b, [1, 2, 3])
        look(a)
        assert len(read_all(a, find(a, [1, 2, 3]))[0]) == 1  # type: ignore[arg-type]


def test_the_latest_note_is_everybody_s(tmp_path: Path) -> None:
    with opened(tmp_path) as a, opened(tmp_path) as b:
        for text in ("a", "longer", "short"):
            for writer, reader in ((a, b), (b, a)):
                writer.keep_note("", text)
                look(reader)
                assert reader.read_note("") == text
                reader.check()


def test_a_server_of_another_machine_lives_as_long_as_its_lease_is_touched(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        (record,) = put_path(cache, [1, 2, 3])
        lease = cache.directory.leases / "0123abcd-00000001"
        half = cache.directory.path_of(record.key).with_suffix(f".{lease.name}.tmp")
        half.write_bytes(bytes(500))
        lease.touch()
        look(cache)
        assert cache.is_shared and half.exists() and cache.stats().others_nbytes == 500, "it counts while it is written"
        seen_s = lease.stat().st_mtime
        os.utime(lease, (seen_s - EXPIRED_S + 30, seen_s - EXPIRED_S + 30))
        look(cache)
        assert cache.is_shared and half.exists()
        os.utime(lease, (seen_s - EXPIRED_S - 30, seen_s - EXPIRED_S - 30))
        look(cache)
        assert not cache.is_shared and not half.exists() and not lease.exists() and cache.stats().others_nbytes == 0
        cache.check()


def test_a_living_server_s_models_stay_also_on_another_machine(tmp_path: Path) -> None:
    with opened(tmp_path, fingerprint="other") as other:
        put_path(other, CHAT)
        leases = other.directory.leases
    (leases / "0123abcd-00000001").touch()
    with opened(tmp_path, max_bytes=3_000) as cache:
        put_path(cache, CHAT)
        assert len(record_files(other.directory.folder)) == 3
        os.utime(leases / "0123abcd-00000001", (1_000, 1_000))
        put_path(cache, CHAT)
        assert len(record_files(other.directory.folder)) < 3


def test_who_was_taken_for_dead_goes_on(tmp_path: Path) -> None:
    """A machine that slept for an hour: its lease has ended, and what it had begun has been removed."""
    with opened(tmp_path) as cache:
        put_path(cache, CHAT)
        shutil.rmtree(cache.directory.leases)
        put_path(cache, [*CHAT, 10])
        assert position(find(cache, [*CHAT, 10])) == 11 and cache.stats().num_errors == 0
        assert len(list(cache.directory.leases.iterdir())) == 1
        cache.check()


def test_what_others_removed_before_it_was_finished_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove(directory: object) -> None:
        for path in all_files(tmp_path):
            if path.suffix == ".tmp":
                path.unlink()

    with opened(tmp_path) as cache:
        with monkeypatch.context() as patch:
            patch.setitem(ACTIONS, Failpoint.DISK_FILLED, remove)
            put_path(cache, [1, 2, 3])
        assert find(cache, [1, 2, 3]) is None and cache.stats().num_errors == 0
        put_path(cache, [1, 2, 3])
        cache.check()


@pytest.mark.parametrize("is_held", [False, True])
def test_without_locks_each_server_writes_one_record_over_the_bound_at_most(
    is_held: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There are none on some network file systems, and a host that died may hold one for ever."""

    def refuse(lock: FileLock, *given: object, **named: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    bound = 8_000
    tmp_path.mkdir(exist_ok=True)
    with FileLock(tmp_path / ("lock" if is_held else "of somebody else")):
        monkeypatch.setattr(directory_module, "LOCKED_S", 0.05)
        if not is_held:
            monkeypatch.setattr(FileLock, "acquire", refuse)
        with opened(tmp_path, max_bytes=bound) as a, opened(tmp_path, max_bytes=bound) as b:
            for k in range(12):
                for cache in (a, b):
                    for record in records_for(cache, [k, 1, 2] if cache is a else [k, 2, 1]):
                        assert cache.put(record)
                for cache in (a, b):
                    assert cache.flush(PATIENCE_S)
                assert sum(all_files(tmp_path).values()) <= bound + 2 * 1_000
            for cache in (a, b):
                look(cache)
                cache.check()
                assert cache.stats().num_evicted > 0 and cache.stats().num_errors == 0 and cache.is_shared
    assert "Cannot lock" in caplog.text
