"""The disk tier in an object store: it does what a directory does, and where the store fails there is less reuse."""

import re
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.core.errors import DiskUnusable
from reprise.core.installation import mend_line
from reprise.disk.folders import model_bucket
from reprise.disk.folders.bucket import BucketUnavailable, open_bucket
from reprise.disk.folders.lease import EXPIRED_S
from reprise.disk.folders.model_bucket import ModelBucket
from reprise.disk.folders.model_folder import FileInfo
from reprise.disk.store import reader, watcher
from reprise.disk.store.cache import DiskCache
from tests.disk.chains import (
    PATIENCE_S,
    DirectoryClock,
    cleared,
    content_of,
    find,
    keys_in,
    look,
    opened,
    position,
    put_path,
    read_all,
    records_for,
    same,
)
from tests.disk.fake_bucket import FakeBucket
from tests.matrix import examples

CHAT = list(range(10))
_HELD_UP_S = 20.0
"""For a few threads to be started: only the clock shows that one is not."""


@pytest.fixture(autouse=True)
def _looks_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "REMOTE_EVERY_S", 3600.0)
    monkeypatch.setattr(watcher, "REMOTE_AGAIN_S", 0.0)
    monkeypatch.setattr(watcher, "MAX_SCAN_SHARE", 1e9)


@contextmanager
def server(bucket: FakeBucket, **options: Any) -> Generator[DiskCache]:
    with opened(cast("Path", bucket), **options) as cache:
        look(cache)
        yield cache


def wait_until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until_s, "it never is"
        time.sleep(0.002)


def test_what_was_written_is_found_by_the_next_server_and_by_another() -> None:
    bucket = FakeBucket()
    with server(bucket) as one, server(bucket) as other:
        records = put_path(one, CHAT)
        assert len(bucket.records()) == len(records) == 3
        assert find(other, CHAT) is None, "before it has scanned"
        look(other)
        found = find(other, CHAT)
        assert found is not None and found.position == 10
        taken, fetch = read_all(other, found)
        assert not fetch.failed and all(map(same, taken, records))
        look(one)
        assert one.is_shared and other.is_shared
        one.check()
        other.check()
    with server(bucket) as again:
        assert not again.is_shared, "who closes says so"
        assert position(find(again, CHAT)) == 10
        again.check()


def test_what_is_known_is_not_asked_for_again() -> None:
    bucket = FakeBucket()
    with server(bucket) as one:
        put_path(one, CHAT)
        with server(bucket) as other:
            num = bucket.num("get")
            assert num == 3, "a header each"
            look(other)
            look(one)
            assert bucket.num("get") == num
            assert put_path(other, CHAT) == []


def test_a_header_of_any_length_is_read() -> None:
    bucket = FakeBucket()
    long = list(range(6000))
    with server(bucket, block=4096) as one:
        put_path(one, long)
    with server(bucket, block=4096) as other:
        found = find(other, long)
        assert found is not None and found.position == 6000
        assert not read_all(other, found)[1].failed


def test_more_than_one_look_takes_in_are_taken_in_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_bucket, "MOST_HEADERS", 2)
    bucket = FakeBucket()
    with server(bucket) as one:
        put_path(one, list(range(25)))
    with server(bucket) as other:
        wait_until(lambda: len(keys_in(other)) == 7)
        assert other.stats().nbytes + other.stats().others_nbytes >= bucket.nbytes


def test_what_is_written_while_the_store_is_listed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = FakeBucket()
    with server(bucket) as cache:
        listing = bucket.listing

        def slow(prefix: str) -> Iterator[FileInfo]:
            found = list(listing(prefix))
            if not prefix:
                put_path(cache, CHAT)
            return iter(found)

        monkeypatch.setattr(bucket, "listing", slow)
        look(cache)
        monkeypatch.undo()
        found = find(cache, CHAT)
        assert found is not None and found.position == 10 and not read_all(cache, found)[1].failed


# Several records at once.


class ReadGate:
    """Holds up the reads of records until so many are under way, and counts them."""

    def __init__(self, bucket: FakeBucket, *, num: int) -> None:
        self._get = bucket.get
        self._num_wanted = num
        self._changed = threading.Condition()
        self._under_way: list[int] = []
        self.most = self.most_nbytes = 0
        self.order: list[str] = []
        """Names, as their reads ended."""

    def get(self, name: str, nbytes: int) -> memoryview:
        with self._changed:
            self._under_way.append(nbytes)
            number = len(self._under_way)
            self.most = max(self.most, number)
            self.most_nbytes = max(self.most_nbytes, sum(self._under_way))
            self._changed.notify_all()
            self._wait_until(lambda: self.most >= self._num_wanted)
            # The last one that began is the first to end.
            self._wait_until(lambda: len(self._under_way) == number)
            self._under_way.pop()
            self.order.append(name)
            self._changed.notify_all()
        return self._get(name, nbytes)

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        """Where one has waited in vain, no other waits."""
        if not self._changed.wait_for(lambda: self._num_wanted == 0 or is_so(), _HELD_UP_S):
            self._num_wanted = 0
            self._changed.notify_all()
            raise AssertionError("read one at a time")

    def release(self) -> None:
        """Hold up nothing any more."""
        with self._changed:
            self._num_wanted = 0
            self._changed.notify_all()


def test_records_of_a_bucket_are_read_at_once_and_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, ids = FakeBucket(), list(range(4 * ModelBucket.reads_at_once - 1))
    with server(bucket) as cache:
        records = put_path(cache, ids)
        found = find(cache, ids)
        assert found is not None and len(records) == ModelBucket.reads_at_once
        gate = ReadGate(bucket, num=len(records))
        monkeypatch.setattr(bucket, "get", gate.get)
        taken, fetch = read_all(cache, found)
        assert gate.most == len(records) and gate.order != [found_name(cache, key) for key in found.keys]
        assert not fetch.failed and len(taken) == len(records) and all(map(same, taken, records))
        cache.check()


class Offered:
    """Holds up each read until the reader, asked for another one, had none to give, and all that it gave have begun."""

    def __init__(self, bucket: FakeBucket, monkeypatch: pytest.MonkeyPatch) -> None:
        self._get, self._begin_next = bucket.get, reader.Fetch.begin_next
        self._changed = threading.Condition()
        self._num_asked = self._num_got = self._num_under_way = self._had_none = self.most = 0
        self._begun: list[int] = []
        """The number of the question to which each read was the answer."""
        monkeypatch.setattr(bucket, "get", self.get)

        def begin_next(fetch: reader.Fetch, read_ahead_bytes: int, room: int | None) -> Any:
            return self.begin_next(fetch, read_ahead_bytes, room)

        monkeypatch.setattr(reader.Fetch, "begin_next", begin_next)

    def begin_next(self, fetch: reader.Fetch, read_ahead_bytes: int, room: int | None) -> Any:
        read = self._begin_next(fetch, read_ahead_bytes, room)
        with self._changed:
            self._num_asked += 1
            if read is not None:
                self._begun.append(self._num_asked)
            else:
                self._had_none = self._num_asked
            self._changed.notify_all()
        return read

    def get(self, name: str, nbytes: int) -> memoryview:
        with self._changed:
            number = self._num_got
            self._num_got += 1
            self._num_under_way += 1
            self.most = max(self.most, self._num_under_way)
            self._changed.notify_all()
            # Which may be before the question that it answers has returned.
            assert self._changed.wait_for(lambda: number < len(self._begun), PATIENCE_S)
            assert self._changed.wait_for(lambda: self._had_none > self._begun[number], PATIENCE_S)
            assert self._changed.wait_for(lambda: self._num_got == len(self._begun), PATIENCE_S)
            self._num_under_way -= 1
        return self._get(name, nbytes)


@pytest.mark.parametrize(("nbytes", "most"), [(3500, 3), (10, 1)], ids=["three", "larger than the bound"])
def test_what_is_under_way_is_bounded_in_bytes(nbytes: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, ids = FakeBucket(), list(range(40))
    monkeypatch.setattr(reader, "UNDER_WAY_NBYTES", nbytes)
    with server(bucket) as cache:
        records = put_path(cache, ids, nbytes=1000)
        found = find(cache, ids)
        assert found is not None
        offered = Offered(bucket, monkeypatch)
        assert len(read_all(cache, found)[0]) == len(records) and offered.most == most


def test_what_comes_after_a_lost_record_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, ids = FakeBucket(), list(range(4 * ModelBucket.reads_at_once - 1))
    with server(bucket) as cache:
        records = put_path(cache, ids)
        found = find(cache, ids)
        assert found is not None
        del bucket.objects[found_name(cache, found.keys[2])]
        monkeypatch.setattr(bucket, "get", ReadGate(bucket, num=len(records)).get)
        taken, fetch = read_all(cache, found)
        assert fetch.failed and len(taken) == 2 and all(map(same, taken, records))


def test_a_cancelled_fetch_leaves_nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, ids = FakeBucket(), list(range(40))
    with server(bucket) as cache:
        put_path(cache, ids)
        found = find(cache, ids)
        assert found is not None
        gate = ReadGate(bucket, num=ModelBucket.reads_at_once + 1)
        monkeypatch.setattr(bucket, "get", gate.get)
        fetch = cache.fetch(found, lambda: None)
        wait_until(lambda: gate.most == ModelBucket.reads_at_once)
        fetch.cancel()
        gate.release()
        assert fetch.take() == [] and len(read_all(cache, found)[0]) == len(found.keys)
        cache.check()


def found_name(cache: DiskCache, key: bytes) -> str:
    return cache.directory.path_of(key).as_posix()


# Where the store fails.


def test_a_store_that_is_away_at_the_start_is_used_when_it_is_there(caplog: pytest.LogCaptureFixture) -> None:
    bucket = FakeBucket()
    with server(bucket) as one:
        put_path(one, CHAT)
    bucket.failing = dict.fromkeys(("put", "get", "list", "delete"), "no route to host")
    with server(bucket) as cache:
        trouble = cache.stats().trouble
        assert trouble is not None and "s3://bucket/prefix" in trouble and "no route to host" in trouble
        assert find(cache, CHAT) is None
        bucket.failing = {}
        cache_meets(cache)
        assert cache.stats().trouble is None and position(find(cache, CHAT)) == 10
    assert sum("no route to host" in record.getMessage() for record in caplog.records) == 1


def cache_meets(cache: DiskCache) -> None:
    """Have it ask now what it would ask in a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watcher, "REMOTE_EVERY_S", 0.0)
        look(cache)
        wait_until(lambda: cache.stats().trouble is None)


def test_a_store_that_goes_away_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    bucket, ids = FakeBucket(), list(range(100))
    with server(bucket) as one:
        put_path(one, ids)
    with server(bucket) as cache:
        found = find(cache, ids)
        assert found is not None
        bucket.failing = {"get": "timed out"}
        num = bucket.num("get")
        taken, fetch = read_all(cache, found)
        assert taken == [] and fetch.failed
        assert bucket.num("get") <= num + ModelBucket.reads_at_once, "the others would take as long"
        assert find(cache, ids) is None and "timed out" in (cache.stats().trouble or "")
        look(cache)
        assert cache.stats().trouble is not None, "listing works, reading does not"
        num_asked = len(bucket.asked)
        cache.keep_note("", "learnt")
        assert cache.read_note("") is None and len(bucket.asked) == num_asked
        bucket.failing = {}
        cache_meets(cache)
        assert not read_all(cache, found)[1].failed
    assert sum("timed out" in record.getMessage() for record in caplog.records) == 1


def test_a_store_that_goes_away_is_asked_once_for_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each path: everyone would wait as long again as the first did."""
    bucket, ids = FakeBucket(), list(range(40))
    # One record at a time.
    monkeypatch.setattr(reader, "UNDER_WAY_NBYTES", 1)
    with server(bucket) as cache:
        put_path(cache, ids)
        found = find(cache, ids)
        assert found is not None
        gate, num = ReadGate(bucket, num=2), bucket.num("get")
        monkeypatch.setattr(bucket, "get", gate.get)
        fetches = [cache.fetch(found, lambda: None) for _ in range(3)]
        wait_until(lambda: gate.most == 1)
        bucket.failing = {"get": "timed out"}
        gate.release()
        wait_until(lambda: all(fetch.is_done for fetch in fetches))
        assert all(fetch.failed and fetch.take() == [] for fetch in fetches)
        assert bucket.num("get") == num + 1


def test_a_store_that_may_not_be_written_is_read(caplog: pytest.LogCaptureFixture) -> None:
    bucket = FakeBucket()
    with server(bucket) as one:
        put_path(one, CHAT)
    with server(bucket) as cache:
        bucket.failing = {"put": "access is denied"}
        for record in records_for(cache, [7, 7, 7]):
            cache.put(record)
        assert cache.flush(PATIENCE_S)
        assert cache.is_paused() and "access is denied" in (cache.stats().trouble or "")
        found = find(cache, CHAT)
        assert found is not None and not read_all(cache, found)[1].failed
    assert sum("access is denied" in record.getMessage() for record in caplog.records) == 1


def test_an_object_that_was_lost_is_a_miss() -> None:
    bucket = FakeBucket()
    with server(bucket) as cache:
        records = put_path(cache, CHAT)
        found = find(cache, CHAT)
        assert found is not None
        del bucket.objects[next(name for name in bucket.records() if records[1].key.hex() in name)]
        taken, fetch = read_all(cache, found)
        assert len(taken) == 1 and fetch.failed
        assert find(cache, CHAT) is None and cache.stats().trouble is None
        assert len(put_path(cache, CHAT)) == 1, "it is written again"
        bucket.objects = {name: it for name, it in bucket.objects.items() if not name.endswith(".kv")}
        look(cache)
        assert find(cache, CHAT) is None and cache.stats().num_files == 0


def test_a_damaged_object_is_removed_and_one_that_came_damaged_is_not(caplog: pytest.LogCaptureFixture) -> None:
    bucket = FakeBucket()
    with server(bucket) as cache:
        records = put_path(cache, CHAT)
        name = next(name for name in bucket.records() if records[2].key.hex() in name)
        found = find(cache, CHAT)
        assert found is not None
        whole = bucket.objects[name]
        get = bucket.get

        def breaks_off_once(name: str, nbytes: int) -> memoryview:
            bucket.get = get
            return get(name, nbytes - 1)

        bucket.get = breaks_off_once
        assert not read_all(cache, found)[1].failed
        bucket.damage(name)
        assert read_all(cache, found)[1].failed
        assert name not in bucket.objects and cache.stats().num_quarantined == 1
        bucket.objects[name] = whole
    assert sum("is damaged" in record.getMessage() for record in caplog.records) == 1


# The bound.


def test_the_bound_holds_over_all_servers() -> None:
    bucket, max_bytes = FakeBucket(), 12_000
    clock = DirectoryClock()
    with (
        server(bucket, max_bytes=max_bytes, clock=clock) as one,
        server(bucket, max_bytes=max_bytes, clock=clock) as other,
    ):
        for turn in range(12):
            clock.now_s += 1
            cache = (one, other)[turn % 2]
            put_path(cache, [100 + turn, *CHAT])
            look(cache)
            assert bucket.nbytes <= max_bytes
        look(one)
        look(other)
        assert keys_in(one) == keys_in(other) != set()
        assert position(find(one, [111, *CHAT])) == 11 and find(one, [100, *CHAT]) is None
        one.check()


def test_two_that_are_over_the_bound_remove_the_same() -> None:
    bucket = FakeBucket()
    with server(bucket) as one, server(bucket) as other:
        for turn in range(10):
            put_path((one, other)[turn % 2], [100 + turn, 1, 2])
    left = sorted(bucket.records())
    max_bytes = 6 * (bucket.nbytes // 10) + 200  # The leases count, too.
    with server(bucket, max_bytes=max_bytes), server(bucket, max_bytes=max_bytes):
        assert len(bucket.records()) == 6 and set(bucket.records()) < set(left)


def test_models_that_nobody_serves_make_room() -> None:
    bucket = FakeBucket()
    with server(bucket, fingerprint="served") as served:
        put_path(served, CHAT)
        nbytes = bucket.nbytes
        # It was written later, and goes first all the same.
        with server(bucket, fingerprint="old") as old:
            put_path(old, CHAT)
        with server(bucket, max_bytes=2 * nbytes + 500) as cache:
            assert cache.stats().others_nbytes >= 2 * nbytes
            put_path(cache, CHAT)
            look(served)
            assert position(find(served, CHAT)) == 10
            assert position(find(cache, CHAT)) == 10 and len(bucket.records()) == 6


def test_a_server_that_died_is_one_no_more() -> None:
    bucket = FakeBucket()
    with server(bucket) as cache:
        model = bucket.records() or next(iter(bucket.objects)).partition("/")[0]
        bucket.objects[f"{model}/servers/dead"] = (b"dead", bucket.now_ns)
        look(cache)
        assert cache.is_shared
        bucket.now_ns += int((EXPIRED_S + 1) * 1e9)
        bucket.put(next(name for name in bucket.objects if "/servers/" in name and "dead" not in name), b"x")
        look(cache)
        assert not cache.is_shared and not any("dead" in name for name in bucket.objects)


# Uses by others.


def let_pass(bucket: FakeBucket, hours: float, *caches: DiskCache) -> None:
    """Move the store's clock; the servers live."""
    bucket.now_ns += int(hours * 3600e9)
    for cache in caches:
        cache.directory.renew_lease()
    for cache in caches:
        look(cache)


def used(cache: DiskCache, ids: list[int]) -> None:
    found = find(cache, ids)
    assert found is not None
    cache.touch(found)
    assert cache.flush(PATIENCE_S)


def num_shown(bucket: FakeBucket) -> int:
    return sum(verb == "put" and "/uses/" in name for verb, name in bucket.asked)


def test_what_another_server_uses_is_not_removed_as_the_oldest() -> None:
    bucket, (old, newer, new) = FakeBucket(), ([first, *CHAT] for first in (100, 101, 102))
    with server(bucket) as one:
        put_path(one, old)
        put_path(one, newer)
        nbytes = bucket.nbytes
    max_bytes = nbytes + nbytes // 4 + 1000
    clock = DirectoryClock()
    clock.now_s = bucket.now_ns / 1e9
    with (
        server(bucket, max_bytes=max_bytes, clock=clock) as one,
        server(bucket, max_bytes=max_bytes, clock=clock) as other,
    ):
        clock.now_s += 7200
        let_pass(bucket, 2, one, other)
        used(other, old)
        let_pass(bucket, 0.1, one, other)
        put_path(one, new)
        assert num_shown(bucket) == 1, "what an evicted record leaves to its parent is no use"
        assert position(find(one, old)) == 11 and position(find(one, newer)) < 11
    with server(bucket, max_bytes=nbytes + 500) as again:
        assert position(find(again, old)) == 11 and position(find(again, newer)) == 0, "a restart knows of it"
        again.check()


def test_a_use_is_shown_once_an_hour_and_for_the_end_of_a_path() -> None:
    bucket = FakeBucket()
    with server(bucket) as cache:
        put_path(cache, CHAT)
        used(cache, CHAT)
        assert num_shown(bucket) == 0, "it was just written"
        let_pass(bucket, 2, cache)
        for _ in range(3):
            used(cache, CHAT)
            look(cache)
        assert num_shown(bucket) == 1
        let_pass(bucket, 2, cache)
        used(cache, CHAT)
        assert num_shown(bucket) == 2
        model = next(iter(bucket.objects)).partition("/")[0]
        bucket.put(f"{model}/uses/notes.txt", b"a stranger's")
        cleared(cache.clear(None))
        look(cache)
        assert [name for name in bucket.objects if "/uses/" in name] == [f"{model}/uses/notes.txt"]
        cache.check()


# Clearing.


def test_a_namespace_is_cleared_for_all_servers() -> None:
    bucket = FakeBucket()
    with server(bucket) as one, server(bucket) as other:
        put_path(one, CHAT, namespace="a")
        put_path(other, [5, *CHAT], namespace="a")
        put_path(other, CHAT, namespace="b")
        one.keep_note("a", "learnt")
        future = one.clear("a")
        assert find(one, CHAT, namespace="a") is None, "at once"
        cleared(future)
        assert len(bucket.records()) == 3 and one.read_note("a") is None
        look(other)
        assert find(other, CHAT, namespace="a") is None and position(find(other, CHAT, namespace="b")) == 10
        cleared(one.clear(None))
        assert bucket.records() == []
        one.check()


def test_what_could_not_be_cleared_is_not_found_and_goes_when_the_store_is_back() -> None:
    bucket = FakeBucket()
    with server(bucket) as one, server(bucket) as other:
        put_path(one, CHAT, namespace="a")
        put_path(other, [5, *CHAT], namespace="a")
        bucket.failing = {"delete": "timed out"}
        with pytest.raises(BucketUnavailable):
            cleared(one.clear("a"))
        assert find(one, CHAT, namespace="a") is None and find(one, [5, *CHAT], namespace="a") is None
        assert len(bucket.records()) == 6
        bucket.failing = {}
        cache_meets(one)
        assert bucket.records() == [] and keys_in(one, "a") == set()
        one.check()


# All of it.

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple)
steps = st.tuples(
    st.integers(0, 1), st.sampled_from(["put", "put", "read", "read", "look", "clear", "lose", "damage"]), prompts
)


@given(steps=st.lists(steps, max_size=20), max_bytes=st.sampled_from([6_000, 10**6]))
@settings(max_examples=examples(25), deadline=None)
def test_whatever_is_read_is_right(steps: list[tuple[int, str, tuple[int, ...]]], max_bytes: int) -> None:
    bucket, content = FakeBucket(), dict[bytes, tuple[Any, ...]]()
    with server(bucket, max_bytes=max_bytes) as one, server(bucket, max_bytes=max_bytes) as other:
        for number, verb, ids in steps:
            cache = (one, other)[number]
            names = bucket.records()
            if verb == "put":
                for record in records_for(cache, ids):
                    cache.put(record)
                    content[record.key] = content_of(record)
                assert cache.flush(PATIENCE_S)
            elif verb == "read" and (found := find(cache, ids)) is not None:
                for record in read_all(cache, found)[0]:
                    assert content_of(record) == content[record.key]
            elif verb == "look":
                look(cache)
            elif verb == "clear":
                cleared(cache.clear(""))
                assert find(cache, ids) is None and bucket.records() == []
            elif verb == "lose" and names:
                bucket.objects.pop(names[len(ids) % len(names)])
            elif verb == "damage" and names:
                bucket.damage(names[len(ids) % len(names)])
        for cache in (one, other, one):
            look(cache)
        assert bucket.nbytes <= max_bytes
        look(other)
        assert keys_in(one) == keys_in(other)
        assert one.stats().trouble is None


# The client.


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_the_client_does_what_a_bucket_does(scheme: str, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    bucket = open_bucket(f"{scheme}://{tmp_path / 'store' if scheme == 'file' else '/'}")
    content = bytes(range(256)) * 40_000
    bucket.put("a/b/c.kv", content)
    bucket.put("a/d", b"12")
    assert bytes(bucket.get("a/b/c.kv", len(content))) == content
    assert bytes(bucket.get("a/b/c.kv", 5)) == content[:5] and bytes(bucket.get("a/d", 100)) == b"12"
    assert {each.path.as_posix(): each.nbytes for each in bucket.listing("")} == {"a/b/c.kv": len(content), "a/d": 2}
    assert [each.path.as_posix() for each in bucket.listing("a/b")] == ["a/b/c.kv"]
    assert all(abs(each.mtime_ns - time.time_ns()) < 60e9 for each in bucket.listing(""))
    with pytest.raises(FileNotFoundError):
        bucket.get("nothing", 5)
    bucket.delete(["a/d", "nothing", "a/b/c.kv"])
    assert list(bucket.listing("")) == []


def test_a_cache_in_a_store_of_the_client_is_found_again(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    for turn in range(2):
        with opened(cast("Path", open_bucket(f"file://{tmp_path}/store"))) as cache:
            look(cache)
            assert position(find(cache, CHAT)) == (10 if turn else 0)
            put_path(cache, CHAT)
            cache.check()


def test_a_place_that_cannot_be_a_store_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DiskUnusable, match=r"s3://, gs://"):
        open_bucket("ftp://host/path")
    if pytest.importorskip("obstore"):
        with pytest.raises(DiskUnusable, match="cannot be used"):
            open_bucket("s3://")

    def find_nothing(name: str) -> None:
        pass

    monkeypatch.setattr("reprise.disk.folders.bucket.find_spec", find_nothing)
    with pytest.raises(DiskUnusable, match=re.escape(mend_line("s3"))):
        open_bucket("s3://bucket/prefix")


def test_a_password_in_the_address_is_not_shown() -> None:
    pytest.importorskip("obstore")
    assert open_bucket("memory://user:secret@/").url == "memory:///"
