"""What requests tell of other chats: which have ended, and which wait for others.

By the policy's numbers of their requests. It says what an id cannot do either: nothing here removes an item, protects
one, or concerns one that another chat brought here. Bounded like the prompts that the policy remembers.
"""

from dataclasses import dataclass

from cachetools import FIFOCache

from reprise.cache.node import Lease
from reprise.core.job import Lineage

_MOST = 1 << 12


@dataclass(frozen=True, slots=True)
class _EndedTail:
    """An ended chat: the number of its first request, and where its system prompt and tools end."""

    first: int
    trunk_at: int


@dataclass(frozen=True, slots=True)
class _ArrivedJob:
    number: int
    trunk_at: int
    namespace: str


class Lineages:
    """What is known of the chats behind the latest 4096 requests, by the policy's numbers."""

    def __init__(self) -> None:
        self._requests: FIFOCache[str, _ArrivedJob] = FIFOCache(_MOST)
        self._ended: FIFOCache[int, _EndedTail] = FIFOCache(_MOST)
        self._alive: FIFOCache[int, int] = FIFOCache(_MOST)

    def arrive(self, job_id: str, lease: Lease, lineage: Lineage, *, trunk_at: int, namespace: str) -> list[int]:
        """Record a request and what it tells. Returns the last numbers of the chats that have ended."""
        number = lease.number
        if number is None:
            return []
        self._requests[job_id] = _ArrivedJob(number, trunk_at, namespace)
        for name in lineage.awaited:
            waiting = self._of(name, namespace)
            if waiting is not None:
                self._alive[waiting.number] = number
        ended: list[int] = []
        for chat in lineage.ended:
            first, last = self._of(chat.first_job, namespace), self._of(chat.last_job, namespace)
            if last is not None:
                self._ended[last.number] = _EndedTail((first or last).number, last.trunk_at)
                ended.append(last.number)
        return ended

    def alive_at(self, number: int | None) -> int | None:
        """The latest request made on behalf of the chat that this request belongs to, or None."""
        return None if number is None else self._alive.get(number)

    def has_ended(self, number: int | None) -> bool:
        """Whether this request was the last one of a chat that has ended."""
        return number in self._ended

    def trunk_of_ended(self, number: int | None, first_visit: int | None) -> int | None:
        """Where an item's own chat has its tail from, if that chat has ended; None if it has not.

        `number`, `first_visit`: of the last and the first request on the item's path. What was there before the chat
        began is not its own.
        """
        ended = None if number is None else self._ended.get(number)
        if ended is None or first_visit is None or first_visit < ended.first:
            return None
        return ended.trunk_at

    def _of(self, job_id: str, namespace: str) -> _ArrivedJob | None:
        found = self._requests.get(job_id)
        return found if found is not None and found.namespace == namespace else None
