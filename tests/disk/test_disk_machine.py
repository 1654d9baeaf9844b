"""The disk cache as a state machine: any operation and any damage in any order, against a dict of what was put."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reprise.core.tokens import Span, as_tokens
from reprise.disk.records.record import DiskMatch, DiskRecord
from reprise.disk.store.cache import DiskCache
from tests.disk.chains import (
    BLOCK,
    PATIENCE_S,
    DirectoryClock,
    all_files,
    cleared,
    content_of,
    damage,
    find,
    position,
    read_all,
    record_files,
    records_for,
)
from tests.disk.test_index import Piece, oracle
from tests.matrix import examples

Ids = tuple[int, ...]

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple)
namespaces = st.sampled_from(["", "", "other"])
numbers = st.integers(0, 1_000)


class DiskMachine(RuleBasedStateMachine):
    @initialize(resumes_anywhere=st.booleans(), max_bytes=st.sampled_from([6_000, 20_000, 10**6]))
    def start(self, resumes_anywhere: bool, max_bytes: int) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kv"))
        self.clock = DirectoryClock()
        self.resumes_anywhere, self.max_bytes = resumes_anywhere, max_bytes
        self.put: dict[bytes, tuple[Piece, DiskRecord]] = {}
        """Everything that should be there, but for what had to make room."""
        self.sick: set[bytes] = set()
        """Records whose bodies were damaged, and nobody has noticed."""
        self.open()

    def open(self) -> None:
        self.cache = DiskCache(
            self.directory,
            fingerprint="model",
            max_bytes=self.max_bytes,
            block=BLOCK,
            resumes_anywhere=self.resumes_anywhere,
            read_ahead_bytes=300,
            clock=self.clock,
        )

    @rule(ids=prompts, namespace=namespaces, nbytes=st.sampled_from([0, 2, 100, 900]))
    def a_path_is_put(self, ids: Ids, namespace: str, nbytes: int) -> None:
        for record in records_for(self.cache, ids, namespace=namespace, nbytes=nbytes):
            if self.cache.put(record):
                piece = Piece(namespace, ids[: record.position], record.is_tail)
                self.put[record.key] = (piece, record)

    @rule(ids=prompts, namespace=namespaces)
    def a_path_is_used(self, ids: Ids, namespace: str) -> None:
        found = find(self.cache, ids, namespace=namespace)
        if found is not None:
            self.cache.touch(found)

    @rule(ids=prompts, namespace=namespaces, limit=st.integers(0, 14), image=st.tuples(*[st.integers(0, 14)] * 2))
    def a_path_is_read(self, ids: Ids, namespace: str, limit: int, image: tuple[int, int]) -> None:
        self.settle()
        span = Span(*sorted(image))
        found = self.cache.find(as_tokens(ids), namespace=namespace, limit=limit, spans=[span])
        have = {piece for piece, _ in self.put.values()}
        limits = [at for at in range(limit + 1) if not span.start < at < span.stop]
        expected = max(oracle(have, namespace, ids, at, resumes_anywhere=self.resumes_anywhere) for at in limits)
        if span.start < expected < span.stop:
            # What lies behind the image resumes in it at best.
            ends = (oracle(have, namespace, ids, at, resumes_anywhere=self.resumes_anywhere) for at in limits)
            expected = max(at for at in ends if not span.start < at < span.stop)
        assert position(found) == expected
        if found is not None:
            self.read(found)

    def read(self, found: DiskMatch) -> None:
        taken, fetch = read_all(self.cache, found)
        healthy = list(found.keys)
        for number, key in enumerate(found.keys):
            if key in self.sick:
                healthy = healthy[:number]
                self.lose(key)
                break
        assert [record.key for record in taken] == healthy
        assert fetch.failed == (len(healthy) < len(found.keys))
        for record in taken:
            assert content_of(record) == content_of(self.put[record.key][1])

    def lose(self, key: bytes) -> None:
        del self.put[key]
        self.sick.discard(key)

    @precondition(lambda self: self.put)
    @rule(number=numbers, at=st.integers(0, 10_000), is_reopened=st.booleans())
    def a_file_is_damaged(self, number: int, at: int, is_reopened: bool) -> None:
        self.settle()
        if not self.put:
            return
        key = sorted(self.put)[number % len(self.put)]
        path = self.cache.directory.path_of(key)
        content = path.read_bytes()
        body_nbytes = sum(section.nbytes for section in self.put[key][1].sections)
        header_nbytes = 8 + int.from_bytes(content[:8], "little")
        in_body = at % 2 == 1 and body_nbytes > 0
        damage(path, len(content) - 1 if in_body else at % header_nbytes)
        # A version that nobody knows is no damage, and such a file is only as good as none.
        self.notice(key, is_reopened=is_reopened, is_seen_at_once=not in_body)

    @precondition(lambda self: self.put)
    @rule(number=numbers, length=numbers, is_reopened=st.booleans(), is_removed=st.booleans())
    def a_file_is_cut_or_removed(self, number: int, length: int, is_reopened: bool, is_removed: bool) -> None:
        self.settle()
        if not self.put:
            return
        key = sorted(self.put)[number % len(self.put)]
        path = self.cache.directory.path_of(key)
        if is_removed:
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:length][:-1])
        self.notice(key, is_reopened=is_reopened, is_seen_at_once=True)

    def notice(self, key: bytes, *, is_reopened: bool, is_seen_at_once: bool) -> None:
        if key not in self.sick and not is_seen_at_once:
            self.sick.add(key)
        elif key in self.sick and not is_seen_at_once:
            # The same bit again: it is well.
            self.sick.remove(key)
        else:
            self.sick.add(key)
            if is_reopened:
                self.cache.close(PATIENCE_S)
                self.lose(key)
                self.open()
            else:
                self.read(DiskMatch(position=1, namespace="", keys=(key,), nbytes=1))

    @rule(namespace=st.sampled_from(["", "other", None]))
    def it_is_cleared(self, namespace: str | None) -> None:
        cleared(self.cache.clear(namespace))
        for key in [key for key, (piece, _) in self.put.items() if namespace in (None, piece.namespace)]:
            self.lose(key)
        assert self.cache.flush(PATIENCE_S)

    @rule()
    def it_is_opened_again(self) -> None:
        self.cache.close(PATIENCE_S)
        self.settle()
        self.open()

    @rule(seconds=st.floats(0.0, 100.0))
    def time_passes(self, seconds: float) -> None:
        self.clock.now_s += seconds

    def settle(self) -> None:
        """Wait for the writer, and forget what made room or found none: nothing on which something stands."""
        assert self.cache.flush(PATIENCE_S)
        there = {bytes.fromhex(path.stem) for path in record_files(self.directory)}
        gone = self.put.keys() - there
        for key in gone:
            record = self.put[key][1]
            assert not any(other.parent == key for _, other in self.put.values() if other.key in there), record
        assert there <= self.put.keys()
        assert not gone or self.max_bytes < 10**6, "there was room for all"
        for key in gone:
            self.lose(key)

    @invariant()
    def the_books_balance(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.settle()
        self.cache.check()
        assert sum(all_files(self.directory).values()) <= self.max_bytes
        assert self.cache.stats().nbytes + self.cache.stats().others_nbytes <= self.max_bytes

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close(PATIENCE_S)
            shutil.rmtree(self.directory)


TestDisk = DiskMachine.TestCase
TestDisk.settings = settings(max_examples=examples(60), stateful_step_count=25, deadline=None)
