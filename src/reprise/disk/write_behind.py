"""Writing to the disk what the cache has stored, soon after and a record at a time.

The engine thread copies the bytes out between two steps and hands them over; another thread writes them. What is
stored and superseded within seconds is not written at all.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from dataclasses import dataclass

from reprise.cache.lookup import Match
from reprise.cache.node import Checkpoint, subtree
from reprise.cache.prefix_cache import PrefixCache
from reprise.core.kinds import Full, KvKind
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Span, Tokens
from reprise.disk.cache import DiskCache
from reprise.disk.ports import NewEncoder, StateEncoder, StateSizes, TierRequest
from reprise.disk.record import DiskRecord

log = logging.getLogger(__name__)

SOON_S = 2.0
"""After so long it is known what of a turn nobody will need again."""

_BEHIND_S = 0.05
"""While the writer is behind, it is looked at again after so long."""

COPIED_AT_ONCE = 32 << 20
"""Bytes. More than about this is not copied between two steps, but for a snapshot."""

SECTION_NBYTES = 8 << 20
"""Entries are written in parts of about so many bytes at most: one of them is the least that is read at a time."""

_MOST_NOTED = 1024
"""Paths that may wait to be written. Of more, the oldest are not."""

_KEPT = frozenset({BoundaryKind.STABLE, BoundaryKind.SYSTEM, BoundaryKind.EXPLICIT, BoundaryKind.GENERATION_END})
"""The kinds of positions that are written wherever they stand. The last one of a path is whatever its kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecordPlan:
    """A record to be made: of the block ``[start, …)``, or of the checkpoint at `position` with a tail from `start` on.

    The entries are read out of what the cache has for `position`.
    """

    position: int
    start: int
    parent: bytes
    is_tail: bool
    kind: BoundaryKind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _RecordCopy:
    """A record that is being copied. `left`: what is still to be copied, a part in each step."""

    plan: _RecordPlan
    encoder: StateEncoder
    left: deque[tuple[KvKind, Span]]


@dataclass(slots=True, eq=False)
class _DuePath:
    """A path to be written. `ends`: positions worth a tail record, beside the checkpoints it will have by then."""

    tokens: Tokens
    namespace: str
    ends: dict[int, BoundaryKind]
    due_s: float
    left: deque[_RecordPlan] | None = None
    """What is left to write, once it has begun."""
    copy: _RecordCopy | None = None


def _is_last_superseded(checkpoint: Checkpoint) -> bool:
    """Whether the last turn's answer is computed again from here: no superseded stable position follows it."""
    if not checkpoint.is_superseded or checkpoint.is_auxiliary or checkpoint.kind is not BoundaryKind.STABLE:
        return False
    below = (other for node in subtree(checkpoint.node) for other in node.checkpoints.values())
    return not any(
        other.is_superseded and other.kind is BoundaryKind.STABLE and other.position > checkpoint.position
        for other in below
    )


class WriteBehind:
    """What is to be written. Used on the engine thread, which never waits for a file."""

    def __init__(self, disk: DiskCache, cache: PrefixCache, *, sizes: StateSizes, new_encoder: NewEncoder) -> None:
        self._disk = disk
        self._cache = cache
        self._sizes = sizes
        self._new_encoder = new_encoder
        self._largest = sizes.full * disk.block + sizes.checkpoint
        """The bytes of a record, about."""
        self._due: OrderedDict[str, _DuePath] = OrderedDict()
        self.is_hurried = False
        """The server is about to end: what is stored is due at once."""

    def note(self, request: TierRequest, position: int, kind: BoundaryKind) -> None:
        """The path of a request has been stored up to `position`: it is to be written soon."""
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
        """Nothing of this namespace (None: of any) is to be written any more."""
        for name in [name for name, path in self._due.items() if namespace in (None, path.namespace)]:
            del self._due[name]

    @property
    def num_due(self) -> int:
        """How many paths wait to be written."""
        return len(self._due)

    @property
    def due_in_s(self) -> float | None:
        """When there will be something to write; None: not before something is stored."""
        first = next(iter(self._due.values()), None)
        if first is None:
            return None
        due_s = 0.0 if self.is_hurried else max(0.0, first.due_s - time.monotonic())
        return due_s if self._disk.can_take(self._largest) else max(due_s, _BEHIND_S)

    def write(self, *, is_closing: bool = False) -> bool:
        """Copy what is due of one record, if the writer is not behind. Whether there was something to do."""
        name, path = next(iter(self._due.items()), ("", None))
        if path is None or not self._disk.can_take(self._largest):
            return False
        if path.due_s > time.monotonic() and not (is_closing or self.is_hurried):
            return False
        try:
            is_left = self._go_on(path)
        except Exception:
            log.exception("could not write a stored prefix to disk")
            is_left = False
        if not is_left:
            del self._due[name]
        return True

    def _go_on(self, path: _DuePath) -> bool:
        """Do the next step of writing a path. Whether something is left to do."""
        is_new = path.left is None
        if path.left is None:
            path.left = self._planned(path)
        if path.copy is None:
            if not path.left:
                return False
            path.copy = self._begun(path.left.popleft())
        if not self._copy(path, path.copy):
            # Something was evicted meanwhile; what is still there is worth as much as before.
            path.left = path.copy = None
            return not is_new
        if path.copy.left:
            return True
        is_taken = self._put(path, path.copy)
        path.copy = None
        # What follows stands on it, for the most part.
        return is_taken and len(path.left) > 0

    def _planned(self, path: _DuePath) -> deque[_RecordPlan]:
        """All records of a path that the disk lacks, in the order in which they are of use."""
        match = self._cache.match(path.tokens, namespace=path.namespace)
        block = self._disk.block
        found: dict[tuple[int, bool], _RecordPlan] = {}
        for end, kind in sorted(self._ends(path, match).items()):
            if end > match.length or self._cache.resume_at(match, limit=end) < end:
                continue
            missing = self._disk.missing(path.tokens[:end], namespace=path.namespace)
            for index, parent in missing.blocks:
                plan = _RecordPlan(position=end, start=index * block, parent=parent, is_tail=False, kind=kind)
                found.setdefault((plan.start, False), plan)
            if missing.needs_tail:
                start, parent = end // block * block, missing.tail_parent
                found[end, True] = _RecordPlan(position=end, start=start, parent=parent, is_tail=True, kind=kind)
        return deque(found.values())

    def _ends(self, path: _DuePath, match: Match) -> dict[int, BoundaryKind]:
        """The positions of a path where somebody may resume one day."""
        stored = (mark for node in match.walk.nodes for mark in node.checkpoints.values())
        marks = [mark for mark in stored if mark.position <= match.length]
        standing = {mark.position: mark.kind for mark in marks if not mark.is_superseded and not mark.is_auxiliary}
        last = max(standing, default=0)
        given_up = {mark.position for mark in marks if mark.position not in standing}
        given_up -= {mark.position for mark in marks if _is_last_superseded(mark)}
        ends = {position: kind for position, kind in path.ends.items() if position not in given_up}
        if self._cache.layout.resumes_anywhere:
            # Whoever has the last position has them all, and an end that was evicted leaves the others.
            return {min(max(ends), match.length): ends[max(ends)]} if ends else {}
        return ends | {position: kind for position, kind in standing.items() if kind in _KEPT or position == last}

    def _begun(self, plan: _RecordPlan) -> _RecordCopy:
        layout, position = self._cache.layout, plan.position
        own = self._span(plan)
        left: deque[tuple[KvKind, Span]] = deque()
        for layers in layout.kinds:
            if isinstance(layers, Full):
                spans = (own,) if len(own) > 0 else ()
            else:
                spans = layers.needs(position) if plan.is_tail else ()
            most = max(1, SECTION_NBYTES // self._sizes.by_kind[layers])
            for span in spans:
                cuts = range(span.start, span.stop, most)
                left += [(layers, Span(start, min(span.stop, start + most))) for start in cuts]
        return _RecordCopy(plan=plan, encoder=self._new_encoder(plan.kind if plan.is_tail else None), left=left)

    def _span(self, plan: _RecordPlan) -> Span:
        """The positions that a record stands for."""
        return Span(plan.start, plan.position if plan.is_tail else plan.start + self._disk.block)

    def _copy(self, path: _DuePath, copy: _RecordCopy) -> bool:
        """Copy the next part of a record. False if the path is not in memory any more: then nothing was done."""
        position = copy.plan.position
        match = self._cache.match(path.tokens[:position], namespace=path.namespace)
        if self._cache.resume_at(match, limit=position) < position:
            return False
        restore = self._cache.read(match, position)
        copied = 0
        while copy.left and copied < COPIED_AT_ONCE:
            layers, span = copy.left.popleft()
            copy.encoder.add_entries(restore.slices[layers], layers, span)
            copied += self._sizes.by_kind[layers] * len(span)
        if copy.plan.is_tail and not copy.left and restore.snapshot is not None:
            copy.encoder.add_snapshot(restore.snapshot)
        return True

    def _put(self, path: _DuePath, copy: _RecordCopy) -> bool:
        """Hand a record to the disk. Whether it was taken."""
        plan, own = copy.plan, self._span(copy.plan)
        record = DiskRecord.of(
            root=self._disk.root(path.namespace),
            parent=plan.parent,
            is_tail=plan.is_tail,
            start=plan.start,
            tokens=path.tokens[own.start : own.stop],
            about=copy.encoder.about,
            sections=copy.encoder.sections,
        )
        return self._disk.put(record)
