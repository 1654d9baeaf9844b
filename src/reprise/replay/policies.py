"""The policies that traces are replayed with: the cache's own, and two from the literature for comparison."""

from bisect import bisect_right
from collections.abc import Callable, Collection

from reprise.cache.policy import EvictionCandidate, ExpectedSaving, Policy
from reprise.core.tokens import Tokens


class _Unlearned:
    """What policies share that do not look at prompts."""

    def __init__(self) -> None:
        self._num_prompts = 0

    def arrive(self, tokens: Tokens, *, known: int, namespace: str) -> tuple[int, int | None]:
        self._num_prompts += 1
        return self._num_prompts, None

    def number_of(self, tokens: Tokens, *, namespace: str) -> int | None:
        return None

    def answered(
        self, number: int, num_tokens: float, *, calls_tool: bool | None = None, at_s: float | None = None
    ) -> None:
        pass

    def fall_silent(self, now_s: float) -> Collection[int]:
        return ()

    def expect(
        self, tokens: Tokens, *, known: int, number: int, namespace: str, calls_tool: bool | None = None
    ) -> None:
        pass

    def leave_tail(self, tokens: Tokens, stable_at: int, *, number: int | None, namespace: str) -> None:
        pass

    def returns(self, number: int | None) -> float:
        return 1.0

    def admits(self, new: EvictionCandidate, than: EvictionCandidate, *, is_exact: bool) -> bool:
        return True

    def review_at(self, candidate: EvictionCandidate) -> int | None:
        return None

    def evicted(self, candidate: EvictionCandidate, score: float) -> None:
        pass


class Lru(_Unlearned):
    """Least recently used first."""

    def score(self, candidate: EvictionCandidate) -> float:
        return float(candidate.last_use)


class GreedyDual(_Unlearned):
    """What a byte saves, aged by what was given up before.

    After Cherkasova, "Improving WWW proxies performance with greedy-dual-size-frequency caching policy" (1998): an
    item's score is the floor at its last use plus uses × cost / size; the floor rises to what is evicted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._raised_at: list[int] = []
        self._floors: list[float] = [0.0]

    def score(self, candidate: EvictionCandidate) -> float:
        floor = self._floors[bisect_right(self._raised_at, candidate.last_use)]
        if candidate.nbytes == 0:
            return floor
        uses = 1 + candidate.num_uses + max(0, candidate.num_branches - 1)
        gain = uses * candidate.cost / candidate.nbytes
        if candidate.is_superseded or candidate.is_auxiliary:
            gain *= 0.1
        return floor + gain

    def evicted(self, candidate: EvictionCandidate, score: float) -> None:
        if score > self._floors[-1]:
            # Whoever is used from the next tick of the cache's clock on starts from here.
            self._raised_at.append(candidate.now + 1)
            self._floors.append(score)


POLICIES: dict[str, Callable[[], Policy]] = {"lru": Lru, "greedy-dual": GreedyDual, "cost": ExpectedSaving}
"""By name; `cost` is the cache's own."""
