"""What the callers' thread, the writer and the reader share, all of it guarded by one condition."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Condition

from reprise.cache.disk.inventory import Inventory
from reprise.cache.disk.record import Record

log = logging.getLogger(__name__)

PAUSE_S = 60.0
"""After a write that failed nothing is written for so long."""


@dataclass(slots=True)
class Tally:
    """What was done since the cache was opened."""

    written_nbytes: int = 0
    read_nbytes: int = 0
    evicted: int = 0
    quarantined: int = 0
    errors: int = 0


class State:
    """Inventory, queue and tallies. Whoever reads or changes them holds `changed`, and never does I/O meanwhile."""

    def __init__(self, inventory: Inventory, *, queue_bytes: int, clock: Callable[[], float]) -> None:
        self.changed = Condition()
        self.inventory = inventory
        self.clock = clock
        self.queue: dict[bytes, Record] = {}
        """To be written, in this order; a record stays until it is on disk or given up."""
        self.queue_bytes = queue_bytes
        self.queued_nbytes = 0
        self.is_writing = False
        self.held: Counter[bytes] = Counter()
        """Records that are being fetched, which stay."""
        self.tally = Tally()
        self.is_closing = False
        self._paused_at: float | None = None
        self._has_warned = False

    def moment(self) -> int:
        """The time of a use: larger than all before."""
        return self.inventory.moment(self.clock())

    def is_paused(self) -> bool:
        # A clock that was set back ends the pause, too.
        return self._paused_at is not None and 0 <= self.clock() - self._paused_at < PAUSE_S

    def has_room(self, nbytes: int) -> bool:
        """Whether the queue takes a record of so many bytes now.

        An empty queue takes any, or one that is larger would never be written.
        """
        fits = not self.queue or self.queued_nbytes + nbytes <= self.queue_bytes
        return fits and not self.is_closing and not self.is_paused()

    def enqueue(self, record: Record) -> None:
        assert record.key not in self.queue, record
        self.queue[record.key] = record
        self.queued_nbytes += record.nbytes
        self.changed.notify_all()

    def drop(self, records: Iterable[Record]) -> None:
        """These are not to be written any more, whether they still wait or not."""
        for record in records:
            if self.queue.get(record.key) is record:
                del self.queue[record.key]
                self.queued_nbytes -= record.nbytes
        self.changed.notify_all()

    def fail(self, error: OSError) -> None:
        """A write failed: what waits is given up, since it would fill the memory meanwhile, and new writes wait."""
        self.drop(list(self.queue.values()))
        self._paused_at = self.clock()
        self.tally.errors += 1
        if not self._has_warned:
            log.warning(
                "The disk cache cannot be written (%s): it is still read, and writing is tried again each minute.",
                error.strerror,
            )
        self._has_warned = True

    def succeed(self, nbytes: int) -> None:
        """A file of so many bytes was written."""
        self._paused_at, self._has_warned = None, False
        self.tally.written_nbytes += nbytes

    def hold(self, keys: Iterable[bytes]) -> None:
        self.held.update(keys)

    def let_go(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.held[key] -= 1
            if self.held[key] == 0:
                del self.held[key]
