"""The thread that looks what other servers did in the folder, and says that this one lives."""

import logging
import time
from collections.abc import Callable

from reprise.disk.lease import BEAT_S
from reprise.disk.store import RecordStore

log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
"""How often it looks while other servers are there. Whether any has come costs one question to the file system."""


class FolderWatcher:
    """Looks now and then, and whenever somebody asks, until the cache closes. For any thread."""

    def __init__(self, store: RecordStore) -> None:
        self._store = store
        self._wakes: list[Callable[[], None]] = []
        self._num_begun = 0
        self._num_ended = 0

    def ask(self, wake: Callable[[], None]) -> int:
        """Look soon; `wake` is called after it. Gives the number of that look."""
        with self._store.changed:
            self._wakes.append(wake)
            self._store.changed.notify_all()
            return self._num_begun + 1

    def has_ended(self, number: int) -> bool:
        """Whether that look is over, as far as it could be done."""
        with self._store.changed:
            return self._num_ended >= number

    def run(self) -> None:
        store, beaten_s = self._store, time.monotonic()
        while True:
            with store.changed:
                store.changed.wait_for(lambda: store.is_closing or self._wakes, LOOK_EVERY_S)
                if store.is_closing:
                    return
                wakes, self._wakes = self._wakes, []
                self._num_begun += 1
            try:
                if time.monotonic() - beaten_s >= BEAT_S:
                    beaten_s = time.monotonic()
                    store.renew_lease()
                if wakes or store.is_shared or store.directory.has_new_servers:
                    store.look()
            except Exception:
                log.debug("cannot look at the disk cache's folder", exc_info=True)
            with store.changed:
                self._num_ended = self._num_begun
            for wake in wakes:
                wake()
