"""Removing what a namespace or the whole model has on disk, for good."""

import logging

from reprise.cache.disk.files import Seen, remove_file
from reprise.cache.disk.inventory import Stray
from reprise.cache.disk.shelf import Shelf
from reprise.cache.disk.state import State

log = logging.getLogger(__name__)


def clear(shelf: Shelf, state: State, root: bytes | None) -> None:
    """Remove all that hangs on `root` (None: all of this model), in memory first and then on disk.

    Quarantined files of this model go too, and files of other versions: nobody can tell what they hang on. What is
    being written right now is no longer in the queue, so that its writer removes it.
    """
    inventory = state.inventory
    with shelf.names:
        with state.changed:
            state.drop([record for record in state.queue.values() if root in (None, record.root)])
            # What others stand on first: after a crash halfway nothing above it can be found.
            entries = [inventory.remove(key) for key in inventory.keys_of(root)]
            gone = [stray for stray in inventory.strays.values() if root is None or stray.root in (None, root)]
            for stray in gone:
                inventory.remove_stray(stray.seen.path)
        for entry in entries:
            seen = Seen(path=shelf.path_of(entry.key), nbytes=entry.file_nbytes, mtime_ns=0)
            gone.append(Stray(seen=seen, root=entry.root))
        for stray in gone:
            _remove(state, stray)
        try:
            shelf.clear_quarantine()
        except OSError as error:
            _warn(state, error)


def _remove(state: State, stray: Stray) -> None:
    try:
        remove_file(stray.seen.path)
    except OSError as error:
        _warn(state, error)
        with state.changed:
            state.inventory.add_stray(stray)


def _warn(state: State, error: OSError) -> None:
    log.warning("A file that was to be cleared is still there: %s", error)
    with state.changed:
        state.tally.errors += 1
