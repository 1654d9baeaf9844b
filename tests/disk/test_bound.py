"""Never more bytes than allowed, and the least recently used goes first, but never before what stands on it."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.disk.folders.model_directory import FolderListings
from reprise.disk.records.format import encode
from reprise.disk.records.record import DiskMatch, DiskRecord, IndexEntry
from reprise.disk.store.cache import DiskCache
from reprise.disk.store.index import DiskIndex
from tests.disk.chains import (
    PATIENCE_S,
    DirectoryClock,
    all_files,
    find,
    keys_in,
    opened,
    position,
    put_path,
    read_all,
    record_files,
    records_for,
)
from tests.matrix import examples


def size_of(record: DiskRecord) -> int:
    return encode(record).nbytes


class Naive:
    """Which records remain, by looking at all of them each time."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.records: dict[bytes, DiskRecord] = {}
        self.last_use: dict[bytes, int] = {}
        self.now = 0

    def use(self, key: bytes) -> None:
        self.now += 1
        if key in self.records:
            self.last_use[key] = self.now

    def put(self, record: DiskRecord) -> None:
        # What was taken counts as a use of what it stands on, before there is room for it.
        self.use(record.parent)
        while self.nbytes() + size_of(record) > self.max_bytes:
            ancestors = self.path(record.parent)
            spare = sum(size_of(r) for key, r in self.records.items() if key not in ancestors)
            if self.nbytes() - spare + size_of(record) > self.max_bytes:
                return
            parents = {r.parent for r in self.records.values()} | ancestors
            oldest = min((key for key in self.records if key not in parents), key=lambda key: self.last_use[key])
            parent = self.records.pop(oldest).parent
            if parent in self.records:
                self.last_use[parent] = max(self.last_use[parent], self.last_use[oldest])
        self.records[record.key] = record
        self.use(record.key)

    def path(self, key: bytes) -> set[bytes]:
        found: set[bytes] = set()
        while key in self.records:
            found.add(key)
            key = self.records[key].parent
        return found

    def nbytes(self) -> int:
        return sum(size_of(record) for record in self.records.values())


paths = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple)


@given(
    steps=st.lists(st.tuples(st.sampled_from(["put", "put", "touch", "reopen"]), paths), max_size=14),
    max_bytes=st.integers(2_000, 12_000),
)
@settings(max_examples=examples(40), deadline=None)
def test_what_remains_is_what_a_naive_store_keeps(steps, max_bytes: int, tmp_path_factory) -> None:
    directory = tmp_path_factory.mktemp("kv")
    naive, clock = Naive(max_bytes), DirectoryClock()
    options = {"max_bytes": max_bytes, "clock": clock}
    cache = DiskCache(directory, fingerprint="model", block=4, resumes_anywhere=False, **options)
    try:
        for verb, path in steps:
            clock.now_s += 1.0
            found = find(cache, path)
            if verb == "put":
                for record in records_for(cache, path):
                    taken = cache.put(record)
                    assert taken == (record.parent == record.root or record.parent in naive.records)
                    assert cache.flush(PATIENCE_S)
                    if taken:
                        naive.put(record)
                    assert sum(all_files(directory).values()) <= max_bytes
            elif verb == "touch" and found is not None:
                cache.touch(found)
                for key in reversed(found.keys):
                    naive.use(key)
            elif verb == "reopen":
                cache.close(PATIENCE_S)
                cache = DiskCache(directory, fingerprint="model", block=4, resumes_anywhere=False, **options)
            assert cache.flush(PATIENCE_S)
            cache.check()
            assert {path.stem for path in record_files(directory)} == {key.hex() for key in naive.records}
    finally:
        cache.close(PATIENCE_S)


def entry(number: int, parent: int | None) -> IndexEntry:
    return IndexEntry(
        key=number.to_bytes(4, "big"),
        parent=b"root" if parent is None else parent.to_bytes(4, "big"),
        root=b"root",
        is_tail=False,
        start=number,
        tokens=bytes(4),
        nbytes=1,
        file_nbytes=1,
    )


def test_a_long_chain_goes_from_its_end() -> None:
    index = DiskIndex(block=1, resumes_anywhere=True)
    for k in range(2000):
        index.add(entry(k, k - 1 if k > 0 else None), k)
    for k in range(1999, -1, -1):
        assert index.oldest(set()) == (1999, k.to_bytes(4, "big"))
        index.remove(k.to_bytes(4, "big"))
    assert index.oldest(set()) is None
    index.check()


def test_what_is_held_is_passed_over_and_comes_back() -> None:
    index = DiskIndex(block=1, resumes_anywhere=True)
    a, b, c = entry(1, None), entry(2, None), entry(3, None)
    for at, each in enumerate([a, b, c]):
        index.add(each, at)
    assert index.oldest({a.key, b.key}) == (2, c.key)
    assert index.oldest({a.key, b.key, c.key}) is None
    assert index.oldest(set()) == (0, a.key)
    index.use(a.key, 5)
    index.check()
    assert index.oldest(set()) == (1, b.key)


def test_what_is_being_fetched_stays(tmp_path: Path) -> None:
    with opened(tmp_path / "kv", max_bytes=8_000, read_ahead_bytes=10) as cache:
        held = put_path(cache, [0] * 10)
        fetch = cache.fetch(find(cache, [0] * 10), lambda: None)  # type: ignore[arg-type]
        for k in range(1, 12):
            put_path(cache, [k, k, k])
        assert cache.stats().num_evicted > 0
        assert {record.key for record in held} <= keys_in(cache)
        fetch.cancel()
        for k in range(21, 32):
            put_path(cache, [k, k, k])
        assert not {record.key for record in held} & keys_in(cache)
        cache.check()


def test_what_cannot_fit_takes_nothing_with_it(tmp_path: Path) -> None:
    with opened(tmp_path / "kv", max_bytes=5_000) as cache:
        put_path(cache, [1, 2, 3])
        big = records_for(cache, [5, 5, 5], nbytes=4_900)
        assert cache.put(big[0]) and cache.flush(PATIENCE_S)
        assert cache.stats().num_files == 1 and cache.stats().num_evicted == 0 and position(find(cache, [1, 2, 3])) == 3


def test_what_stands_on_what_found_no_room_is_not_written(tmp_path: Path) -> None:
    with opened(tmp_path / "kv", max_bytes=5_000) as cache:
        block = records_for(cache, [5, 5, 5, 5], nbytes=4_900, has_tail=False)[0]
        mark = records_for(cache, [5, 5, 5, 5, 6], nbytes=10)[1]
        assert cache.put(block) and cache.put(mark) and cache.flush(PATIENCE_S)
        assert cache.stats().num_files == 0 and cache.stats().queued_nbytes == 0


def test_a_path_longer_than_the_disk_keeps_its_beginning(tmp_path: Path) -> None:
    with opened(tmp_path / "kv", max_bytes=6_000, resumes_anywhere=True) as cache:
        path = list(range(60))
        for record in records_for(cache, path):
            cache.put(record)
            assert cache.flush(PATIENCE_S)
        kept = position(find(cache, path))
        assert kept == cache.stats().num_files * 4 >= 16 and cache.stats().num_evicted == 0


def test_a_smaller_bound_holds_from_the_start(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as cache:
        for k in range(8):
            put_path(cache, [k, k, k])
    with opened(tmp_path / "kv", max_bytes=4_000) as cache:
        cache.check()
        assert sum(all_files(tmp_path).values()) <= 4_000
        assert find(cache, [0, 0, 0]) is None and position(find(cache, [7, 7, 7])) == 3


def test_a_clock_that_is_set_back_does_not_turn_the_order_around(tmp_path: Path) -> None:
    clock = DirectoryClock()
    with opened(tmp_path / "kv", clock=clock) as cache:
        put_path(cache, [1, 1, 1])
    clock.now_s -= 10_000.0
    with opened(tmp_path / "kv", clock=clock, max_bytes=2_000) as cache:
        assert cache.stats().nbytes > 600
        put_path(cache, [2, 2, 2])
        put_path(cache, [3, 3, 3])
        put_path(cache, [4, 4, 4])
        assert find(cache, [1, 1, 1]) is None and position(find(cache, [4, 4, 4])) == 3


def foreign_files(directory: Path, *, num: int = 6, nbytes: int = 1_000, at_s: float = 1_000.0) -> list[Path]:
    """A folder of another model whose server has gone, one file a second."""
    model = directory / "0123456789abcdef"
    paths: list[Path] = []
    for k in range(num):
        name = f"{k:02x}".ljust(64, "0")
        path = model / name[:2] / f"{name}.kv"
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(nbytes))
        os.utime(path, (at_s + k, at_s + k))
        paths.append(path)
    (model / "lock").touch()
    return paths


def test_files_of_models_that_nobody_serves_count_and_go_by_age(tmp_path: Path) -> None:
    others = foreign_files(tmp_path)
    (tmp_path / "note.txt").write_bytes(bytes(500))
    with opened(tmp_path, max_bytes=8_000, clock=DirectoryClock()) as cache:
        assert cache.stats().others_nbytes == 6_500
        for k in range(10):
            put_path(cache, [k, k, k])
            assert sum(all_files(tmp_path).values()) <= 8_000
            left = [path.exists() for path in others]
            assert cache.stats().others_nbytes == 500 + 1_000 * sum(left)
            assert left == sorted(left), "the oldest first"
        assert left == [False] * 6 and (tmp_path / "note.txt").exists()
        cache.check()


def test_ours_goes_before_what_is_younger_of_others(tmp_path: Path) -> None:
    clock = DirectoryClock()
    others = foreign_files(tmp_path, at_s=clock.now_s + 100)
    with opened(tmp_path, max_bytes=8_000, clock=clock) as cache:
        for k in range(5):
            put_path(cache, [k, k, k])
        assert all(path.exists() for path in others) and find(cache, [0, 0, 0]) is None
        assert position(find(cache, [4, 4, 4])) == 3


def test_a_live_server_s_files_count_and_stay(tmp_path: Path) -> None:
    with opened(tmp_path, max_bytes=8_000) as cache, opened(tmp_path, fingerprint="b", max_bytes=8_000) as other:
        for k in range(6):
            # In turn, so that each has to see what the other has just written.
            for mine in (cache, other):
                for record in records_for(mine, [k, k, k]):
                    mine.put(record)
                    assert mine.flush(PATIENCE_S)
                assert sum(all_files(tmp_path).values()) <= 8_000
                cache.check()
                other.check()
        before = other.stats().num_files
        for k in range(10, 20):
            put_path(cache, [k, k, k])
        assert before == other.stats().num_files > 2
        other.check()
        assert cache.stats().others_nbytes == other.stats().nbytes


def test_what_has_not_changed_is_not_listed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = foreign_files(tmp_path)
    for path in [*others, *(path.parent for path in others), others[0].parent.parent]:
        os.utime(path, (1_000, 1_000))
    listed: list[Path] = []
    scandir = os.scandir

    def counting(folder: Path):
        if "0123456789abcdef" in str(folder) or folder == tmp_path:
            listed.append(folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", counting)
    with opened(tmp_path) as cache:
        assert len(listed) == 8
        put_path(cache, [1, 2, 3])
        assert set(listed[8:]) <= {tmp_path}, "only where something may have changed"
        new = others[0].with_name(f"{'9' * 64}.kv")
        new.write_bytes(bytes(100))
        put_path(cache, [1, 2, 4])
        assert others[0].parent in listed[8:] and cache.stats().others_nbytes == 6_100


def test_a_folder_that_has_just_changed_is_listed_again(tmp_path: Path) -> None:
    """Two changes at one tick of the file system's clock leave one time."""
    around = FolderListings(tmp_path, but=tmp_path / "own")
    for num in (1, 2, 3):
        (tmp_path / str(num)).write_bytes(bytes(100))
        os.utime(tmp_path, (1_000, 1_000))
        around.look(1_001 * 10**9)
        assert around.nbytes == 100 * num


def test_a_use_is_known_after_a_restart(tmp_path: Path) -> None:
    clock = DirectoryClock()
    with opened(tmp_path, clock=clock) as cache:
        for k in range(4):
            put_path(cache, [k, k, k])
        clock.now_s += 10.0
        cache.touch(find(cache, [0, 0, 0]))  # type: ignore[arg-type]
        nbytes = cache.stats().nbytes
    with opened(tmp_path, clock=clock, max_bytes=nbytes - 1) as cache:
        assert position(find(cache, [0, 0, 0])) == 3 and find(cache, [1, 1, 1]) is None


def test_the_oldest_record_of_all_namespaces_goes_first(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        for namespace in "bac":
            put_path(cache, [1, 1, 1], namespace=namespace)
        nbytes = cache.stats().nbytes
    with opened(tmp_path, max_bytes=nbytes - 1) as cache:
        assert [position(find(cache, [1, 1, 1], namespace=namespace)) for namespace in "bac"] == [0, 3, 3]


def test_who_used_a_record_used_what_it_stands_on_also_after_a_restart(tmp_path: Path) -> None:
    clock = DirectoryClock()
    with opened(tmp_path, clock=clock) as cache:
        path = put_path(cache, [5] * 7)
        put_path(cache, [1, 1, 1])
        clock.now_s += 10.0
        cache.touch(DiskMatch(position=7, namespace="", keys=(path[1].key,), nbytes=1))
        used_ns = round(clock() * 1e9)
        (last,) = put_path(cache, [2, 2, 2])
    with opened(tmp_path, clock=clock, max_bytes=size_of(path[0]) + size_of(last)) as cache:
        assert keys_in(cache) == {path[0].key, last.key}, "the other was used before"
    with opened(tmp_path, clock=clock) as cache:
        assert cache.directory.path_of(path[0].key).stat().st_mtime_ns >= used_ns


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "big").write_bytes(bytes(100_000))
    directory = tmp_path / "kv"
    directory.mkdir()
    (directory / "0123456789abcdef").symlink_to(tmp_path / "elsewhere")
    (directory / "link").symlink_to(tmp_path / "elsewhere" / "big")
    with opened(directory, max_bytes=8_000) as cache:
        for k in range(20):
            put_path(cache, [k, k, k])
        assert cache.stats().num_files > 5 and (tmp_path / "elsewhere" / "big").exists()


def test_files_that_cannot_be_used_count_and_go_by_age(tmp_path: Path) -> None:
    with opened(tmp_path, block=8) as cache:
        put_path(cache, list(range(13)))
        folder = cache.directory.folder
    content = b"REPRIS\r\n" + bytes(500)  # As version 1 began.
    future = folder / "ab" / f"{'ab' * 32}.kv"
    future.parent.mkdir(exist_ok=True)
    future.write_bytes(content)
    with opened(tmp_path, max_bytes=5_000) as cache:
        cache.check()
        assert cache.stats().num_files == 0 and cache.stats().num_quarantined == 0
        assert cache.stats().nbytes == sum(all_files(tmp_path).values()) > 2_000
        assert find(cache, list(range(13))) is None
        for k in range(8):
            put_path(cache, [k, k, k])
            cache.check()
            assert sum(all_files(tmp_path).values()) <= 5_000
        assert not future.exists()


def test_quarantine_goes_first(tmp_path: Path) -> None:
    with opened(tmp_path, max_bytes=5_000) as cache:
        for k in range(4):
            put_path(cache, [k, k, k])
        path = cache.directory.path_of(find(cache, [3, 3, 3]).keys[0])  # type: ignore[union-attr]
        path.write_bytes(bytes(path.stat().st_size))
        assert read_all(cache, find(cache, [3, 3, 3]))[1].failed  # type: ignore[arg-type]
        assert len(list((tmp_path / "quarantine").iterdir())) == 1
        for k in range(10, 20):
            put_path(cache, [k, k, k])
            if cache.stats().num_evicted > 0:
                break
        assert list((tmp_path / "quarantine").iterdir()) == [] and position(find(cache, [0, 0, 0])) == 3
