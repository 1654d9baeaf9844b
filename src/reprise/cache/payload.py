"""What hangs on the tree, as the cache sees it: opaque things with a size.

The engine gives payloads that hold MLX arrays; the simulator and the tests give payloads of their own.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from reprise.core.kinds import KvKind
from reprise.core.spans import Span


class SegmentPayload(Protocol):
    """The entries of one layer kind for a run of consecutive positions. Immutable; owns its bytes."""

    @property
    def nbytes(self) -> int: ...

    def cut(self, start: int, stop: int) -> "SegmentPayload":
        """A copy of the entries ``[start, stop)``, counted from this payload's own first entry."""
        ...

    def join(self, others: Sequence["SegmentPayload"]) -> "SegmentPayload":
        """One payload of this one's entries and then the others', in order."""
        ...


class Lent(ABC):
    """A segment payload whose entries still stand in a live sequence (`lender`), which can be asked to give copies.

    It is counted like any other, and the lender's own buffers by so much less. Dropping it frees nothing while the
    lender lives: so before an edge with lent entries is evicted, the cache recalls them (`PrefixCache.recall`).
    """

    @property
    @abstractmethod
    def lender(self) -> object: ...

    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    @abstractmethod
    def cut(self, start: int, stop: int) -> SegmentPayload: ...

    @abstractmethod
    def join(self, others: Sequence[SegmentPayload]) -> SegmentPayload: ...


class SnapshotPayload(Protocol):
    """The saved state of all layers that have no entries, at one position. Immutable; owns its bytes."""

    @property
    def nbytes(self) -> int: ...


class Source(Protocol):
    """A live sequence that a commit copies from. It stands at the position that is committed."""

    def segment_nbytes(self, kind: KvKind, length: int) -> int:
        """The bytes that `segment` will take for this many positions, beside what the sequence holds."""
        ...

    def snapshot_nbytes(self) -> int: ...

    def segment(self, kind: KvKind, span: Span) -> SegmentPayload:
        """A copy of the entries of `span`, which lies within what `kind` needs at this position."""
        ...

    def snapshot(self) -> SnapshotPayload: ...
