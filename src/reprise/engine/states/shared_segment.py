"""Segments of the prefix cache that are spans of a sequence's buffers.

Otherwise, a long conversation's KV would be held twice, by the cache and by the running sequence, and copied twice per
turn. So a long sequence shares: a commit takes a `SharedSegment` instead of a copy, and when its request ends the
sequence stays idle with its buffers. The next turn continues in them without a copy. Other requests copy the entries;
before any of them is evicted, an idle sequence is closed and the cache gets copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from reprise.cache.payload import SegmentPayload, SharedPayload
from reprise.core.kinds import KvKind
from reprise.core.tokens import Span
from reprise.engine.states.payloads import PackedSegment

if TYPE_CHECKING:
    from reprise.engine.running.runner import LiveSequence


class SharedSegment(SharedPayload):
    """The entries of `span` (absolute positions) of one layer kind, in the buffers of a live sequence."""

    def __init__(self, live: LiveSequence, kind: KvKind, span: Span, nbytes_each: int) -> None:
        self._live = live
        self.kind = kind
        self.span = span
        self._nbytes_each = nbytes_each
        live.shared.add(self)

    @property
    def sequence(self) -> LiveSequence:
        return self._live

    @property
    def nbytes(self) -> int:
        return self._nbytes_each * len(self.span)

    @property
    def length(self) -> int:
        return len(self.span)

    def cut(self, start: int, stop: int) -> SharedSegment:
        at = self.span.start
        return SharedSegment(self._live, self.kind, Span(at + start, at + stop), self._nbytes_each)

    def join(self, others: Sequence[SegmentPayload]) -> SegmentPayload:
        # Only segments in the same buffers are joined: others would have to be copied.
        shared = [other for other in others if isinstance(other, SharedSegment) and other.sequence is self._live]
        assert len(shared) == len(others), self
        return SharedSegment(
            self._live, self.kind, Span(self.span.start, [self, *shared][-1].span.stop), self._nbytes_each
        )

    @property
    def dtypes(self) -> list[mx.Dtype]:
        return self._live.dtypes(self.kind)

    def words(self, start: int, stop: int, planes: range) -> list[mx.array]:
        """Like `PackedSegment.words`: views of the live buffers."""
        at = self.span.start
        return self._live.words(self.kind, Span(at + start, at + stop), planes)

    def owned(self) -> PackedSegment:
        """A copy that owns its bytes."""
        return self._live.copy(self.kind, self.span)
