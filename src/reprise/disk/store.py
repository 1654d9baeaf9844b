"""A model's records: its files and the index of them, kept in step."""

import errno
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from threading import Condition

from reprise.core.errors import DiskUnusable
from reprise.disk.directory import FileInfo, ModelDirectory, OtherFiles
from reprise.disk.format import OtherVersion, RecordHeader, Unverified, encode
from reprise.disk.index import DiskIndex, IndexEntry, UnusableFile, entry_of
from reprise.disk.record import DiskRecord

log = logging.getLogger(__name__)

_NEVER_NS = 1 << 62
"""A time of use behind all others."""


@dataclass(slots=True)
class DiskCounters:
    """What was done since the cache was opened."""

    written_nbytes: int = 0
    read_nbytes: int = 0
    num_evicted: int = 0
    num_quarantined: int = 0
    num_errors: int = 0


class RecordStore:
    """The records of one model, within `max_bytes` for all files below the directory. For any thread.

    Whoever looks at `index`, `counters` or `held` holds `changed`, and does no I/O meanwhile. A file gets or loses its
    name under `directory.names`, which is taken first.
    """

    def __init__(
        self,
        directory: ModelDirectory,
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
        """Records that are being fetched, which stay."""
        self.is_closing = False
        self.clock = clock
        self._others = OtherFiles(directory.directory, directory.folder)
        try:
            self._take_stock()
            with directory.locked() as now_ns:
                self._make_room(0, beside=b"", now_ns=now_ns)
        except OSError as error:
            directory.release()
            raise DiskUnusable(
                f"The cache directory {directory.directory} cannot be used ({error.strerror}): "
                "choose one that is yours alone."
            ) from error

    # For those who hold `changed`.

    @property
    def others_nbytes(self) -> int:
        return self._others.nbytes

    def moment(self) -> int:
        """The time of a use: larger than all before."""
        return self.index.moment(self.clock())

    def hold(self, keys: Iterable[bytes]) -> None:
        """These records are not to be evicted, until they are let go as often."""
        self.held.update(keys)

    def let_go(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.held[key] -= 1
            if self.held[key] == 0:
                del self.held[key]

    # Opening.

    def _take_stock(self) -> None:
        """Enter what lies in the folder. Bodies are not read. Raises OSError.

        What a process that died had not finished is removed, and what does not verify goes into quarantine.
        """
        for info in list(self.directory.files()):
            if info.is_unfinished:
                self.directory.remove(info.path)
                continue
            if (root := self.directory.root_of_note(info.path)) is not None:
                self._add_note(info, root)
                continue
            if not self.directory.is_place_of_record(info.path):
                # Below a folder that somebody has made here: it counts, and nobody looks into it.
                self.index.add_unusable(UnusableFile(info=info, root=None))
                continue
            try:
                header = self.directory.header(info)
            except OtherVersion:
                self.index.add_unusable(UnusableFile(info=info, root=None))
            except Unverified as error:
                self._quarantine(info, str(error))
            else:
                if self._fits(header):
                    self.index.add(entry_of(header, file_nbytes=header.file_nbytes), info.mtime_ns)
                else:
                    self.index.add_unusable(UnusableFile(info=info, root=header.root))

    def _fits(self, header: RecordHeader) -> bool:
        """Whether the record was cut for blocks of our size."""
        length, block = len(header.tokens), self.index.block
        return header.start % block == 0 and (length < block if header.is_tail else length == block)

    # Reading.

    def read(self, key: bytes) -> DiskRecord | None:
        """The record, verified; None if it cannot be had. What is damaged goes into quarantine."""
        with self.changed:
            if key not in self.index.entries:
                return None
        try:
            record = self.directory.read(key)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            self.forget_missing(key)
            return None
        except OSError as error:
            if error.errno == errno.EIO:
                self._put_away(key, "it cannot be read")
                return None
            log.warning("A file of the disk cache cannot be read (%s); what it holds is computed.", error.strerror)
            with self.changed:
                self.counters.num_errors += 1
            return None
        except (Unverified, OtherVersion) as error:
            self._put_away(key, str(error))
            return None
        except Exception as error:
            log.exception("a file of the disk cache cannot be understood")
            self._put_away(key, f"it cannot be understood ({error})")
            return None
        with self.changed:
            self.counters.read_nbytes += record.nbytes
            # Not if it was evicted meanwhile.
            self.index.verified.update({key} & self.index.entries.keys())
        return record

    def forget_missing(self, key: bytes) -> None:
        """Forget a record whose file somebody has removed, and all of them if the whole folder has gone."""
        with self.directory.names, self.changed:
            if self.directory.has_vanished():
                self.index.remove_all()
            # Not if it was evicted and written again since.
            elif key in self.index.entries and not self.directory.path_of(key).is_file():
                self.index.remove(key)

    def _put_away(self, key: bytes, reason: str) -> None:
        """Forget the record and move its file into quarantine."""
        with self.directory.names:
            with self.changed:
                if key not in self.index.entries:
                    return
                entry = self.index.remove(key)
            path = self.directory.path_of(key)
            self._quarantine(FileInfo(path=path, nbytes=entry.file_nbytes, mtime_ns=0), reason)

    def _quarantine(self, info: FileInfo, reason: str) -> None:
        """Move a file of which nothing is known into quarantine."""
        log.warning("A file of the disk cache is damaged, since %s; it is put aside: %s", reason, info.path.name)
        try:
            self.directory.quarantine(info.path)
        except OSError as error:
            log.warning("It cannot be moved (%s), and stays where it is, unused.", error.strerror)
            with self.changed:
                self.counters.num_errors += 1
                self.index.add_unusable(UnusableFile(info=info, root=None))
        with self.changed:
            self.counters.num_quarantined += 1
            self.index.has_met_damage = True

    # Notes: a small file for each namespace, which counts and goes with its records.

    def read_note(self, root: bytes) -> str | None:
        try:
            return self.directory.note_path(root).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("A note of the disk cache cannot be read, and is left out: %s", error)
            return None

    def write_note(self, root: bytes, content: bytes) -> None:
        """Keep it, if there is room for it and the old one together. Raises OSError."""
        path = self.directory.note_path(root)
        with self.directory.names:
            with self.changed:
                if self.is_closing:
                    return
            with self.directory.locked() as now_ns:
                has_room = self._make_room(len(content), beside=b"", now_ns=now_ns)
                with self.changed:
                    # What went for it has changed times of use, which the writer writes.
                    self.changed.notify_all()
                if not has_room:
                    return
                self.directory.write_note(path, content)
            with self.changed:
                if path in self.index.unusable:
                    self.index.remove_unusable(path)
                self._add_note(FileInfo(path=path, nbytes=len(content), mtime_ns=0), root)

    def _add_note(self, info: FileInfo, root: bytes) -> None:
        # It is no record. Whatever the bound takes, it takes last.
        self.index.add_unusable(UnusableFile(info=replace(info, mtime_ns=_NEVER_NS), root=root))

    # Writing.

    def write(self, record: DiskRecord, *, is_wanted: Callable[[], bool]) -> bool:
        """Write the record, with room made for it. Whether it was: nothing happens where there is none. Raises OSError.

        `is_wanted` is asked with `changed` held, before anything is done and again before the file gets its name.
        """
        directory, path = self.directory, self.directory.path_of(record.key)
        if not self._is_due(record, is_wanted) or self._is_there(record.key):
            return False
        if path.is_dir():
            log.warning("A folder lies in the place of a record, which is left out: %s", path.name)
            return False
        encoded = encode(record)
        with directory.names:
            if directory.has_vanished():
                self._start_anew()
                if not self._is_due(record, is_wanted):
                    return False
            with directory.locked() as now_ns:
                if not self._make_room(encoded.nbytes, beside=record.parent, now_ns=now_ns):
                    log.debug("no room on disk for a record of %d bytes", encoded.nbytes)
                    return False
                # It has its size from the start, so that other servers count it.
                descriptor = directory.begin(record.key, encoded.nbytes)
        temporary = directory.temporary_of(record.key)
        try:
            directory.fill(descriptor, encoded)
            with self.changed:
                at_ns = self.moment()
            directory.set_time(temporary, at_ns)
            with directory.names:
                # Cleared meanwhile, or what it stands on has gone: it must not appear.
                if not self._is_due(record, is_wanted):
                    return False
                directory.publish(record.key)
                with self.changed:
                    # A damaged file of that name that could not be moved has gone with it.
                    if path in self.index.unusable:
                        self.index.remove_unusable(path)
                    self.index.add(entry_of(record, file_nbytes=encoded.nbytes), at_ns)
                    self.index.verified.add(record.key)
                    self.counters.written_nbytes += encoded.nbytes
            return True
        finally:
            directory.remove(temporary)

    def _is_due(self, record: DiskRecord, is_wanted: Callable[[], bool]) -> bool:
        """Whether it is still to be written, and would be found."""
        with self.changed:
            has_parent = record.parent == record.root or record.parent in self.index.entries
            return has_parent and not self.is_closing and is_wanted()

    def _is_there(self, key: bytes) -> bool:
        """Whether the record needs no writing. One that is suspect is read now, and put away if it is damaged."""
        with self.changed:
            is_suspect = self.index.is_suspect(key)
        if is_suspect:
            self.read(key)
        with self.changed:
            return key in self.index.entries

    def _start_anew(self) -> None:
        """The folder has vanished with all that was in it: make it again. Raises OSError."""
        log.warning("The disk cache's folder has vanished, and is made again: %s", self.directory.folder)
        with self.changed:
            self.index.remove_all()
        self.directory.make_again()
        self._take_stock()

    def show_uses(self, uses: Mapping[bytes, int]) -> None:
        """Let the files' times tell when they were used: what is known after a restart."""
        for key, at_ns in uses.items():
            try:
                self.directory.set_time(self.directory.path_of(key), at_ns)
            except OSError as error:
                # It went meanwhile, or is a little older after a restart.
                log.debug("the time of a cache file cannot be set: %s", error)

    # Eviction.

    def _make_room(self, nbytes: int, *, beside: bytes, now_ns: int) -> bool:
        """Whether so many bytes may be written now; what had to go for it has gone. Raises OSError.

        The least recently used goes first: ours leaf first, other models' by age alone, since their headers are not
        read. Nothing goes if that would not be enough. `beside`, and all that it stands on, stays. The caller holds the
        names and the directory's lock.
        """
        self._others.look(now_ns)
        with self.changed:
            over = self.index.nbytes + self._others.nbytes + nbytes - self.max_bytes
            staying = self.index.path_nbytes(self.held.keys() | {beside})
            own_spare = self.index.nbytes - staying
        if over <= 0:
            return True
        others = deque(self._others.evictable())
        if own_spare + sum(info.nbytes for info in others) < over:
            return False
        num_others = len(others)
        while over > 0:
            removed = self._remove_oldest(others, beside)
            if removed is None:
                break
            over -= removed
        if len(others) < num_others:
            self._others.look(now_ns)
        return over <= 0

    def _remove_oldest(self, others: deque[FileInfo], beside: bytes) -> int | None:
        """Remove one file; gives its bytes, or None if nothing may go."""
        with self.changed:
            own = self.index.oldest(self.held.keys() | {beside})
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

    # The file goes first: if it cannot, it stays known.

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

    # Clearing.

    def clear(self, root: bytes | None) -> None:
        """Remove all that hangs on `root` (None: all of this model), in memory first and then on disk.

        Quarantined files of this model go too, and files of other versions: nobody can tell what they hang on. The
        caller holds the names, and has seen to it that what is being written right now is not wanted any more.
        """
        with self.changed:
            # What others stand on first: after a crash halfway nothing above it can be found.
            entries = [self.index.remove(key) for key in self.index.keys_of(root)]
            gone = [file for file in self.index.unusable.values() if root is None or file.root in (None, root)]
            for file in gone:
                self.index.remove_unusable(file.info.path)
        for entry in entries:
            info = FileInfo(path=self.directory.path_of(entry.key), nbytes=entry.file_nbytes, mtime_ns=0)
            gone.append(UnusableFile(info=info, root=entry.root))
        for file in gone:
            try:
                self.directory.remove(file.info.path)
            except OSError as error:
                self._note_left(error)
                with self.changed:
                    self.index.add_unusable(file)
        try:
            self.directory.clear_quarantine()
        except OSError as error:
            self._note_left(error)

    def _note_left(self, error: OSError) -> None:
        log.warning("A file that was to be cleared is still there: %s", error)
        with self.changed:
            self.counters.num_errors += 1

    # The books.

    def check(self) -> None:
        """AssertionError where the index differs from the folder, with nothing under way. Reads all headers."""
        with self.directory.names, self.changed:
            self.index.check()
            files = {info.path: info for info in self.directory.files()}
            entries: dict[bytes, IndexEntry] = {}
            for path, info in files.items():
                if path in self.index.unusable:
                    assert info.nbytes == self.index.unusable[path].info.nbytes, path
                    continue
                header = self.directory.header(info)
                assert self._fits(header), path
                entries[header.key] = entry_of(header, file_nbytes=header.file_nbytes)
            assert entries == self.index.entries, "the index knows what is there"
            assert self.index.unusable.keys() <= files.keys(), "files that cannot be used are there"
            nbytes = sum(info.nbytes for info in files.values())
            assert nbytes == self.index.nbytes, (nbytes, self.index.nbytes)
            assert all(num > 0 for num in self.held.values())
