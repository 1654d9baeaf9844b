"""Writes committed prefixes to disk after a short delay, one record at a time.

The engine thread copies the bytes between two steps and queues them; the writer thread writes them. What is superseded
within the delay is never written.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from functools import partial
from math import lcm

from reprise.cache.lookup import Match
from reprise.cache.node import Checkpoint, subtree
from reprise.core.kinds import Chunk, Full, KvKind, Layout, Window
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Span, Tokens, own_tokens
from reprise.disk.records.record import DiskRecord
from reprise.disk.store.cache import DiskCache
from reprise.engine.running.records import RecordEncoder
from reprise.loop.requests import RunningRequest
from reprise.loop.sequences import SequencePool

log = logging.getLogger(__name__)

SOON_S = 2.0
"""Delay before a path is written: by then it is known which of its checkpoints are superseded."""

_BEHIND_S = 0.05
"""How often a full writer queue is polled."""

COPIED_AT_ONCE = 32 << 20
"""About the most bytes copied between two steps; a snapshot is copied whole."""

SECTION_NBYTES = 8 << 20
"""About the most bytes per section, which is the smallest unit decoded in one step when it is read."""

_MOST_NOTED = 1024
"""Paths that may wait to be written; beyond this the oldest are dropped."""

_KEPT = frozenset({BoundaryKind.STABLE, BoundaryKind.SYSTEM, BoundaryKind.EXPLICIT, BoundaryKind.GENERATION_END})
"""The kinds of checkpoints that are always written. So are the last one of a path, the branch that others share, and
the starts of chunks."""


_LASTING = frozenset({BoundaryKind.SYSTEM, BoundaryKind.EXPLICIT, BoundaryKind.BRANCH})
"""Kinds of positions that are worth their bytes even if the chat itself does not go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecordPlan:
    """A record to be written: the block at `start`, or the tail record ``[start, position)``.

    Its entries are read from the cache's match at `position`.
    """

    position: int
    start: int
    parent: bytes
    is_tail: bool
    kind: BoundaryKind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _RecordCopy:
    """A record being copied. `left`: the spans still to be copied."""

    plan: _RecordPlan
    encoder: RecordEncoder
    left: deque[tuple[KvKind, Span]]


@dataclass(slots=True, eq=False)
class _DuePath:
    """A path to be written. `ends`: positions worth a tail record, besides the checkpoints it will have by then."""

    tokens: Tokens
    namespace: str
    ends: dict[int, BoundaryKind]
    due_s: float
    left: deque[_RecordPlan] | None = None
    """The records still to be written, once writing has begun."""
    copy: _RecordCopy | None = None


def _is_last_superseded(checkpoint: Checkpoint) -> bool:
    """Whether this is the path's last superseded stable position, from which a regenerate resumes."""
    if not checkpoint.is_superseded or checkpoint.is_auxiliary or checkpoint.kind is not BoundaryKind.STABLE:
        return False
    below = (other for node in subtree(checkpoint.node) for other in node.checkpoints.values())
    return not any(
        other.is_superseded and other.kind is BoundaryKind.STABLE and other.position > checkpoint.position
        for other in below
    )


def _is_shared(checkpoint: Checkpoint) -> bool:
    """Whether prompts diverge here, so that others may begin like them: no boundary of the template shows it."""
    return checkpoint.kind is BoundaryKind.BRANCH and not checkpoint.is_auxiliary


def _chunk_starts(layout: Layout, length: int) -> range:
    """The positions up to `length` at which memory resumes without a checkpoint, since a chunk begins there.

    None where a layer needs more than the entries of its chunk.
    """
    chunks = [layers.size for layers in layout.kinds if isinstance(layers, Chunk)]
    if not chunks or layout.has_snapshots or any(isinstance(layers, Window) for layers in layout.kinds):
        return range(0)
    step = lcm(*chunks)
    return range(step, length + 1, step)


class WriteBehind:
    """The paths to be written. Used on the engine thread; never waits for a file."""

    def __init__(self, disk: DiskCache, sequences: SequencePool) -> None:
        self._disk = disk
        self._cache = sequences.cache
        self._footprint = footprint = sequences.runner.footprint
        self._largest = footprint.full * disk.block + footprint.checkpoint
        """Estimated bytes of the largest record."""
        self._due: OrderedDict[str, _DuePath] = OrderedDict()
        self.is_hurried = False
        """The server is shutting down: everything is due at once."""

    def note(self, request: RunningRequest, position: int, kind: BoundaryKind) -> None:
        if request.is_auxiliary:
            return
        known = self._due.get(request.id)
        below = (b for b in request.job.prompt.boundaries if 0 < b.position < position)
        ends = {b.position: b.kind for b in below if b.kind in _KEPT}
        self._due[request.id] = _DuePath(
            tokens=request.tokens_to(position),
            namespace=request.namespace,
            ends={**ends, position: kind},
            due_s=known.due_s if known is not None else time.monotonic() + SOON_S,
        )
        while len(self._due) > _MOST_NOTED:
            self._due.popitem(last=False)

    def forget(self, namespace: str | None) -> None:
        """Drop the paths of a namespace (None: of all)."""
        for name in [name for name, path in self._due.items() if namespace in (None, path.namespace)]:
            del self._due[name]

    @property
    def num_due(self) -> int:
        return len(self._due)

    @property
    def due_in_s(self) -> float | None:
        """Seconds until there is something to write; None if nothing is scheduled."""
        first = next(iter(self._due.values()), None)
        if first is None:
            return None
        due_s = 0.0 if self.is_hurried else max(0.0, first.due_s - time.monotonic())
        return due_s if due_s >= _BEHIND_S or self._disk.can_take(self._largest) else _BEHIND_S

    def write(self, *, is_closing: bool = False) -> bool:
        """Copy the next part of a due record if the writer's queue has room. Returns whether it did anything."""
        name, path = next(iter(self._due.items()), ("", None))
        if path is None or (path.due_s > time.monotonic() and not (is_closing or self.is_hurried)):
            return False
        if not self._disk.can_take(self._largest):
            return False
        try:
            is_left = self._write_part(path)
        except Exception:
            log.exception("cannot write a stored prefix to disk")
            is_left = False
        if not is_left:
            del self._due[name]
        return True

    def _write_part(self, path: _DuePath) -> bool:
        """Copy the next part of a path's current record. Returns whether anything is left to write."""
        is_new = path.left is None
        if path.left is None:
            path.left = self._missing_records(path)
        if path.copy is None:
            if not path.left:
                return False
            path.copy = self._start_copy(path.left.popleft())
        if not self._copy(path, path.copy):
            # Part of the path was evicted meanwhile: plan again for the rest.
            path.left = path.copy = None
            return not is_new
        if path.copy.left:
            return True
        is_taken = self._put(path, path.copy)
        path.copy = None
        # Most of the following records have this one as parent: if it was refused, they would be too.
        return is_taken and len(path.left) > 0

    def _missing_records(self, path: _DuePath) -> deque[_RecordPlan]:
        """The records of a path that the disk lacks, in order of position."""
        match = self._cache.match(path.tokens, namespace=path.namespace)
        block, kinds = self._disk.block, self._ends(path, match)
        ends = [end for end in sorted(kinds) if self._cache.resume_at(match, limit=end) == end]
        found: deque[_RecordPlan] = deque()
        for end, missing in zip(ends, self._disk.missing(path.tokens, ends, namespace=path.namespace), strict=True):
            plan = partial(_RecordPlan, position=end, kind=kinds[end])
            found.extend(plan(start=k * block, parent=parent, is_tail=False) for k, parent in missing.blocks)
            if missing.needs_tail:
                found.append(plan(start=end // block * block, parent=missing.tail_parent, is_tail=True))
        return found

    def _ends(self, path: _DuePath, match: Match) -> dict[int, BoundaryKind]:
        """The positions of a path at which a later request may resume, with their kinds."""
        stored = [c for node in match.walk.nodes for c in node.checkpoints.values() if c.position <= match.length]
        current = {c.position: c.kind for c in stored if not c.is_superseded and not c.is_auxiliary}
        last = max(current, default=0)
        dropped = {c.position for c in stored if c.position not in current and not _is_last_superseded(c)}
        # Of a chat that is not expected to go on, only what others begin with, and what the client asked to keep.
        goes_on = self._cache.expects_return(path.tokens, namespace=path.namespace)
        worth = frozenset(BoundaryKind) if goes_on else _LASTING
        ends = {position: kind for position, kind in path.ends.items() if position not in dropped and kind in worth}
        if self._cache.layout.resumes_anywhere:
            # The last position implies all others; if its end was evicted, the rest of the path is written.
            return {min(max(ends), match.length): ends[max(ends)]} if ends else {}
        shared = {c.position: c.kind for c in stored if _is_shared(c)}
        shared |= dict.fromkeys(_chunk_starts(self._cache.layout, match.length), BoundaryKind.INTERVAL)
        kept = {position: kind for position, kind in current.items() if kind in _KEPT or position == last}
        return {position: kind for position, kind in (ends | shared | kept).items() if kind in worth}

    def _start_copy(self, plan: _RecordPlan) -> _RecordCopy:
        layout, position = self._cache.layout, plan.position
        own = self._span(plan)
        left: deque[tuple[KvKind, Span]] = deque()
        for layers in layout.kinds:
            if isinstance(layers, Full):
                spans = (own,) if len(own) > 0 else ()
            else:
                spans = layers.needs(position) if plan.is_tail else ()
            most = max(1, SECTION_NBYTES // self._footprint.by_kind[layers])
            for span in spans:
                cuts = range(span.start, span.stop, most)
                left += [(layers, Span(start, min(span.stop, start + most))) for start in cuts]
        return _RecordCopy(plan=plan, encoder=RecordEncoder.new(plan.kind if plan.is_tail else None), left=left)

    def _span(self, plan: _RecordPlan) -> Span:
        """The positions of the record's tokens."""
        return Span(plan.start, plan.position if plan.is_tail else plan.start + self._disk.block)

    def _copy(self, path: _DuePath, copy: _RecordCopy) -> bool:
        """Copy the next part of a record; False, without copying, if the path is no longer in memory."""
        position = copy.plan.position
        resume_at, match = self._cache.lookup(path.tokens[:position], position, namespace=path.namespace)
        if resume_at < position:
            return False
        restore = self._cache.read(match, position)
        copied = 0
        while copy.left and copied < COPIED_AT_ONCE:
            layers, span = copy.left.popleft()
            copy.encoder.add_entries(restore.slices[layers], layers, span)
            copied += self._footprint.by_kind[layers] * len(span)
        if copy.plan.is_tail and not copy.left and restore.snapshot is not None:
            copy.encoder.add_snapshot(restore.snapshot)
        return True

    def _put(self, path: _DuePath, copy: _RecordCopy) -> bool:
        """Queue the copied record for writing; returns whether it was accepted."""
        plan, own = copy.plan, self._span(copy.plan)
        record = DiskRecord(
            root=self._disk.root(path.namespace),
            parent=plan.parent,
            is_tail=plan.is_tail,
            start=plan.start,
            tokens=own_tokens(path.tokens[own.start : own.stop]),
            about=copy.encoder.about,
            sections=copy.encoder.sections,
        )
        if not self._disk.put(record):
            return False
        copy.encoder.note_queued(record)
        return True
