"""In which order records go: the least recently used first, and none before what stands on it."""

import heapq
from collections.abc import Callable, Set


class LeafOrder:
    """The time of the last use of every record, and the records on which nothing stands, oldest first.

    The heap may hold more than what counts: an item counts if its time is that of its key's last use and nothing
    stands on the key. Everything is O(log n), spread over the calls.
    """

    def __init__(self, is_bare: Callable[[bytes], bool]) -> None:
        self.last_use_ns: dict[bytes, int] = {}
        self._is_bare = is_bare
        self._heap: list[tuple[int, bytes]] = []

    def use(self, key: bytes, at_ns: int) -> None:
        """`key` is there, and was used at this time."""
        self.last_use_ns[key] = at_ns
        if self._is_bare(key):
            self._push(key)

    def forget(self, key: bytes, parent: bytes) -> bool:
        """`key` has gone, and its parent may be the next. Whether the parent was used later than was known of it.

        Who used a record used what it stands on.
        """
        at_ns = self.last_use_ns.pop(key)
        known_ns = self.last_use_ns.get(parent)
        if known_ns is None:
            return False
        self.use(parent, max(at_ns, known_ns))
        return at_ns > known_ns

    def oldest(self, keep: Set[bytes]) -> tuple[int, bytes] | None:
        """The record that goes next and its time, those in `keep` left out; None if there is none."""
        passed: list[tuple[int, bytes]] = []
        while self._heap and (not self._counts(self._heap[0]) or self._heap[0][1] in keep):
            item = heapq.heappop(self._heap)
            if self._counts(item):
                passed.append(item)
        first = self._heap[0] if self._heap else None
        for item in passed:
            heapq.heappush(self._heap, item)
        return first

    def check(self, keys: Set[bytes]) -> None:
        """AssertionError if not exactly these keys are known, or one that could go would never be chosen."""
        assert self.last_use_ns.keys() == keys, "the order knows what is there"
        bare = {key for key in keys if self._is_bare(key)}
        assert bare <= {item[1] for item in self._heap if self._counts(item)}, "whatever could go stands in the order"

    def _counts(self, item: tuple[int, bytes]) -> bool:
        return self.last_use_ns.get(item[1]) == item[0] and self._is_bare(item[1])

    def _push(self, key: bytes) -> None:
        if len(self._heap) > 64 + 2 * len(self.last_use_ns):
            self._heap = [(at_ns, key) for key, at_ns in self.last_use_ns.items() if self._is_bare(key)]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (self.last_use_ns[key], key))
