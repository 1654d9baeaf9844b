"""The one door to the file system: private folders, locks, and files that are there whole or not at all."""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from reprise.cache.disk.format import Encoded

PRIVATE_FILE = 0o600
PRIVATE_FOLDER = 0o700


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A file as a listing saw it."""

    path: Path
    nbytes: int
    mtime_ns: int


def make_private(folder: Path) -> None:
    """The folder, open to nobody but its owner. Raises OSError."""
    folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    if folder.stat().st_mode & 0o077:
        folder.chmod(PRIVATE_FOLDER)


def take_lock(path: Path, *, waits: bool) -> int | None:
    """A descriptor that holds the lock file until it is closed or the process dies; None if another holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def locked(path: Path) -> Generator[int]:
    """Holds the lock file, after having waited for it."""
    descriptor = take_lock(path, waits=True)
    assert descriptor is not None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Whether somebody holds the lock file now."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def begin_file(path: Path, nbytes: int) -> int:
    """A descriptor of a new file that counts with its whole size from now on. Raises OSError."""
    make_private(path.parent)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, PRIVATE_FILE)
    try:
        os.ftruncate(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        remove_file(path)
        raise
    return descriptor


def fill_file(descriptor: int, encoded: Encoded) -> None:
    """Write the content and wait until the disk has it. The descriptor is closed. Raises OSError."""
    with os.fdopen(descriptor, "wb") as file:
        for chunk in encoded.chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def remove_file(path: Path) -> None:
    """The file is gone afterwards, whether it was there or not. Raises OSError if it stays."""
    path.unlink(missing_ok=True)


def listing(folder: Path) -> tuple[tuple[Seen, ...], tuple[Path, ...]]:
    """The plain files and the folders in a folder; none if it is not there. Links are not followed. Raises OSError."""
    files: list[Seen] = []
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
                        files.append(Seen(path=Path(item.path), nbytes=stat.st_size, mtime_ns=stat.st_mtime_ns))
    except FileNotFoundError:
        return (), ()
    return tuple(files), tuple(folders)
