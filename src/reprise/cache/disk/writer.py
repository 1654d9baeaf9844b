"""The thread that writes: records from the queue, and the times of use."""

import logging
import os

from reprise.cache.disk.files import begin_file, fill_file, remove_file
from reprise.cache.disk.format import encode
from reprise.cache.disk.index import entry_of
from reprise.cache.disk.record import Record
from reprise.cache.disk.room import Room
from reprise.cache.disk.shelf import Shelf
from reprise.cache.disk.state import State

log = logging.getLogger(__name__)


class Writer:
    """Writes one record at a time until the cache closes. Whatever fails, the thread goes on."""

    def __init__(self, shelf: Shelf, state: State, room: Room) -> None:
        self._shelf = shelf
        self._state = state
        self._room = room

    def run(self) -> None:
        state = self._state
        while True:
            with state.changed:
                state.is_writing = False
                state.changed.notify_all()
                state.changed.wait_for(lambda: state.is_closing or state.queue or state.inventory.unwritten_uses)
                if state.is_closing:
                    return
                state.is_writing = True
                record = next(iter(state.queue.values()), None)
                uses, state.inventory.unwritten_uses = state.inventory.unwritten_uses, {}
            self._show(uses)
            if record is not None:
                self._write_or_drop(record)

    def _show(self, uses: dict[bytes, int]) -> None:
        """Let the files' times tell when they were used: what is known after a restart."""
        for key, at_ns in uses.items():
            try:
                os.utime(self._shelf.path_of(key), ns=(at_ns, at_ns))
            except OSError as error:
                # It went meanwhile, or is a little older after a restart.
                log.debug("the time of a cache file cannot be set: %s", error)

    def _write_or_drop(self, record: Record) -> None:
        try:
            self._write(record)
        except OSError as error:
            with self._state.changed:
                self._state.fail(error)
        except Exception:
            log.exception("a record of the disk cache cannot be written, and is left out")
            with self._state.changed:
                self._state.tally.errors += 1
        finally:
            with self._state.changed:
                self._state.drop([record])

    def _write(self, record: Record) -> None:
        shelf, state = self._shelf, self._state
        if not self._is_wanted(record):
            return
        encoded = encode(record)
        temporary = shelf.temporary_of(record.key)
        with shelf.names, shelf.directory_locked() as now_ns:
            if not self._room.make(encoded.nbytes, beside=record.parent, now_ns=now_ns):
                log.debug("no room on disk for a record of %d bytes", encoded.nbytes)
                return
            # It has its size from the start, so that other servers count it.
            descriptor = begin_file(temporary, encoded.nbytes)
        try:
            fill_file(descriptor, encoded)
            with state.changed:
                at_ns = state.moment()
            os.utime(temporary, ns=(at_ns, at_ns))
            with shelf.names:
                # Cleared meanwhile, or what it stands on has gone: it must not appear.
                if not self._is_wanted(record):
                    return
                path = shelf.path_of(record.key)
                temporary.replace(path)
                with state.changed:
                    # A damaged file of that name that could not be moved has gone with it.
                    if path in state.inventory.strays:
                        state.inventory.remove_stray(path)
                    state.inventory.add(entry_of(record, file_nbytes=encoded.nbytes), at_ns)
                    state.succeed(encoded.nbytes)
                    state.drop([record])
        finally:
            remove_file(temporary)

    def _is_wanted(self, record: Record) -> bool:
        """Whether it is still to be written, and would be found."""
        with self._state.changed:
            has_parent = record.parent == record.root or record.parent in self._state.inventory.index.entries
            return self._state.queue.get(record.key) is record and has_parent and not self._state.is_closing
