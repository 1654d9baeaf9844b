"""What a model's records lie in: a directory (`directory.py`), or a bucket (`model_bucket.py`).

Files are there whole or not at all, never change, and may go at any time, since other servers use the folder, too. A
file is called by a path, also in a bucket.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Protocol

from reprise.disk.format import EncodedFile, RecordHeader
from reprise.disk.record import DiskRecord

TEMPORARY_ENDING = ".tmp"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """A file as a listing saw it."""

    path: Path
    nbytes: int
    mtime_ns: int

    @property
    def is_unfinished(self) -> bool:
        """Whether it is what a writer had not finished."""
        return self.path.suffix == TEMPORARY_ENDING


class FilesAround(Protocol):
    """What lies beside the folder and counts: other models' files, and whatever else."""

    nbytes: int

    def look(self, now_ns: int) -> None:
        """Look again. Raises OSError."""
        ...

    def evictable(self) -> list[FileInfo]:
        """Those that may go, in that order."""
        ...


class ModelFolder(Protocol):
    """One model's folder, used by this server until `release`, and by others. What asks the store raises OSError."""

    names: RLock
    """Held while a file gets or loses its name."""
    servers: frozenset[str]
    """The other servers that had the folder when last looked at."""
    is_remote: bool
    """Whether a question takes a network's time: then only the threads behind the cache ask, and room is made by what
    was listed last."""

    @property
    def place(self) -> str:
        """What it is called in messages."""
        ...

    @property
    def around(self) -> FilesAround: ...

    removed_at_once: int
    has_unread: bool
    """Whether the last look left something for the next, since there was too much."""

    # Other servers.

    def begin_lease(self) -> None:
        """Say that this server uses the folder."""
        ...

    def renew_lease(self) -> None: ...

    def release(self) -> None:
        """Use the folder no more. Releasing twice changes nothing."""
        ...

    @property
    def has_vanished(self) -> bool:
        """Whether somebody has removed the folder, and all that was in it."""
        ...

    def note_servers(self, now_ns: int) -> bool:
        """Look which servers have the folder. Whether others have used it since this was asked last."""
        ...

    @property
    def has_new_servers(self) -> bool:
        """Whether servers may have come or gone since they were noted."""
        ...

    def locked(self) -> AbstractContextManager[int]:
        """As far as that can be, no other server makes room meanwhile; gives the store's own time in nanoseconds."""
        ...

    # What lies there.

    def prepare(self, is_known: Callable[[Path, int], bool], is_closing: Callable[[], bool]) -> None:
        """Ask the store for what `listed` and `header` give next, with nothing held.

        `is_known`: whether a file of this path and size is. `is_closing`: whether there is no time for more.
        """
        ...

    def listed(self, now_ns: int) -> Mapping[Path, Collection[FileInfo]]:
        """The files of each folder that may have changed since the last time."""
        ...

    def forget_listed(self) -> None:
        """Everything is listed again the next time."""
        ...

    def sweep(self) -> int:
        """Remove what dead servers had not finished; the bytes of what others are writing."""
        ...

    def all_files(self) -> Iterable[FileInfo]:
        """All finished files, listed now: for who checks the books."""
        ...

    def is_there(self, path: Path) -> bool: ...

    def has_folder(self) -> bool:
        """Whether there is anything at all."""
        ...

    def used_ns(self, path: Path) -> int | None:
        """When any server used the file last, as far as files tell; None: it has gone."""
        ...

    # Names.

    def path_of(self, key: bytes) -> Path: ...

    def key_of(self, path: Path) -> bytes | None:
        """The key of the record that lies there; None if it is no record's place."""
        ...

    def note_path(self, root: bytes) -> Path: ...

    def root_of_note(self, path: Path) -> bytes | None: ...

    def is_place_of_record(self, path: Path) -> bool: ...

    def is_obstructed(self, key: bytes) -> bool:
        """Whether something that cannot be replaced is in the place of a record."""
        ...

    # Reading.

    def header(self, info: FileInfo) -> RecordHeader:
        """Raises Unverified and OtherVersion, too."""
        ...

    def read(self, key: bytes) -> DiskRecord:
        """The record, verified. Raises Unverified and OtherVersion, too."""
        ...

    def read_note(self, root: bytes) -> str: ...

    # Writing: begin, fill, publish; and abandon in any case.

    def temporary_of(self, path: Path) -> Path:
        """What is called so until it gets its name."""
        ...

    def begin(self, key: bytes, nbytes: int) -> int:
        """So many bytes count from now on. Gives what `fill` wants."""
        ...

    def fill(self, begun: int, encoded: EncodedFile) -> None:
        """The content; it has no name yet."""
        ...

    def publish(self, key: bytes) -> None:
        """It has its name now."""
        ...

    def abandon(self, key: bytes) -> None:
        """What was begun and has no name is gone."""
        ...

    def write_note(self, path: Path, content: bytes) -> None: ...

    def set_time(self, path: Path, at_ns: int) -> None:
        """Have the file say that it was used at this time, where files can."""
        ...

    # Removing.

    def remove(self, path: Path) -> None:
        """The file is gone afterwards, whether it was there or not."""
        ...

    def remove_all(self, paths: Collection[Path]) -> None:
        """All of these are gone afterwards; `removed_at_once` of them at most."""
        ...

    def quarantine(self, path: Path) -> None:
        """Put a file that does not verify out of the way."""
        ...

    def clear_quarantine(self) -> None: ...
