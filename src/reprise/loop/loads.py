"""Reading from the disk what the memory has no more, while others go on.

A request whose prompt goes further on disk than in memory is not admitted until its records have been read. What was
read is committed like anything that was computed, under the same budget, and the request resumes from the cache.

A step takes over no more than keeps it within a part of the longest gap that other streams are to have. A large path is
copied straight into the buffers of a sequence, which the cache then shares and the request goes on in: so it is never
copied as a whole, neither into the cache nor out of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from reprise.cache.payload import Source
from reprise.cache.prefix_cache import PrefixCache
from reprise.core.kinds import Full
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Tokens
from reprise.disk.cache import DiskCache, Fetch
from reprise.engine.records import RecordSource, RestoringSequence
from reprise.engine.runner import LiveSequence, Runner
from reprise.loop.requests import Ended, RunningRequest, Waiting
from reprise.loop.sequences import INITIAL_DECODE_SLOTS, SequencePool
from reprise.memory import Account

log = logging.getLogger("reprise.loop")

WORTH = 64
"""Tokens. Fewer are computed as soon as they are read."""

_MOST_LOADS = 3
"""How often one request is sent to the disk, should what was read be gone again before it is admitted."""


_SHARE_OF_STALL = 0.25
"""A step takes over what was read for this part of the longest gap between two tokens that is aimed at."""

_COPIED_AT_ONCE = 32 << 20
"""Bytes. More than about this is not taken over in one step."""

_LARGE_NBYTES = 32 << 20
"""A path of more bytes is copied straight into a sequence."""

_STALLED_S = 15.0
"""When no record has come for so long the disk hangs: what was to be read is computed."""

_REST_S = 60.0
"""And nothing is read for so long."""


class PrefixMatcher(Protocol):
    """Who looks requests up in the cache, and notes where they could resume."""

    def match(self, request: RunningRequest) -> object: ...

    def match_followers(self, leader: RunningRequest) -> None: ...


@dataclass(slots=True, eq=False)
class _Load:
    """Records on their way into the cache, and the requests that wait for them."""

    tokens: Tokens
    namespace: str
    first_key: bytes
    fetch: Fetch
    target: RecordSource | RestoringSequence
    needed: int
    """Bytes with which the first of them can be admitted."""
    heard_s: float
    """When something came last."""
    tasks: list[RunningRequest] = field(default_factory=list[RunningRequest])
    next: list[RunningRequest] = field(default_factory=list[RunningRequest])
    """Those for which there is no room beside it."""
    is_void: bool = False
    """The cache was cleared meanwhile: what is read is not to come back."""


def _is_busy(load: _Load) -> bool:
    """Whether something was taken that is not where it belongs yet."""
    return isinstance(load.target, RestoringSequence) and load.target.is_busy


class Loads:
    """What is being read for requests that wait. Used on the engine thread, which never waits for a file."""

    def __init__(
        self,
        disk: DiskCache,
        cache: PrefixCache,
        *,
        runner: Runner,
        sequences: SequencePool,
        matcher: PrefixMatcher,
        max_stall_s: float,
        wake: Callable[[], None],
    ) -> None:
        """`wake` is called on another thread when something was read: `advance` has something to do then."""
        self._disk = disk
        self._cache = cache
        self._runner = runner
        self._sequences = sequences
        self._step_s = max_stall_s * _SHARE_OF_STALL
        self._matcher = matcher
        self._wake = wake
        self._loads: list[_Load] = []
        self._rests_until_s = 0.0

    def reach(self, task: RunningRequest) -> int:
        """How far the task's prompt could be resumed from the disk."""
        found = self._disk.find(task.prompt.tokens, namespace=task.namespace, limit=task.end)
        return found.position if found is not None else 0

    def begin(self, task: RunningRequest) -> bool:
        """Whether a request that is to be admitted has to wait for what is being read for it."""
        tokens, namespace = task.prompt.tokens, task.namespace
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
        needed = self._sequences.estimate_to_admit(len(task.prompt), found.position)
        load = next((load for load in self._loads if load.first_key == keys[0] and not load.is_void), None)
        if load is not None:
            load.tasks.append(task)
        elif self._may_fit(found.position, needed):
            task.num_loads += 1
            self._disk.touch(found)
            fetch = self._disk.fetch(replace(found, keys=keys), self._wake)
            target = self._target(found.position, len(task.prompt), is_whole=known == 0)
            load = _Load(tokens[: found.position], namespace, keys[0], fetch, target, needed, time.monotonic())
            load.tasks.append(task)
            self._loads.append(load)
        elif self._loads:
            self._loads[-1].next.append(task)
        else:
            return False
        task.set_loading(is_loading=True)
        return True

    def _target(self, position: int, num_prompt: int, *, is_whole: bool) -> RecordSource | RestoringSequence:
        """What the records of a path go into, of which all is read if it `is_whole`."""
        footprint = self._runner.footprint
        if not is_whole or footprint.full * position <= _LARGE_NBYTES:
            return RecordSource()
        # No more room to grow than a sequence may have that waits for its next turn.
        length = min(num_prompt + INITIAL_DECODE_SLOTS, position + max(INITIAL_DECODE_SLOTS, position // 16))
        if not self._cache.memory.reserve(footprint.live(length, chunk=1) + footprint.checkpoint):
            # It takes less to have the cache hold it alone until the request can start.
            return RecordSource()
        return RestoringSequence(self._runner, length=length)

    def _may_fit(self, position: int, needed: int) -> bool:
        """Whether there is room for a path of that length; beside others, for all to be admitted (`needed` bytes).

        Else what was read for one would be evicted for another before it is used.
        """
        free = self._cache.memory.available
        if free is None:
            return True
        # What has come of the others is not free any more, and counted with the rest of them.
        room = free + self._cache.memory.nbytes(Account.INCOMING) + self._cache.nbytes - self._cache.protected_nbytes()
        room += sum(load.target.live.rows.nbytes for load in self._loads if isinstance(load.target, RestoringSequence))
        if not self._loads:
            return self._runner.footprint.at(position) <= room
        return sum(load.needed for load in self._loads) + needed <= room

    @property
    def due_in_s(self) -> float | None:
        """When there is something to take over, or what is being read is given up; None: nothing is being read."""
        if any(load.fetch.has_more or _is_busy(load) for load in self._loads):
            return 0.0
        heard_s = [load.heard_s for load in self._loads]
        return max(0.0, min(heard_s) + _STALLED_S - time.monotonic()) if heard_s else None

    def advance(self) -> None:
        """Take what was read for a while, and commit what is complete."""
        until_s = time.monotonic() + self._step_s
        for load in list(self._loads):
            if load.is_void or all(isinstance(task.phase, Ended) for task in load.tasks):
                self._end(load)
                continue
            try:
                self._take(load, until_s)
            except Exception:
                log.exception("what was read from the disk could not be used: it is computed")
                self._end(load)

    def _take(self, load: _Load, until_s: float) -> None:
        # Asked for before the records are taken: those that come in between are for the next time.
        is_done = load.fetch.is_done
        taken = self._take_over(load, until_s)
        self._count()
        now_s = time.monotonic()
        if is_done and not load.fetch.has_more and not _is_busy(load):
            self._commit(load)
            self._end(load)
        elif taken > 0:
            load.heard_s = now_s
        elif now_s - load.heard_s >= _STALLED_S:
            log.warning(
                "The disk cache does not answer: what was to be read is computed, and nothing read for a while."
            )
            self._rests_until_s = now_s + _REST_S
            self._end(load)

    def _take_over(self, load: _Load, until_s: float) -> int:
        """Take over what was read until then, or until so much is taken as one step may; gives the bytes."""
        taken = 0
        while taken < _COPIED_AT_ONCE and (taken == 0 or time.monotonic() < until_s):
            if isinstance(load.target, RestoringSequence) and load.target.is_busy:
                taken += load.target.work()
                continue
            records = load.fetch.take(1)
            if not records:
                break
            load.target.add(records[0])
            taken += records[0].nbytes
        return taken

    def void(self, namespace: str | None) -> None:
        """Nothing of this namespace (None: of any) that is being read now is to get into the cache."""
        for load in self._loads:
            load.is_void |= namespace in (None, load.namespace)

    def _commit(self, load: _Load) -> None:
        position, kind = len(load.tokens), BoundaryKind.INTERVAL
        if load.fetch.failed:
            # What came before it is as good as ever where every position is resumable.
            position = min(load.target.stop, position) if self._cache.layout.resumes_anywhere else 0
        elif load.target.kind is not None:
            kind = load.target.kind
        tokens = load.tokens[:position]
        match = self._cache.match(tokens, namespace=load.namespace)
        if self._cache.resume_at(match, limit=position) == position:
            return
        self._count(but=load)  # The commit counts what it takes over from here.
        waiting = [task for task in (*load.tasks, *load.next) if isinstance(task.phase, Waiting)]
        before = [self._resume_at(task) for task in waiting]
        live: LiveSequence | None = None
        try:
            source: Source
            if isinstance(load.target, RestoringSequence):
                live = load.target.finish(position)
                source = self._runner.source(live, shares=True)
            else:
                source = load.target
            committed = self._cache.commit(
                tokens, source, kind=kind, namespace=load.namespace, overrides_admission=True
            )
        except LookupError as error:
            log.debug("what was not read again since the memory had it has gone: %s", error)
            return
        if live is not None:
            # It waits for its request like one whose next turn is to come.
            load.target = RecordSource()
            self._sequences.end(live, tokens, namespace=load.namespace)
        for task, held in zip(waiting, before, strict=True):
            task.loaded += max(0, self._resume_at(task) - held)
        if not committed.is_resumable:
            # There was no room, whatever could be evicted: there will be none the next time.
            for task in load.tasks:
                task.num_loads = _MOST_LOADS

    def _resume_at(self, task: RunningRequest) -> int:
        match = self._cache.match(task.prompt.tokens, namespace=task.namespace)
        return self._cache.resume_at(match, limit=task.end)

    def _end(self, load: _Load) -> None:
        load.fetch.cancel()
        self._loads.remove(load)
        if isinstance(load.target, RestoringSequence):
            load.target.give_up()
        waiting = [task for task in (*load.tasks, *load.next) if isinstance(task.phase, Waiting)]
        for task in waiting:
            task.set_loading(is_loading=False)
        self._count()
        for task in waiting:
            self._matcher.match(task)
            self._matcher.match_followers(task)

    def _count(self, *, but: _Load | None = None) -> None:
        """What was read and is not in the cache yet counts like the buffers of running requests."""
        nbytes = sum(load.target.nbytes for load in self._loads if load is not but)
        self._cache.memory.measure(Account.INCOMING, nbytes)
        self._sequences.measure()
