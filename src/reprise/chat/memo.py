"""A memory of bounded size: what was used least recently is forgotten first."""

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Memo(Generic[K, V]):
    """A map that holds at most `nbytes` bytes, as counted by `size`. Safe to use from several threads.

    What is alone larger than the bound is not kept.
    """

    def __init__(self, *, nbytes: int, size: Callable[[K, V], int]) -> None:
        self._bound = nbytes
        self._size = size
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._held = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        return self._held

    def get(self, key: K) -> V | None:
        """The value, which counts as used now, or None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: K, value: V) -> None:
        """Remember the value in place of an earlier one."""
        nbytes = self._size(key, value)
        with self._lock:
            old = self._entries.pop(key, None)
            if old is not None:
                self._held -= old[1]
            if nbytes > self._bound:
                return
            self._entries[key] = (value, nbytes)
            self._held += nbytes
            while self._held > self._bound:
                _, (_, freed) = self._entries.popitem(last=False)
                self._held -= freed

    def check(self) -> None:
        """Recount everything; raises AssertionError on any difference."""
        with self._lock:
            counted = sum(self._size(key, value) for key, (value, _) in self._entries.items())
            assert counted == self._held, (counted, self._held)
            assert self._held <= self._bound, (self._held, self._bound)
