"""The thread that reads and verifies records, a bounded number of bytes ahead of their consumers."""

import logging
from collections import deque
from collections.abc import Callable, Sequence

from reprise.disk.record import DiskRecord
from reprise.disk.store import RecordStore

log = logging.getLogger(__name__)


class Fetch:
    """A read of some records, in order. Made by `DiskCache.fetch`. Thread-safe."""

    def __init__(self, store: RecordStore, keys: Sequence[bytes], wake: Callable[[], None]) -> None:
        self._store = store
        self._held = tuple(keys)
        self._left = deque(keys)
        self._read: deque[DiskRecord] = deque()
        self._ahead_nbytes = 0
        self._wake = wake
        self._is_done = False
        self._has_failed = False
        with store.changed:
            store.hold(self._held)

    def take(self, max_nbytes: int | None = None) -> list[DiskRecord]:
        """The records read since the last call, in order: at most `max_nbytes` in total, but at least one."""
        taken: list[DiskRecord] = []
        nbytes = 0
        with self._store.changed:
            while self._read and (not taken or max_nbytes is None or nbytes + self._read[0].nbytes <= max_nbytes):
                taken.append(self._read.popleft())
                nbytes += taken[-1].nbytes
            self._ahead_nbytes -= nbytes
            self._store.changed.notify_all()
        return taken

    @property
    def has_more(self) -> bool:
        """Whether `take` would return a record now."""
        with self._store.changed:
            return len(self._read) > 0

    @property
    def is_done(self) -> bool:
        """Whether nothing more will be read: a later `take` without a limit returns all that is left."""
        with self._store.changed:
            return self._is_done

    @property
    def failed(self) -> bool:
        """Whether a record was missing or damaged. `take` returns the records before it and none after it."""
        with self._store.changed:
            return self._has_failed

    def cancel(self) -> None:
        """Stop reading and drop what was not taken. Idempotent."""
        with self._store.changed:
            if not self._is_done:
                self._end()
            self._read.clear()
            self._ahead_nbytes = 0

    # For the reader's thread, with `store.changed` held.

    def next_key(self, read_ahead_bytes: int) -> bytes | None:
        """The record to read next; None if the read-ahead is full or nothing is left."""
        if self._is_done:
            return None
        entry = self._store.index.entries.get(self._left[0])
        ahead = self._ahead_nbytes + (entry.nbytes if entry is not None else 0)
        # At least one record, however large.
        return self._left[0] if ahead <= read_ahead_bytes or not self._read or self._has_failed else None

    def deliver(self, record: DiskRecord | None) -> None:
        """Add the next record; None: it is missing or damaged.

        The records after a damaged one are still read and verified: where one file is damaged others often are, and
        each would otherwise be found only after everything before it has been recomputed.
        """
        if self._is_done:
            return
        self._left.popleft()
        self._has_failed |= record is None
        if record is not None and not self._has_failed:
            self._read.append(record)
            self._ahead_nbytes += record.nbytes
        if not self._left:
            self._end()

    def give_up(self) -> None:
        """Fail, unless it is done already."""
        if not self._is_done:
            self._has_failed = True
            self._end()

    def _end(self) -> None:
        self._is_done = True
        self._left.clear()
        self._store.unhold(self._held)
        self._store.changed.notify_all()

    @property
    def is_over(self) -> bool:
        return self._is_done

    def wake(self) -> None:
        """Notify the consumer; call it without a lock."""
        try:
            self._wake()
        except Exception:
            log.exception("cannot notify the engine thread of records read from disk")


class RecordReader:
    """Reads for all fetches round-robin, one record at a time, until the cache closes."""

    def __init__(self, store: RecordStore, *, read_ahead_bytes: int) -> None:
        self._store = store
        self._read_ahead_bytes = read_ahead_bytes
        self._fetches: list[Fetch] = []
        self._to_measure: bytes | None = None

    def measure(self, key: bytes) -> None:
        """Read this one record for its time alone, once nobody waits for another."""
        with self._store.changed:
            self._to_measure = key
            self._store.changed.notify_all()

    def begin(self, fetch: Fetch) -> None:
        """Read for this fetch too. After the cache was closed, it fails at once."""
        with self._store.changed:
            is_closing = self._store.is_closing
            if is_closing:
                fetch.give_up()
            else:
                self._fetches.append(fetch)
                self._store.changed.notify_all()
        if is_closing:
            fetch.wake()

    def run(self) -> None:
        store = self._store
        while True:
            with store.changed:
                chosen, measured = None, None
                while chosen is None and measured is None and not store.is_closing:
                    chosen = self._choose()
                    if chosen is None:
                        measured, self._to_measure = self._to_measure, None
                    if chosen is None and measured is None:
                        store.changed.wait()
            if measured is not None and chosen is None:
                store.read(measured)
                continue
            if chosen is None:
                return
            fetch, key = chosen
            record = store.read(key)
            with store.changed:
                fetch.deliver(record)
                # Each of those behind it would be waited for as long.
                failed = [each for each in self._fetches if store.is_away and not each.is_over]
                for each in failed:
                    each.give_up()
            for each in {fetch, *failed}:
                each.wake()

    def close(self) -> None:
        """Fail the remaining fetches, after the thread has ended."""
        with self._store.changed:
            left, self._fetches = self._fetches, []
            for fetch in left:
                fetch.give_up()
        for fetch in left:
            fetch.wake()

    def _choose(self) -> tuple[Fetch, bytes] | None:
        """The next fetch and the key to read for it, or None if there is nothing to do."""
        self._fetches = [fetch for fetch in self._fetches if not fetch.is_over]
        for fetch in self._fetches:
            key = fetch.next_key(self._read_ahead_bytes)
            if key is not None:
                # Round-robin: no fetch waits for all records of another.
                self._fetches.remove(fetch)
                self._fetches.append(fetch)
                return fetch, key
        return None
