"""The storage of a model's records: a directory (`model_directory.py`) or a bucket (`model_bucket.py`).

Files appear complete or not at all, never change, and may disappear at any time, since other servers use the folder
too. Files in a bucket also have paths as names.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Protocol

from reprise.disk.records.format import EncodedFile, Unverified
from reprise.disk.records.record import DiskRecord, IndexEntry

TEMPORARY_ENDING = ".tmp"
SERVERS = "servers"
NOTES = "notes"
_RECORD_ENDING = ".kv"
_NOTE_ENDING = ".json"
MODEL_NAME = re.compile(r"[0-9a-f]{16}")
RECORD_NAME = re.compile(r"[0-9a-f]{64}(\.kv|\.[0-9a-f-]+\.tmp|\.json)")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """A file at the time of a listing."""

    path: Path
    nbytes: int
    mtime_ns: int

    @property
    def is_unfinished(self) -> bool:
        """Whether it is a writer's temporary file."""
        return self.path.suffix == TEMPORARY_ENDING


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedParts:
    """What other machines have on disk. `max_bytes`: the least of their limits; `keys`: those of each of them."""

    max_bytes: int
    keys: tuple[Collection[bytes], ...]


class PartsElsewhere(Protocol):
    """Other machines that have a part of each record, under the same key. Thread-safe."""

    def open(self, *, fingerprint: str, block: int, resumes_anywhere: bool) -> OpenedParts:
        """Have them open their parts. Raises DiskUnusable."""
        ...

    def folder(self, directory: Path, *, fingerprint: str) -> "ModelFolder":
        """This machine's folder, whose records are read only where all have their part. Raises DiskUnusable."""
        ...

    def remove(self, keys: Collection[bytes]) -> None:
        """Have them remove their parts of these records."""
        ...

    def clear(self, root: bytes | None) -> Future[None]:
        """Have them remove everything of a namespace (None: of the model). The future is done when they have."""
        ...


class ModelFolder(ABC):
    """One model's folder, used by this server until `release`, and by others. Methods that do I/O raise OSError.

    Files "around" are those outside the folder that count towards the limit: other models' and any others.
    """

    is_remote = False
    """Whether I/O uses a network: then only the cache's threads do it, and evictions use the last listing."""
    removed_at_once = 1
    """How many files `remove_all` takes."""
    reads_at_once = 1
    """How many records are worth reading at once."""
    has_unread = False
    """Whether the last scan left unknown files for the next one, since there were too many."""
    around_nbytes = 0
    """As of the last `look_around`."""

    def __init__(self, folder: Path, *, place: str) -> None:
        """`place`: its name in messages."""
        self.folder, self.place = folder, place
        self.names = RLock()
        """Held while a file is renamed or removed."""
        self.servers: frozenset[str] = frozenset()
        """The other servers that used the folder at the last `note_servers`."""

    # Other servers.

    @abstractmethod
    def begin_lease(self) -> None:
        """Take this server's lease, in a folder that is created if needed."""

    @abstractmethod
    def renew_lease(self) -> None:
        """Send a heartbeat, due every `BEAT_S` seconds."""

    @abstractmethod
    def release(self) -> None:
        """Give up the lease. Idempotent."""

    @property
    def has_vanished(self) -> bool:
        """Whether the folder was removed, with everything in it, or the lease alone."""
        return False

    @abstractmethod
    def note_servers(self, now_ns: int) -> bool:
        """Update `servers`; returns whether another one has used the folder since the last call. Call it `locked`."""

    @property
    def has_new_servers(self) -> bool:
        """Whether servers may have joined or left since `note_servers`."""
        return True

    @abstractmethod
    def locked(self) -> AbstractContextManager[int]:
        """Keep other servers from evicting, as far as possible; yields the store's time in ns."""

    # Files.

    def prepare(self, is_known: Callable[[Path, int], bool], is_closing: Callable[[], bool]) -> None:
        """Fetch what the next `listed` and `entry` return; call it without a lock.

        `is_known`: whether a file with this path and size is known. `is_closing`: whether to stop early.
        """

    @abstractmethod
    def listed(self, now_ns: int) -> Mapping[Path, Collection[FileInfo]]:
        """The files of each folder that may have changed since the last call."""

    def forget_listed(self) -> None:
        """Have the next `listed` return everything."""

    def sweep(self) -> int:
        """Remove temporary files of dead servers; returns the bytes of those that other servers are writing."""
        return 0

    @abstractmethod
    def all_files(self) -> Iterable[FileInfo]:
        """All complete files, listed now, for `check`."""

    def has_folder(self) -> bool:
        """Whether the folder exists."""
        return True

    @abstractmethod
    def used_ns(self, path: Path) -> int | None:
        """When any server last used the file, as far as the store knows; None if there is none."""

    @abstractmethod
    def look_around(self, now_ns: int) -> None:
        """Scan the files around again."""

    @abstractmethod
    def evictable_around(self) -> list[FileInfo]:
        """Those of the files around that may be evicted, in this order. Call it `locked`."""

    # Names.

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

    def is_obstructed(self, key: bytes) -> bool:
        """Whether something that cannot be replaced has a record's path."""
        return False

    # Reading. `entry` and `read` also raise Unverified and OtherVersion.

    @abstractmethod
    def entry(self, info: FileInfo) -> IndexEntry:
        """What the header of a file says of its record."""

    @abstractmethod
    def read(self, key: bytes) -> DiskRecord:
        """The record, verified."""

    def verify_name(self, path: Path, found: IndexEntry | DiskRecord) -> None:
        """Raises Unverified unless what was read from this path belongs there."""
        if path != self.path_of(found.key):
            raise Unverified("its name does not match its content")

    @abstractmethod
    def read_note(self, root: bytes) -> str: ...

    # Writing: begin, fill, publish; and abandon in any case.

    def begin(self, key: bytes, nbytes: int) -> None:
        """Reserve space for a record."""

    @abstractmethod
    def fill(self, key: bytes, encoded: EncodedFile, at_ns: int) -> None:
        """Write the content, used at `at_ns`, which is not published yet."""

    @abstractmethod
    def publish(self, key: bytes) -> None:
        """Make the record visible under its name."""

    @abstractmethod
    def abandon(self, key: bytes) -> None:
        """Remove what was begun and not published."""

    @abstractmethod
    def write_note(self, path: Path, content: bytes) -> None:
        """Replace the note atomically."""

    @abstractmethod
    def set_time(self, path: Path, at_ns: int) -> None:
        """Set the file's time of last use, if the store supports it."""

    # Removing.

    @abstractmethod
    def remove(self, path: Path) -> None:
        """Remove the file if it exists."""

    @abstractmethod
    def remove_all(self, paths: Collection[Path]) -> None:
        """Remove these files if they exist; at most `removed_at_once`."""

    def quarantine(self, path: Path) -> None:
        """Set a file aside that failed verification, or remove it."""
        self.remove(path)

    def clear_quarantine(self) -> None:
        """Remove this model's files that were set aside."""
