"""Keeps the bytes of all files below the directory within the bound."""

from collections import deque
from collections.abc import Callable
from functools import partial

from reprise.cache.disk.files import Seen, remove_file
from reprise.cache.disk.inventory import Stray
from reprise.cache.disk.shelf import Shelf
from reprise.cache.disk.state import State
from reprise.cache.disk.surroundings import Surroundings


class Room:
    """Removes what is least recently used until there is room.

    Ours goes leaf first, other models' by age alone: their headers are not read.
    """

    def __init__(self, shelf: Shelf, state: State, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.surroundings = Surroundings(shelf.directory, shelf.folder)
        self._shelf = shelf
        self._state = state

    def make(self, nbytes: int, *, beside: bytes, now_ns: int) -> bool:
        """Whether so many bytes may be written now; what had to go for it has gone.

        Nothing goes if that would not be enough. `beside`, and all that it stands on, stays. The caller holds the
        names and the directory's lock. Raises OSError.
        """
        self.surroundings.look(now_ns)
        with self._state.changed:
            inventory = self._state.inventory
            over = inventory.nbytes + self.surroundings.nbytes + nbytes - self.max_bytes
            staying = inventory.index.path_nbytes(self._state.held.keys() | {beside})
            own_spare = inventory.nbytes - staying
        if over <= 0:
            return True
        others = deque(self.surroundings.evictable())
        if own_spare + sum(seen.nbytes for seen in others) < over:
            return False
        num_others = len(others)
        while over > 0:
            removed = self._remove_oldest(others, beside)
            if removed is None:
                break
            over -= removed
        if len(others) < num_others:
            self.surroundings.look(now_ns)
        return over <= 0

    def _remove_oldest(self, others: deque[Seen], beside: bytes) -> int | None:
        """Remove one file; gives its bytes, or None if nothing may go."""
        with self._state.changed:
            own = self._state.inventory.order.oldest(self._state.held.keys() | {beside})
            stray = self._state.inventory.oldest_stray()
        candidates: list[tuple[int, Callable[[], int]]] = []
        if own is not None:
            candidates.append((own[0], partial(self._remove_own, own[1])))
        if stray is not None:
            candidates.append((stray.seen.mtime_ns, partial(self._remove_stray, stray)))
        if others:
            candidates.append((others[0].mtime_ns, partial(self._remove_other, others)))
        if not candidates:
            return None
        _, remove = min(candidates, key=lambda candidate: candidate[0])
        nbytes = remove()
        with self._state.changed:
            self._state.tally.evicted += 1
        return nbytes

    # The file goes first: if it cannot, it stays known.

    def _remove_own(self, key: bytes) -> int:
        remove_file(self._shelf.path_of(key))
        with self._state.changed:
            return self._state.inventory.remove(key).file_nbytes

    def _remove_stray(self, stray: Stray) -> int:
        remove_file(stray.seen.path)
        with self._state.changed:
            self._state.inventory.remove_stray(stray.seen.path)
        return stray.seen.nbytes

    def _remove_other(self, others: deque[Seen]) -> int:
        seen = others.popleft()
        remove_file(seen.path)
        return seen.nbytes
