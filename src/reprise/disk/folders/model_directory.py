"""The only access to the file system: a model's folder as a `ModelFolder`.

Several servers, on one machine or several, may use a folder at once. A file is renamed to its final name when it is
complete. Only the size limit needs a lock: space is reserved under it, and where locks do not work the limit can be
exceeded by what each server is writing. Files around are counted, and evicted if no server uses their model.
"""

import logging
import os
import shutil
import time
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_ISREG
from typing import IO

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
from reprise.disk.folders.model_folder import MODEL_NAME, RECORD_NAME, SERVERS, TEMPORARY_ENDING, FileInfo, ModelFolder
from reprise.disk.records.format import EncodedFile, read_header, read_record
from reprise.disk.records.record import DiskRecord, IndexEntry, folder_name

log = logging.getLogger(__name__)

MAX_QUARANTINED = 4
"""Files kept in quarantine, over all models."""

_QUARANTINE = "quarantine"
_LOCK = "lock"
LOCKED_S = 10.0
"""Longer than any eviction takes: a lock held longer belongs to a dead host, or locking does not work."""

_UNLOCKED_S = 600.0
"""After a lock timeout, continue without the lock for this long."""

# A folder that changed this recently could change again without a new modification time.
_SETTLED_NS = 2_000_000_000


class ModelDirectory(ModelFolder):
    """A model's folder in a directory.

    directory/lock                      held while space is reserved, by all servers that share the directory
    directory/quarantine/               files that failed verification
    directory/<16 hex of the model>/servers/<server>    the lease of a server
    directory/<16 hex of the model>/<2 hex of the key>/<key>.kv, and <key>.<server>.tmp while it is written
    directory/<16 hex of the model>/notes/<key of a namespace's root>.json
    """

    reads_at_once = min(4, os.cpu_count() or 1)
    """A file is hashed by one core, and a disk is faster than one."""

    def __init__(self, directory: Path, *, fingerprint: str) -> None:
        """Raises DiskUnusable."""
        super().__init__(directory / folder_name(fingerprint), place=str(directory))
        self.directory = directory
        self.quarantine_folder = directory / _QUARANTINE
        self.leases = self.folder / SERVERS
        self._files = FolderListings(self.folder, but=self.leases)
        self._around = FolderListings(directory, but=self.folder)
        self._looked_ns = 0
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

    # Other servers.

    def begin_lease(self) -> None:
        # Only what is created here is made private: the directory may serve other purposes too.
        self.directory.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        # Files of models without a lease are evicted under this lock, so ours cannot be.
        with self.locked():
            make_private(self.folder)
            self._lease.take()

    def release(self) -> None:
        self._lease.release()

    def renew_lease(self) -> None:
        self._lease.renew()

    @property
    def has_vanished(self) -> bool:
        return self._lease.is_lost

    def note_servers(self, now_ns: int) -> bool:
        before = self.servers
        self.servers = living_servers(self.leases, now_ns) - {self._lease.name}
        changed_before_ns, self._servers_changed_ns = self._servers_changed_ns, self.leases.stat().st_mtime_ns
        # Even if it has left again since.
        return bool(before or self.servers) or self._servers_changed_ns != changed_before_ns

    @property
    def has_new_servers(self) -> bool:
        return self.leases.stat().st_mtime_ns != self._servers_changed_ns

    @contextmanager
    def locked(self) -> Generator[int]:
        # Without the lock if locks do not work or it is held for more than `LOCKED_S`.
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

    # Files.

    def listed(self, now_ns: int) -> Mapping[Path, tuple[FileInfo, ...]]:
        return self._files.look(now_ns)

    def forget_listed(self) -> None:
        self._files.forget()

    def sweep(self) -> int:
        servers = self.servers | {self._lease.name}
        nbytes = 0
        for info in [info for info in self._files if info.is_unfinished]:
            if info.path.name.split(".")[-2] in servers:
                nbytes += info.nbytes
            else:
                self.remove(info.path)
        return nbytes

    def all_files(self) -> Iterable[FileInfo]:
        found = FolderListings(self.folder, but=self.leases)
        found.look(0)
        return [info for info in found if not info.is_unfinished]

    def has_folder(self) -> bool:
        return self.folder.is_dir()

    def used_ns(self, path: Path) -> int | None:
        try:
            stat = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return stat.st_mtime_ns if S_ISREG(stat.st_mode) else None

    def is_obstructed(self, key: bytes) -> bool:
        return self.path_of(key).is_dir()

    def look_around(self, now_ns: int) -> None:
        self._around.look(now_ns)
        self._looked_ns, self.around_nbytes = now_ns, self._around.nbytes

    def evictable_around(self) -> list[FileInfo]:
        """Quarantine, then the records of models without a server, oldest first."""
        # Quarantined files count as never used.
        first = [replace(info, mtime_ns=0) for info in self._around.below(self.quarantine_folder)[0]]
        unserved = {
            model
            for model in self._around.below(self.directory)[1]
            if MODEL_NAME.fullmatch(model.name)
            and model != self.folder
            # Without the lock, a server could start to use it now.
            and not living_servers(model / SERVERS, self._looked_ns)
        }
        records = (info for info in self._around if RECORD_NAME.fullmatch(info.path.name))
        return first + sorted((info for info in records if info.path.parent.parent in unserved), key=_age)

    # Reading.

    def entry(self, info: FileInfo) -> IndexEntry:
        with info.path.open("rb") as file:
            entry = read_header(file, os.fstat(file.fileno()).st_size).entry
        self.verify_name(info.path, entry)
        return entry

    def read(self, key: bytes) -> DiskRecord:
        reach(Failpoint.DISK_READ, self, key)
        path = self.path_of(key)
        with path.open("rb") as file:
            record = read_record(file, os.fstat(file.fileno()).st_size)
        self.verify_name(path, record)
        return record

    def read_note(self, root: bytes) -> str:
        return self.note_path(root).read_text(encoding="utf-8")

    # Writing.

    def _temporary_of(self, path: Path) -> Path:
        """The path under which this server writes `path`."""
        return path.with_suffix(f".{self._lease.name}{TEMPORARY_ENDING}")

    def begin(self, key: bytes, nbytes: int) -> None:
        """Create the record's temporary file at its final size, which reserves its space."""
        reach(Failpoint.DISK_BEGIN, self)
        try:
            with _created(self._temporary_of(self.path_of(key))) as file:
                file.truncate(nbytes)
        except BaseException:
            self.abandon(key)
            raise

    def fill(self, key: bytes, encoded: EncodedFile, at_ns: int) -> None:
        # FileNotFoundError if another server removed it.
        path = self._temporary_of(self.path_of(key))
        with path.open("r+b") as file:
            reach(Failpoint.DISK_FILL, self)
            for chunk in encoded.chunks:
                file.write(chunk)
            _sync(file)
        reach(Failpoint.DISK_FILLED, self)
        self.set_time(path, at_ns)

    def publish(self, key: bytes) -> None:
        path = self.path_of(key)
        self._temporary_of(path).replace(path)

    def abandon(self, key: bytes) -> None:
        self.remove(self._temporary_of(self.path_of(key)))

    def write_note(self, path: Path, content: bytes) -> None:
        temporary = self._temporary_of(path)
        try:
            with _created(temporary) as file:
                file.write(content)
                _sync(file)
            temporary.replace(path)
        finally:
            self.remove(temporary)

    def set_time(self, path: Path, at_ns: int) -> None:
        os.utime(path, ns=(at_ns, at_ns))

    # Removing.

    def remove(self, path: Path) -> None:
        reach(Failpoint.DISK_REMOVE, self, path)
        path.unlink(missing_ok=True)

    def remove_all(self, paths: Collection[Path]) -> None:
        for path in paths:
            self.remove(path)

    def quarantine(self, path: Path) -> None:
        """Move the file into quarantine, which keeps the newest `MAX_QUARANTINED`."""
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
        for info in listing(self.quarantine_folder)[0]:
            if info.path.name.startswith(self.folder.name):
                self.remove(info.path)


def _created(path: Path) -> IO[bytes]:
    """A new, empty file, accessible only to its owner, open for writing."""
    make_private(path.parent)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, PRIVATE_FILE), "wb")


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


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
