"""Reads and verifies records, a bounded number of bytes ahead of their consumers, and from a bucket several at once."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reprise.disk.records.record import DiskRecord
from reprise.disk.store.store import RecordStore

log = logging.getLogger(__name__)

UNDER_WAY_NBYTES = 32 << 20
"""Records read at once are at most so large together, unless one alone is larger. The client reads such a one in parts,
which fills a link as well, and the first of a path is not to wait for the last."""

MEASURED_NBYTES = 16 << 20
"""The most bytes that are read for their time alone, but at least one record."""


@dataclass(slots=True, eq=False)
class _Read:
    """A record that is being read, or was read before those in front of it."""

    key: bytes
    nbytes: int
    record: DiskRecord | None = None
    has_ended: bool = False


class Fetch:
    """A read of some records, in order. Made by `DiskCache.fetch`. Thread-safe."""

    def __init__(self, store: RecordStore, keys: Sequence[bytes], wake: Callable[[], None]) -> None:
        self._store = store
        self._held = tuple(keys)
        self._left = deque(keys)
        self._begun: deque[_Read] = deque()
        """What is being read, and what was read before something in front of it, in order."""
        self._read: deque[DiskRecord] = deque()
        self._read_nbytes = 0
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
            self._read_nbytes -= nbytes
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
            self._read_nbytes = 0

    # For the reader, with `store.changed` held.

    def begin_next(self, read_ahead_bytes: int, room: int | None) -> _Read | None:
        """The record to read next, of at most `room` bytes (None: of any size).

        None if the read-ahead is full or nothing is left.
        """
        if self._is_done or not self._left:
            return None
        entry = self._store.index.entries.get(self._left[0])
        nbytes = entry.nbytes if entry is not None else 0
        if room is not None and nbytes > room:
            return None
        ahead = self._read_nbytes + sum(read.nbytes for read in self._begun) + nbytes
        # At least one record, however large.
        if ahead > read_ahead_bytes and (self._read or self._begun) and not self._has_failed:
            return None
        self._begun.append(_Read(self._left.popleft(), nbytes))
        return self._begun[-1]

    def deliver(self, read: _Read, record: DiskRecord | None) -> None:
        """Take a record that was begun; None: it is missing or damaged. They become available in order.

        The records after a damaged one are still read and verified: where one file is damaged others often are, and
        each would otherwise be found only after everything before it has been recomputed.
        """
        read.record, read.has_ended = record, True
        if self._is_done:
            return
        while self._begun and self._begun[0].has_ended:
            first = self._begun.popleft()
            self._has_failed |= first.record is None
            if first.record is not None and not self._has_failed:
                self._read.append(first.record)
                self._read_nbytes += first.record.nbytes
        if not self._left and not self._begun:
            self._end()

    def give_up(self) -> None:
        """Fail, unless it is done already."""
        if not self._is_done:
            self._has_failed = True
            self._end()

    def _end(self) -> None:
        self._is_done = True
        self._left.clear()
        self._begun.clear()
        self._store.unhold(self._held)
        self._store.changed.notify_all()

    def wake(self) -> None:
        """Notify the consumer; call it without a lock."""
        try:
            self._wake()
        except Exception:
            log.exception("cannot notify the engine thread of records read from disk")


class RecordReader:
    """Reads for all fetches round-robin until the cache closes, in order within each.

    As many threads run `run` as the store's `reads_at_once`; what they read at once is at most `UNDER_WAY_NBYTES`.
    """

    def __init__(self, store: RecordStore, *, read_ahead_bytes: int) -> None:
        self._store = store
        self._read_ahead_bytes = read_ahead_bytes
        self._most = store.directory.reads_at_once
        self._fetches: list[Fetch] = []
        self._to_measure: deque[bytes] = deque()
        # Guarded by `store.changed`.
        self._num_under_way = 0
        self._nbytes_under_way = 0

    def measure(self, keys: Sequence[bytes]) -> None:
        """Read the first of these records for their time alone, once no other read is waiting: as many as at once."""
        store = self._store
        with store.changed:
            self._to_measure.clear()
            nbytes = 0
            for key in keys[: self._most]:
                nbytes += store.index.entries[key].nbytes if key in store.index.entries else 0
                if self._to_measure and nbytes > MEASURED_NBYTES:
                    break
                self._to_measure.append(key)
            store.changed.notify_all()

    def num_at_once(self, sizes: Sequence[int]) -> int:
        """How many of the records of a path are read at once, as far as their sizes (bytes) allow it."""
        fit = UNDER_WAY_NBYTES // max(1, *sizes) if sizes else self._most
        return max(1, min(self._most, fit))

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
        changed = self._store.changed
        while True:
            with changed:
                chosen = None
                while not self._store.is_closing and (chosen := self._choose()) is None:
                    changed.wait()
                if chosen is None:
                    return
                fetch, read = chosen
                self._num_under_way += 1
                self._nbytes_under_way += read.nbytes
            self._read(fetch, read)
            # What was read last is not kept until something else is.
            del chosen, fetch, read

    def _read(self, fetch: Fetch | None, read: _Read) -> None:
        store = self._store
        try:
            record = store.read(read.key)
        except Exception:
            log.exception("cannot read a record of the disk cache")
            record = None
        with store.changed:
            self._num_under_way -= 1
            self._nbytes_under_way -= read.nbytes
            # Each of those behind it would be waited for as long.
            waiting = {each for each in self._fetches if store.is_unavailable and not each.is_done}
            if fetch is not None:
                fetch.deliver(read, record)
                waiting.add(fetch)
            if store.is_unavailable:
                for each in waiting:
                    each.give_up()
            store.changed.notify_all()
        for each in waiting:
            each.wake()

    def close(self) -> None:
        """Fail the remaining fetches, after the threads have ended."""
        with self._store.changed:
            left, self._fetches = self._fetches, []
            for fetch in left:
                fetch.give_up()
        for fetch in left:
            fetch.wake()

    def _choose(self) -> tuple[Fetch | None, _Read] | None:
        """The next record to read and the fetch it is for (None: for its time alone); None if there is none for now."""
        room = UNDER_WAY_NBYTES - self._nbytes_under_way if self._num_under_way > 0 else None
        self._fetches = [fetch for fetch in self._fetches if not fetch.is_done]
        for fetch in self._fetches:
            read = fetch.begin_next(self._read_ahead_bytes, room)
            if read is not None:
                # Round-robin: no fetch waits for all records of another.
                self._fetches.remove(fetch)
                self._fetches.append(fetch)
                return fetch, read
        if self._to_measure and not self._fetches:
            return None, _Read(self._to_measure.popleft(), 0)
        return None
