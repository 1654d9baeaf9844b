"""What lies in our folder, in memory: the records, the files that are none of ours to read, and their bytes."""

from dataclasses import dataclass
from pathlib import Path

from reprise.cache.disk.files import Seen
from reprise.cache.disk.index import Entry, Index
from reprise.cache.disk.order import LeafOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Stray:
    """A file in our folder that cannot be used: of another format version, or of blocks of another size."""

    seen: Seen
    root: bytes | None
    """What it hangs on, if its header could be read."""


class Inventory:
    """The index, the order in which records go, and the strays; the bytes of all of them are counted here alone."""

    def __init__(self, *, block: int, resumes_anywhere: bool) -> None:
        self.index = Index(block=block, resumes_anywhere=resumes_anywhere)
        self.order = LeafOrder(self.index.is_bare)
        self.strays: dict[Path, Stray] = {}
        self.nbytes = 0
        self.unwritten_uses: dict[bytes, int] = {}
        """Times of use (ns) that the files do not show yet, by key."""
        self.latest_ns = 0

    def moment(self, now_s: float) -> int:
        """The time as a number that is larger than all before, in nanoseconds: no two uses are at the same time.

        A clock that was set back does not turn the order around.
        """
        self.latest_ns = max(round(now_s * 1e9), self.latest_ns + 1)
        return self.latest_ns

    def add(self, entry: Entry, at_ns: int) -> None:
        """The record is there; its file's time is `at_ns`."""
        self.index.add(entry)
        self.order.use(entry.key, at_ns)
        self.nbytes += entry.file_nbytes
        self.latest_ns = max(self.latest_ns, at_ns)

    def remove(self, key: bytes) -> Entry:
        """The record is there no more. Its last use counts for what it stood on."""
        entry = self.index.remove(key)
        self.nbytes -= entry.file_nbytes
        self.unwritten_uses.pop(key, None)
        if self.order.forget(key, entry.parent):
            self.unwritten_uses[entry.parent] = self.order.last_use_ns[entry.parent]
        return entry

    def use(self, key: bytes, at_ns: int) -> None:
        """The record was used; nothing happens if it is not there."""
        if key in self.index.entries:
            self.order.use(key, at_ns)
            self.unwritten_uses[key] = at_ns

    def add_stray(self, stray: Stray) -> None:
        assert stray.seen.path not in self.strays, stray
        self.strays[stray.seen.path] = stray
        self.nbytes += stray.seen.nbytes

    def remove_stray(self, path: Path) -> None:
        self.nbytes -= self.strays.pop(path).seen.nbytes

    def oldest_stray(self) -> Stray | None:
        return min(self.strays.values(), key=lambda stray: stray.seen.mtime_ns, default=None)

    def keys_of(self, root: bytes | None) -> list[bytes]:
        """The keys of the records of a namespace (None: of all), what others stand on first. O(records)."""
        entries = [entry for entry in self.index.entries.values() if root is None or entry.root == root]
        entries.sort(key=lambda entry: (entry.start, entry.is_mark))
        return [entry.key for entry in entries]

    def check(self) -> None:
        """AssertionError where index, order and byte count do not agree with each other."""
        self.index.check()
        self.order.check(self.index.entries.keys())
        nbytes = sum(entry.file_nbytes for entry in self.index.entries.values())
        nbytes += sum(stray.seen.nbytes for stray in self.strays.values())
        assert nbytes == self.nbytes, (nbytes, self.nbytes)
        assert self.unwritten_uses.keys() <= self.index.entries.keys()
