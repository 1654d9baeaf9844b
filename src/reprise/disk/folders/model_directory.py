"""The only access to the file system: a model's folder as a `ModelFolder`.

Several servers, on one machine or several, may use a folder at once. A file is renamed to its final name when it is
complete. Only the size limit needs a lock: space is reserved under it, and where locks do not work the limit can be
exceeded by what each server is writing. Files elsewhere below the directory (`OtherFiles`) are counted, and evicted if
no server uses their model.
"""

import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import Timeout

from reprise.core.errors import DiskUnusable
from reprise.core.failpoints import Failpoint, reach
from reprise.disk.folders.lease import (
    PRIVATE_FILE,
    PRIVATE_FOLDER,
    ServerLease,
    file_lock,
    living_servers,
    make_private,
)
from reprise.disk.folders.model_folder import TEMPORARY_ENDING, FileInfo
from reprise.disk.records.format import EncodedFile, RecordHeader, Unverified, read_header, read_record
from reprise.disk.records.record import DiskRecord, folder_name

log = logging.getLogger(__name__)

MAX_QUARANTINED = 4
"""Files kept in quarantine, over all models."""

_QUARANTINE = "quarantine"
_LOCK = "lock"
_RECORD_ENDING = ".kv"
NOTES = "notes"
_NOTE_ENDING = ".json"
SERVERS = "servers"
LOCKED_S = 10.0
"""Longer than any eviction takes: a lock held longer belongs to a dead host, or locking does not work."""

_UNLOCKED_S = 600.0
"""After a lock timeout, continue without the lock for this long."""

MODEL_NAME = re.compile(r"[0-9a-f]{16}")
RECORD_NAME = re.compile(r"[0-9a-f]{64}(\.kv|\.[0-9a-f-]+\.tmp|\.json)")

# A folder that changed this recently could change again without a new modification time.
_SETTLED_NS = 2_000_000_000


class NamedRecords:
    """The names of a model's files below its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path_of(self, key: bytes) -> Path:
        name = key.hex()
        return self.folder / name[:2] / (name + _RECORD_ENDING)

    def key_of(self, path: Path) -> bytes | None:
        """The key of the record at `path`, or None if no record belongs there."""
        is_record = RECORD_NAME.fullmatch(path.name) is not None and path.suffix == _RECORD_ENDING
        key = bytes.fromhex(path.stem) if is_record else None
        return key if key is not None and path == self.path_of(key) else None

    def note_path(self, root: bytes) -> Path:
        """The path of a namespace's note, by the namespace's root key."""
        return self.folder / NOTES / (root.hex() + _NOTE_ENDING)

    def root_of_note(self, path: Path) -> bytes | None:
        """The root key of the note at `path`, or None if it is not a note."""
        is_note = path.parent == self.folder / NOTES and RECORD_NAME.fullmatch(path.name) is not None
        return bytes.fromhex(path.stem) if is_note and path.suffix == _NOTE_ENDING else None

    def is_place_of_record(self, path: Path) -> bool:
        """Whether `path` is at a depth at which records are stored."""
        return self.folder in (path.parent, path.parent.parent)


class ModelDirectory(NamedRecords):
    """One model's folder, used by this server until `release`, and by others.

    directory/lock                      held while space is reserved, by all servers that share the directory
    directory/quarantine/               files that failed verification
    directory/<16 hex of the model>/servers/<server>    the lease of a server
    directory/<16 hex of the model>/<2 hex of the key>/<key>.kv, and <key>.<server>.tmp while it is written
    directory/<16 hex of the model>/notes/<key of a namespace's root>.json
    """

    is_remote = False
    removed_at_once = 1
    reads_at_once = min(4, os.cpu_count() or 1)
    """A file is hashed by one core, and a disk is faster than one."""
    has_unread = False

    def __init__(self, directory: Path, *, fingerprint: str) -> None:
        """Raises DiskUnusable."""
        super().__init__(directory / folder_name(fingerprint))
        self.directory = directory
        self.quarantine_folder = directory / _QUARANTINE
        self.names = threading.RLock()
        """Held while a file is renamed or removed."""
        self.leases = self.folder / SERVERS
        self._files = FolderListings(self.folder, but=self.leases)
        self.around = OtherFiles(directory, self.folder)
        self.servers: frozenset[str] = frozenset()
        """The other servers that used the folder at the last `note_servers`."""
        self._room_lock = file_lock(directory / _LOCK)
        self._unlocked_until_s = 0.0
        self._lease = ServerLease(self.leases)
        self._servers_changed_ns = 0
        try:
            self.begin_lease()
        except OSError as error:
            raise DiskUnusable(
                f"Cannot use the cache directory {directory} ({error.strerror}). Choose a writable one."
            ) from error

    @property
    def place(self) -> str:
        return str(self.directory)

    # Other servers.

    def begin_lease(self) -> None:
        """Create the folder if needed and take this server's lease in it. Raises OSError."""
        # Only what is created here is made private: the directory may serve other purposes too.
        self.directory.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        # Files of models without a lease are evicted under this lock, so ours cannot be.
        with self.locked():
            make_private(self.folder)
            self._lease.take()

    def release(self) -> None:
        """Give up the lease. Idempotent."""
        self._lease.release()

    def renew_lease(self) -> None:
        """Send a heartbeat, due every `BEAT_S` seconds. Raises OSError."""
        self._lease.renew()

    @property
    def has_vanished(self) -> bool:
        """Whether the folder was removed, with everything in it."""
        return self._lease.is_lost

    def note_servers(self, now_ns: int) -> bool:
        """Update `servers`; returns whether another one has used the folder since the last call. Raises OSError.

        The caller holds the directory's lock, which gave it `now_ns`.
        """
        before = self.servers
        self.servers = living_servers(self.leases, now_ns) - {self._lease.name}
        changed_before_ns, self._servers_changed_ns = self._servers_changed_ns, self.leases.stat().st_mtime_ns
        # Even if it has left again since.
        return bool(before or self.servers) or self._servers_changed_ns != changed_before_ns

    @property
    def has_new_servers(self) -> bool:
        """Whether servers have joined or left since `note_servers`. Raises OSError."""
        return self.leases.stat().st_mtime_ns != self._servers_changed_ns

    def _is_abandoned(self, info: FileInfo) -> bool:
        """Whether the server that was writing this temporary file no longer runs."""
        return info.path.name.split(".")[-2] not in self.servers | {self._lease.name}

    @contextmanager
    def locked(self) -> Generator[int]:
        """Hold the directory's lock, under which servers evict and create files; yields the file system's time in ns.

        Continues without the lock if locks do not work or it is held for more than `LOCKED_S`.
        """
        is_held = False
        if time.monotonic() >= self._unlocked_until_s:
            try:
                self._room_lock.acquire(timeout=LOCKED_S)
                is_held = True
            except (Timeout, OSError, NotImplementedError) as error:
                if not self.directory.is_dir():
                    raise
                log.warning(
                    "Cannot lock the disk cache's directory (%s): servers that share it may exceed its limit by "
                    "what they are writing.",
                    error,
                )
                self._unlocked_until_s = time.monotonic() + _UNLOCKED_S
        try:
            path = self.directory / _LOCK
            path.touch(mode=PRIVATE_FILE)
            yield path.stat().st_mtime_ns
        finally:
            if is_held:
                self._room_lock.release()

    # What lies there. All of it raises OSError.

    def prepare(self, is_known: Callable[[Path, int], bool], is_closing: Callable[[], bool]) -> None:
        """Nothing: listing is fast here."""

    def listed(self, now_ns: int) -> Mapping[Path, tuple[FileInfo, ...]]:
        return self._files.look(now_ns)

    def forget_listed(self) -> None:
        self._files.forget()

    def sweep(self) -> int:
        unfinished = [info for info in self._files if info.is_unfinished]
        abandoned = [info for info in unfinished if self._is_abandoned(info)]
        for info in abandoned:
            self.remove(info.path)
        return sum(info.nbytes for info in unfinished if info not in abandoned)

    def all_files(self) -> Iterable[FileInfo]:
        found = FolderListings(self.folder, but=self.leases)
        found.look(0)
        return [info for info in found if not info.is_unfinished]

    def is_there(self, path: Path) -> bool:
        return path.is_file()

    def has_folder(self) -> bool:
        return self.folder.is_dir()

    def used_ns(self, path: Path) -> int | None:
        try:
            return path.stat().st_mtime_ns
        except FileNotFoundError:
            return None

    # Names.

    def temporary_of(self, path: Path) -> Path:
        """The temporary path under which this server writes `path`."""
        return path.with_suffix(f".{self._lease.name}{TEMPORARY_ENDING}")

    def is_obstructed(self, key: bytes) -> bool:
        return self.path_of(key).is_dir()

    # Reading. These raise OSError.

    def header(self, info: FileInfo) -> RecordHeader:
        """The header of a file in our folder. Also raises Unverified and OtherVersion."""
        with info.path.open("rb") as file:
            header = read_header(file, os.fstat(file.fileno()).st_size)
        if info.path != self.path_of(header.key):
            raise Unverified("its name does not match its content")
        return header

    def read(self, key: bytes) -> DiskRecord:
        """The record of this key, verified. Also raises Unverified and OtherVersion."""
        reach(Failpoint.DISK_READ, self, key)
        with self.path_of(key).open("rb") as file:
            record = read_record(file, os.fstat(file.fileno()).st_size)
        if record.key != key:
            raise Unverified("its name does not match its content")
        return record

    def read_note(self, root: bytes) -> str:
        return self.note_path(root).read_text(encoding="utf-8")

    # Writing. These raise OSError.

    def begin(self, key: bytes, nbytes: int) -> int:
        """Create the record's temporary file at its final size, which reserves its space; returns the descriptor."""
        reach(Failpoint.DISK_BEGIN, self)
        path = self.temporary_of(self.path_of(key))
        make_private(path.parent)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, PRIVATE_FILE)
        try:
            os.ftruncate(descriptor, nbytes)
        except BaseException:
            os.close(descriptor)
            self.remove(path)
            raise
        return descriptor

    def fill(self, begun: int, encoded: EncodedFile) -> None:
        """Write the content, flush it to disk (fsync) and close the descriptor."""
        with os.fdopen(begun, "wb") as file:
            reach(Failpoint.DISK_FILL, self)
            for chunk in encoded.chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        reach(Failpoint.DISK_FILLED, self)

    def write_note(self, path: Path, content: bytes) -> None:
        """Replace the note atomically."""
        make_private(path.parent)
        temporary = self.temporary_of(path)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            with os.fdopen(os.open(temporary, flags, PRIVATE_FILE), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            self.remove(temporary)

    def set_time(self, path: Path, at_ns: int) -> None:
        """Set the file's time of last use."""
        os.utime(path, ns=(at_ns, at_ns))

    def publish(self, key: bytes) -> None:
        """Rename the temporary file to its final name."""
        path = self.path_of(key)
        self.temporary_of(path).replace(path)

    def abandon(self, key: bytes) -> None:
        self.remove(self.temporary_of(self.path_of(key)))

    def remove(self, path: Path) -> None:
        """Remove the file if it exists."""
        reach(Failpoint.DISK_REMOVE, self, path)
        path.unlink(missing_ok=True)

    def remove_all(self, paths: Collection[Path]) -> None:
        for path in paths:
            self.remove(path)

    # Quarantine. These raise OSError.

    def quarantine(self, path: Path) -> None:
        """Move a file that failed verification into quarantine, which keeps the newest `MAX_QUARANTINED`."""
        make_private(self.quarantine_folder)
        kept_as = self.quarantine_folder / f"{self.folder.name}-{path.name}"
        try:
            path.replace(kept_as)
        except FileNotFoundError:
            return
        os.utime(kept_as)
        kept = sorted(listing(self.quarantine_folder)[0], key=_age)
        for info in kept[:-MAX_QUARANTINED]:
            self.remove(info.path)

    def clear_quarantine(self) -> None:
        """Remove this model's quarantined files."""
        for info in listing(self.quarantine_folder)[0]:
            if info.path.name.startswith(self.folder.name):
                self.remove(info.path)


def file_system_nbytes(directory: Path) -> int:
    """The size of the file system that the directory is on, or will be."""
    there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    return shutil.disk_usage(there).total


def listing(folder: Path) -> tuple[tuple[FileInfo, ...], tuple[Path, ...]]:
    """The regular files and the folders in a folder; empty if it is missing. Links are skipped. Raises OSError."""
    files: list[FileInfo] = []
    folders: list[Path] = []
    try:
        with os.scandir(folder) as items:
            for item in items:
                if item.is_dir(follow_symlinks=False):
                    folders.append(Path(item.path))
                elif item.is_file(follow_symlinks=False):
                    # It may have been removed since.
                    with suppress(FileNotFoundError):
                        stat = item.stat(follow_symlinks=False)
                        files.append(FileInfo(path=Path(item.path), nbytes=stat.st_size, mtime_ns=stat.st_mtime_ns))
    except FileNotFoundError:
        return (), ()
    return tuple(files), tuple(folders)


def _age(info: FileInfo) -> int:
    return info.mtime_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listing:
    """A folder's content as of its modification time `changed_ns`.

    `is_settled`: a later change will show another modification time.
    """

    changed_ns: int
    is_settled: bool
    files: tuple[FileInfo, ...]
    folders: tuple[Path, ...]
    nbytes: int


class FolderListings:
    """The files below `top`, except those below `but`, as of the last `look`."""

    def __init__(self, top: Path, *, but: Path) -> None:
        self._top = top
        self._but = but
        self._known: dict[Path, _Listing] = {}

    def look(self, now_ns: int) -> dict[Path, tuple[FileInfo, ...]]:
        """Scan again; `now_ns` is the file system's time. O(folders + files in changed folders). Raises OSError.

        Returns the files of each folder that was listed again; empty for a folder that was removed.
        """
        known, listed = dict[Path, _Listing](), dict[Path, tuple[FileInfo, ...]]()
        unseen = [self._top]
        while unseen:
            folder = unseen.pop()
            try:
                changed_ns = folder.stat().st_mtime_ns
            except FileNotFoundError:
                continue
            there = self._known.get(folder)
            if there is None or not there.is_settled or there.changed_ns != changed_ns:
                files, folders = listing(folder)
                there = _Listing(
                    changed_ns=changed_ns,
                    is_settled=now_ns - changed_ns > _SETTLED_NS,
                    files=files,
                    folders=folders,
                    nbytes=sum(info.nbytes for info in files),
                )
                listed[folder] = files
            known[folder] = there
            unseen += [inner for inner in there.folders if inner != self._but]
        listed.update(dict.fromkeys(self._known.keys() - known.keys(), ()))
        self._known = known
        return listed

    def forget(self) -> None:
        """Have the next `look` list everything."""
        self._known = {}

    def __iter__(self) -> Iterator[FileInfo]:
        return (info for known in self._known.values() for info in known.files)

    @property
    def nbytes(self) -> int:
        return sum(known.nbytes for known in self._known.values())

    def below(self, folder: Path) -> tuple[tuple[FileInfo, ...], tuple[Path, ...]]:
        """The files and folders in a folder; empty if it is unknown."""
        known = self._known.get(folder)
        return ((), ()) if known is None else (known.files, known.folders)


class OtherFiles:
    """The files below `directory` but not below `own`: other models, the quarantine, anything else."""

    def __init__(self, directory: Path, own: Path) -> None:
        self._directory = directory
        self._own = own
        self._listings = FolderListings(directory, but=own)
        self._seen_ns = 0
        self.nbytes = 0

    def look(self, now_ns: int) -> None:
        """Scan again, like `FolderListings.look`. Raises OSError."""
        self._listings.look(now_ns)
        self._seen_ns, self.nbytes = now_ns, self._listings.nbytes

    def evictable(self) -> list[FileInfo]:
        """What may be evicted, in this order: quarantine, then the records of models without a server, oldest first.

        The caller holds the directory's lock, without which no server can start to use a model's folder.
        """
        quarantined, _ = self._listings.below(self._directory / _QUARANTINE)
        # Quarantined files count as never used.
        first = [replace(info, mtime_ns=0) for info in quarantined]
        models = [inner for inner in self._listings.below(self._directory)[1] if inner != self._own]
        dead = [
            model
            for model in models
            if MODEL_NAME.fullmatch(model.name) and not living_servers(model / SERVERS, self._seen_ns)
        ]
        return first + sorted((info for model in dead for info in self._records(model)), key=_age)

    def _records(self, model: Path) -> Iterator[FileInfo]:
        for inner in self._listings.below(model)[1]:
            yield from (info for info in self._listings.below(inner)[0] if RECORD_NAME.fullmatch(info.path.name))
