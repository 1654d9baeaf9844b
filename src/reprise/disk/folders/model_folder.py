"""The storage of a model's records: a directory (`model_directory.py`) or a bucket (`model_bucket.py`).

Files appear complete or not at all, never change, and may disappear at any time, since other servers use the folder
too. Files in a bucket also have paths as names.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Protocol

from reprise.disk.records.format import EncodedFile, RecordHeader
from reprise.disk.records.record import DiskRecord

TEMPORARY_ENDING = ".tmp"


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


class FilesAround(Protocol):
    """The files outside the folder that count towards the limit: other models' and any others."""

    nbytes: int

    def look(self, now_ns: int) -> None:
        """Scan again. Raises OSError."""
        ...

    def evictable(self) -> list[FileInfo]:
        """The files that may be evicted, in order."""
        ...


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


class ModelFolder(Protocol):
    """One model's folder, used by this server until `release`, and by others. Methods that do I/O raise OSError."""

    names: RLock
    """Held while a file is renamed or removed."""
    servers: frozenset[str]
    """The other servers that used the folder at the last `note_servers`."""
    is_remote: bool
    """Whether I/O uses a network: then only the cache's threads do it, and evictions use the last listing."""

    @property
    def place(self) -> str:
        """Its name in messages."""
        ...

    @property
    def around(self) -> FilesAround: ...

    removed_at_once: int
    reads_at_once: int
    """How many records are worth reading at once."""
    has_unread: bool
    """Whether the last scan left unknown files for the next one, since there were too many."""

    # Other servers.

    def begin_lease(self) -> None:
        """Take this server's lease."""
        ...

    def renew_lease(self) -> None: ...

    def release(self) -> None:
        """Give up the lease. Idempotent."""
        ...

    @property
    def has_vanished(self) -> bool:
        """Whether the folder was removed, with everything in it."""
        ...

    def note_servers(self, now_ns: int) -> bool:
        """Update `servers`; returns whether another one has used the folder since the last call."""
        ...

    @property
    def has_new_servers(self) -> bool:
        """Whether servers may have joined or left since `note_servers`."""
        ...

    def locked(self) -> AbstractContextManager[int]:
        """Keep other servers from evicting, as far as possible; yields the store's time in ns."""
        ...

    # Files.

    def prepare(self, is_known: Callable[[Path, int], bool], is_closing: Callable[[], bool]) -> None:
        """Fetch what the next `listed` and `header` return; call it without a lock.

        `is_known`: whether a file with this path and size is known. `is_closing`: whether to stop early.
        """
        ...

    def listed(self, now_ns: int) -> Mapping[Path, Collection[FileInfo]]:
        """The files of each folder that may have changed since the last call."""
        ...

    def forget_listed(self) -> None:
        """Have the next `listed` return everything."""
        ...

    def sweep(self) -> int:
        """Remove temporary files of dead servers; returns the bytes of those that other servers are writing."""
        ...

    def all_files(self) -> Iterable[FileInfo]:
        """All complete files, listed now, for `check`."""
        ...

    def is_there(self, path: Path) -> bool: ...

    def has_folder(self) -> bool:
        """Whether the folder exists."""
        ...

    def used_ns(self, path: Path) -> int | None:
        """When any server last used the file, as far as the store knows; None if it is gone."""
        ...

    # Names.

    def path_of(self, key: bytes) -> Path: ...

    def key_of(self, path: Path) -> bytes | None:
        """The key of the record at `path`, or None if no record belongs there."""
        ...

    def note_path(self, root: bytes) -> Path: ...

    def root_of_note(self, path: Path) -> bytes | None: ...

    def is_place_of_record(self, path: Path) -> bool: ...

    def is_obstructed(self, key: bytes) -> bool:
        """Whether something that cannot be replaced has a record's path."""
        ...

    # Reading.

    def header(self, info: FileInfo) -> RecordHeader:
        """The header of a file. Also raises Unverified and OtherVersion."""
        ...

    def read(self, key: bytes) -> DiskRecord:
        """The record, verified. Also raises Unverified and OtherVersion."""
        ...

    def read_note(self, root: bytes) -> str: ...

    # Writing: begin, fill, publish; and abandon in any case.

    def temporary_of(self, path: Path) -> Path:
        """The path under which `path` is written before it is published."""
        ...

    def begin(self, key: bytes, nbytes: int) -> int:
        """Reserve space for a record; returns a handle for `fill`."""
        ...

    def fill(self, begun: int, encoded: EncodedFile) -> None:
        """Write the content, which is not published yet."""
        ...

    def publish(self, key: bytes) -> None:
        """Make the record visible under its name."""
        ...

    def abandon(self, key: bytes) -> None:
        """Remove what was begun and not published."""
        ...

    def write_note(self, path: Path, content: bytes) -> None: ...

    def set_time(self, path: Path, at_ns: int) -> None:
        """Set the file's time of last use, if the store supports it."""
        ...

    # Removing.

    def remove(self, path: Path) -> None:
        """Remove the file if it exists."""
        ...

    def remove_all(self, paths: Collection[Path]) -> None:
        """Remove these files if they exist; at most `removed_at_once`."""
        ...

    def quarantine(self, path: Path) -> None:
        """Remove or set aside a file that failed verification."""
        ...

    def clear_quarantine(self) -> None: ...
