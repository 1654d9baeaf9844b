"""A model's records: keeps its files and their index consistent."""

import errno
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Condition

from reprise.core.errors import DiskUnusable
from reprise.disk.folders.bucket import BucketUnavailable
from reprise.disk.folders.model_folder import FileInfo, ModelFolder
from reprise.disk.records.format import OtherVersion, Unverified, encode
from reprise.disk.records.record import DiskRecord, IndexEntry, entry_of
from reprise.disk.store.index import DiskIndex, UnusableFile
from reprise.disk.store.link import LinkSpeed

log = logging.getLogger(__name__)

GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ESTALE})
"""Errors of opening or reading a file that was removed, including over a network."""

_RECENT_S = 60.0
"""A use is shown in a remote store if it is not older."""

_LAST_NS = 1 << 62
"""A time of last use after all others."""


@dataclass(slots=True)
class DiskCounters:
    """Counters since the cache was opened."""

    written_nbytes: int = 0
    read_nbytes: int = 0
    num_evicted: int = 0
    num_quarantined: int = 0
    num_errors: int = 0


class RecordStore:
    """The records of one model, with all files below the directory within `max_bytes`. Thread-safe.

    `changed` guards `index`, `counters` and `held`, and is never held during I/O. `directory.names` is held while files
    are renamed or removed, and is acquired before `changed`.
    """

    def __init__(
        self,
        directory: ModelFolder,
        *,
        max_bytes: int,
        block: int,
        resumes_anywhere: bool,
        clock: Callable[[], float],
    ) -> None:
        """Raises DiskUnusable."""
        self.directory = directory
        self.max_bytes = max_bytes
        self.changed = Condition()
        self.index = DiskIndex(block=block, resumes_anywhere=resumes_anywhere)
        self.counters = DiskCounters()
        self.held: Counter[bytes] = Counter()
        """Records being fetched, by number of fetches: they are not evicted."""
        self.is_closing = False
        self.clock = clock
        self.is_shared = False
        """Whether another server used the folder at the last scan."""
        self.has_unread = False
        """Whether the last scan left unknown files for the next one: true until those are in the index."""
        self.link = LinkSpeed()
        self.trouble: str | None = None
        """Why nothing is read for now, in a sentence; None: it is."""
        self.spared: str | None = None
        """Why nothing is written for now though it could be, to spare the disk; None: it is."""
        self.write_trouble: str | None = None
        """Why nothing is written for now; None: it is."""
        self._unread: bytes | None = None
        """The record that could not be read, with which that is tried again."""
        self._hidden: set[bytes | None] = set()
        """Roots that are being cleared (None: all): their records are not to be found any more, and are still there."""
        self._unfinished_nbytes = 0
        if directory.is_remote:
            return  # The watcher scans first, and no request waits for it.
        try:
            self.scan(is_first=True)
            with directory.locked() as now_ns:
                self._make_room(0, beside=b"", now_ns=now_ns)
        except OSError as error:
            directory.release()
            raise DiskUnusable(
                f"Cannot use the cache directory {directory.place} ({error.strerror}). Choose one that belongs to you."
            ) from error

    # These need `changed` held.

    @property
    def others_nbytes(self) -> int:
        return self.directory.around_nbytes + self._unfinished_nbytes

    def moment(self) -> int:
        """The time for a use, later than all before, in ns."""
        return self.index.moment(self.clock())

    def hold(self, keys: Iterable[bytes]) -> None:
        """Protect these records from eviction until an equal number of `unhold` calls."""
        self.held.update(keys)

    def unhold(self, keys: Iterable[bytes]) -> None:
        self.held -= Counter(keys)

    @property
    def is_unavailable(self) -> bool:
        """Whether a remote store fails: until it is back, only `reconnect` sends it requests."""
        return self.trouble is not None

    def note_unavailable(self, error: OSError) -> None:
        if self.trouble is None:
            self.trouble = (
                f"The object store {self.directory.place} cannot be read ({error.strerror}): "
                "prefixes are computed until it can."
            )
            log.warning("%s", self.trouble)
        self.counters.num_errors += 1

    # Files in the folder.

    def reconnect(self) -> None:
        """Try a remote store again, and update the index with what is there. Raises OSError."""
        self.renew_lease()
        self.scan(is_first=True)
        with self.changed:
            left = sorted(self._hidden, key=lambda root: root is not None)
            unread = self._unread if self._unread in self.index.entries else None
        for root in left:
            self.clear(root)
        if unread is not None:
            try:
                self.directory.read(unread)
            except (Unverified, OtherVersion, FileNotFoundError) as error:
                log.debug("a record is not what it was: %s", error)
        with self.changed:
            if self.trouble is not None:
                log.info("The object store %s can be read again.", self.directory.place)
            self.trouble = self._unread = None

    def scan(self, *, is_first: bool = False) -> None:
        """Update the index with what other servers wrote and removed; reads headers only. Raises OSError.

        `is_first`: read the folder even if no other server has used it.
        """
        with self.directory.names, self.directory.locked() as now_ns:
            is_used = self._note_servers(now_ns)
        # Outside the lock: listing and reading headers may take long.
        if is_first or is_used:
            self._rescan(now_ns)
        if self.directory.is_remote:
            # What others wrote since the last time was not counted.
            with self.directory.names:
                self._make_room(0, beside=b"", now_ns=now_ns)
            with self.changed:
                # What went has changed times of use, which the writer writes.
                self.changed.notify_all()

    def renew_lease(self) -> None:
        """Say that this server lives. Raises OSError."""
        with self.directory.names:
            if self.directory.has_vanished:
                self._recreate()
            self.directory.renew_lease()

    def _note_servers(self, now_ns: int) -> bool:
        is_used = self.directory.note_servers(now_ns)
        with self.changed:
            self.is_shared = bool(self.directory.servers)
        return is_used

    def _rescan(self, now_ns: int) -> None:
        """Bring the index up to date with the folders that changed. Raises OSError.

        Removes temporary files of dead servers, and quarantines files whose headers do not verify.
        """
        self.directory.prepare(self._is_known_file, lambda: self.is_closing)
        with self.directory.names:
            listed = self.directory.listed(now_ns)
            try:
                for path in self._gone(listed):
                    self._forget(path)
                for info in (info for inner in listed.values() for info in inner if not info.is_unfinished):
                    self._enter(info)
            except BaseException:
                self.directory.forget_listed()
                raise
            unfinished_nbytes = self.directory.sweep()
        with self.changed:
            self._unfinished_nbytes = unfinished_nbytes
            self.has_unread = self.directory.has_unread
            # What has gone has changed times of use, which the writer writes.
            self.changed.notify_all()

    def _gone(self, listed: Mapping[Path, Collection[FileInfo]]) -> list[Path]:
        """The known files that these folders no longer have. O(records), without I/O for most of them."""
        names = {folder.name for folder in listed}
        with self.changed:
            keys, unusable = list(self.index.entries), list(self.index.unusable)
        known = [*unusable, *(self.directory.path_of(key) for key in keys if key[:1].hex() in names)]
        there = {info.path for files in listed.values() for info in files}
        gone = [path for path in known if path.parent in listed and path not in there]
        return [path for path in gone if self.directory.used_ns(path) is None]

    def _forget(self, path: Path) -> None:
        """Remove the file at `path` from the index."""
        key = self.directory.key_of(path)
        with self.changed:
            if key in self.index.entries:
                self.index.remove(key)
            if path in self.index.unusable:
                self.index.remove_unusable(path)

    def _enter(self, info: FileInfo) -> None:
        """Add a complete file to the index, unless it is known. Raises OSError."""
        if self._is_known_file(info.path, info.nbytes):
            return
        # It may have been rewritten, by a server that found it damaged or has a newer note.
        self._forget(info.path)
        if (root := self.directory.root_of_note(info.path)) is not None:
            self._add_note(info, root)
            return
        if not self.directory.is_place_of_record(info.path):
            # In a foreign folder: it counts towards the limit and is not opened.
            self._add_unusable(info, root=None)
            return
        try:
            entry = self.directory.entry(info)
        except OtherVersion:
            self._add_unusable(info, root=None)
        except Unverified as error:
            self._quarantine(info, str(error))
        except OSError as error:
            if error.errno not in GONE:
                raise
        else:
            if not self._fits(entry):
                self._add_unusable(info, root=entry.root)
                return
            with self.changed:
                self.index.add(entry, info.mtime_ns)

    def _is_known_file(self, path: Path, nbytes: int) -> bool:
        key = self.directory.key_of(path)
        with self.changed:
            if (unusable := self.index.unusable.get(path)) is not None:
                return unusable.info.nbytes == nbytes
            return key in self.index.entries and self.index.entries[key].file_nbytes == nbytes

    def _add_unusable(self, info: FileInfo, *, root: bytes | None) -> None:
        with self.changed:
            self.index.add_unusable(UnusableFile(info=info, root=root))

    def _fits(self, entry: IndexEntry) -> bool:
        """Whether the record was written with our block size."""
        length, block = entry.stop - entry.start, self.index.block
        return entry.start % block == 0 and (length < block if entry.is_tail else length == block)

    # Reading.

    def read(self, key: bytes) -> DiskRecord | None:
        """The record, verified, or None if it is missing or damaged; a damaged file is quarantined."""
        with self.changed:
            entry = self.index.entries.get(key)
            if entry is None or self.is_hidden(entry.root):
                return None
            started = self.link.begin(time.monotonic())
        record: DiskRecord | None = None
        try:
            record = self._read_verified(key)
        finally:
            with self.changed:
                self.link.end(started, time.monotonic(), nbytes=record.nbytes if record is not None else None)
        if record is not None:
            with self.changed:
                self.counters.read_nbytes += record.nbytes
                # Unless it was evicted meanwhile.
                self.index.verified.update({key} & self.index.entries.keys())
        return record

    def _read_verified(self, key: bytes) -> DiskRecord | None:
        try:
            return self.directory.read(key)
        except BucketUnavailable as error:
            with self.changed:
                self._unread = key
                self.note_unavailable(error)
            return None
        except OSError as error:
            if error.errno in GONE:
                self.forget_missing(key)
                return None
            if error.errno == errno.EIO:
                self._drop_damaged(key, "it cannot be read")
                return None
            log.warning("Cannot read a file of the disk cache (%s); its content will be computed.", error.strerror)
            with self.changed:
                self.counters.num_errors += 1
            return None
        except (Unverified, OtherVersion) as error:
            self._drop_damaged(key, str(error))
            return None
        except Exception as error:
            log.exception("cannot decode a file of the disk cache")
            self._drop_damaged(key, f"it cannot be decoded ({error})")
            return None

    def forget_missing(self, key: bytes) -> None:
        """Forget a record whose file was removed, or all records if the folder was."""
        with self.directory.names:
            has_folder = self.directory.has_folder()
            # Unless it was evicted and rewritten since.
            is_there = has_folder and self.directory.used_ns(self.directory.path_of(key)) is not None
            with self.changed:
                if not has_folder:
                    self.index.remove_all()
                elif key in self.index.entries and not is_there:
                    self.index.remove(key)
                    # Its parent has another time of use, which the writer writes.
                    self.changed.notify_all()

    def _drop_damaged(self, key: bytes, reason: str) -> None:
        """Remove the record from the index and quarantine its file."""
        with self.directory.names:
            with self.changed:
                if key not in self.index.entries:
                    return
                entry = self.index.remove(key)
            path = self.directory.path_of(key)
            self._quarantine(FileInfo(path=path, nbytes=entry.file_nbytes, mtime_ns=0), reason)

    def _quarantine(self, info: FileInfo, reason: str) -> None:
        """Move a file that is not in the index into quarantine."""
        log.warning("A file of the disk cache is damaged (%s) and was quarantined: %s", reason, info.path.name)
        try:
            self.directory.quarantine(info.path)
        except OSError as error:
            log.warning("It cannot be moved (%s) and stays in place, unused.", error.strerror)
            with self.changed:
                self.counters.num_errors += 1
                self.index.add_unusable(UnusableFile(info=info, root=None))
        with self.changed:
            self.counters.num_quarantined += 1
            self.index.has_met_damage = True

    # Notes: one small file per namespace, counted and cleared with its records.

    def read_note(self, root: bytes) -> str | None:
        try:
            return self.directory.read_note(root)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("Cannot read a note of the disk cache; it is skipped: %s", error)
            return None

    def write_note(self, root: bytes, content: bytes) -> None:
        """Replace the note, if there is room for the old and the new one together. Raises OSError."""
        path = self.directory.note_path(root)
        with self.directory.names:
            with self.changed:
                if self.is_closing:
                    return
            with self.directory.locked() as now_ns:
                has_room = self._make_room(len(content), beside=b"", now_ns=now_ns)
                with self.changed:
                    # Evictions changed times of last use, which the writer thread writes.
                    self.changed.notify_all()
                if not has_room:
                    return
                self.directory.write_note(path, content)
            with self.changed:
                if path in self.index.unusable:
                    self.index.remove_unusable(path)
                self._add_note(FileInfo(path=path, nbytes=len(content), mtime_ns=0), root)

    def _add_note(self, info: FileInfo, root: bytes) -> None:
        # Not a record: counted as unusable, and evicted last.
        self._add_unusable(replace(info, mtime_ns=_LAST_NS), root=root)

    # Writing.

    def write(self, record: DiskRecord, *, is_wanted: Callable[[], bool]) -> bool:
        """Write a record, evicting for it; returns whether it was written. Raises OSError.

        `is_wanted` is called with `changed` held, first and again before the file is published.
        """
        directory, path = self.directory, self.directory.path_of(record.key)
        if not self._is_due(record, is_wanted) or self._is_there(record.key):
            return False
        if directory.is_obstructed(record.key):
            log.warning("A folder is in the place of a record, which is skipped: %s", path.name)
            return False
        encoded = encode(record)
        with directory.names:
            if directory.has_vanished:
                self._recreate()
                if not self._is_due(record, is_wanted):
                    return False
            with directory.locked() as now_ns:
                if not self._make_room(encoded.nbytes, beside=record.parent, now_ns=now_ns):
                    log.debug("no room on disk for a record of %d bytes", encoded.nbytes)
                    return False
                if self._is_known(record.key):
                    return False  # Another server has written it meanwhile.
                # Created at its full size, so that other servers count it.
                directory.begin(record.key, encoded.nbytes)
        try:
            with self.changed:
                at_ns = self.moment()
            directory.fill(record.key, encoded, at_ns)
            with directory.names:
                # Not if it was cleared meanwhile or its parent has gone.
                if not self._is_due(record, is_wanted) or self._is_known(record.key):
                    return False
                directory.publish(record.key)
                with self.changed:
                    # It replaced a damaged file that could not be quarantined.
                    if path in self.index.unusable:
                        self.index.remove_unusable(path)
                    self.index.add(entry_of(record, file_nbytes=encoded.nbytes), at_ns)
                    self.index.verified.add(record.key)
                    self.counters.written_nbytes += encoded.nbytes
            return True
        except FileNotFoundError as error:
            log.debug("another server considered this one dead and removed its temporary file: %s", error)
            return False
        finally:
            directory.abandon(record.key)

    def _is_due(self, record: DiskRecord, is_wanted: Callable[[], bool]) -> bool:
        """Whether the record is still wanted and its parent is present."""
        with self.changed:
            has_parent = record.parent == record.root or record.parent in self.index.entries
            return has_parent and not self.is_closing and is_wanted()

    def _is_there(self, key: bytes) -> bool:
        """Whether the record is on disk. A suspect one is verified first."""
        with self.changed:
            is_suspect = self.index.is_suspect(key)
        if is_suspect:
            self.read(key)
        return self._is_known(key)

    def _is_known(self, key: bytes) -> bool:
        with self.changed:
            return key in self.index.entries

    def _recreate(self) -> None:
        """Recreate the folder and the lease after either was removed. Raises OSError."""
        log.warning("The disk cache's folder was removed; creating it again: %s", self.directory.place)
        with self.changed:
            self.index.remove_all()
        self.directory.forget_listed()
        self.directory.begin_lease()
        self.scan(is_first=True)

    def show_uses(self, uses: Mapping[bytes, int]) -> None:
        """Write times of last use (ns) to the files, where a restart and other servers find them."""
        if self.directory.is_remote:
            uses = self._uses_to_show(uses)
        for key, at_ns in uses.items():
            try:
                self.directory.set_time(self.directory.path_of(key), at_ns)
            except OSError as error:
                # The file has gone, or will seem a little older after a restart.
                log.debug("cannot set the time of a cache file: %s", error)

    def _uses_to_show(self, uses: Mapping[bytes, int]) -> dict[bytes, int]:
        """Those for which a remote store is asked: each takes a request, and it puts its own time of now on it."""
        recent_ns = round((self.clock() - _RECENT_S) * 1e9)
        with self.changed:
            if self.is_unavailable:
                return {}
            # What hangs on a record keeps it: the ends of paths are enough. Older times are those of evicted children.
            parents = {self.index.entries[key].parent for key in uses if key in self.index.entries}
            return {key: at_ns for key, at_ns in uses.items() if key not in parents and at_ns >= recent_ns}

    # Eviction.

    def _make_room(self, nbytes: int, *, beside: bytes, now_ns: int) -> bool:
        """Evict until `nbytes` fit; returns whether they do. Raises OSError.

        Least recently used first: our own children before parents, other models' files by age alone, since their
        headers are not read. Evicts nothing if that would not suffice. Spares the record `beside` and its ancestors.
        The caller holds `directory.names` and the directory's lock.
        """
        self.directory.look_around(now_ns)
        if not self.directory.is_remote and self._note_servers(now_ns):
            self._rescan(now_ns)
        with self.changed:
            over = self.index.nbytes + self.others_nbytes + nbytes - self.max_bytes
            staying = self.index.path_nbytes(self.held.keys() | {beside})
            own_spare = self.index.nbytes - staying
        if over <= 0:
            return True
        others = deque(self.directory.evictable_around())
        if own_spare + sum(info.nbytes for info in others) < over:
            return False
        num_others = len(others)
        removed = self._remove(over, others, beside)
        if len(others) < num_others:
            self.directory.look_around(now_ns)
        return removed >= over

    def _remove(self, nbytes: int, others: deque[FileInfo], beside: bytes) -> int:
        """Evict until at least this many bytes are free, as far as possible; returns how many are."""
        total = 0
        while total < nbytes and (removed := self._remove_oldest(others, beside)) is not None:
            total += removed
        return total

    def _remove_oldest(self, others: deque[FileInfo], beside: bytes) -> int | None:
        """Evict one file; returns its bytes, or None if nothing can be evicted."""
        while True:
            with self.changed:
                own = self.index.oldest(self.held.keys() | {beside})
            if own is None or not self.is_shared or not self._was_used_since(*own):
                break
        with self.changed:
            unusable = self.index.oldest_unusable()
        candidates: list[tuple[int, Callable[[], int]]] = []
        if own is not None:
            candidates.append((own[0], partial(self._remove_own, own[1])))
        if unusable is not None:
            candidates.append((unusable.info.mtime_ns, partial(self._remove_unusable, unusable)))
        if others:
            candidates.append((others[0].mtime_ns, partial(self._remove_other, others)))
        if not candidates:
            return None
        _, remove = min(candidates, key=lambda candidate: candidate[0])
        nbytes = remove()
        with self.changed:
            self.counters.num_evicted += 1
        return nbytes

    def _was_used_since(self, at_ns: int, key: bytes) -> bool:
        """Whether another server has used the record since; if so, the index is updated."""
        used_ns = self.directory.used_ns(self.directory.path_of(key))
        if used_ns is None or used_ns <= at_ns:
            return False
        with self.changed:
            self.index.note_use(key, used_ns)
        return True

    # The file is removed first: if that fails, it stays in the index.

    def _remove_own(self, key: bytes) -> int:
        self.directory.remove(self.directory.path_of(key))
        with self.changed:
            return self.index.remove(key).file_nbytes

    def _remove_unusable(self, unusable: UnusableFile) -> int:
        self.directory.remove(unusable.info.path)
        with self.changed:
            self.index.remove_unusable(unusable.info.path)
        return unusable.info.nbytes

    def _remove_other(self, others: deque[FileInfo]) -> int:
        info = others.popleft()
        self.directory.remove(info.path)
        return info.nbytes

    def remove(self, keys: Collection[bytes]) -> None:
        """Remove these records, as far as they are known. The caller holds `directory.names`. Raises OSError."""
        for key in keys:
            if self._is_known(key):
                self._remove_own(key)

    # Clearing.

    def clear(self, root: bytes | None) -> None:
        """Remove all records of `root` (None: of this model), from the index first and then from disk, and end `hide`.

        Also removes this model's quarantined files and those of other versions, whose root is unknown. The caller has
        made sure that a record being written is no longer wanted. Raises OSError if something is still there: it is not
        found any more, and in a remote store it stays hidden and is removed when the store answers again.
        """
        with self.directory.names:
            self._clear(root)

    def _clear(self, root: bytes | None) -> None:
        try:
            self.scan(is_first=self.directory.is_remote)
        except OSError as error:
            self._note_left(error)
            if self.directory.is_remote:
                raise
        left: OSError | None = None
        with self.changed:
            # Parents first: after a crash halfway their descendants are unreachable.
            entries = [self.index.remove(key) for key in self.index.keys_of(root)]
            gone = [file for file in self.index.unusable.values() if root is None or file.root in (None, root)]
            for file in gone:
                self.index.remove_unusable(file.info.path)
        gone += [self._unfindable(entry) for entry in entries]
        for at in range(0, len(gone), self.directory.removed_at_once):
            some = gone[at : at + self.directory.removed_at_once]
            try:
                self.directory.remove_all([file.info.path for file in some])
            except OSError as error:
                left = error
                self._note_left(error)
                with self.changed:
                    for file in some:
                        self.index.add_unusable(file)
                if self.directory.is_remote:
                    raise
        try:
            self.directory.clear_quarantine()
        except OSError as error:
            left = error
            self._note_left(error)
        with self.changed:
            self._hidden.discard(root)
        if left is not None:
            raise left

    # These need `changed` held.

    def hide(self, root: bytes | None) -> None:
        """Find nothing more that hangs on `root` (None: on any), until it is cleared. O(1)."""
        self._hidden.add(root)

    def is_hidden(self, root: bytes) -> bool:
        return root in self._hidden or None in self._hidden

    @property
    def is_clearing(self) -> bool:
        """Whether any root is hidden."""
        return len(self._hidden) > 0

    def _unfindable(self, entry: IndexEntry) -> UnusableFile:
        info = FileInfo(path=self.directory.path_of(entry.key), nbytes=entry.file_nbytes, mtime_ns=0)
        return UnusableFile(info=info, root=entry.root)

    def _note_left(self, error: OSError) -> None:
        log.warning("A file that was to be cleared is still there: %s", error)
        with self.changed:
            self.counters.num_errors += 1

    # Self-check.

    def check(self) -> None:
        """AssertionError if the index differs from the folder while no I/O is running. Reads all headers."""
        with self.directory.names, self.changed:
            self.index.check()
            files = {info.path: info for info in self.directory.all_files()}
            entries: dict[bytes, IndexEntry] = {}
            for path, info in files.items():
                if path in self.index.unusable:
                    assert info.nbytes == self.index.unusable[path].info.nbytes, path
                    continue
                entry = self.directory.entry(info)
                assert self._fits(entry), path
                entries[entry.key] = entry
            assert entries == self.index.entries, "the index has exactly the records in the folder"
            assert self.index.unusable.keys() <= files.keys(), "indexed unusable files exist"
            nbytes = sum(info.nbytes for info in files.values())
            assert nbytes == self.index.nbytes, (nbytes, self.index.nbytes)
            assert all(num > 0 for num in self.held.values())
