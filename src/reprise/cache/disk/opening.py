"""The inventory of a folder, from the headers of its files."""

import os

from reprise.cache.disk.damage import put_away_file
from reprise.cache.disk.files import Seen, remove_file
from reprise.cache.disk.format import Header, OtherVersion, Unverified, read_header
from reprise.cache.disk.index import Entry, entry_of
from reprise.cache.disk.inventory import Stray
from reprise.cache.disk.shelf import Shelf
from reprise.cache.disk.state import State
from reprise.cache.disk.surroundings import TEMPORARY_ENDING


def take_stock(shelf: Shelf, state: State) -> None:
    """Enter what lies in the folder, before there are other threads. Bodies are not read. Raises OSError.

    What a process that died had not finished is removed, and what does not verify goes into quarantine.
    """
    inventory = state.inventory
    for seen in list(shelf.files()):
        if seen.path.suffix == TEMPORARY_ENDING:
            remove_file(seen.path)
            continue
        try:
            header = header_of(shelf, seen)
        except OtherVersion:
            inventory.add_stray(Stray(seen=seen, root=None))
        except Unverified as error:
            put_away_file(shelf, state, seen, str(error))
        else:
            if fits(header, inventory.index.block):
                inventory.add(entry_of(header, file_nbytes=header.file_nbytes), seen.mtime_ns)
            else:
                inventory.add_stray(Stray(seen=seen, root=header.root))


def header_of(shelf: Shelf, seen: Seen) -> Header:
    """The header of a file in our folder. Raises Unverified, OtherVersion and OSError."""
    with seen.path.open("rb") as file:
        header = read_header(file, os.fstat(file.fileno()).st_size)
    if seen.path != shelf.path_of(header.key):
        raise Unverified("it is another record than its name says")
    return header


def fits(header: Header, block: int) -> bool:
    """Whether the record was cut for blocks of this size."""
    length = len(header.tokens)
    return header.start % block == 0 and (length < block if header.is_mark else length == block)


def check_stock(shelf: Shelf, state: State) -> None:
    """AssertionError where the inventory differs from the folder, with nothing under way. Reads all headers."""
    with shelf.names, state.changed:
        inventory = state.inventory
        inventory.check()
        files = {seen.path: seen for seen in shelf.files()}
        entries: dict[bytes, Entry] = {}
        for path, seen in files.items():
            if path in inventory.strays:
                assert seen.nbytes == inventory.strays[path].seen.nbytes, path
                continue
            header = header_of(shelf, seen)
            assert fits(header, inventory.index.block), path
            entries[header.key] = entry_of(header, file_nbytes=header.file_nbytes)
        assert entries == inventory.index.entries, "the index knows what is there"
        assert inventory.strays.keys() <= files.keys(), "strays are there"
        nbytes = sum(seen.nbytes for seen in files.values())
        assert nbytes == inventory.nbytes, (nbytes, inventory.nbytes)
        assert sum(record.nbytes for record in state.queue.values()) == state.queued_nbytes
        assert all(num > 0 for num in state.held.values())
