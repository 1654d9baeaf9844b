"""The thread that scans for other servers' changes, renews this server's lease, and clears."""

import logging
import random
import time
from concurrent.futures import Future

from reprise.core.failpoints import Failpoint, reach
from reprise.disk.folders.bucket import BucketUnavailable
from reprise.disk.folders.lease import BEAT_S
from reprise.disk.store.store import RecordStore

log = logging.getLogger(__name__)

SCAN_EVERY_S = 5.0
"""How often it scans while other servers use the folder. Noticing the first of them costs one `stat` each time."""

REMOTE_EVERY_S = 15.0
"""How often it scans a remote store, with jitter, so that several servers do not scan at once."""

REMOTE_AGAIN_S = 2.0
"""A scan on request is skipped if the last one is not older than this."""

MAX_SCAN_SHARE = 0.2
"""The largest share of its time that a watcher of a remote store spends on scans."""

_ALL_AGAIN_S = 600.0
"""A store that no other server seems to use is listed as a whole so often."""


class FolderWatcher:
    """Scans periodically and on request, until the cache closes. Thread-safe."""

    def __init__(self, store: RecordStore) -> None:
        self._store = store
        self._is_remote = store.directory.is_remote
        self._asked: list[Future[None]] = []
        self._clears: list[tuple[bytes | None, Future[None]]] = []
        self._scanned_s = self._beaten_s = self._listed_s = -float("inf")
        self._scan_took_s = 0.0
        self.has_connected = not self._is_remote
        """Whether what is in the folder has been listed."""

    def ask(self) -> Future[None]:
        """Request a scan. The future is done when it has ended, successfully or not."""
        asked: Future[None] = Future()
        with self._store.changed:
            self._asked.append(asked)
            self._store.changed.notify_all()
        return asked

    def clear(self, root: bytes | None) -> Future[None]:
        """Hide what hangs on `root` (None: everything of this model) now, and remove it soon.

        The caller holds `changed`. The future raises OSError if something could not be removed; in a remote store that
        is tried again.
        """
        cleared: Future[None] = Future()
        cleared.set_running_or_notify_cancel()
        self._store.hide(root)
        self._clears.append((root, cleared))
        self._store.changed.notify_all()
        return cleared

    def run(self) -> None:
        store = self._store
        while True:
            with store.changed:
                store.changed.wait_for(lambda: store.is_closing or self._asked or self._clears, self._next_s())
                is_closing = store.is_closing
                clears, self._clears = self._clears, []
                asked, self._asked = self._asked, []
            if is_closing:
                for root, cleared in clears:
                    if self._is_remote:
                        cleared.set_exception(BucketUnavailable("the server is shutting down"))
                    else:
                        # Or it would be found again after a restart.
                        self._clear(root, cleared)
                return
            for root, cleared in clears:
                self._clear(root, cleared)
            try:
                reach(Failpoint.DISK_SCAN, bool(asked))
                if self._is_remote:
                    self._scan_remote(is_asked=bool(asked))
                else:
                    self._scan(is_asked=bool(asked))
            except Exception:
                log.debug("cannot scan the disk cache's folder", exc_info=True)
            for scan in asked:
                scan.set_result(None)

    def _next_s(self) -> float:
        if not self._is_remote:
            return SCAN_EVERY_S
        if not self.has_connected and self._scanned_s == -float("inf"):
            return 0.0
        if self._store.directory.has_unread and not self._store.is_unavailable:
            return 0.0
        return max(REMOTE_EVERY_S * random.uniform(0.8, 1.2), self._scan_took_s / MAX_SCAN_SHARE)

    def _scan(self, *, is_asked: bool) -> None:
        store = self._store
        if time.monotonic() - self._beaten_s >= BEAT_S:
            self._beaten_s = time.monotonic()
            store.renew_lease()
        if is_asked or store.is_shared or store.directory.has_new_servers:
            store.scan()

    def _scan_remote(self, *, is_asked: bool) -> None:
        """Scan, unless that was just done; a failure is logged once, until a scan succeeds again."""
        store, now_s = self._store, time.monotonic()
        again_s = max(REMOTE_AGAIN_S, self._scan_took_s / MAX_SCAN_SHARE)
        if is_asked and (now_s - self._scanned_s < again_s or store.is_unavailable) and self.has_connected:
            return
        try:
            if not self.has_connected or store.is_unavailable:
                store.reconnect()
                self.has_connected, self._beaten_s, self._listed_s = True, now_s, now_s
            else:
                if now_s - self._beaten_s >= BEAT_S:
                    store.renew_lease()
                    self._beaten_s = now_s
                is_due = now_s - self._listed_s >= _ALL_AGAIN_S or store.directory.has_unread
                store.scan(is_first=is_due or is_asked)
                if is_due or is_asked or store.is_shared:
                    self._listed_s = now_s
        except OSError as error:
            with store.changed:
                store.note_unavailable(error)
        finally:
            self._scanned_s = time.monotonic()
            self._scan_took_s = self._scanned_s - now_s

    def _clear(self, root: bytes | None, cleared: Future[None]) -> None:
        try:
            self._store.clear(root)
        except OSError as error:
            if self._is_remote:
                with self._store.changed:
                    self._store.note_unavailable(error)
            cleared.set_exception(error)
        except Exception as error:
            log.exception("cannot clear the disk cache")
            cleared.set_exception(error)
        else:
            cleared.set_result(None)
