"""Records by key in a size-limited directory that survives restarts and can be shared by servers.

The caller's thread does no file I/O except in opening, `flush`, `close` and the notes; a writer, a reader and a watcher
thread do the rest.
"""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from threading import Thread

import numpy as np

from reprise.core.backend import StoredText
from reprise.core.images import outside
from reprise.core.inspection import DiskTree, OnDisk
from reprise.core.tokens import Span, Tokens, as_tokens
from reprise.disk.folders.bucket import ObjectBucket
from reprise.disk.folders.model_bucket import ModelBucket
from reprise.disk.folders.model_directory import ModelDirectory
from reprise.disk.folders.model_folder import ModelFolder, PartsElsewhere
from reprise.disk.records.record import DiskMatch, DiskRecord, MissingRecords, root_key
from reprise.disk.sparing import SparedWrites
from reprise.disk.store.edges import disk_tree
from reprise.disk.store.index import DiskCursor
from reprise.disk.store.reader import Fetch, RecordReader
from reprise.disk.store.store import RecordStore
from reprise.disk.store.watcher import FolderWatcher
from reprise.disk.store.writer import RecordWriter

__all__ = ["DiskCache", "Fetch"]

log = logging.getLogger(__name__)

MIB = 1024 * 1024

_NO_ROOT = b""

_MOST_PATHS = 4096
"""The most leaves of a namespace that `tree` and `newest_texts` visit."""


class DiskCache:
    """Records of one model (`fingerprint`) below a directory or in a bucket, which holds at most `max_bytes` in total.

    `block`: tokens per block. `resumes_anywhere`: any position whose blocks are on disk can be resumed, without a tail
    record. Other servers may use the directory at the same time. Raises DiskUnusable if it cannot be used.
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
        elsewhere: PartsElsewhere | None = None,
        writes: SparedWrites | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`elsewhere`: who has the other parts of each record; only with a directory. `writes`: bounds what is
        written; None: `max_bytes` alone does."""
        assert min(max_bytes, block, queue_bytes, read_ahead_bytes) > 0
        self.block = block
        self.directory = _folder(directory, fingerprint, elsewhere)
        self._elsewhere, self._writes = elsewhere, writes
        self._fingerprint = fingerprint
        self._store = RecordStore(
            self.directory,
            max_bytes=max_bytes,
            block=block,
            resumes_anywhere=resumes_anywhere,
            clock=clock,
        )
        self._writer = RecordWriter(self._store, queue_bytes=queue_bytes, writes=writes)
        self._reader = RecordReader(self._store, read_ahead_bytes=read_ahead_bytes)
        self._watcher = FolderWatcher(self._store)
        self._threads = [
            Thread(target=self._watcher.run, name="reprise-disk-watcher", daemon=True),
            Thread(target=self._writer.run, name="reprise-disk-writer", daemon=True),
            *(
                Thread(target=self._reader.run, name="reprise-disk-reader", daemon=True)
                for _ in range(self.directory.reads_at_once)
            ),
        ]
        self._drawn: tuple[tuple[bytes, int], DiskTree] | None = None
        for thread in self._threads:
            thread.start()

    def root(self, namespace: str) -> bytes:
        """The parent key of the first record of every prompt in a namespace."""
        return root_key(fingerprint=self._fingerprint, namespace=namespace)

    # Other servers.

    @property
    def is_shared(self) -> bool:
        """Whether another server used the folder at the last scan."""
        return self._store.is_shared

    def scan(self) -> Future[None]:
        """Request a scan for records that other servers have written; done when it has ended, on another thread."""
        return self._watcher.ask()

    def read_s(self, keys: Collection[bytes]) -> float | None:
        """Estimated seconds to read these records; None before enough was measured."""
        with self._store.changed:
            entries = [self._store.index.entries.get(key) for key in keys]
            sizes = [entry.nbytes for entry in entries if entry is not None]
            return self._store.link.estimate_s(sizes, at_once=self._reader.num_at_once(sizes))

    def measure(self, keys: Sequence[bytes]) -> None:
        """Read the first of these records when there is nothing else to read, to measure how long that takes."""
        self._reader.measure(keys)

    # Queries. They change nothing and read no file.

    def find(self, tokens: Tokens, *, namespace: str, limit: int, spans: Sequence[Span] = ()) -> DiskMatch | None:
        """The largest position ≤ `limit` outside of the `spans` that can be resumed from disk, or None."""
        with self._store.changed:
            root = self._readable_root(namespace)
            while True:
                found = self._store.index.find(tokens, root=root, namespace=namespace, limit=limit)
                if found is None or (limit := outside(found.position, spans)) == found.position:
                    return found

    def common_length(self, tokens: Tokens, *, namespace: str) -> int:
        """How far the tokens agree with a path on disk, resumable there or not."""
        with self._store.changed:
            return self._store.index.common_length(tokens, root=self._readable_root(namespace))

    def missing(self, tokens: Tokens, ends: Sequence[int], *, namespace: str) -> list[MissingRecords]:
        """The records to `put` so that each of `ends`, which ascend, can be resumed. Queued ones count as present."""
        queued = self._writer.queue.keys()
        with self._store.changed:
            return self._store.index.missing(tokens, ends, root=self.root(namespace), queued=queued)

    def runs(self, namespace: str) -> list[tuple[bytes, bytes, Tokens]]:
        """All reachable records of a namespace as (key, parent key, tokens), parents first. Thread-safe.

        The parent of a first record is `root(namespace)`.
        """
        with self._store.changed:
            entries = self._store.index.runs(self._findable_root(namespace))
        return [(entry.key, entry.parent, as_tokens(np.frombuffer(entry.tokens, dtype=np.int32))) for entry in entries]

    def tree(self, namespace: str) -> DiskTree:
        """The records of a namespace as a tree, memoized until something changes. Thread-safe."""
        store = self._store
        with store.changed:
            root = self._findable_root(namespace)
            at = (root, store.index.num_changes)
            if self._drawn is not None and self._drawn[0] == at:
                return self._drawn[1]
            entries, is_whole = store.index.newest(root, most=_MOST_PATHS)
        drawn = disk_tree(entries, root=root, is_whole=is_whole)
        self._drawn = (at, drawn)
        return drawn

    def newest_texts(self, namespace: str, *, most: int) -> list[StoredText] | None:
        """About `most` tokens of a namespace: see `DiskIndex.newest_texts`. None: it is not known yet what is there."""
        store = self._store
        with store.changed:
            root = self._findable_root(namespace)
            if store.is_unavailable or store.has_unread or not self._watcher.has_connected:
                return None
            return store.index.newest_texts(root, most=most, most_leaves=_MOST_PATHS)

    def path_tokens(self, namespace: str, key: bytes, span: Span) -> Tokens | None:
        """The tokens of a span of the path to a record, or None if the record is gone. Thread-safe."""
        with self._store.changed:
            found = self._store.index.path_tokens(key, span, root=self._findable_root(namespace))
        return None if found is None else as_tokens(np.frombuffer(found, dtype=np.int32))

    def start(self, namespace: str) -> DiskCursor:
        """A cursor at the root of a namespace, for `follow`."""
        with self._store.changed:
            return DiskCursor(parent=self._findable_root(namespace))

    def _findable_root(self, namespace: str) -> bytes:
        """Its root key, or one on which nothing hangs while it is being cleared."""
        root = self.root(namespace)
        return _NO_ROOT if self._store.is_hidden(root) else root

    def _readable_root(self, namespace: str) -> bytes:
        """`_findable_root`, or one on which nothing hangs while nothing can be read."""
        return _NO_ROOT if self._store.is_unavailable else self._findable_root(namespace)

    def follow(
        self, cursor: DiskCursor, tokens: Tokens, ends: Collection[int]
    ) -> tuple[DiskCursor | None, dict[int, int]]:
        """See `DiskIndex.follow`."""
        with self._store.changed:
            return self._store.index.follow(cursor, tokens, ends)

    def can_take(self, nbytes: int) -> bool:
        """Whether `put` would accept a record of `nbytes` now."""
        with self._store.changed:
            return self._writer.has_room(nbytes) and not self._store.is_clearing

    def is_paused(self) -> bool:
        """Whether writing is suspended: after a write that failed or was spared, or while the machine is left alone."""
        with self._store.changed:
            return self._writer.is_paused()

    def stats(self) -> OnDisk:
        """Sizes now, and counters since the cache was opened."""
        store, writes = self._store, self._writes
        with store.changed:
            return OnDisk(
                num_files=len(store.index.entries),
                nbytes=store.index.nbytes,
                others_nbytes=store.others_nbytes,
                budget_nbytes=store.max_bytes,
                queued_nbytes=self._writer.queued_nbytes,
                **asdict(store.counters),
                trouble=store.trouble or store.write_trouble,
                spared=store.spared if writes is None else writes.why_quiet() or store.spared,
                today_nbytes=None if writes is None else writes.today_nbytes,
                daily_nbytes=None if writes is None else writes.daily_nbytes,
            )

    # Notes. These wait for a file: call them on any thread but the engine's.

    def read_note(self, namespace: str) -> str | None:
        """The text of the last `keep_note`, of this process or an earlier one, or None."""
        # A note in a store that is unavailable would be waited for.
        root = self._readable_root(namespace)
        return None if root == _NO_ROOT else self._store.read_note(root)

    def keep_note(self, namespace: str, text: str) -> None:
        """Store a text until the namespace is cleared. Logs a warning if it cannot be written."""
        root = self._readable_root(namespace)
        try:
            if root != _NO_ROOT:
                self._store.write_note(root, text.encode())
        except OSError as error:
            log.warning("Cannot write a note to the disk cache: %s", error)

    # Changes. Other threads do the I/O.

    def put(self, record: DiskRecord) -> bool:
        """Queue a record for writing; returns whether it was queued.

        Refused: a record that is present or queued, one whose parent is neither, one of a namespace that is being
        cleared, and what `can_take` refuses. A suspect
        record is queued, and rewritten if its file does not verify.
        """
        key, parent, store, queue = record.key, record.parent, self._store, self._writer.queue
        with store.changed:
            if store.index.has(key) or key in queue or store.is_hidden(record.root):
                return False
            if parent != record.root and parent not in store.index.entries and parent not in queue:
                return False
            if not self._writer.has_room(record.nbytes):
                return False
            self._writer.add(record)
            # Otherwise the parent could be the oldest record and be evicted before this one is written.
            store.index.use(parent, store.moment())
            return True

    def read(self, key: bytes) -> DiskRecord | None:
        """The record, verified, also if it is only queued; None if it is missing or damaged. Waits for a file."""
        store = self._store
        with store.changed:
            queued, is_known = self._writer.queue.get(key), key in store.index.entries
        if queued is not None:
            return queued
        if not is_known and store.is_shared:
            store.scan()  # Another server may have written it.
        record = store.read(key)
        if record is not None:
            with store.changed:
                store.index.use(key, store.moment())
                store.changed.notify_all()
        return record

    def remove(self, keys: Collection[bytes]) -> None:
        """Remove these records, also from the queue. Waits for the files. Raises OSError."""
        with self.directory.names:
            with self._store.changed:
                self._writer.drop(each for each in self._writer.queue.values() if each.key in keys)
            self._store.remove(keys)
            with self._store.changed:
                # Parents have changed times of use, which the writer writes.
                self._store.changed.notify_all()

    def agree(self, keys: Collection[Collection[bytes]]) -> None:
        """Remove what is not complete; `keys`: those that each of the others has a part of."""
        assert self._elsewhere is not None, "there are other parts"
        if self.is_shared:
            return  # Another server may be writing what seems to be missing: it is found out when it is read.
        own, theirs = self.all_keys(), [set(each) for each in keys]
        common = own.intersection(*theirs)
        self.remove(own - common)
        self._elsewhere.remove(set[bytes]().union(*theirs) - own)

    def all_keys(self) -> set[bytes]:
        """The keys of all records on disk."""
        with self._store.changed:
            return set(self._store.index.entries)

    def fetch(self, found: DiskMatch, wake: Callable[[], None]) -> Fetch:
        """Start reading the records of `found`. `wake` is called on another thread after each one."""
        fetch = Fetch(self._store, found.keys, wake)
        self._reader.begin(fetch)
        return fetch

    def touch(self, found: DiskMatch) -> None:
        """Mark these records as just used."""
        store = self._store
        with store.changed:
            if store.is_closing:
                return
            # Parents get the later time, so that an order by age alone still evicts leaves first.
            for key in reversed(found.keys):
                store.index.use(key, store.moment())
            store.changed.notify_all()

    def clear(self, namespace: str | None) -> Future[None]:
        """Remove all files of a namespace (None: of this model); nothing of it is found any more when this returns.

        The future is done when the files are removed, by another thread (OSError: not all could be; those in a bucket
        are removed when it answers again). Includes files whose namespace is unknown: this model's
        quarantined files and those of other versions.
        """
        root = self.root(namespace) if namespace is not None else None
        cleared = self.clear_root(root)
        return cleared if self._elsewhere is None else _both(cleared, self._elsewhere.clear(root))

    def clear_root(self, root: bytes | None) -> Future[None]:
        """`clear` by the root key of a namespace."""
        with self._store.changed:
            # A record being written right now is dropped from the queue, so the writer does not publish it.
            self._writer.drop(each for each in self._writer.queue.values() if root in (None, each.root))
            return self._watcher.clear(root)

    # Shutdown and self-check.

    def flush(self, timeout_s: float) -> bool:
        """Wait until the queue is written or dropped; returns whether it was, in time."""
        with self._store.changed:
            return self._store.changed.wait_for(self._writer.is_done, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Write the queue as far as time allows, then release the folder. Idempotent."""
        self.flush(timeout_s)
        with self._store.changed:
            self._store.is_closing = True
            self._writer.drop(self._writer.queue.values())
        until_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        if self._writes is not None:
            self._writes.save()
        if any(thread.is_alive() for thread in self._threads):
            # The thread may still write: keep the lease until the process ends.
            log.warning("The disk cache did not close in time; exiting without it.")
            return
        self._reader.close()
        if not self._store.is_unavailable:
            self.directory.release()

    def check(self) -> None:
        """AssertionError if index and folder differ. Call after `flush`, with no fetch running. Reads all headers."""
        with self._store.changed:
            assert not self._store.held, "records stay held though nothing fetches them"
            assert sum(record.nbytes for record in self._writer.queue.values()) == self._writer.queued_nbytes
        self._store.check()


def _both(first: Future[None], second: Future[None]) -> Future[None]:
    """Done when both are, with the first of their errors."""
    done: Future[None] = Future()
    done.set_running_or_notify_cancel()

    def end(_: Future[None]) -> None:
        error = first.exception() or second.exception()
        done.set_result(None) if error is None else done.set_exception(error)

    first.add_done_callback(lambda _: second.add_done_callback(end))
    return done


def _folder(directory: Path | ObjectBucket, fingerprint: str, elsewhere: PartsElsewhere | None) -> ModelFolder:
    if not isinstance(directory, Path):
        assert elsewhere is None, "parts of records are kept in directories"
        return ModelBucket(directory, fingerprint=fingerprint)
    if elsewhere is None:
        return ModelDirectory(directory, fingerprint=fingerprint)
    return elsewhere.folder(directory, fingerprint=fingerprint)
