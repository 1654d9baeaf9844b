"""Our folder in the directory: where each file lies, who may use the folder, and what happens to damaged files."""

import os
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from reprise.cache.disk.files import Seen, listing, locked, make_private, remove_file, take_lock
from reprise.cache.disk.keys import folder_name
from reprise.cache.disk.surroundings import LOCK, QUARANTINE, RECORD_ENDING, TEMPORARY_ENDING
from reprise.core.errors import DiskUnusable

MAX_QUARANTINED = 4
"""Files kept in quarantine, of all models together."""


class Shelf:
    """One model's folder, locked for this process.

    directory/lock                      held while room is made, by all servers that share the directory
    directory/quarantine/               files that did not verify
    directory/<16 hex of the model>/lock
    directory/<16 hex of the model>/<2 hex of the key>/<key>.kv, and <key>.tmp while it is written
    """

    def __init__(self, directory: Path, *, fingerprint: str) -> None:
        """Raises DiskUnusable."""
        self.directory = directory
        self.folder = directory / folder_name(fingerprint)
        self.quarantine = directory / QUARANTINE
        self.names = threading.RLock()
        """Held while a file gets or loses its name."""
        try:
            # Only what is made here is closed to others: the directory may be one that serves other purposes, too.
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            make_private(self.folder)
            # Whoever removes files of models that nobody serves holds the directory's lock, and so never ours.
            with locked(directory / LOCK):
                self._lock = take_lock(self.folder / LOCK, waits=False)
        except OSError as error:
            raise DiskUnusable(
                f"The cache directory {directory} cannot be used ({error.strerror}): choose one that can be written."
            ) from error
        if self._lock is None:
            raise DiskUnusable(
                f"Another server keeps this model's cache in {self.folder}: stop it, or choose another directory."
            )

    def release(self) -> None:
        """Let others use the folder. Releasing twice changes nothing."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def path_of(self, key: bytes) -> Path:
        name = key.hex()
        return self.folder / name[:2] / (name + RECORD_ENDING)

    def temporary_of(self, key: bytes) -> Path:
        return self.path_of(key).with_suffix(TEMPORARY_ENDING)

    def files(self) -> Iterator[Seen]:
        """All files in our folder but the lock. Raises OSError."""
        unseen = [self.folder]
        while unseen:
            files, folders = listing(unseen.pop())
            yield from (seen for seen in files if seen.path != self.folder / LOCK)
            unseen += folders

    @contextmanager
    def directory_locked(self) -> Generator[int]:
        """No other server makes room or begins a file meanwhile; gives the file system's own time in nanoseconds."""
        with locked(self.directory / LOCK) as descriptor:
            os.utime(descriptor)
            yield os.fstat(descriptor).st_mtime_ns

    def put_away(self, path: Path) -> None:
        """Move a file that does not verify into quarantine, whose oldest files make way. Raises OSError."""
        make_private(self.quarantine)
        kept_as = self.quarantine / f"{self.folder.name}-{path.name}"
        try:
            path.replace(kept_as)
        except FileNotFoundError:
            return
        os.utime(kept_as)
        kept = sorted(listing(self.quarantine)[0], key=lambda seen: seen.mtime_ns)
        for seen in kept[:-MAX_QUARANTINED]:
            remove_file(seen.path)

    def clear_quarantine(self) -> None:
        """Remove what this model has there. Raises OSError."""
        for seen in listing(self.quarantine)[0]:
            if seen.path.name.startswith(self.folder.name):
                remove_file(seen.path)
