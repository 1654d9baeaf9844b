"""Entries that the prefix cache holds on loan from a live sequence.

A long conversation's KV would be held twice, once by the cache and once by the sequence that runs on it, and copied
twice a turn. So a long sequence lends: a commit takes a `Loan` instead of a copy, and when the sequence ends it is
parked with its buffers. The next turn adopts the parked buffers and copies nothing. Whoever else needs the entries
copies them out of the buffers; eviction recalls the loans first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from reprise.cache.payload import SegmentPayload, SharedPayload
from reprise.core.kinds import KvKind
from reprise.core.spans import Span
from reprise.engine.payloads import Segment

if TYPE_CHECKING:
    from reprise.engine.runner import Live


class Loan(SharedPayload):
    """The entries of `span` (absolute positions) of one layer kind, in the buffers of a live sequence."""

    def __init__(self, live: Live, kind: KvKind, span: Span, nbytes_each: int) -> None:
        self._live = live
        self.kind = kind
        self.span = span
        self._nbytes_each = nbytes_each
        live.loans.add(self)

    @property
    def sequence(self) -> Live:
        return self._live

    @property
    def nbytes(self) -> int:
        return self._nbytes_each * len(self.span)

    @property
    def length(self) -> int:
        return len(self.span)

    def cut(self, start: int, stop: int) -> Loan:
        at = self.span.start
        return Loan(self._live, self.kind, Span(at + start, at + stop), self._nbytes_each)

    def join(self, others: Sequence[SegmentPayload]) -> SegmentPayload:
        # What is lent joins only what the same sequence lends: joined with others it would have to be copied.
        loans = [other for other in others if isinstance(other, Loan) and other.sequence is self._live]
        assert len(loans) == len(others), self
        return Loan(self._live, self.kind, Span(self.span.start, [self, *loans][-1].span.stop), self._nbytes_each)

    @property
    def dtypes(self) -> list[mx.Dtype]:
        return self._live.dtypes(self.kind)

    def words(self, start: int, stop: int) -> list[mx.array]:
        """As `Segment.words`: views into the live buffers."""
        at = self.span.start
        return self._live.words(self.kind, Span(at + start, at + stop))

    def owned(self) -> Segment:
        """A copy that owns its bytes."""
        return self._live.copy(self.kind, self.span)


def own_all(loans: Sequence[Loan]) -> list[Segment]:
    """Copies of all that a parked sequence lends, in the order of `loans`; its buffers are used up.

    Plane by plane, each buffer given up before the next is copied: so the entries are never held twice.
    """
    if not loans:
        return []
    live = loans[0].sequence
    copies: list[list[mx.array]] = [[] for _ in loans]
    for kind in {loan.kind for loan in loans}:
        for index in range(live.num_planes(kind)):
            for place, loan in enumerate(loans):
                if loan.kind == kind:
                    copies[place].append(mx.array(live.plane(kind, index, loan.span)))
            mx.eval([planes[-1] for planes in copies if planes])
            live.drop_plane(kind, index)
    places = [tuple((index, 0) for index in range(len(planes))) for planes in copies]
    return [Segment(tuple(planes), place) for planes, place in zip(copies, places, strict=True)]
