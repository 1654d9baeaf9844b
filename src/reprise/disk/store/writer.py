"""The thread that writes queued records and times of last use."""

import logging
from collections.abc import Iterable

from reprise.disk.records.record import DiskRecord
from reprise.disk.sparing import SparedWrites
from reprise.disk.store.store import RecordStore

log = logging.getLogger(__name__)

PAUSE_S = 60.0
"""How long nothing is written after a failed write, or after one that was spared."""


class RecordWriter:
    """The write queue and its thread, which survives any failed write and runs until the cache closes.

    The queue's methods need `store.changed` held.
    """

    def __init__(self, store: RecordStore, *, queue_bytes: int, writes: SparedWrites | None = None) -> None:
        """`writes`: whether nothing is to be written; None: never."""
        self._store = store
        self._writes = writes
        self.queue: dict[bytes, DiskRecord] = {}
        """Records by key, in write order. A record stays in it until it is on disk or dropped."""
        self.queued_nbytes = 0
        self._queue_bytes = queue_bytes
        self._is_writing = False
        self._paused_at: float | None = None
        self._has_warned = False

    # The queue.

    def has_room(self, nbytes: int) -> bool:
        """Whether the queue accepts a record of `nbytes` now; an empty queue accepts one larger than its limit."""
        fits = not self.queue or self.queued_nbytes + nbytes <= self._queue_bytes
        return fits and nbytes <= self._store.max_bytes and not self._store.is_closing and not self.is_paused()

    def add(self, record: DiskRecord) -> None:
        assert record.key not in self.queue, record
        self.queue[record.key] = record
        self.queued_nbytes += record.nbytes
        self._store.changed.notify_all()

    def drop(self, records: Iterable[DiskRecord]) -> None:
        """Drop records, including one that is being written, which is then not published."""
        for record in list(records):
            if self.queue.get(record.key) is record:
                del self.queue[record.key]
                self.queued_nbytes -= record.nbytes
        self._store.changed.notify_all()

    def is_paused(self) -> bool:
        """Whether writing is suspended: for a while, or as long as the machine is left alone."""
        if self._writes is not None and self._writes.why_quiet() is not None:
            return True
        # A clock that was set back also ends the pause.
        return self._paused_at is not None and 0 <= self._store.clock() - self._paused_at < PAUSE_S

    def is_done(self) -> bool:
        """Whether nothing is left to write."""
        return not (self.queue or self._store.index.unwritten_uses or self._is_writing)

    # The thread, which holds no lock between these calls.

    def run(self) -> None:
        store = self._store
        while True:
            with store.changed:
                self._is_writing = False
                store.changed.notify_all()
                store.changed.wait_for(lambda: store.is_closing or self.queue or store.index.unwritten_uses)
                if store.is_closing:
                    return
                self._is_writing = True
                record = next(iter(self.queue.values()), None)
                uses, store.index.unwritten_uses = store.index.unwritten_uses, {}
            store.show_uses(uses)
            if record is not None and not self._is_spared(record):
                self._write(record)

    def _is_spared(self, record: DiskRecord) -> bool:
        """Whether nothing is to be written for now: then the queue is dropped, and writing pauses."""
        writes = self._writes
        if writes is None:
            return False
        is_quiet, reason = writes.why_quiet() is not None, writes.why_not(record.nbytes)
        with self._store.changed:
            if is_quiet:
                # It lasts as long as the machine is quiet, which is logged where that is seen.
                self.drop(self.queue.values())
                return True
            if reason is not None:
                if reason != self._store.spared:
                    log.info("%s", reason)
                self.drop(self.queue.values())
                self._paused_at = self._store.clock()
            self._store.spared = reason
        return reason is not None

    def _write(self, record: DiskRecord) -> None:
        changed, before = self._store.changed, self._store.counters.written_nbytes
        try:
            # If the key was queued again meanwhile, this write is no longer wanted.
            is_written = self._store.write(record, is_wanted=lambda: self.queue.get(record.key) is record)
        except (IsADirectoryError, NotADirectoryError, FileExistsError) as error:
            log.warning("Something else is in the place of a record, which is not written: %s", error)
            with changed:
                self._store.counters.num_errors += 1
        except OSError as error:
            with changed:
                self._fail(error)
        except Exception:
            log.exception("cannot write a record of the disk cache; it is skipped")
            with changed:
                self._store.counters.num_errors += 1
        else:
            if is_written:
                if self._writes is not None:
                    self._writes.note(self._store.counters.written_nbytes - before)
                with changed:
                    self._paused_at, self._has_warned, self._store.write_trouble = None, False, None
        finally:
            with changed:
                self.drop([record])

    def _fail(self, error: OSError) -> None:
        """After a failed write: suspend writing, and drop the queue rather than keep it in memory."""
        self.drop(self.queue.values())
        self._paused_at = self._store.clock()
        self._store.counters.num_errors += 1
        self._store.write_trouble = (
            f"Cannot write to the disk cache ({error.strerror}): it is still read, and writing is retried every minute."
        )
        if not self._has_warned:
            log.warning("%s", self._store.write_trouble)
        self._has_warned = True
