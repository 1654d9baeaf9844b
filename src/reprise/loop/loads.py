"""Reading from the disk what the memory has no more, while others go on.

A request whose prompt goes further on disk than in memory is not admitted until its records have been read. What was
read is committed like anything that was computed, under the same budget, and the request resumes from the cache.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from reprise.cache.store import PrefixCache
from reprise.core.kinds import Full
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Tokens
from reprise.disk.cache import DiskCache, Fetch
from reprise.engine.records import RecordSource
from reprise.engine.runner import Footprint
from reprise.loop.room import Room
from reprise.loop.stored import Stored
from reprise.loop.task import Phase, Task

log = logging.getLogger("reprise.loop")

WORTH = 64
"""Tokens. Fewer are computed as soon as they are read."""

_MOST_LOADS = 3
"""How often one request is sent to the disk, should what was read be gone again before it is admitted."""


_STALLED_S = 15.0
"""When no record has come for so long the disk hangs: what was to be read is computed."""

_REST_S = 60.0
"""And nothing is read for so long."""


@dataclass(slots=True, eq=False)
class _Load:
    """Records on their way into the cache, and the requests that wait for them."""

    tokens: Tokens
    namespace: str
    first_key: bytes
    fetch: Fetch
    source: RecordSource
    needed: int
    """Bytes with which the first of them can be admitted."""
    heard_s: float
    """When something came last."""
    tasks: list[Task] = field(default_factory=list[Task])
    next: list[Task] = field(default_factory=list[Task])
    """Those for which there is no room beside it."""
    is_void: bool = False
    """The cache was cleared meanwhile: what is read is not to come back."""


class Loads:
    """What is being read for requests that wait. Used on the engine thread, which never waits for a file."""

    def __init__(
        self,
        disk: DiskCache,
        cache: PrefixCache,
        footprint: Footprint,
        room: Room,
        stored: Stored,
        *,
        wake: Callable[[], None],
    ) -> None:
        """`wake` is called on another thread when something was read: `advance` has something to do then."""
        self._disk = disk
        self._cache = cache
        self._footprint = footprint
        self._room = room
        self._stored = stored
        self._wake = wake
        self._loads: list[_Load] = []
        self._rests_until_s = 0.0

    def reach(self, task: Task) -> int:
        """How far the task's prompt could be resumed from the disk."""
        found = self._disk.find(task.prompt.tokens, namespace=task.job.namespace, limit=task.end)
        return found.position if found is not None else 0

    def begin(self, task: Task) -> bool:
        """Whether a request that is to be admitted has to wait for what is being read for it."""
        tokens, namespace = task.prompt.tokens, task.job.namespace
        match = self._cache.match(tokens, namespace=namespace)
        held = self._cache.resume_at(match, limit=task.end)
        is_resting = time.monotonic() < self._rests_until_s
        if task.num_loads >= _MOST_LOADS or task.end - held < WORTH or is_resting:
            return False
        found = self._disk.find(tokens, namespace=namespace, limit=task.end)
        if found is None or found.position - held < WORTH:
            return False
        known = found.position // self._disk.block
        if any(isinstance(kind, Full) for kind in self._cache.layout.kinds):
            # Full attention is whole on every path; blocks of models without it say only that the path is there.
            known = min(known, match.length // self._disk.block)
        keys = found.keys[known:]
        needed = self._room.needed_to_admit(len(task.prompt), found.position)
        load = next((load for load in self._loads if load.first_key == keys[0] and not load.is_void), None)
        if load is not None:
            load.tasks.append(task)
        elif self._may_fit(found.position, needed):
            task.num_loads += 1
            self._disk.touch(found)
            fetch = self._disk.fetch(replace(found, keys=keys), self._wake)
            load = _Load(tokens[: found.position], namespace, keys[0], fetch, RecordSource(), needed, time.monotonic())
            load.tasks.append(task)
            self._loads.append(load)
        elif self._loads:
            self._loads[-1].next.append(task)
        else:
            return False
        task.is_loading = True
        return True

    def _may_fit(self, position: int, needed: int) -> bool:
        """Whether there is room for a path of that length; beside others, for all to be admitted (`needed` bytes).

        Else what was read for one would be evicted for another before it is used.
        """
        free = self._cache.free()
        if free is None:
            return True
        # What has come of the others is not free any more, and counted with the rest of them.
        room = free + self._cache.coming + self._cache.ledger.held - self._cache.protected_nbytes()
        if not self._loads:
            return self._footprint.at(position) <= room
        return sum(load.needed for load in self._loads) + needed <= room

    @property
    def due_in_s(self) -> float | None:
        """When what is being read is given up if nothing comes; None: nothing is being read."""
        heard_s = [load.heard_s for load in self._loads]
        return max(0.0, min(heard_s) + _STALLED_S - time.monotonic()) if heard_s else None

    def advance(self) -> None:
        """Take what was read, and commit what is complete."""
        for load in list(self._loads):
            if load.is_void or all(task.phase is Phase.ENDED for task in load.tasks):
                self._end(load)
                continue
            try:
                self._take(load)
            except Exception:
                log.exception("what was read from the disk could not be used: it is computed")
                self._end(load)

    def _take(self, load: _Load) -> None:
        # Asked for before the records are taken: those that come in between are for the next time.
        is_done = load.fetch.is_done
        records = load.fetch.take()
        for record in records:
            load.source.add(record)
        self._count()
        now_s = time.monotonic()
        if is_done:
            self._commit(load)
            self._end(load)
        elif records:
            load.heard_s = now_s
        elif now_s - load.heard_s >= _STALLED_S:
            log.warning(
                "The disk cache does not answer: what was to be read is computed, and nothing read for a while."
            )
            self._rests_until_s = now_s + _REST_S
            self._end(load)

    def void(self, namespace: str | None) -> None:
        """Nothing of this namespace (None: of any) that is being read now is to get into the cache."""
        for load in self._loads:
            load.is_void |= namespace in (None, load.namespace)

    def _commit(self, load: _Load) -> None:
        position, kind = len(load.tokens), BoundaryKind.INTERVAL
        if load.fetch.failed:
            # What came before it is as good as ever where every position is resumable.
            position = min(load.source.stop, position) if self._cache.layout.resumes_anywhere else 0
        elif load.source.kind is not None:
            kind = load.source.kind
        tokens = load.tokens[:position]
        match = self._cache.match(tokens, namespace=load.namespace)
        if self._cache.resume_at(match, limit=position) == position:
            return
        self._count(but=load)  # The commit counts what it takes over from here.
        waiting = [task for task in (*load.tasks, *load.next) if task.phase is Phase.WAITING]
        before = [self._resume_at(task) for task in waiting]
        try:
            committed = self._cache.commit(tokens, load.source, kind=kind, namespace=load.namespace, is_wanted=True)
        except LookupError as error:
            log.debug("what was not read again since the memory had it has gone: %s", error)
            return
        for task, held in zip(waiting, before, strict=True):
            task.loaded += max(0, self._resume_at(task) - held)
        if not committed.is_resumable:
            # There was no room, whatever could be evicted: there will be none the next time.
            for task in load.tasks:
                task.num_loads = _MOST_LOADS

    def _resume_at(self, task: Task) -> int:
        match = self._cache.match(task.prompt.tokens, namespace=task.job.namespace)
        return self._cache.resume_at(match, limit=task.end)

    def _end(self, load: _Load) -> None:
        load.fetch.cancel()
        self._loads.remove(load)
        waiting = [task for task in (*load.tasks, *load.next) if task.phase is Phase.WAITING]
        for task in waiting:
            task.is_loading = False
        self._count()
        for task in waiting:
            self._stored.match(task)
            self._stored.match_followers(task)

    def _count(self, *, but: _Load | None = None) -> None:
        """What was read and is not in the cache yet counts like the buffers of running requests."""
        self._cache.coming = sum(load.source.nbytes for load in self._loads if load is not but)
        self._room.charge()
