"""The order of eviction: a heap of landmarks by worth, with lazy re-evaluation.

An entry is stale when its landmark is gone or has a newer version. A popped landmark whose worth has risen since it
was pushed goes back with its new worth, so facts that change elsewhere (a neighbour evicted, a branch added) need no
bookkeeping here. A worth that changes by itself is looked at again when the policy says so: a second heap, by the
number of the prompt. O(log n) for each push and pop.
"""

import heapq
from collections.abc import Callable
from itertools import count

from reprise.cache.policy import Facts, Policy
from reprise.cache.tree import Landmark


class EvictionOrder:
    """Gives landmarks, least worth first."""

    def __init__(self, policy: Policy, facts_of: Callable[[Landmark], Facts]) -> None:
        self.policy = policy
        self._facts_of = facts_of
        self._heap: list[tuple[float, int, Landmark, int]] = []
        self._reviews: list[tuple[int, int, Landmark, int]] = []
        self._ticks = count()

    def __len__(self) -> int:
        return len(self._heap)

    def use(self, landmark: Landmark) -> None:
        """Place the landmark anew: it was made or used."""
        landmark.floor = self.policy.floor
        self.place(landmark)

    def place(self, landmark: Landmark) -> None:
        """Place the landmark anew: something about it changed, but it was not used."""
        landmark.version += 1
        facts = self._facts_of(landmark)
        self._push(self.policy.worth(facts), landmark)
        review_at = self.policy.review_at(facts)
        if review_at is not None:
            heapq.heappush(self._reviews, (review_at, next(self._ticks), landmark, landmark.version))

    def advance(self, number: int) -> None:
        """Prompt `number` has come: look again at what was to be looked at by then."""
        while self._reviews and self._reviews[0][0] <= number:
            _, _, landmark, version = heapq.heappop(self._reviews)
            if _is_live(landmark, version):
                self.place(landmark)

    def _push(self, worth: float, landmark: Landmark) -> None:
        heapq.heappush(self._heap, (worth, next(self._ticks), landmark, landmark.version))

    def pop(self, *, may_evict: Callable[[Landmark], bool], new: Facts | None = None) -> Landmark | None:
        """The landmark of least worth that may be evicted, or None. It is no longer in the order.

        `new`: what is to take its place. None if the policy does not admit that.
        """
        put_back: list[tuple[float, Landmark]] = []
        found: Landmark | None = None
        while self._heap:
            worth, _, landmark, version = heapq.heappop(self._heap)
            if not _is_live(landmark, version):
                continue
            if not may_evict(landmark):
                put_back.append((worth, landmark))
                continue
            now_worth = self.policy.worth(self._facts_of(landmark))
            if now_worth > worth and self._heap and now_worth > self._heap[0][0]:
                self._push(now_worth, landmark)
                continue
            if new is not None and not self.policy.admits(new, now_worth):
                put_back.append((now_worth, landmark))
                break
            self.policy.on_evict(now_worth)
            landmark.version += 1
            found = landmark
            break
        for worth, landmark in put_back:
            self._push(worth, landmark)
        return found

    def num_placed(self) -> int:
        """How many landmarks stand in the order: entries that are not stale. O(n)."""
        return sum(_is_live(landmark, version) for _, _, landmark, version in self._heap)

    def num_reviews(self) -> int:
        """How many entries wait to be looked at again, stale ones among them."""
        return len(self._reviews)

    def sweep(self, num_live: int) -> None:
        """Drop stale entries when they outnumber the live ones, so that the heap stays proportional to the tree."""
        if len(self._heap) > 4 * num_live + 64:
            live = [entry for entry in self._heap if _is_live(entry[2], entry[3])]
            heapq.heapify(live)
            self._heap = live
        if len(self._reviews) > 4 * num_live + 64:
            due = [entry for entry in self._reviews if _is_live(entry[2], entry[3])]
            heapq.heapify(due)
            self._reviews = due


def _is_live(landmark: Landmark, version: int) -> bool:
    return version == landmark.version and landmark.node.landmarks.get(landmark.position) is landmark
