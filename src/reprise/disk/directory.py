"""The one door to the file system: a model's folder, its lock, and files that are there whole or not at all.

What lies elsewhere below the directory (`OtherFiles`) is only counted, and removed where nobody serves it. A store of
another kind, or one that several servers write at once, would stand in the place of `ModelDirectory`.
"""

import errno
import os
import re
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from reprise.core.errors import DiskUnusable
from reprise.disk.format import EncodedFile, RecordHeader, Unverified, read_header, read_record
from reprise.disk.record import DiskRecord, folder_name

PRIVATE_FILE = 0o600
PRIVATE_FOLDER = 0o700
MAX_QUARANTINED = 4
"""Files kept in quarantine, of all models together."""

_QUARANTINE = "quarantine"
_LOCK = "lock"
_RECORD_ENDING = ".kv"
_TEMPORARY_ENDING = ".tmp"
_NOTES = "notes"
_NOTE_ENDING = ".json"
_POLL_S = 0.005
"""How often a lock that another server holds for a moment is asked for."""

_MODEL_NAME = re.compile(r"[0-9a-f]{16}")
_RECORD_NAME = re.compile(r"[0-9a-f]{64}(\.kv|\.tmp|\.json)")

# A folder that changed within so long before it was listed could change again and show the same time.
_SETTLED_NS = 2_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """A file as a listing saw it."""

    path: Path
    nbytes: int
    mtime_ns: int

    @property
    def is_unfinished(self) -> bool:
        """Whether it is what a writer had not finished."""
        return self.path.suffix == _TEMPORARY_ENDING


class ModelDirectory:
    """One model's folder, locked for this process until `release`, or until the process dies.

    directory/lock                      held while room is made, by all servers that share the directory
    directory/quarantine/               files that did not verify
    directory/<16 hex of the model>/lock
    directory/<16 hex of the model>/<2 hex of the key>/<key>.kv, and <key>.tmp while it is written
    directory/<16 hex of the model>/notes/<key of a namespace's root>.json
    """

    def __init__(self, directory: Path, *, fingerprint: str) -> None:
        """Raises DiskUnusable."""
        self.directory = directory
        self.folder = directory / folder_name(fingerprint)
        self.quarantine_folder = directory / _QUARANTINE
        self.names = threading.RLock()
        """Held while a file gets or loses its name."""
        # Without flock it must fail: files that stand for locks would outlive a process that dies.
        self._room_lock = _lock_of(directory / _LOCK)
        self._lock = _lock_of(self.folder / _LOCK)
        self._inode: int | None = None
        try:
            is_ours = self._take_folder()
        except OSError as error:
            raise DiskUnusable(
                f"The cache directory {directory} cannot be used ({error.strerror}): choose one that can be written."
            ) from error
        if not is_ours:
            raise DiskUnusable(
                f"Another server keeps this model's cache in {self.folder}: stop it, or choose another directory."
            )

    def _take_folder(self) -> bool:
        """Make the folder if need be, and lock it. False if another process has it. Raises OSError."""
        # Only what is made here is closed to others: the directory may be one that serves other purposes, too.
        self.directory.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        _make_private(self.folder)
        # Whoever removes files of models that nobody serves holds the directory's lock, and so never ours.
        with self._room_lock:
            try:
                self._lock.acquire(blocking=False)
            except Timeout:
                return False
        self._inode = (self.folder / _LOCK).stat().st_ino
        return True

    def release(self) -> None:
        """Let others use the folder. Releasing twice changes nothing."""
        self._lock.release(force=True)

    def has_vanished(self) -> bool:
        """Whether somebody has removed the folder that is locked here, and all that was in it."""
        try:
            return (self.folder / _LOCK).stat().st_ino != self._inode
        except FileNotFoundError:
            return True

    def make_again(self) -> None:
        """Make and lock the folder once more, after it has vanished. Raises OSError."""
        self._lock.release(force=True)
        if not self._take_folder():
            raise OSError(errno.EBUSY, f"another server has made {self.folder} meanwhile")

    @contextmanager
    def locked(self) -> Generator[int]:
        """No other server makes room or begins a file meanwhile; gives the file system's own time in nanoseconds."""
        with self._room_lock:
            os.utime(self.directory / _LOCK)
            yield (self.directory / _LOCK).stat().st_mtime_ns

    # Names.

    def path_of(self, key: bytes) -> Path:
        name = key.hex()
        return self.folder / name[:2] / (name + _RECORD_ENDING)

    def temporary_of(self, key: bytes) -> Path:
        return self.path_of(key).with_suffix(_TEMPORARY_ENDING)

    def note_path(self, root: bytes) -> Path:
        """Where what was learnt of a namespace's chats is kept, by the key of its root."""
        return self.folder / _NOTES / (root.hex() + _NOTE_ENDING)

    def root_of_note(self, path: Path) -> bytes | None:
        """The other way; None if it is no note."""
        is_note = path.parent == self.folder / _NOTES and _RECORD_NAME.fullmatch(path.name) is not None
        return bytes.fromhex(path.stem) if is_note and path.suffix == _NOTE_ENDING else None

    def is_place_of_record(self, path: Path) -> bool:
        """Whether a record could lie there, as far as folders tell."""
        return self.folder in (path.parent, path.parent.parent)

    def files(self) -> Iterator[FileInfo]:
        """All files in our folder but the lock. Raises OSError."""
        unseen = [self.folder]
        while unseen:
            files, folders = listing(unseen.pop())
            yield from (info for info in files if info.path != self.folder / _LOCK)
            unseen += folders

    # Reading. All of it raises OSError.

    def header(self, info: FileInfo) -> RecordHeader:
        """The header of a file in our folder. Raises Unverified and OtherVersion, too."""
        with info.path.open("rb") as file:
            header = read_header(file, os.fstat(file.fileno()).st_size)
        if info.path != self.path_of(header.key):
            raise Unverified("it is another record than its name says")
        return header

    def read(self, key: bytes) -> DiskRecord:
        """The record of this key, verified. Raises Unverified and OtherVersion, too."""
        with self.path_of(key).open("rb") as file:
            record = read_record(file, os.fstat(file.fileno()).st_size)
        if record.key != key:
            raise Unverified("it is another record than its name says")
        return record

    # Writing. All of it raises OSError.

    def begin(self, key: bytes, nbytes: int) -> int:
        """A descriptor of the record's temporary file, which counts with its whole size from now on."""
        path = self.temporary_of(key)
        _make_private(path.parent)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, PRIVATE_FILE)
        try:
            os.ftruncate(descriptor, nbytes)
        except BaseException:
            os.close(descriptor)
            self.remove(path)
            raise
        return descriptor

    def fill(self, descriptor: int, encoded: EncodedFile) -> None:
        """Write the content and wait until the disk has it. The descriptor is closed."""
        with os.fdopen(descriptor, "wb") as file:
            for chunk in encoded.chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())

    def write_note(self, path: Path, content: bytes) -> None:
        """The note is this one afterwards, or the one that it was."""
        _make_private(path.parent)
        temporary = path.with_suffix(_TEMPORARY_ENDING)
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
        """Have the file say that it was used at this time."""
        os.utime(path, ns=(at_ns, at_ns))

    def publish(self, key: bytes) -> None:
        """Give the temporary file its name."""
        self.temporary_of(key).replace(self.path_of(key))

    def remove(self, path: Path) -> None:
        """The file is gone afterwards, whether it was there or not."""
        path.unlink(missing_ok=True)

    # Quarantine. All of it raises OSError.

    def quarantine(self, path: Path) -> None:
        """Move a file that does not verify into quarantine, whose oldest files make way."""
        _make_private(self.quarantine_folder)
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
        """Remove what this model has there."""
        for info in listing(self.quarantine_folder)[0]:
            if info.path.name.startswith(self.folder.name):
                self.remove(info.path)


def _lock_of(path: Path) -> FileLock:
    # One lock for all threads of the process: a folder is closed on another thread than it was opened on.
    return FileLock(path, mode=PRIVATE_FILE, thread_local=False, poll_interval=_POLL_S, fallback_to_soft=False)


def _is_locked(path: Path) -> bool:
    """Whether somebody holds the lock file now. None is made."""
    if not path.exists():
        return False
    lock = _lock_of(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return True
    lock.release()
    return False


def _make_private(folder: Path) -> None:
    """The folder, open to nobody but its owner. Raises OSError."""
    folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    if folder.stat().st_mode & 0o077:
        folder.chmod(PRIVATE_FOLDER)


def listing(folder: Path) -> tuple[tuple[FileInfo, ...], tuple[Path, ...]]:
    """The plain files and the folders in a folder; none if it is not there. Links are not followed. Raises OSError."""
    files: list[FileInfo] = []
    folders: list[Path] = []
    try:
        with os.scandir(folder) as items:
            for item in items:
                if item.is_dir(follow_symlinks=False):
                    folders.append(Path(item.path))
                elif item.is_file(follow_symlinks=False):
                    # It may have gone since.
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
    """A folder as it was when it was last changed."""

    changed_ns: int
    is_settled: bool
    files: tuple[FileInfo, ...]
    folders: tuple[Path, ...]
    nbytes: int


class OtherFiles:
    """The files below `directory` that are not below `own`, as they were when last looked at.

    Other models' files, quarantine, whatever else.
    """

    def __init__(self, directory: Path, own: Path) -> None:
        self._directory = directory
        self._own = own
        self._listings: dict[Path, _Listing] = {}
        self.nbytes = 0

    def look(self, now_ns: int) -> None:
        """Look again; `now_ns` is the file system's own time. O(folders) and what has changed. Raises OSError."""
        listings: dict[Path, _Listing] = {}
        unseen = [self._directory]
        while unseen:
            folder = unseen.pop()
            try:
                changed_ns = folder.stat().st_mtime_ns
            except FileNotFoundError:
                continue
            known = self._listings.get(folder)
            if known is None or not known.is_settled or known.changed_ns != changed_ns:
                files, folders = listing(folder)
                known = _Listing(
                    changed_ns=changed_ns,
                    is_settled=now_ns - changed_ns > _SETTLED_NS,
                    files=files,
                    folders=folders,
                    nbytes=sum(info.nbytes for info in files),
                )
            listings[folder] = known
            unseen += [inner for inner in known.folders if inner != self._own]
        self._listings = listings
        self.nbytes = sum(known.nbytes for known in listings.values())

    def evictable(self) -> list[FileInfo]:
        """The files that may go, in that order: quarantine, then those of models that nobody serves now, oldest first.

        A live server's files are its own. Whoever starts one waits for the directory's lock, which the caller holds.
        """
        quarantined = self._listings.get(self._directory / _QUARANTINE)
        # As if they had never been used: nothing is worth less.
        first = [replace(info, mtime_ns=0) for info in quarantined.files] if quarantined is not None else []
        models = [inner for inner in self._listings[self._directory].folders if inner != self._own]
        dead = [model for model in models if _MODEL_NAME.fullmatch(model.name) and not _is_locked(model / _LOCK)]
        return first + sorted((info for model in dead for info in self._records(model)), key=_age)

    def _records(self, model: Path) -> Iterator[FileInfo]:
        for inner in self._listings[model].folders if model in self._listings else ():
            if inner in self._listings:
                yield from (info for info in self._listings[inner].files if _RECORD_NAME.fullmatch(info.path.name))
