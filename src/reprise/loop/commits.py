"""What tasks have computed, stored for whoever comes next."""

from __future__ import annotations

import time

from reprise.cache.store import PrefixCache
from reprise.core.prompt import BoundaryKind
from reprise.engine.runner import Runner
from reprise.loop.disk import Disk
from reprise.loop.pinning import Pinning
from reprise.loop.settled import SettledSpans
from reprise.loop.stored import Stored
from reprise.loop.task import Phase, Task


class Commits:
    """Puts into the cache what a task has computed, and tells those whom that concerns."""

    def __init__(
        self,
        *,
        runner: Runner,
        cache: PrefixCache,
        stored: Stored,
        settled: SettledSpans,
        pinning: Pinning,
        disk: Disk,
        is_used: bool,
    ) -> None:
        """`is_used`: whether there is a prefix cache at all, as far as requests are concerned."""
        self._runner = runner
        self._cache = cache
        self._stored = stored
        self._settled = settled
        self._pinning = pinning
        self._disk = disk
        self._is_used = is_used
        self.is_compact = True
        """Whether nothing was stored since the small pieces of the cache were joined; set by who joins them."""

    def progress(self, task: Task) -> None:
        """Store what the task has computed so far."""
        if task.live is None or task.position <= task.resume_at:
            return
        is_decoding = task.phase is Phase.DECODING
        self.store(task, task.position, BoundaryKind.GENERATION_END if is_decoding else BoundaryKind.INTERVAL)
        self.note_settled(task)

    def note_settled(self, task: Task) -> None:
        """A settle is over or given up: a later request is told how much of what it reuses was computed by it."""
        if task.is_settle:
            self._settled.add(task.job.prompt.tokens, task.resume_at, task.position)

    def store(self, task: Task, position: int, kind: BoundaryKind) -> None:
        assert task.live is not None and position == task.position, (task.id, position, task.position)
        if not self._is_used:
            return
        committed = self._cache.commit(
            task.tokens_to(position),
            self._runner.source(task.live),
            kind=kind,
            namespace=task.job.namespace,
            is_side=task.is_side,
            is_wanted=task.is_wanted,
            stable_at=task.job.prompt.stable_at,
        )
        # The time of a pin begins now, and the pass that led here may have taken long.
        self._cache.now_s = time.monotonic()
        self._pinning.keep(task)
        task.newly_stored += committed.tokens
        task.stored = min(position, len(task.job.prompt))
        self._disk.note(task, position, kind)
        self.is_compact = False
        self._stored.match_followers(task)
