"""What happens to files that are not what they should be."""

import logging
from pathlib import Path

from reprise.cache.disk.files import Seen
from reprise.cache.disk.inventory import Stray
from reprise.cache.disk.shelf import Shelf
from reprise.cache.disk.state import State

log = logging.getLogger(__name__)


def put_away(shelf: Shelf, state: State, key: bytes, reason: str) -> None:
    """Forget the record and move its file into quarantine."""
    path = shelf.path_of(key)
    with shelf.names:
        with state.changed:
            if key not in state.inventory.index.entries:
                return
            entry = state.inventory.remove(key)
        put_away_file(shelf, state, Seen(path=path, nbytes=entry.file_nbytes, mtime_ns=0), reason)


def put_away_file(shelf: Shelf, state: State, seen: Seen, reason: str) -> None:
    """Move a file that nothing is known of into quarantine. The caller holds the names, if there are threads yet."""
    log.warning("A file of the disk cache is damaged, since %s; it is put aside: %s", reason, seen.path.name)
    try:
        shelf.put_away(seen.path)
    except OSError as error:
        log.warning("It cannot be moved (%s), and stays where it is, unused.", error.strerror)
        with state.changed:
            state.tally.errors += 1
            state.inventory.add_stray(Stray(seen=seen, root=None))
    with state.changed:
        state.tally.quarantined += 1


def forget_missing(shelf: Shelf, state: State, key: bytes) -> None:
    """Forget a record whose file somebody has removed."""
    path: Path = shelf.path_of(key)
    with shelf.names, state.changed:
        # Not if it was evicted and written again since.
        if key in state.inventory.index.entries and not path.exists():
            state.inventory.remove(key)
