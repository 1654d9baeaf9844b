"""The disk tier of the prefix cache: what a restart finds again, in a bounded directory.

Used by one thread, which never waits for a file, but for opening, clearing, flushing and closing; a writer and a reader
work behind it.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import numpy as np

from reprise.cache.disk.clearing import clear
from reprise.cache.disk.fetch import Fetch
from reprise.cache.disk.inventory import Inventory
from reprise.cache.disk.keys import root_key
from reprise.cache.disk.opening import check_stock, take_stock
from reprise.cache.disk.reader import Reader
from reprise.cache.disk.record import DiskStats, Found, Missing, Record
from reprise.cache.disk.room import Room
from reprise.cache.disk.shelf import Shelf
from reprise.cache.disk.state import State
from reprise.cache.disk.writer import Writer
from reprise.core.errors import DiskUnusable
from reprise.core.tokens import Tokens, as_tokens

__all__ = ["DiskCache", "Fetch"]

log = logging.getLogger(__name__)

MIB = 1024 * 1024


class DiskCache:
    """Records of one model (`fingerprint`) below `directory`, which never holds more than `max_bytes` in all.

    `block`: tokens of a block. `resumes_anywhere`: every position can be resumed if its blocks are there, without a
    mark. Raises DiskUnusable if the directory cannot be used or another process has this model's part of it.
    """

    def __init__(
        self,
        directory: Path,
        *,
        fingerprint: str,
        max_bytes: int,
        block: int = 512,
        resumes_anywhere: bool,
        queue_bytes: int = 256 * MIB,
        read_ahead_bytes: int = 256 * MIB,
        clock: Callable[[], float] = time.time,
    ) -> None:
        assert min(max_bytes, block, queue_bytes, read_ahead_bytes) > 0
        self.block = block
        self._fingerprint = fingerprint
        self._shelf = Shelf(directory, fingerprint=fingerprint)
        inventory = Inventory(block=block, resumes_anywhere=resumes_anywhere)
        self._state = State(inventory, queue_bytes=queue_bytes, clock=clock)
        self._room = Room(self._shelf, self._state, max_bytes=max_bytes)
        try:
            take_stock(self._shelf, self._state)
            with self._shelf.directory_locked() as now_ns:
                self._room.make(0, beside=b"", now_ns=now_ns)
        except OSError as error:
            self._shelf.release()
            raise DiskUnusable(
                f"The cache directory {directory} cannot be used ({error.strerror}): choose one that is yours alone."
            ) from error
        self._reader = Reader(self._shelf, self._state, read_ahead_bytes=read_ahead_bytes)
        writer = Writer(self._shelf, self._state, self._room)
        self._threads = [
            Thread(target=writer.run, name="reprise-disk-writer", daemon=True),
            Thread(target=self._reader.run, name="reprise-disk-reader", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def root(self, namespace: str) -> bytes:
        """The key that the first block of every prompt of a namespace stands on."""
        return root_key(fingerprint=self._fingerprint, namespace=namespace)

    # Questions. They change nothing and read no file.

    def find(self, tokens: Tokens, *, namespace: str, limit: int) -> Found | None:
        """The largest position ≤ `limit` that can be resumed from what is on disk, None if there is none."""
        with self._state.changed:
            index = self._state.inventory.index
            return index.find(tokens, root=self.root(namespace), namespace=namespace, limit=limit)

    def missing(self, tokens: Tokens, *, namespace: str) -> Missing:
        """What must be put so that the position ``len(tokens)`` can be resumed; what is queued counts as there."""
        with self._state.changed:
            index = self._state.inventory.index
            return index.missing(tokens, root=self.root(namespace), queued=self._state.queue.keys())

    def runs(self, namespace: str) -> list[tuple[bytes, bytes, Tokens]]:
        """The tokens of everything of a namespace that can be found: (key, key of what they follow, tokens).

        Each comes behind what it follows; what follows nothing follows `root(namespace)`. May be asked on any thread.
        """
        with self._state.changed:
            entries = self._state.inventory.index.runs(self.root(namespace))
        return [(entry.key, entry.parent, as_tokens(np.frombuffer(entry.tokens, dtype=np.int32))) for entry in entries]

    def can_take(self, nbytes: int) -> bool:
        """Whether `put` would have room for a record of so many bytes now."""
        with self._state.changed:
            return nbytes <= self._room.max_bytes and self._state.has_room(nbytes)

    def is_paused(self) -> bool:
        """Whether nothing is written for a while, since writing failed."""
        with self._state.changed:
            return self._state.is_paused()

    def stats(self) -> DiskStats:
        """What is held, and what was done since the cache was opened."""
        with self._state.changed:
            inventory, tally = self._state.inventory, self._state.tally
            return DiskStats(
                files=len(inventory.index.entries),
                nbytes=inventory.nbytes,
                others_nbytes=self._room.surroundings.nbytes,
                max_bytes=self._room.max_bytes,
                queued_nbytes=self._state.queued_nbytes,
                written_nbytes=tally.written_nbytes,
                read_nbytes=tally.read_nbytes,
                evicted=tally.evicted,
                quarantined=tally.quarantined,
                errors=tally.errors,
            )

    # Changes. What they ask of the disk is done by other threads.

    def put(self, record: Record) -> bool:
        """Queue the record for writing. Whether it was taken; nothing happened if not.

        Not taken is what is there or queued, what stands on something that is neither, and what `can_take` refuses.
        """
        key, parent, state = record.key, record.parent, self._state
        with state.changed:
            entries = state.inventory.index.entries
            if key in entries or key in state.queue:
                return False
            if parent != record.root and parent not in entries and parent not in state.queue:
                return False
            if not self.can_take(record.nbytes):
                return False
            state.enqueue(record)
            # Else it could be the oldest of all, and go just before something is to stand on it.
            state.inventory.use(parent, state.moment())
            return True

    def fetch(self, found: Found, wake: Callable[[], None]) -> Fetch:
        """Read the records of `found`. `wake` is called on another thread whenever there is something new."""
        fetch = Fetch(self._state, found.keys, wake)
        self._reader.begin(fetch)
        return fetch

    def touch(self, found: Found) -> None:
        """Note that these records are used now."""
        with self._state.changed:
            if self._state.is_closing:
                return
            # What others stand on is the younger, so that the order by age alone takes the end of a path first.
            for key in reversed(found.keys):
                self._state.inventory.use(key, self._state.moment())
            self._state.changed.notify_all()

    def clear(self, namespace: str | None) -> None:
        """Remove everything of a namespace, None: of this model. It has gone from the disk when this returns.

        That includes what cannot be told apart: this model's files in quarantine and those of other versions.
        """
        clear(self._shelf, self._state, self.root(namespace) if namespace is not None else None)

    # The end, and the books.

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued is written or given up. Whether that was so in time."""
        state = self._state
        with state.changed:
            return state.changed.wait_for(
                lambda: not (state.queue or state.inventory.unwritten_uses or state.is_writing), timeout_s
            )

    def close(self, timeout_s: float) -> None:
        """Write what is queued, as far as the time allows, and let others use the folder. Twice changes nothing."""
        self.flush(timeout_s)
        with self._state.changed:
            self._state.is_closing = True
            self._state.drop(list(self._state.queue.values()))
        for thread in self._threads:
            thread.join(timeout_s)
        if any(thread.is_alive() for thread in self._threads):
            # It may still write: the folder stays locked until the process ends.
            log.warning("The disk cache did not answer in time, and is left to itself.")
            return
        self._reader.close()
        self._shelf.release()

    def check(self) -> None:
        """Compare what is known with the folder, after `flush`; AssertionError on any difference. Reads all headers."""
        check_stock(self._shelf, self._state)
