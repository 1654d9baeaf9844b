"""The thread that reads and verifies."""

import errno
import logging
import os

from reprise.cache.disk.damage import forget_missing, put_away
from reprise.cache.disk.fetch import Fetch
from reprise.cache.disk.format import OtherVersion, Unverified, read_record
from reprise.cache.disk.record import Record
from reprise.cache.disk.shelf import Shelf
from reprise.cache.disk.state import State

log = logging.getLogger(__name__)


class Reader:
    """Reads for all fetches in turn, a record at a time, until the cache closes."""

    def __init__(self, shelf: Shelf, state: State, *, read_ahead_bytes: int) -> None:
        self._shelf = shelf
        self._state = state
        self._read_ahead_bytes = read_ahead_bytes
        self._fetches: list[Fetch] = []

    def begin(self, fetch: Fetch) -> None:
        """Read for this fetch, too. Once the cache is closed, a fetch fails at once."""
        with self._state.changed:
            is_closing = self._state.is_closing
            if is_closing:
                fetch.give_up()
            else:
                self._fetches.append(fetch)
                self._state.changed.notify_all()
        if is_closing:
            fetch.wake()

    def run(self) -> None:
        state = self._state
        while True:
            with state.changed:
                chosen = None
                while chosen is None and not state.is_closing:
                    chosen = self._choose()
                    if chosen is None:
                        state.changed.wait()
            if chosen is None:
                return
            fetch, key = chosen
            record = self._read(key)
            with state.changed:
                fetch.deliver(record)
            fetch.wake()

    def close(self) -> None:
        """End what is under way: the thread is gone."""
        with self._state.changed:
            left, self._fetches = self._fetches, []
            for fetch in left:
                fetch.give_up()
        for fetch in left:
            fetch.wake()

    def _choose(self) -> tuple[Fetch, bytes] | None:
        """Whose turn it is and what is to be read, None if there is nothing to do."""
        self._fetches = [fetch for fetch in self._fetches if not fetch.is_over]
        for fetch in self._fetches:
            key = fetch.next_key(self._read_ahead_bytes)
            if key is not None:
                # To the end of the row: nobody waits for all of another's records.
                self._fetches.remove(fetch)
                self._fetches.append(fetch)
                return fetch, key
        return None

    def _read(self, key: bytes) -> Record | None:
        with self._state.changed:
            if key not in self._state.inventory.index.entries:
                return None
        path = self._shelf.path_of(key)
        try:
            with path.open("rb") as file:
                record = read_record(file, os.fstat(file.fileno()).st_size)
            if record.key != key:
                raise Unverified("it is another record than its name says")
        except FileNotFoundError:
            forget_missing(self._shelf, self._state, key)
            return None
        except OSError as error:
            if error.errno == errno.EIO:
                put_away(self._shelf, self._state, key, "it cannot be read")
                return None
            log.warning("A file of the disk cache cannot be read (%s); what it holds is computed.", error.strerror)
            with self._state.changed:
                self._state.tally.errors += 1
            return None
        except (Unverified, OtherVersion) as error:
            put_away(self._shelf, self._state, key, str(error))
            return None
        except Exception as error:
            log.exception("a file of the disk cache cannot be understood")
            put_away(self._shelf, self._state, key, f"it cannot be understood ({error})")
            return None
        with self._state.changed:
            self._state.tally.read_nbytes += record.nbytes
        return record
