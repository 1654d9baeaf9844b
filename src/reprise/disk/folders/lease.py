"""Which servers use a model's folder: each has a small lease file there, which expires however the server dies.

A server on this machine is alive while its lease is locked: the kernel releases the lock when the process dies. Locks
of other machines are unreliable (over NFS and SMB they may be invisible, or outlive a dead host), so a server on
another machine is alive while its lease is touched regularly, by the file system's clock.
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
"""A lease of another machine expires after this long without a heartbeat: several beats, plus the time for which a
network file system may show a stale time."""

POLL_S = 0.005
"""How often a lock that another server holds is retried."""

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
        """Take the lease, or take it again after it was lost. Raises OSError."""
        make_private(self._path.parent)
        self._lock.release(force=True)
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            pass  # Another server is testing the lock at this moment; the file exists.
        except OSError:
            # No locks on this file system: only the heartbeat counts.
            self._path.touch(mode=PRIVATE_FILE)
        self.renew()

    def renew(self) -> None:
        """Touch the lease (a heartbeat). Raises FileNotFoundError if it is lost, and OSError."""
        os.utime(self._path)

    @property
    def is_lost(self) -> bool:
        """Whether its file was removed: with the folder, or because this server missed its heartbeats."""
        return not self._path.exists()

    def release(self) -> None:
        """Remove the lease. Idempotent."""
        if not self.is_lost:
            with suppress(OSError):
                self._path.unlink()
        self._lock.release(force=True)


def living_servers(folder: Path, now_ns: int) -> frozenset[str]:
    """The servers with a valid lease in this folder; expired leases are removed. Raises OSError.

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
    """A lock that ends with the process. Fails without flock: a lock that is a mere file would outlive the process."""
    # Shared by the threads of the process: one may release what another acquired.
    return FileLock(path, mode=PRIVATE_FILE, thread_local=False, poll_interval=POLL_S, fallback_to_soft=False)


def make_private(folder: Path) -> None:
    """Create the folder if needed, accessible only to its owner. Raises OSError."""
    folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    if folder.stat().st_mode & 0o077:
        folder.chmod(PRIVATE_FOLDER)
