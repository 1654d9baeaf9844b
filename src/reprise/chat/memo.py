"""A memory of bounded size: what was used least recently is forgotten first."""

from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

from cachetools import LRUCache

K = TypeVar("K")
V = TypeVar("V")


class Memo(Generic[K, V]):
    """A map that holds at most `nbytes` bytes, as counted by `size`. Safe to use from several threads.

    What is alone larger than the bound is not kept.
    """

    def __init__(self, *, nbytes: int, size: Callable[[K, V], int]) -> None:
        self._size = size
        # Each value with its size: an `LRUCache` shows `getsizeof` no key.
        self._entries: LRUCache[K, tuple[V, int]] = LRUCache(nbytes, getsizeof=lambda entry: entry[1])
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        return int(self._entries.currsize)

    def get(self, key: K) -> V | None:
        """The value, which counts as used now, or None."""
        with self._lock:
            entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def put(self, key: K, value: V) -> None:
        """Remember the value in place of an earlier one."""
        nbytes = self._size(key, value)
        with self._lock:
            if nbytes > self._entries.maxsize:
                self._entries.pop(key, None)
            else:
                self._entries[key] = (value, nbytes)
