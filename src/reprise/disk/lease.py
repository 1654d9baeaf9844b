"""Who uses a model's folder: a small file for each server, its lease, which ends whatever the server dies of.

A server of this machine lives while its lease is locked: the kernel unlocks it when the process dies. Locks of another
machine mean little (over NFS and SMB they may not be seen, or outlive a host that died), so that its server lives while
its lease is touched, by the file system's own clock.
"""

import hashlib
import os
import platform
import secrets
import uuid
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

PRIVATE_FILE = 0o600
PRIVATE_FOLDER = 0o700
BEAT_S = 20.0
"""How often a server touches its lease."""

EXPIRED_S = 150.0
"""A lease of another machine that was not touched for so long has ended: several beats, and as long as a network file
system may show an old time."""

POLL_S = 0.005
"""How often a lock that another server holds for a moment is asked for."""

_MACHINE = hashlib.sha256(f"{platform.node()} {uuid.getnode():x}".encode()).hexdigest()[:8]


def new_server_name() -> str:
    """Of no other server."""
    return f"{_MACHINE}-{secrets.token_hex(4)}"


class ServerLease:
    """This server's lease in a folder of leases."""

    def __init__(self, folder: Path) -> None:
        self.name = new_server_name()
        self._path = folder / self.name
        self._lock = file_lock(self._path)

    def take(self) -> None:
        """Begin, also where the lease was lost. Raises OSError."""
        make_private(self._path.parent)
        self._lock.release(force=True)
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            pass  # Whoever looks whether it is locked; the file is there.
        except OSError:
            # No locks here: it lives by its beats alone.
            self._path.touch(mode=PRIVATE_FILE)
        self.renew()

    def renew(self) -> None:
        """Say that this server lives. Raises FileNotFoundError if the lease is lost, and OSError."""
        os.utime(self._path)

    @property
    def is_lost(self) -> bool:
        """Whether somebody has removed it: the folder with it, or since this server did not answer for too long."""
        return not self._path.exists()

    def release(self) -> None:
        """End. Twice changes nothing."""
        if not self.is_lost:
            with suppress(OSError):
                self._path.unlink()
        self._lock.release(force=True)


def living_servers(folder: Path, now_ns: int) -> frozenset[str]:
    """The servers with a lease in this folder of leases; leases that have ended are removed. Raises OSError.

    The caller holds the directory's lock, under which leases are taken.
    """
    try:
        leases = list(folder.iterdir())
    except FileNotFoundError:
        return frozenset()
    living: set[str] = set()
    for lease in leases:
        if _lives(lease, now_ns):
            living.add(lease.name)
        else:
            lease.unlink(missing_ok=True)
    return frozenset(living)


def _lives(path: Path, now_ns: int) -> bool:
    if path.name.startswith(f"{_MACHINE}-"):
        lock = file_lock(path)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            return True
        except OSError:
            pass
        else:
            lock.release()
            return False
    try:
        return now_ns - path.stat().st_mtime_ns < EXPIRED_S * 1e9
    except FileNotFoundError:
        return False


def file_lock(path: Path) -> FileLock:
    """A lock that ends with the process: without flock it fails, since a file that stands for a lock would not end."""
    # One for all threads of the process: what one thread locks another unlocks.
    return FileLock(path, mode=PRIVATE_FILE, thread_local=False, poll_interval=POLL_S, fallback_to_soft=False)


def make_private(folder: Path) -> None:
    """The folder, open to nobody but its owner. Raises OSError."""
    folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    if folder.stat().st_mode & 0o077:
        folder.chmod(PRIVATE_FOLDER)
