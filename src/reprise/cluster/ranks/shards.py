"""The parts of records that a rank other than 0 has: see `reprise.cluster.ranks.record_parts`."""

import logging
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from threading import Event, Lock, Thread

from reprise.cluster.ranks.codec import form_of
from reprise.disk.records.record import DiskRecord
from reprise.disk.store.cache import DiskCache

log = logging.getLogger(__name__)


class ShardKeeper:
    """A rank's parts of records, kept at rank 0's command.

    Called on the thread that runs rank 0's operations, which waits for files only in `close`.
    """

    def __init__(self, disk: DiskCache, answer: Callable[[int, str | None], None]) -> None:
        """`answer` is called with the number of what rank 0 asked and the form of what was read (None: it is missing).

        It is called on any thread.
        """
        self.disk = disk
        self._answer = answer
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._read: dict[int, DiskRecord] = {}
        """The parts read for rank 0, by number, until it releases them."""
        self._reading = Lock()
        self._thread = Thread(target=self._work, name="reprise-shards", daemon=True)
        self._thread.start()

    def put(self, record: DiskRecord) -> None:
        """Queue our part of a record for writing."""
        if not self.disk.put(record):
            log.debug("a part of a record is not written")

    def read(self, number: int, key: bytes) -> None:
        """Read and verify our part of a record, on another thread, and answer."""
        self._tasks.put(lambda: self._load(number, key))

    def forget(self, number: int) -> None:
        """Drop what was read, or is still to be read, under this number."""
        self._tasks.put(lambda: self.drop(number))

    def drop(self, number: int) -> None:
        """Drop what was read under this number, at once. Thread-safe."""
        with self._reading:
            self._read.pop(number, None)

    def part(self, number: int) -> DiskRecord:
        """What was read under this number."""
        with self._reading:
            return self._read[number]

    @property
    def num_read(self) -> int:
        """How many records are kept for rank 0."""
        with self._reading:
            return len(self._read)

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was asked so far is done, and what is queued is written; returns whether it was, in time."""
        done = Event()
        self._tasks.put(done.set)
        return done.wait(timeout_s) and self.disk.flush(timeout_s)

    def remove(self, keys: Iterable[bytes]) -> None:
        """Remove our parts of these records, on another thread."""
        keys = frozenset(keys)
        self._tasks.put(lambda: self.disk.remove(keys))

    def clear(self, number: int, root: bytes | None) -> None:
        """Remove everything that hangs on `root` (None: everything of the model), and answer when it is gone."""
        self.disk.clear_root(root).add_done_callback(lambda _: self._answer(number, ""))

    def close(self, timeout_s: float) -> None:
        """Write what is queued, as far as time allows."""
        self._tasks.put(None)
        self._thread.join(timeout_s)
        self.disk.close(timeout_s)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:
                log.exception("a part of a record cannot be read or removed")

    def _load(self, number: int, key: bytes) -> None:
        record = None
        try:
            record = self.disk.read(key)
        finally:
            form = None
            if record is not None:
                with self._reading:
                    self._read[number] = record
                form = form_of(record)
            self._answer(number, form)
