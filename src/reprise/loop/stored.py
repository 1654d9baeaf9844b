"""How much of each waiting prompt the cache has by now."""

from __future__ import annotations

from collections.abc import Mapping

from reprise.cache.store import PrefixCache
from reprise.core.record import Reason
from reprise.loop.task import Phase, Task


class Stored:
    """Looks prompts up: on arrival, and again when another task has stored what they share with it."""

    def __init__(self, cache: PrefixCache, tasks: Mapping[str, Task], *, is_used: bool) -> None:
        """`is_used`: whether there is a prefix cache at all, as far as requests are concerned."""
        self._cache = cache
        self._tasks = tasks
        self._is_used = is_used

    def match(self, task: Task) -> None:
        """Note where a waiting task could resume."""
        if not self._is_used:
            task.reason = Reason.CACHE_OFF
            return
        match = self._cache.match(task.prompt.tokens, namespace=task.job.namespace)
        task.resume_at = self._cache.resume_at(match, limit=task.reusable)
        if task.admitted_s is None:
            task.matched = match.length
        task.stored = max(task.stored, task.resume_at)

    def match_followers(self, task: Task) -> None:
        """The same for those that wait and share something with this task."""
        for other in self._tasks.values():
            if other.phase is Phase.WAITING and (task.id in other.shares or other.id in task.shares):
                self.match(other)
