"""The disk tier's face: what a restart finds again, and another server, in a bounded directory.

Used by one thread, which never waits for a file, but for opening, clearing, flushing and closing; a writer, a reader
and a watcher work behind it.
"""

import logging
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path
from threading import Thread

import numpy as np

from reprise.core.inspection import DiskTree, OnDisk
from reprise.core.tokens import Span, Tokens, as_tokens
from reprise.disk.bucket import ObjectBucket
from reprise.disk.directory import ModelDirectory
from reprise.disk.edges import disk_tree
from reprise.disk.folder import ModelFolder
from reprise.disk.index import DiskCursor
from reprise.disk.model_bucket import ModelBucket
from reprise.disk.reader import Fetch, RecordReader
from reprise.disk.record import DiskMatch, DiskRecord, MissingRecords, root_key
from reprise.disk.store import RecordStore
from reprise.disk.watcher import FolderWatcher
from reprise.disk.writer import RecordWriter

__all__ = ["DiskCache", "Fetch"]

log = logging.getLogger(__name__)

MIB = 1024 * 1024

_MOST_PATHS = 4096
"""Ends of paths, of all namespaces, that are looked at for whoever wants to see what is there."""


class DiskCache:
    """Records of one model (`fingerprint`) below a directory or in a bucket, which holds at most `max_bytes` in all.

    `block`: tokens of a block. `resumes_anywhere`: every position can be resumed if its blocks are there, without a
    tail record. Other servers may use the directory at the same time. Raises DiskUnusable if it cannot be used.
    """

    def __init__(
        self,
        directory: Path | ObjectBucket,
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
        self.directory: ModelFolder = (
            ModelDirectory(directory, fingerprint=fingerprint)
            if isinstance(directory, Path)
            else ModelBucket(directory, fingerprint=fingerprint)
        )
        self._fingerprint = fingerprint
        self._store = RecordStore(
            self.directory, max_bytes=max_bytes, block=block, resumes_anywhere=resumes_anywhere, clock=clock
        )
        self._writer = RecordWriter(self._store, queue_bytes=queue_bytes)
        self._reader = RecordReader(self._store, read_ahead_bytes=read_ahead_bytes)
        self._watcher = FolderWatcher(self._store)
        self._threads = [
            Thread(target=self._watcher.run, name="reprise-disk-watcher", daemon=True),
            Thread(target=self._writer.run, name="reprise-disk-writer", daemon=True),
            Thread(target=self._reader.run, name="reprise-disk-reader", daemon=True),
        ]
        self._drawn: tuple[tuple[bytes, int], DiskTree] | None = None
        for thread in self._threads:
            thread.start()

    def root(self, namespace: str) -> bytes:
        """The key that the first block of every prompt of a namespace stands on."""
        return root_key(fingerprint=self._fingerprint, namespace=namespace)

    # Other servers.

    @property
    def is_shared(self) -> bool:
        """Whether another server used the folder when last looked at."""
        return self._store.is_shared

    def look(self, wake: Callable[[], None]) -> int:
        """Take up what other servers have written by now; `wake` is called on another thread when that is done.

        Gives a number for `has_looked`.
        """
        return self._watcher.ask(wake)

    def has_looked(self, number: int) -> bool:
        return self._watcher.has_ended(number)

    def read_s(self, keys: Collection[bytes]) -> float | None:
        """How long reading these records will take, as far as was measured; None: nothing was."""
        with self._store.changed:
            entries = [self._store.index.entries.get(key) for key in keys]
            return self._store.link.estimate_s([entry.nbytes for entry in entries if entry is not None])

    def note_read(self, nbytes: int, seconds: float) -> None:
        """A record of so many bytes was read in this time, which counts for `read_s`."""
        with self._store.changed:
            self._store.link.note(nbytes, seconds)

    def measure(self, key: bytes) -> None:
        """Read this record once there is nothing else to read, to see how long that takes."""
        self._reader.measure(key)

    # Questions. They change nothing and read no file.

    def find(self, tokens: Tokens, *, namespace: str, limit: int) -> DiskMatch | None:
        """The largest position ≤ `limit` that can be resumed from what is on disk, None if there is none."""
        with self._store.changed:
            if self._store.is_away:
                return None
            return self._store.index.find(tokens, root=self.root(namespace), namespace=namespace, limit=limit)

    def missing(self, tokens: Tokens, *, namespace: str) -> MissingRecords:
        """What must be put so that the position ``len(tokens)`` can be resumed; what is queued counts as there."""
        with self._store.changed:
            return self._store.index.missing(tokens, root=self.root(namespace), queued=self._writer.queue.keys())

    def runs(self, namespace: str) -> list[tuple[bytes, bytes, Tokens]]:
        """The tokens of everything of a namespace that can be found: (key, key of what they follow, tokens).

        Each comes behind what it follows; what follows nothing follows `root(namespace)`. May be asked on any thread.
        """
        with self._store.changed:
            entries = self._store.index.runs(self.root(namespace))
        return [(entry.key, entry.parent, as_tokens(np.frombuffer(entry.tokens, dtype=np.int32))) for entry in entries]

    def tree(self, namespace: str) -> DiskTree:
        """What is on disk of a namespace, as a tree; kept until something changes. May be asked on any thread."""
        root, store = self.root(namespace), self._store
        with store.changed:
            at = (root, store.index.num_changes)
            if self._drawn is not None and self._drawn[0] == at:
                return self._drawn[1]
            entries, is_whole = store.index.newest(root, most=_MOST_PATHS)
        drawn = disk_tree(entries, root=root, is_whole=is_whole)
        self._drawn = (at, drawn)
        return drawn

    def path_tokens(self, namespace: str, key: bytes, span: Span) -> Tokens | None:
        """The tokens of a span of the path to a record; None: it has gone. May be asked on any thread."""
        with self._store.changed:
            found = self._store.index.path_tokens(key, span, root=self.root(namespace))
        return None if found is None else as_tokens(np.frombuffer(found, dtype=np.int32))

    def start(self, namespace: str) -> DiskCursor:
        """Where the paths of a namespace begin, for `follow`."""
        return DiskCursor(parent=self.root(namespace))

    def follow(
        self, cursor: DiskCursor, tokens: Tokens, ends: Collection[int]
    ) -> tuple[DiskCursor | None, dict[int, int]]:
        """See `DiskIndex.follow`."""
        with self._store.changed:
            return self._store.index.follow(cursor, tokens, ends)

    def can_take(self, nbytes: int) -> bool:
        """Whether `put` would have room for a record of so many bytes now."""
        with self._store.changed:
            return self._writer.has_room(nbytes)

    def is_paused(self) -> bool:
        """Whether nothing is written for a while, since writing failed."""
        with self._store.changed:
            return self._writer.is_paused()

    def stats(self) -> OnDisk:
        """What is held, and what was done since the cache was opened."""
        store = self._store
        with store.changed:
            return OnDisk(
                num_files=len(store.index.entries),
                nbytes=store.index.nbytes,
                others_nbytes=store.others_nbytes,
                budget_nbytes=store.max_bytes,
                queued_nbytes=self._writer.queued_nbytes,
                written_nbytes=store.counters.written_nbytes,
                read_nbytes=store.counters.read_nbytes,
                num_evicted=store.counters.num_evicted,
                num_quarantined=store.counters.num_quarantined,
                num_errors=store.counters.num_errors,
                trouble=store.trouble or store.write_trouble,
            )

    # Notes. These wait for a file, and may be asked on any thread but the loop's.

    def read_note(self, namespace: str) -> str | None:
        """What `keep_note` kept last, by this process or one before it; None: nothing."""
        return self._store.read_note(self.root(namespace))

    def keep_note(self, namespace: str, text: str) -> None:
        """Keep this text, which goes when the namespace is cleared. Says so in the log where it cannot."""
        try:
            self._store.write_note(self.root(namespace), text.encode())
        except OSError as error:
            log.warning("Cannot write a note to the disk cache: %s", error)

    # Changes. What they ask of the disk is done by other threads.

    def put(self, record: DiskRecord) -> bool:
        """Queue the record for writing. Whether it was taken; nothing happened if not.

        Not taken is what is there or queued, what stands on something that is neither, and what `can_take` refuses.
        What is there and suspect is taken, and written where its file does not verify.
        """
        key, parent, store, queue = record.key, record.parent, self._store, self._writer.queue
        with store.changed:
            if store.index.has(key) or key in queue:
                return False
            if parent != record.root and parent not in store.index.entries and parent not in queue:
                return False
            if not self._writer.has_room(record.nbytes):
                return False
            self._writer.add(record)
            # Else it could be the oldest of all, and go just before something is to stand on it.
            store.index.use(parent, store.moment())
            return True

    def fetch(self, found: DiskMatch, wake: Callable[[], None]) -> Fetch:
        """Read the records of `found`. `wake` is called on another thread whenever there is something new."""
        fetch = Fetch(self._store, found.keys, wake)
        self._reader.begin(fetch)
        return fetch

    def touch(self, found: DiskMatch) -> None:
        """Note that these records are used now."""
        store = self._store
        with store.changed:
            if store.is_closing:
                return
            # What others stand on is the younger, so that the order by age alone takes the end of a path first.
            for key in reversed(found.keys):
                store.index.use(key, store.moment())
            store.changed.notify_all()

    def clear(self, namespace: str | None) -> Future[None]:
        """Remove everything of a namespace, None: of this model. Nothing of it is found when this returns.

        It has gone when the future says so: at once from a directory, later from a bucket (OSError: it is away, and
        that is done when it answers again). That includes what cannot be told apart: this model's files in quarantine
        and those of other versions.
        """
        root = self.root(namespace) if namespace is not None else None
        if self.directory.is_remote:
            with self._store.changed:
                self._writer.drop(lambda record: root in (None, record.root))
                self._store.drop(root)
                return self._watcher.clear(root)
        # What is being written right now is in the queue no more, so that its writer removes it.
        with self.directory.names:
            with self._store.changed:
                self._writer.drop(lambda record: root in (None, record.root))
            self._store.clear(root)
        cleared: Future[None] = Future()
        cleared.set_result(None)
        return cleared

    # The end, and the books.

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued is written or given up. Whether that was so in time."""
        with self._store.changed:
            return self._store.changed.wait_for(self._writer.is_done, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Write what is queued, as far as the time allows, and let others use the folder. Twice changes nothing."""
        self.flush(timeout_s)
        with self._store.changed:
            self._store.is_closing = True
            self._writer.drop(lambda record: True)
        for thread in self._threads:
            thread.join(timeout_s)
        if any(thread.is_alive() for thread in self._threads):
            # It may still write: the lease stays until the process ends.
            log.warning("The disk cache did not close in time; exiting without it.")
            return
        self._reader.close()
        self.directory.release()

    def check(self) -> None:
        """Compare what is known with the folder, after `flush` and with no fetch under way; AssertionError otherwise.

        Reads all headers.
        """
        with self._store.changed:
            assert not self._store.held, "what nobody fetches any more may go"
            assert sum(record.nbytes for record in self._writer.queue.values()) == self._writer.queued_nbytes
        self._store.check()
