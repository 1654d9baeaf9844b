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
from reprise.cache.prefix_cache import PrefixCache
from reprise.core.kinds import Full, KvKind
from reprise.core.prompt import BoundaryKind
from reprise.core.spans import Span
from reprise.core.tokens import Tokens
from reprise.disk.cache import DiskCache
from reprise.disk.record import DiskRecord
from reprise.engine.payloads import Snapshot
from reprise.engine.records import RecordEncoder
from reprise.engine.runner import Footprint
from reprise.loop.requests import RunningRequest

log = logging.getLogger("reprise.loop")

_SOON_S = 2.0
"""After so long it is known what of a turn nobody will need again."""

_BEHIND_S = 0.05
"""While the writer is behind, it is looked at again after so long."""

_AT_ONCE = 32 << 20
"""Bytes. More than about this is not copied between two steps, but for a snapshot."""

_MOST_NOTED = 1024
"""Paths that may wait to be written. Of more, the oldest are not."""

_KEPT = frozenset({BoundaryKind.STABLE, BoundaryKind.SYSTEM, BoundaryKind.EXPLICIT, BoundaryKind.GENERATION_END})
"""The kinds of positions that are written wherever they stand. The last one of a path is whatever its kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A record to be made: of the block ``[start, …)``, or of the mark at `position` with a tail from `start` on.

    The entries are read out of what the cache has for `position`.
    """

    position: int
    start: int
    parent: bytes
    is_tail: bool
    kind: BoundaryKind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Making:
    """A record in the making. `left`: what is still to be copied, a part in each step."""

    piece: _Piece
    encoder: RecordEncoder
    left: deque[tuple[KvKind, Span]]


@dataclass(slots=True, eq=False)
class _Noted:
    """A path to be written. `ends`: positions worth a mark, beside the checkpoints that the path will have by then."""

    tokens: Tokens
    namespace: str
    ends: dict[int, BoundaryKind]
    due_s: float
    left: deque[_Piece] | None = None
    """What is left to write, once it has begun."""
    making: _Making | None = None


class Writes:
    """What is to be written. Used on the engine thread, which never waits for a file."""

    def __init__(self, disk: DiskCache, cache: PrefixCache, footprint: Footprint) -> None:
        self._disk = disk
        self._cache = cache
        self._footprint = footprint
        self._largest = footprint.full * disk.block + footprint.checkpoint
        """The bytes of a record, about."""
        self._noted: OrderedDict[str, _Noted] = OrderedDict()
        self.is_hurried = False
        """The server is about to end: what is stored is due at once."""

    def note(self, task: RunningRequest, position: int, kind: BoundaryKind) -> None:
        """The path of a task has been stored up to `position`: it is to be written soon."""
        if task.is_auxiliary:
            return
        known = self._noted.get(task.id)
        ends = {b.position: b.kind for b in task.job.prompt.boundaries if b.kind in _KEPT and 0 < b.position < position}
        self._noted[task.id] = _Noted(
            tokens=task.tokens_to(position),
            namespace=task.namespace,
            ends={**ends, position: kind},
            due_s=known.due_s if known is not None else time.monotonic() + _SOON_S,
        )
        while len(self._noted) > _MOST_NOTED:
            self._noted.popitem(last=False)

    def forget(self, namespace: str | None) -> None:
        """Nothing of this namespace (None: of any) is to be written any more."""
        for name in [name for name, noted in self._noted.items() if namespace in (None, noted.namespace)]:
            del self._noted[name]

    @property
    def due_in_s(self) -> float | None:
        """When there will be something to write; None: not before something is stored."""
        first = next(iter(self._noted.values()), None)
        if first is None:
            return None
        due_s = 0.0 if self.is_hurried else max(0.0, first.due_s - time.monotonic())
        return due_s if self._disk.can_take(self._largest) else max(due_s, _BEHIND_S)

    def write(self, *, is_closing: bool = False) -> bool:
        """Copy what is due of one record, if the writer is not behind. Whether there was something to do."""
        name, noted = next(iter(self._noted.items()), ("", None))
        if noted is None or not self._disk.can_take(self._largest):
            return False
        if noted.due_s > time.monotonic() and not (is_closing or self.is_hurried):
            return False
        try:
            is_left = self._go_on(noted)
        except Exception:
            log.exception("a stored prefix could not be written to the disk")
            is_left = False
        if not is_left:
            del self._noted[name]
        return True

    def _go_on(self, noted: _Noted) -> bool:
        """Do the next step of writing a path. Whether something is left to do."""
        is_new = noted.left is None
        if noted.left is None:
            noted.left = self._planned(noted)
        if noted.making is None:
            if not noted.left:
                return False
            noted.making = self._begun(noted.left.popleft())
        if not self._copy(noted, noted.making):
            # Something was evicted meanwhile; what is still there is worth as much as before.
            noted.left = noted.making = None
            return not is_new
        if noted.making.left:
            return True
        is_taken = self._put(noted, noted.making)
        noted.making = None
        # What follows stands on it, for the most part.
        return is_taken and len(noted.left) > 0

    def _planned(self, noted: _Noted) -> deque[_Piece]:
        """All records of a path that the disk lacks, in the order in which they are of use."""
        match = self._cache.match(noted.tokens, namespace=noted.namespace)
        block = self._disk.block
        found: dict[tuple[int, bool], _Piece] = {}
        for end, kind in sorted(self._ends(noted, match).items()):
            if end > match.length or self._cache.resume_at(match, limit=end) < end:
                continue
            missing = self._disk.missing(noted.tokens[:end], namespace=noted.namespace)
            for index, parent in missing.blocks:
                piece = _Piece(position=end, start=index * block, parent=parent, is_tail=False, kind=kind)
                found.setdefault((piece.start, False), piece)
            if missing.needs_tail:
                start, parent = end // block * block, missing.tail_parent
                found[end, True] = _Piece(position=end, start=start, parent=parent, is_tail=True, kind=kind)
        return deque(found.values())

    def _ends(self, noted: _Noted, match: Match) -> dict[int, BoundaryKind]:
        """The positions of a path where somebody may resume one day."""
        stored = (mark for node in match.walk.nodes for mark in node.checkpoints.values())
        marks = [mark for mark in stored if mark.position <= match.length]
        standing = {mark.position: mark.kind for mark in marks if not mark.is_superseded and not mark.is_auxiliary}
        last = max(standing, default=0)
        given_up = {mark.position for mark in marks if mark.position not in standing}
        ends = {position: kind for position, kind in noted.ends.items() if position not in given_up}
        if self._cache.layout.resumes_anywhere:
            # Whoever has the last position has them all, and an end that was evicted leaves the others.
            return {min(max(ends), match.length): ends[max(ends)]} if ends else {}
        return ends | {position: kind for position, kind in standing.items() if kind in _KEPT or position == last}

    def _begun(self, piece: _Piece) -> _Making:
        layout, position = self._cache.layout, piece.position
        own = self._span(piece)
        left: deque[tuple[KvKind, Span]] = deque()
        for layers in layout.kinds:
            if isinstance(layers, Full):
                spans = (own,) if len(own) > 0 else ()
            else:
                spans = layers.needs(position) if piece.is_tail else ()
            most = max(1, _AT_ONCE // self._footprint.by_kind[layers])
            for span in spans:
                cuts = range(span.start, span.stop, most)
                left += [(layers, Span(start, min(span.stop, start + most))) for start in cuts]
        return _Making(piece=piece, encoder=RecordEncoder(kind=piece.kind if piece.is_tail else None), left=left)

    def _span(self, piece: _Piece) -> Span:
        """The positions that a record stands for."""
        return Span(piece.start, piece.position if piece.is_tail else piece.start + self._disk.block)

    def _copy(self, noted: _Noted, making: _Making) -> bool:
        """Copy the next part of a record. False if the path is not in memory any more: then nothing was done."""
        position = making.piece.position
        match = self._cache.match(noted.tokens[:position], namespace=noted.namespace)
        if self._cache.resume_at(match, limit=position) < position:
            return False
        restore = self._cache.read(match, position)
        copied = 0
        while making.left and copied < _AT_ONCE:
            layers, span = making.left.popleft()
            making.encoder.add_entries(restore.slices[layers], layers, span)
            copied += self._footprint.by_kind[layers] * len(span)
        if making.piece.is_tail and not making.left and isinstance(restore.snapshot, Snapshot):
            making.encoder.add_snapshot(restore.snapshot)
        return True

    def _put(self, noted: _Noted, making: _Making) -> bool:
        """Hand a record to the disk. Whether it was taken."""
        piece, own = making.piece, self._span(making.piece)
        record = DiskRecord.of(
            root=self._disk.root(noted.namespace),
            parent=piece.parent,
            is_tail=piece.is_tail,
            start=piece.start,
            tokens=noted.tokens[own.start : own.stop],
            about=making.encoder.about,
            sections=making.encoder.sections,
        )
        return self._disk.put(record)
