"""Reading records in the background, a bounded number of bytes ahead of who takes them."""

import logging
from collections import deque
from collections.abc import Callable, Sequence

from reprise.cache.disk.record import Record
from reprise.cache.disk.state import State

log = logging.getLogger(__name__)


class Fetch:
    """Records on their way from disk, in order. `DiskCache.fetch` makes them; any thread may use one."""

    def __init__(self, state: State, keys: Sequence[bytes], wake: Callable[[], None]) -> None:
        self._state = state
        self._held = tuple(keys)
        self._left = deque(keys)
        self._read: list[Record] = []
        self._ahead_nbytes = 0
        self._wake = wake
        self._is_done = False
        self._has_failed = False
        with state.changed:
            state.hold(self._held)

    def take(self) -> list[Record]:
        """The records that were read since the last call, in order."""
        with self._state.changed:
            taken, self._read = self._read, []
            self._ahead_nbytes = 0
            self._state.changed.notify_all()
        return taken

    @property
    def is_done(self) -> bool:
        """Whether no more will come: what `take` gives after this was asked is the rest."""
        with self._state.changed:
            return self._is_done

    @property
    def failed(self) -> bool:
        """Whether a record was missing or did not verify. All before it are given, and none behind it."""
        with self._state.changed:
            return self._has_failed

    def cancel(self) -> None:
        """Read no more, and forget what was not taken. Nothing happens if it is over."""
        with self._state.changed:
            if not self._is_done:
                self._end()
            self._read = []

    # For the reader's thread, which holds the state.

    def next_key(self, read_ahead_bytes: int) -> bytes | None:
        """The record to be read next, None if enough is read or nothing is left."""
        if self._is_done:
            return None
        entry = self._state.inventory.index.entries.get(self._left[0])
        ahead = self._ahead_nbytes + (entry.nbytes if entry is not None else 0)
        # One record at least, however large.
        return self._left[0] if ahead <= read_ahead_bytes or not self._read or self._has_failed else None

    def deliver(self, record: Record | None) -> None:
        """The next record, None if it cannot be had.

        Those behind it are read all the same, and verified: where one file is damaged others often are, and each would
        be met on another day, when what came before it has been computed again.
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
        """Nothing is read any more."""
        if not self._is_done:
            self._has_failed = True
            self._end()

    def _end(self) -> None:
        self._is_done = True
        self._left.clear()
        self._state.let_go(self._held)
        self._state.changed.notify_all()

    @property
    def is_over(self) -> bool:
        return self._is_done

    def wake(self) -> None:
        """Tell the taker, without holding anything."""
        try:
            self._wake()
        except Exception:
            log.exception("who waits for records from the disk could not be told")
